"""The engines behind the `Engine` protocol. Each module imports its inference library, and is itself imported only when
its engine is chosen."""
