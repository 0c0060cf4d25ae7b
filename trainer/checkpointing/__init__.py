"""Checkpoints and saved steps on disk: complete or absent."""
