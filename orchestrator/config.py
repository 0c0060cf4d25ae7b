"""The whole run as one frozen model, composed from the rooms' configs; TOML and `--set a.b=c`.

Owns what the loop itself needs (run, staleness, deadlines). Knows no torch, vllm or ray.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, cast, get_args

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from actors.config import ClusterConfig
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
    StoreConfig,
    VllmConfig,
    returns_routing,
)
from rollout.errors import UserError
from rollout.faults.checks import FaultSurroundings, check_faults
from rollout.faults.config import FaultsConfig
from trainer.config.consistency import ConsistencyConfig, NoCorrection
from trainer.config.trainer import ModelConfig, TinyModelConfig, TrainerConfig, WeightsConfig, check_algorithm


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Folder of the run below `dir`; None takes the config's name and the time."""
    dir: Path = Path("runs")
    """Where run folders are made; relative to the working directory."""
    seed: int = 0
    """Seed of the prompt order, of the engines' draws and of the trainer."""
    steps: PositiveInt = 100
    """Optimizer steps of the whole run, resumes included."""
    batch_groups: PositiveInt = 16
    """Groups (prompts) a step."""
    group_size: PositiveInt = 8
    """Trajectories a group."""
    deterministic: bool = False
    """Same seed, same result, bit for bit: torch or scripted engine, one rank, one thread."""


class StalenessConfig(Section):
    """How far rollout may run ahead of training."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """eta, in optimizer steps; 0 is the synchronous loop."""
    policy: Literal["drop", "mask", "wait"] = "drop"
    """What the consumption gate does about tokens older than eta."""
    order: Literal["ready", "dispatch"] = "ready"
    """`ready`: first finished, first trained (favours short answers). `dispatch`: oldest dispatch first."""
    dispatch_window: PositiveInt = 1
    """With order `dispatch`: a step chooses among the oldest `dispatch_window` x batch unfinished groups."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups in generation at once; None takes (eta + 1) x batch."""


class DeadlinesConfig(Section):
    """How long the loop waits for what before it calls it an error."""

    engine_start_s: PositiveFloat = 600.0
    """One engine replica, from its process to its first verified weights."""
    trainer_start_s: PositiveFloat = 600.0
    """Store, reward workers and trainer ranks to start, and a checkpoint to load."""
    step_s: PositiveFloat = 1800.0
    """One training step: lease, forward, backward, optimizer."""
    update_s: PositiveFloat = 300.0
    """One weight update of one replica, canary included."""
    checkpoint_s: PositiveFloat = 1800.0
    """Writing a checkpoint, or publishing weights."""
    store_s: PositiveFloat = 60.0
    """One call to the store."""
    stall_s: PositiveFloat = 600.0
    """Without a finished step for this long, the run dumps stacks, names what it waits for, and ends."""
    health_interval_s: PositiveFloat = 2.0
    """Between two health checks of a replica."""
    restart_pause_s: PositiveFloat = 1.0
    """Before a replica that could not be started is started again; twice as long each time, up to a minute."""
    shutdown_s: PositiveFloat = 10.0
    """For the running step and the last checkpoint, after Ctrl-C or SIGTERM."""


class ExporterConfig(Section):
    """Where Prometheus finds the signals of the run."""

    enabled: bool = True
    """Serve them over HTTP while the run lasts."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` lets other machines look."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one; the run prints it, and `summary.json` has it."""


class TrackersConfig(Section):
    """Where the signals of every step go besides. Needs the extra `trackers`."""

    tensorboard: bool = False
    """Write event files to `RUN/tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `offline` writes `RUN/wandb` for a later `wandb sync`, `online` also sends it; who you are
    comes from `wandb login`."""
    wandb_project: str = "concord"
    """Project of Weights & Biases."""


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
    store: StoreConfig = StoreConfig()
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
        if self.weights.transport != "disk" and not (
            self.engine.num_gpus and self.trainer.num_gpus and self.engine.type == "vllm"
        ):
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
        scripted = [
            name for name, kind in (("engine", self.engine.type), ("trainer", self.trainer.type)) if kind == "scripted"
        ]
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
                raise ValueError(
                    f"run.deterministic = true needs {key} = {' or '.join(map(repr, allowed))}, got {got!r}"
                )


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML config and apply `a.b=c` overrides (values in TOML syntax; bare words are strings).

    Raises:
        UserError: the file cannot be read, is no TOML, or does not fit the schema; each problem is named with its key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as cause:
        raise UserError(
            f"cannot read config {path}: {cause.strerror}; give the path of a TOML file, such as "
            "examples/quickstart.toml"
        ) from cause
    except tomllib.TOMLDecodeError as cause:
        raise UserError(f"config {path} is not valid TOML: {cause}") from cause
    return parse_config(document, str(path), overrides)


