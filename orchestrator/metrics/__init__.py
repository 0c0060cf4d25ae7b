"""The catalogue: every signal is declared here once, with its type, unit, help and labels."""
