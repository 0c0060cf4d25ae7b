"""What must agree: structure, tokens, versions, routing, and the gap of log-probs."""
