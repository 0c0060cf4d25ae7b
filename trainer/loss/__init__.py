"""The policy loss, its settings and its off-policy corrections."""
