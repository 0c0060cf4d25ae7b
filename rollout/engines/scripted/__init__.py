"""The scripted engine, for tests and rehearsals without a model: tokens and latencies from a seed, time by an explicit
clock."""
