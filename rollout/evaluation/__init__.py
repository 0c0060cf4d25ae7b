"""Periodic independent evaluation: held-out prompts under one fixed configuration, whose fingerprint goes with every
score."""
