"""New weights reach every engine, are verified, and are committed to the ledger."""
