"""Importance ratios and mismatch statistics of a batch."""
