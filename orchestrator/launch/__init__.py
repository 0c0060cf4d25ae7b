"""From a config to a running loop: inputs, plan, start, stop signals, and what the terminal shows meanwhile."""