def parse_config(document: dict[str, object], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Validate a config document after `overrides`; `source` names it in errors.

    Raises:
        UserError: as for `load_config`.
    """
    for override in overrides:
        _apply_override(document, override)
    try:
        return RunConfig.model_validate(document)
    except ValidationError as cause:
        lines = [
            _explain(problem["type"], problem["loc"], problem["msg"], problem["input"]) for problem in cause.errors()
        ]
        raise UserError(f"config {source}:\n" + "\n".join(f"  {line}" for line in lines)) from cause


def _apply_override(document: dict[str, object], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"got --set {override!r}; expected the form section.key=value, such as --set run.steps=20")
    try:
        value: object = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    node = document
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(f"got --set {override!r}, but {part!r} is a value in the config, not a section")
        node = cast("dict[str, object]", child)
    node[parts[-1]] = value


def _explain(kind: str, location: tuple[int | str, ...], message: str, given: object) -> str:
    names = [str(part) for part in location]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(names[-1], sorted(_keys_beside(names)), n=1, cutoff=0.0)
        return (
            f"{'.'.join(_without_tags(names))}: unknown key; the nearest known key is {near[0]!r}"
            if near
            else f"{'.'.join(names)}: unknown key"
        )
    if kind == "union_tag_not_found":
        key = ".".join(_without_tags(names))
        return f"{key}: its kind is missing; set {key}.type to one of {', '.join(map(repr, _kinds(names)))}"
    shown = "" if isinstance(given, dict) else f" (got {json.dumps(given, default=str)})"
    return f"{'.'.join(_without_tags(names)) or 'config'}: {message.removeprefix('Value error, ')}{shown}"


def _keys_beside(names: Sequence[str]) -> set[str]:
    """Known keys at the place of the last of `names`."""
    model: type[BaseModel] = RunConfig
    for index, name in enumerate(names[:-1]):
        options = list(_models_in(model.model_fields[name].annotation)) if name in model.model_fields else []
        if len(options) > 1:
            tag = next((part for part in names[index + 1 :] if not part.isdigit()), "")
            options = [option for option in options if option.model_fields["type"].default == tag] or options
        if options:
            model = options[0]
    return set(model.model_fields)


def _kinds(names: Sequence[str]) -> list[str]:
    """Values of `type` that the union at the place `names` takes."""
    models: list[type[BaseModel]] = [RunConfig]
    for name in names:
        if not name.isdigit():
            inner = [
                option
                for model in models
                if name in model.model_fields
                for option in _models_in(model.model_fields[name].annotation)
            ]
            models = (
                inner
                or [
                    model
                    for model in models
                    if "type" in model.model_fields and model.model_fields["type"].default == name
                ]
                or models
            )
    return [str(model.model_fields["type"].default) for model in models if "type" in model.model_fields]


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _without_tags(names: Sequence[str]) -> list[str]:
    """Drop the union tags that pydantic puts into a location: `engine.vllm.dtype` -> `engine.dtype`."""
    kept: list[str] = []
    model: type[BaseModel] | None = RunConfig
    pending: list[type[BaseModel]] = []
    for name in names:
        if model is not None and name in model.model_fields:
            kept.append(name)
            options = list(_models_in(model.model_fields[name].annotation))
            model = options[0] if len(options) == 1 else None
            pending = options
        elif model is None:
            model = next((o for o in pending if o.model_fields["type"].default == name), None)
        else:
            kept.append(name)
    return kept
