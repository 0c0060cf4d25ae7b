"""The asynchronous loop: one, for every eta.

    prompts -> admission -> [episode workers: engine, reward, store] -> collection -> gate -> training
    -> publication -> engines

* admission consumes capacity and prompts (re-admitted ones first); produces durable dispatches; waits for capacity;
  unblocked by a ledger commit, by a dispatch that ends, by a replica that begins to serve.
* collection (one per episode worker) consumes what came back; produces ready headers or endings; waits for its worker.
* training consumes a batch that the gate lets through; produces a step, its commit record and published weights; waits
  for ready groups; unblocked by collection and by ledger commits.
* publication consumes the newest weights; produces a committed version; waits for engines.
* consistency (one per service actor) consumes ready headers; produces evidence, and in mode `gate` the verdicts that
  let groups through; waits for the service; unblocked by collection and by ledger commits.
* supervision checks replicas and restarts what failed.
* evaluation consumes ledger commits; produces scores of held-out prompts through a replica that serves; the engines'
  first update waits for that of version 0.
* the doctor reads rows and events every few steps and says what is wrong.

None waits for another beyond those edges; eta = 0 is the same loop with a window of one batch. This module wires them
and owns their tasks.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from actors.ports import Fleet
from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress, watch_for_stall
from orchestrator.dispatch.accounts import Accounts
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.book import Book
from orchestrator.dispatch.collection import Collection
from orchestrator.dispatch.staleness import Gate, Window
from orchestrator.loop.auditing import Baselines, Consistency
from orchestrator.loop.evaluation import Evaluation
from orchestrator.loop.live_doctor import LiveDoctor
from orchestrator.loop.measured_store import MeasuredStore
from orchestrator.loop.supervision import Supervision
from orchestrator.loop.training import Checkpoints, Training
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.publication import Publisher
from orchestrator.weight_sync.transfer import build_transfer
from rollout.errors import ConcordError, first_error
from rollout.types.generation import PauseMode
from rollout.types.protocols import PromptSource, Recovery
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where the loop starts: the recovered store, and the trainer's weights, which the engines already serve."""

    recovery: Recovery
    manifest: WeightManifest


