"""Published weights as files: the manifest, its digests, and the tensors."""
