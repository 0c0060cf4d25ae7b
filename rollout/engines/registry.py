"""From an engine's config section to the engine. Imports an inference library only when its engine is chosen."""

from collections.abc import Mapping
from importlib import import_module

from rollout.config import EngineConfig, ScriptedConfig, TorchEngineConfig, VllmConfig
from rollout.types.engine_identity import EngineIdentity
from rollout.types.protocols import Engine

_ENGINES: Mapping[type[object], tuple[str, str]] = {
    ScriptedConfig: ("rollout.engines.scripted.engine", "ScriptedEngine"),
    TorchEngineConfig: ("rollout.engines.torch.engine", "TorchEngine"),
    VllmConfig: ("rollout.engines.vllm.engine", "VllmEngine"),
}
"""Section -> (module, class); the class is built from its section and its identity."""


def build_engine(config: EngineConfig, identity: EngineIdentity) -> Engine:
    """One replica, not yet started; the type of its section chooses the engine."""
    module, name = _ENGINES[type(config)]
    return getattr(import_module(module), name)(config, identity)
