"""A fleet in this process: the real store, episode workers, engines and reward functions behind the same ports, without
Ray."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from support.in_process_store import in_process

from actors.ports import EnginePort, Started, Updated
from orchestrator.config import RunConfig
from orchestrator.launch.inputs import Inputs, checked_prompts, training_source
from rollout.engines.registry import build_engine
from rollout.environments.registry import build_envs
from rollout.episodes.episode import EpisodeSettings
from rollout.episodes.worker import EpisodeWorker, Outcome, WorkerSettings
from rollout.errors import ProcessLostError
from rollout.evaluation.evaluator import Evaluates, EvaluationReport, build_evaluator
from rollout.faults.evaluations import plant_evaluator
from rollout.faults.prompts import PlantedPrompts
from rollout.faults.registry import plant_engine, planted_engine_config
from rollout.faults.rewards import plant_reward
from rollout.rewards.errors import RewardWorkerDied
from rollout.rewards.judging import judge_group
from rollout.rewards.registry import build_reward
from rollout.store.sqlite.store import SqliteStore
from rollout.tokenization.agreement import TokenizerIdentity, identify
from rollout.tokenization.tokenizer import Tokenizer, load_tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import PauseMode, SamplingParams
from rollout.types.prompts import Prompt
from rollout.types.protocols import Engine, EngineLoad, Store
from rollout.types.trajectory import EngineTag, Reward, Trajectory
from rollout.types.weights import PolicyVersion, WeightManifest
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.consistency.service.auditor import Auditor
from trainer.consistency.service.build import build_auditor
from trainer.consistency.service.report import AuditContext, AuditReport, StepAudit, StepToAudit
from trainer.step.build import TrainerRank
from trainer.types.step import StepReport, StepRequest

EngineWrapper = Callable[[Engine, int], Engine]


def inputs_of(config: RunConfig, model_dir: Path) -> Inputs:
    """What `drive` needs besides its config, for a model with a context of 512."""
    source = training_source(config)
    return Inputs(
        model_dir=model_dir,
        max_context=512,
        source=source,
        tokenizer=identify(load_tokenizer(model_dir)),
        prompts=checked_prompts(config, source),
    )


class QuietReporter:
    """Keeps the rows of a run and what was said, and calls `on_step` with each step's number."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list[dict[str, float]] = []
        self.on_step: Callable[[int], None] = lambda step: None

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, row: Mapping[str, float], steps: int) -> None:
        self.rows.append(dict(row))
        self.on_step(int(row["step"]))

    def close(self) -> None:
        return None


class LocalEnginePort:
    def __init__(self, engine: Engine, tokenizer: TokenizerIdentity) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.dead = False

    def _check(self) -> None:
        if self.dead:
            raise ProcessLostError("the engine was killed")

    async def start(self, manifest: WeightManifest) -> Started:
        tag = await self.engine.start(manifest)
        return Started(
            tag=tag, canary_logprobs=await self.engine.score(manifest.canary.token_ids), tokenizer=self.tokenizer
        )

    async def update(self, manifest: WeightManifest, mode: PauseMode) -> Updated:
        self._check()
        await self.engine.pause(mode)
        report = await self.engine.apply(manifest)
        await self.engine.resume()
        return Updated(report=report, canary_logprobs=await self.engine.score(manifest.canary.token_ids))

    async def healthy(self) -> bool:
        self._check()
        return await self.engine.healthy()

    async def load(self) -> EngineLoad:
        self._check()
        return await self.engine.load()

    async def kill(self) -> None:
        if not self.dead:
            self.dead = True
            await self.engine.stop()


