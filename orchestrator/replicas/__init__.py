"""The engine replicas of a run: their slots, and what each must be before it gets work."""
