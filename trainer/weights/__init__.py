"""The trainer's side of publication: files, transfer, canary."""
