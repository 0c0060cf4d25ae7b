"""The embedded store: one SQLite database for facts, append-only segments for tokens."""
