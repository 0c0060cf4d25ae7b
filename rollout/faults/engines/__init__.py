"""Faults of an engine: its answers, its speed, the weights and files that it reads."""