class LocalWorkerPort:
    def __init__(self, worker: EpisodeWorker, prompts: PlantedPrompts) -> None:
        self.worker = worker
        self._prompts = prompts
        self.dead = asyncio.Event()

    def _check(self) -> None:
        if self.dead.is_set():
            raise ProcessLostError("the episode worker was killed")

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        assert isinstance(engine, LocalEnginePort)
        self.worker.connect(slot, engine.engine, tag)

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        self._check()
        self._prompts.note(dispatches)
        self.worker.submit(dispatches)

    async def collect(self) -> tuple[Outcome, ...]:
        collected = asyncio.ensure_future(self.worker.collect())
        died = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({collected, died}, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return await collected
        finally:
            died.cancel()
            collected.cancel()

    async def kill(self) -> None:
        self.dead.set()
        await self.worker.close()


class LocalTrainer:
    def __init__(self, trainer: TrainerRank, store: Store, run_dir: Path) -> None:
        self.trainer = trainer
        self._store = store
        self._run_dir = run_dir
        self.batches: list[tuple[int, tuple[str, ...]]] = []
        """(version, dispatch ids) of every step, in order."""
        self.sent: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        """(version, members) of every transfer, in order; the bytes themselves stay on disk."""

    async def step(self, trainer_epoch: int, dispatch_ids: Sequence[str], request: StepRequest) -> StepReport:
        lease = await self._store.lease(trainer_epoch, dispatch_ids)
        report = await asyncio.to_thread(self.trainer.step, lease, request)
        report = self.trainer.save_step(self._run_dir / "saved_steps", lease, request, report)
        self.batches.append((request.policy.version, tuple(dispatch_ids)))
        return report

    async def publish(self, policy: PolicyVersion) -> WeightManifest:
        manifest = self.trainer.publish(policy, self._run_dir / "weights" / policy.key)
        assert manifest is not None
        return manifest

    async def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int
    ) -> WeightManifest:
        self.sent.append((manifest.policy.version, tuple(members)))
        return manifest

    async def send(self, manifest: WeightManifest) -> None:
        return None

    async def save(self, policy: PolicyVersion, directory: Path) -> None:
        self.trainer.save_checkpoint(directory, CheckpointState(policy=policy, seed=0, weights_digest=""))

    async def load(self, directory: Path) -> PolicyVersion:
        return self.trainer.load_checkpoint(directory).policy

    async def kill(self) -> None:
        return None


class LocalAuditor:
    """The service in this process, over the same store."""

    def __init__(self, auditor: Auditor, store: Store) -> None:
        self.auditor = auditor
        self._store = store
        self.dead = False

    async def audit(self, dispatch_ids: Sequence[str], context: AuditContext, kind: str) -> AuditReport:
        if self.dead:
            raise ProcessLostError("the service was killed")
        report, annotations = await asyncio.to_thread(
            self.auditor.audit, await self._store.fetch(dispatch_ids), context, kind
        )
        await self._store.annotate(annotations)
        return report

    async def audit_step(self, dispatch_ids: Sequence[str], step: StepToAudit) -> StepAudit | None:
        return await asyncio.to_thread(self.auditor.audit_step, await self._store.fetch(dispatch_ids), step)

    async def kill(self) -> None:
        self.dead = True


class LocalEvaluator:
    """The evaluation in this process."""

    def __init__(self, evaluator: Evaluates) -> None:
        self.evaluator = evaluator
        self.asked: list[tuple[int, PolicyVersion]] = []

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        assert isinstance(engine, LocalEnginePort)
        self.evaluator.connect(slot, engine.engine, tag)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        self.asked.append((slot, policy))
        return await self.evaluator.evaluate(slot, policy, label)

    async def kill(self) -> None:
        return None


def _dead() -> None:
    raise RewardWorkerDied("the reward worker died")


