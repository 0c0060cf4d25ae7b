"""The in-process reference engine: plain torch on one thread, the same result bit for bit."""
