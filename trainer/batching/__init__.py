"""From audited groups to micro-batches; and the quarantine that keeps a trajectory out."""
