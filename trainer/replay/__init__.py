"""A saved step, run again: does it reproduce, and where not."""
