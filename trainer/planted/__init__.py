"""Faults planted into a step's gradient, for rehearsals: a wrapper round the loss and hooks round a block. The real
parts know none of them."""
