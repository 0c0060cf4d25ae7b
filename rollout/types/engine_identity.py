"""What an engine replica is told about itself, besides its config section. It knows no engine and no model."""

from dataclasses import dataclass

from rollout.config import SamplingConfig


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
