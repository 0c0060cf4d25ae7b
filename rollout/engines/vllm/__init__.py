"""The vLLM engine: its process, requests, weight updates and routing, behind the `Engine` protocol."""
