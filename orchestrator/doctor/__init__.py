"""The doctor: from the series and events of a run to findings in causal order. Its rules know no loop, no store and no
file."""
