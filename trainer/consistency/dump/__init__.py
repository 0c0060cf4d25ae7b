"""Dumps of other frameworks: read, aligned and audited without a run."""
