"""From an engine's config section to the engine. Imports an inference library only when its engine is chosen."""

from rollout.config import EngineConfig, ScriptedConfig, TorchEngineConfig
from rollout.types.engine_identity import EngineIdentity
from rollout.types.protocols import Engine


def build_engine(config: EngineConfig, identity: EngineIdentity) -> Engine:
    """One replica, not yet started; the type of its section chooses the engine."""
    if isinstance(config, ScriptedConfig):
        from rollout.engines.scripted.engine import ScriptedEngine

        return ScriptedEngine(config, identity)
    if isinstance(config, TorchEngineConfig):
        from rollout.engines.torch.engine import TorchEngine

        return TorchEngine(config, identity)
    from rollout.engines.vllm.engine import VllmEngine

    return VllmEngine(config, identity)
