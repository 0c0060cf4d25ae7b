"""Real training of the tiny model in one process, with planted faults."""
