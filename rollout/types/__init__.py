"""The types that a trajectory goes through, the protocols between parts, and how both are written as bytes."""
