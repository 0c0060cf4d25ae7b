"""The auditor: groups in, evidence and verdicts out."""
