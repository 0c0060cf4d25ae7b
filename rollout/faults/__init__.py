"""Planted faults: wrappers round an engine or a tokenizer that go wrong in one known way, for rehearsals. The real
parts know none of them."""
