"""What an engine replica knows of itself besides its config section. It knows no engine and no model."""

from dataclasses import dataclass

from rollout.config import SamplingConfig
from rollout.types.trajectory import EngineTag, LogprobSemantics


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Which replica of which run an engine is; all of it ends up in its `EngineTag` or in its random numbers."""

    replica: int
    """Slot of this replica, from 0; a restarted replica keeps it."""
    seed: int
    """The run's seed; requests without seeds draw theirs from it, the replica and their id."""
    deterministic: bool
    """Results depend on requests, seeds and weights alone, never on arrival times."""
    sampling: SamplingConfig
    """What the run's requests sample with, for the tag."""
    tokenizer_fingerprint: str = ""
    chat_template_digest: str = ""

    def tag(
        self,
        engine: str,
        version: str,
        *,
        dtype: str,
        kv_across_versions: str,
        weights_digest: str,
        quantization: str = "none",
    ) -> EngineTag:
        """The tag of this replica. The KV cache has the dtype of the weights; log-probs are of what was sampled from,
        and what a truncated draw kept is listed. `version` is the library's."""
        return EngineTag(
            engine=engine,
            engine_version=version,
            replica=self.replica,
            weights_dtype=dtype,
            kv_dtype=dtype,
            quantization=quantization,
            logprob_semantics=LogprobSemantics.PROCESSED,
            kv_across_versions=kv_across_versions,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            chat_template_digest=self.chat_template_digest,
            weights_digest=weights_digest,
            lists_supports=True,
        )
