"""How a token is drawn from logits: truncation, temperature, and the key of each draw."""
