"""Reward functions and the judgement around them: whatever a reward does, the episode gets a number or a classified
failure."""
