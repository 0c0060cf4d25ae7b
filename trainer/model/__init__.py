"""The policy model: loading, sharding, log-probs, routing replay, and its blocks."""
