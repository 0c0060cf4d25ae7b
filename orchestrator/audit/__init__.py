"""`concord audit`: a dump of log-probs from any framework, read, checked and shown. It knows no run directory."""
