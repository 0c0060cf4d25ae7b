"""Config, the loop, staleness, version ledger, metrics catalogue and command line. Importing it pulls in no torch, vllm
or ray."""
