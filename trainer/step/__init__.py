"""One optimizer step: from a batch to a report."""
