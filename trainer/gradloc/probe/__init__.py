"""What a live step can be asked: norms of parts, pulls of terms, gradients of chosen terms."""
