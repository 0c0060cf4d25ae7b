"""The optimizer, its clips and its guards."""
