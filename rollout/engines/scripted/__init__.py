"""The scripted engine: text by rule and time by an explicit clock, for tests and rehearsals without a model."""
