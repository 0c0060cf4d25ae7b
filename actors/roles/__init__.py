"""One Ray actor a role, and the port by which others call it."""
