"""The tasks of one run and the event loop that owns them."""
