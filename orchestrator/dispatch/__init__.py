"""What may start and what may be trained on: admission, the staleness window at both ends, and the book of every
dispatch."""
