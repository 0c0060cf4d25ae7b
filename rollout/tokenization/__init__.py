"""Tokenizers: loading, fingerprints, agreement between two of them, chat templates."""
