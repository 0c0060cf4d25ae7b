"""One group of one prompt, from its turns to its sample: what an episode worker does."""
