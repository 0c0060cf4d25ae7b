"""Log-probs recomputed with the trainer's own numerics, at the version that sampled each token."""