class LocalFleet:
    """Implements `actors.ports.Fleet`, faults of the config included. `wrap_engine` puts a test's own fault round an
    engine."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        tokenizer_dir: Path,
        trainer: TrainerRank,
        wrap_engine: EngineWrapper | None = None,
    ) -> None:
        self._config = config
        self.store = in_process(SqliteStore(run_dir, config.store.durability))
        self.trainer = LocalTrainer(trainer, self.store, run_dir)
        self._tokenizer: Tokenizer = load_tokenizer(tokenizer_dir)
        self.engine_tokenizer_dir = tokenizer_dir
        """What engines that start from now on tokenize with."""
        self._wrap = wrap_engine
        self.engines: dict[int, LocalEnginePort] = {}
        self.workers: dict[int, LocalWorkerPort] = {}
        self.auditors: dict[int, LocalAuditor] = {}
        self.make_auditor: Callable[[], Auditor] = self._real_auditor
        """A test may put another service in its place."""
        self.evaluators: list[LocalEvaluator] = []
        self.make_evaluator: Callable[[], Evaluates] = self._real_evaluator
        """A test may put another evaluator in its place."""
        self._model_dir, self._run_dir = tokenizer_dir, run_dir

    async def new_engine(self, slot: int) -> LocalEnginePort:
        config, tokenizer = self._config, load_tokenizer(self.engine_tokenizer_dir)
        engine = build_engine(
            planted_engine_config(config.engine, config.faults, slot),
            EngineIdentity(
                replica=slot,
                seed=config.run.seed,
                deterministic=config.run.deterministic,
                sampling=config.sampling,
                tokenizer_fingerprint=tokenizer.fingerprint(),
                chat_template_digest=tokenizer.chat_template_digest(),
            ),
        )
        engine = plant_engine(engine, config.faults, slot, scratch=self._run_dir / "faults", tokenizer=tokenizer)
        self.engines[slot] = LocalEnginePort(self._wrap(engine, slot) if self._wrap else engine, identify(tokenizer))
        return self.engines[slot]

    async def new_worker(self, index: int) -> LocalWorkerPort:
        config, function = self._config, plant_reward(build_reward(self._config.reward), self._config.faults, _dead)
        prompts = PlantedPrompts(self._tokenizer, config.faults)

        async def score(
            prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
        ) -> Sequence[Reward]:
            return judge_group(function, prompt, completions, trajectories)

        settings = WorkerSettings(
            episode=EpisodeSettings(
                sampling=SamplingParams(**config.sampling.model_dump()),
                max_context=512,
                seed=config.run.seed if config.run.deterministic else None,
            ),
            deadline_s=config.episodes.deadline_s,
            store_deadline_s=config.deadlines.store_s,
            max_attempts=config.episodes.max_attempts,
        )
        worker = EpisodeWorker(
            store=self.store,
            score=score,
            tokenizer=self._tokenizer,
            make_envs=lambda prompt, count: build_envs(
                config.environment, prompt, prompts.tokenizer_for(prompt), count
            ),
            settings=settings,
        )
        self.workers[index] = LocalWorkerPort(worker, prompts)
        return self.workers[index]

    async def new_auditor(self, index: int) -> LocalAuditor:
        self.auditors[index] = LocalAuditor(self.make_auditor(), self.store)
        return self.auditors[index]

    async def new_evaluator(self) -> LocalEvaluator:
        self.evaluators.append(LocalEvaluator(self.make_evaluator()))
        return self.evaluators[-1]

    def _real_evaluator(self) -> Evaluates:
        config = self._config
        build = partial(
            build_evaluator,
            config=config.evaluation,
            environment=config.environment,
            reward=config.reward,
            sampling=config.sampling,
            seed=config.run.seed,
            max_context=512,
        )
        return plant_evaluator(lambda tokenizer: build(tokenizer=tokenizer), self._tokenizer, config.faults)

    def _real_auditor(self) -> Auditor:
        config = self._config
        return build_auditor(
            model_dir=self._model_dir,
            weights_dir=self._run_dir / "weights",
            config=config.consistency,
            trainer=config.trainer,
            environment=config.environment,
            engine=config.engine,
            max_staleness=config.staleness.max_staleness,
            deterministic=config.run.deterministic,
            total_steps=config.run.steps,
        )

    async def processes(self) -> Mapping[str, int]:
        """All of it is one process."""
        return {"driver": os.getpid()}

    async def dump_stacks(self) -> str:
        return ""

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.kill()
        for engine in self.engines.values():
            await engine.kill()
        await self.store.close()
