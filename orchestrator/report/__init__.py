"""`report.html`: a run directory, read into plain data, drawn as figures, put on one page that loads nothing. It knows
no loop and no store but its files."""
