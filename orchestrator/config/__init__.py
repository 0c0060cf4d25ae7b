"""The config of a whole run: its sections, what they must agree on, and how a file becomes one. Torch-free."""

from orchestrator.config.loading import load_config, parse_config
from orchestrator.config.run import RunConfig
from orchestrator.config.sections import DeadlinesConfig

__all__ = ["DeadlinesConfig", "RunConfig", "load_config", "parse_config"]