class Loop:
    """All tasks of one run, on one event loop."""

    def __init__(
        self,
        *,
        config: RunConfig,
        fleet: Fleet,
        replicas: Replicas,
        source: PromptSource,
        opening: Opening,
        checkpoints: Checkpoints,
        progress: Progress,
        baselines: Baselines | None = None,
    ) -> None:
        """With `baselines`, the consistency service of the config's mode takes part; without, nothing is scored."""
        self._config = config
        self._fleet = fleet
        self.replicas = replicas
        self.accounts = Accounts()
        self._store = MeasuredStore(fleet.store, self._note_store_latency)
        self.doctor = LiveDoctor(self._store.record_event)
        self._store.on_event = self.doctor.event
        self.progress = progress
        self.stop = asyncio.Event()
        self.book = Book(
            store=self._store,
            store_deadline_s=config.deadlines.store_s,
            replicas=replicas,
            recovery=opening.recovery,
            accounts=self.accounts,
            progress=self.progress,
        )
        self.supervision = Supervision(replicas=replicas, book=self.book, deadlines=config.deadlines, spawn=self._spawn)
        self.publisher = self.supervision.publisher = self._publisher(config, opening.manifest)
        self.admission = Admission(
            book=self.book,
            window=_window(config),
            source=source,
            publisher=self.publisher,
            replicas=replicas,
            group_size=config.run.group_size,
            submit_deadline_s=config.deadlines.store_s,
        )
        self.collection = Collection(
            fleet=fleet,
            replicas=replicas,
            book=self.book,
            admission=self.admission,
            max_attempts=config.episodes.max_attempts,
        )
        self.collection.check_engines = self.supervision.check
        self.consistency = None if baselines is None else self._consistency(config, baselines, opening)
        self.training = Training(
            trainer=fleet.trainer,
            book=self.book,
            gate=_gate(config, audited_only=self.consistency is not None and self.consistency.gates),
            publisher=self.publisher,
            checkpoints=checkpoints,
            deadlines=config.deadlines,
            start=opening.manifest,
            consistency=self.consistency,
        )
        self.evaluation = self._evaluation(config) if config.evaluation.every_steps else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    def _publisher(self, config: RunConfig, first: WeightManifest) -> Publisher:
        publisher = Publisher(
            replicas=self.replicas,
            store=self._store,
            first=first,
            mode=PauseMode.DRAIN if config.run.deterministic else PauseMode(config.engine.kv_across_versions),
            on_commit=self._committed,
            on_failure=self.supervision.fail,
            transfer=build_transfer(config, self._fleet.trainer),
        )
        if config.run.deterministic:
            publisher.ready_to_apply = self._until_idle
        return publisher

    def _consistency(self, config: RunConfig, baselines: Baselines, opening: Opening) -> Consistency:
        consistency = Consistency(
            config=config.consistency,
            seed=config.run.seed,
            fleet=self._fleet,
            book=self.book,
            replicas=self.replicas,
            baselines=baselines,
            ledger=[*(entry.policy for entry in opening.recovery.ledger), opening.manifest.policy],
            fail_replica=self.supervision.fail,
        )
        self.book.on_ready = consistency.take
        self.supervision.on_tainted = consistency.canary_failed
        return consistency

    def _evaluation(self, config: RunConfig) -> Evaluation:
        evaluation = Evaluation(
            config=config.evaluation,
            fleet=self._fleet,
            replicas=self.replicas,
            book=self.book,
            publisher=self.publisher,
        )
        self.publisher.ready_to_apply = evaluation.version_0_is_scored
        self.supervision.on_serving = evaluation.ring
        return evaluation

    def request_stop(self) -> None:
        """Finish the running step, checkpoint, and end."""
        self.stop.set()
        self.book.ring()

    def policies_in_use(self) -> set[PolicyVersion]:
        """Policies that live groups, replicas or waiting publications refer to."""
        pool = self.book.pool
        ready = {policy for header in pool.ready.values() for policy in header.policies}
        return ready | {dispatch.policy for dispatch in pool.running.values()} | self.publisher.held()

    async def run(self) -> None:
        """Train until `run.steps` or a stop.

        Raises:
            ConcordError: what ended the run early.
        """
        config = self._config
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._spawn(self.admission.run(), "admission")
                self._spawn(self.publisher.run(), "publication")
                self._spawn(self.supervision.run(), "supervision")
                self._spawn(self.doctor.run(), "doctor")
                stall_watch = self._spawn(
                    watch_for_stall(self.progress, config.deadlines.stall_s, self._fleet.dump_stacks), "stall watch"
                )
                for index in range(config.episodes.workers):
                    self._spawn(self.collection.run(index), f"collection {index}")
                if self.consistency is not None:
                    self._spawn_consistency(self.consistency)
                if self.evaluation is not None:
                    self._spawn(self.evaluation.run(), "evaluation")
                try:
                    await self.training.run(config.run.steps, config.trainer.checkpoint.every_steps, self.stop)
                    stall_watch.cancel()  # no step is to come
                    if self.evaluation is not None and not self.stop.is_set():
                        await self.evaluation.last(self.training.policy, self.stop)
                finally:
                    for task in list(self._tasks):
                        task.cancel()
        except* ConcordError as errors:
            raise first_error(errors) from errors

    def _spawn_consistency(self, consistency: Consistency) -> None:
        for index in range(self._config.consistency.workers):
            self._spawn(consistency.run(index), f"consistency {index}")
        if consistency.gates and self._config.consistency.when_behind == "audit":
            self._spawn(consistency.waive(), "consistency waiver")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        if self._group is None:
            raise ConcordError(f"{name} was asked for before the loop ran")
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _committed(self, reports: list[ApplyReport]) -> None:
        self.accounts.weight_updates += 1
        self.accounts.paused([report.pause_s for report in reports])
        self.accounts.distributions.observe_all(
            "concord_weight_update_pause_seconds", (report.pause_s for report in reports)
        )
        if self.consistency is not None:
            self.consistency.committed(self.publisher.committed.policy)
        if self.evaluation is not None:
            self.evaluation.ring()
        self.book.ring()

    def _note_store_latency(self, call: str, seconds: float) -> None:
        self.accounts.distributions.observe("concord_store_latency_seconds", seconds, call)

    async def _until_idle(self) -> None:
        """Deterministic mode: a version is applied when nothing runs and nothing may start under the one before."""
        self.book.idle.clear()
        self.book.admit_bell.set()
        await self.book.idle.wait()


def _window(config: RunConfig) -> Window:
    return Window(
        max_staleness=config.staleness.max_staleness,
        batch_groups=config.run.batch_groups,
        max_concurrent=config.max_concurrent_groups,
    )


def _gate(config: RunConfig, *, audited_only: bool) -> Gate:
    staleness = config.staleness
    return Gate(
        max_staleness=staleness.max_staleness,
        batch_groups=config.run.batch_groups,
        policy=staleness.policy,
        order=staleness.order,
        dispatch_window=staleness.dispatch_window,
        audited_only=audited_only,
    )
