"""Prompt sources and environments: where tasks come from and what the world answers. One module each; `registry`
chooses by config."""
