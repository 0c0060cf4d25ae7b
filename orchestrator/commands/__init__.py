"""What a person types: one module a command, each a thin way into the other sub-rooms."""
