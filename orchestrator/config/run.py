"""The whole run as one frozen model, composed from the rooms' configs, and what its sections must agree on."""

from typing import Self

from pydantic import model_validator

from actors.config import ClusterConfig
from orchestrator.config.sections import DeadlinesConfig, ExporterConfig, RunSection, StalenessConfig, TrackersConfig
from rollout.config import (
    ArithmeticConfig,
    EngineConfig,
    EnvironmentConfig,
    EpisodesConfig,
    EvaluationConfig,
    ExactMatchConfig,
    RewardConfig,
    RewardWorkersConfig,
    SamplingConfig,
    Section,
    SqliteStoreConfig,
    StoreConfig,
    VllmConfig,
    returns_routing,
)
from rollout.faults.checks import FaultSurroundings, check_faults
from rollout.faults.config import FaultsConfig
from trainer.config.consistency import ConsistencyConfig, NoCorrection
from trainer.config.trainer import ModelConfig, TinyModelConfig, TrainerConfig, WeightsConfig, check_algorithm


class RunConfig(Section):
    """One run."""

    run: RunSection = RunSection()
    model: ModelConfig = TinyModelConfig()
    environment: EnvironmentConfig = ArithmeticConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = VllmConfig()
    reward: RewardConfig = ExactMatchConfig()
    reward_workers: RewardWorkersConfig = RewardWorkersConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    store: StoreConfig = SqliteStoreConfig()
    staleness: StalenessConfig = StalenessConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    consistency: ConsistencyConfig = ConsistencyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    exporter: ExporterConfig = ExporterConfig()
    trackers: TrackersConfig = TrackersConfig()
    faults: FaultsConfig = FaultsConfig()

    @property
    def max_concurrent_groups(self) -> int:
        """Groups in generation at once."""
        return self.staleness.max_concurrent_groups or (self.staleness.max_staleness + 1) * self.run.batch_groups

    @property
    def max_failures_in_a_row(self) -> int:
        """Dispatches that may fail in a row."""
        return self.episodes.max_failures_in_a_row or max(20, 10 * self.max_concurrent_groups)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        check_algorithm(self.trainer.algorithm, self.run.group_size, self.consistency)
        trajectories = self.run.batch_groups * self.run.group_size
        if trajectories % self.trainer.ranks:
            raise ValueError(
                f"a step has run.batch_groups x run.group_size = {trajectories} trajectories, which trainer.ranks = "
                f"{self.trainer.ranks} does not divide; choose ranks or batch so that it does"
            )
        if self.reward_workers.workers < self.episodes.workers:
            raise ValueError(
                f"got reward_workers.workers = {self.reward_workers.workers} for episodes.workers = "
                f"{self.episodes.workers}; every episode worker needs one of its own: set reward_workers.workers to "
                f"{self.episodes.workers} or more"
            )
        on_gpus = self.engine.num_gpus and self.trainer.num_gpus and self.engine.type == "vllm"
        if self.weights.transport != "disk" and not on_gpus:
            raise ValueError(
                f"got weights.transport = {self.weights.transport!r}, which needs engine.type = 'vllm' and GPUs on both"
                " sides; set weights.transport = 'disk', or engine.num_gpus and trainer.num_gpus"
            )
        self._check_gpu_transport()
        self._check_deterministic()
        check_faults(self.faults, self._fault_surroundings())
        self._check_consistency()
        self._check_routing_replay()
        self._check_evaluation()
        return self

    def _check_evaluation(self) -> None:
        if not self.evaluation.every_steps:
            return
        if self.run.deterministic:
            raise ValueError(
                "got evaluation.every_steps with run.deterministic = true: evaluations share the engine's batches at "
                "times that the clock chooses; set evaluation.every_steps = 0, or run.deterministic = false"
            )
        reads_a_file = "path" in type(self.environment).model_fields
        if reads_a_file and self.evaluation.path is None:
            raise ValueError(
                f'got evaluation.every_steps with environment.type = "{self.environment.type}" and no evaluation.path; '
                "set it to a file of held-out prompts"
            )
        if not reads_a_file and self.evaluation.path is not None:
            raise ValueError(
                f"got evaluation.path with environment.type = {self.environment.type!r}, which holds prompts out by "
                "itself; leave it out"
            )

    def _check_routing_replay(self) -> None:
        if not self.trainer.replay_routing:
            return
        if isinstance(self.model, TinyModelConfig) and not self.model.moe:
            raise ValueError(
                "got trainer.replay_routing = true with model.moe = false, and a dense model routes nothing; set "
                "model.moe = true, or turn the replay off"
            )
        if not returns_routing(self.engine):
            raise ValueError(
                f"got trainer.replay_routing = true with engine.type = {self.engine.type!r}, which is not asked for its"
                " routing; set engine.return_routing = true (torch, or vllm on GPU), or turn the replay off"
            )

    def _check_consistency(self) -> None:
        kinds = (("engine", self.engine.type), ("trainer", self.trainer.type))
        scripted = [name for name, kind in kinds if kind == "scripted"]
        if scripted and self.consistency.mode != "off":
            raise ValueError(
                f"got consistency.mode = {self.consistency.mode!r} with {scripted[0]}.type = 'scripted', whose "
                "log-probs belong to no model; set consistency.mode = 'off'"
            )

    def _fault_surroundings(self) -> FaultSurroundings:
        tiny = self.model if isinstance(self.model, TinyModelConfig) else None
        return FaultSurroundings(
            engine=self.engine,
            sampling=self.sampling,
            deterministic=self.run.deterministic,
            disk=self.weights.transport == "disk",
            tied_head=None if tiny is None else tiny.tie_embeddings,
            mixture_of_experts=None if tiny is None else tiny.moe,
            scripted_trainer=self.trainer.type == "scripted",
            ratio_unused=self.consistency.mode == "gate" and isinstance(self.consistency.correction, NoCorrection),
            coupled_terms=self.trainer.algorithm.couples_tokens,
            evaluates=self.evaluation.every_steps > 0,
            sums=self.environment.type == "arithmetic",
        )

    def _check_gpu_transport(self) -> None:
        transport, engine, trainer = self.weights.transport, self.engine.num_gpus, self.trainer.num_gpus
        if transport != "disk" and self.trainer.type != "fsdp":
            raise ValueError(
                f"got weights.transport = {transport!r} with trainer.type = {self.trainer.type!r}, which sends nothing;"
                " set 'disk'"
            )
        if transport == "nccl" and (engine < 1 or trainer < 1):
            raise ValueError(
                f"got weights.transport = 'nccl' with engine.num_gpus = {engine:g} and trainer.num_gpus = {trainer:g}; "
                "it needs a GPU for each process: set both to 1 or more, or weights.transport = 'ipc' for processes "
                "that share one"
            )
        if transport == "ipc" and (engine >= 1 or trainer >= 1):
            raise ValueError(
                f"got weights.transport = 'ipc' with engine.num_gpus = {engine:g} and trainer.num_gpus = {trainer:g}; "
                "it is for processes that share a GPU: set both below 1 (such as 0.5), or weights.transport = 'nccl' "
                "for GPUs of their own"
            )

    def _check_deterministic(self) -> None:
        if not self.run.deterministic:
            return
        wanted = (
            ("engine.type", self.engine.type, ("torch", "scripted")),
            ("engine.kv_across_versions", self.engine.kv_across_versions, ("recompute",)),
            ("engine.replicas", self.engine.replicas, (1,)),
            ("trainer.ranks", self.trainer.ranks, (1,)),
            ("trainer.threads", self.trainer.threads, (1,)),
            ("staleness.order", self.staleness.order, ("dispatch",)),
            ("staleness.dispatch_window", self.staleness.dispatch_window, (1,)),
        )
        for key, got, allowed in wanted:
            if got not in allowed:
                wanted_text = " or ".join(map(repr, allowed))
                raise ValueError(f"run.deterministic = true needs {key} = {wanted_text}, got {got!r}")
