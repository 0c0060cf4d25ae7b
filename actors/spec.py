"""What a fleet is built from: the rooms' configs and the places of a run. Picklable, so that it travels to every
actor."""

from dataclasses import dataclass, field
from pathlib import Path

from actors.config import ClusterConfig
from rollout.config import (
    EngineConfig,
    EnvironmentConfig,
    EpisodesConfig,
    EvaluationConfig,
    RewardConfig,
    RewardWorkersConfig,
    SamplingConfig,
    StoreConfig,
)
from rollout.faults.config import FaultsConfig
from trainer.config.consistency import ConsistencyConfig
from trainer.config.trainer import TrainerConfig, WeightsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """All that actors need to know at their start."""

    run_dir: Path
    model_dir: Path
    seed: int
    deterministic: bool
    total_steps: int
    store_deadline_s: float
    """`deadlines.store_s`, for calls to the store that actors make."""
    max_context: int
    """Tokens that an engine can hold, prompt included."""
    environment: EnvironmentConfig
    sampling: SamplingConfig
    engine: EngineConfig
    reward: RewardConfig
    reward_workers: RewardWorkersConfig
    episodes: EpisodesConfig
    store: StoreConfig
    trainer: TrainerConfig
    weights: WeightsConfig
    cluster: ClusterConfig
    consistency: ConsistencyConfig
    max_staleness: int
    metrics_host: str
    """Address on which engines serve metrics of their own."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
