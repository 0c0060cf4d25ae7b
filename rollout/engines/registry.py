"""From an engine's config section to the engine. Imports an inference library only when its engine is chosen."""

from rollout.config import EngineConfig, SamplingConfig, ScriptedConfig, TorchEngineConfig
from rollout.types.engine_identity import EngineIdentity
from rollout.types.protocols import Engine


def build_engine(
    config: EngineConfig,
    *,
    replica: int,
    seed: int,
    deterministic: bool,
    sampling: SamplingConfig,
    tokenizer_fingerprint: str = "",
    chat_template_digest: str = "",
) -> Engine:
    """One replica, not yet started.

    Args:
        config: the engine's section; its type chooses the engine.
        replica: slot of the replica, from 0.
        seed: the run's seed.
        deterministic: results shall depend on requests, seeds and weights alone.
        sampling: what the run samples with; it goes into the engine's tag.
        tokenizer_fingerprint: goes into the tag.
        chat_template_digest: goes into the tag.
    """
    identity = EngineIdentity(
        replica=replica,
        seed=seed,
        deterministic=deterministic,
        sampling=sampling,
        tokenizer_fingerprint=tokenizer_fingerprint,
        chat_template_digest=chat_template_digest,
    )
    if isinstance(config, ScriptedConfig):
        from rollout.engines.scripted.engine import ScriptedEngine

        return ScriptedEngine(config, identity)
    if isinstance(config, TorchEngineConfig):
        from rollout.engines.torch.engine import TorchEngine

        return TorchEngine(config, identity)
    from rollout.engines.vllm.engine import VllmEngine

    return VllmEngine(config, identity)
