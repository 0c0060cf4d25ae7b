"""The tiny model: built and trained here, so that no test needs a download."""
