"""The state of the loop, reduced to the declared metrics."""
