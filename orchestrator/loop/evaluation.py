"""Periodic evaluation: a committed version -> a score with its fingerprint, as an event and as columns.

Consumes ledger commits; asks the evaluation actor, which asks one serving replica beside its ordinary work. It waits
for nobody, and two wait for it: the engines' first update, until version 0 is scored, which no engine holds afterwards
(the trainer goes on meanwhile); and the end of a run, for its last score. An evaluation that fails is an event; the
next one is due at its own time.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from actors.ports import EvaluatorPort, Fleet
from orchestrator.dispatch.book import Book
from orchestrator.metrics.learning import CONFIGURATIONS
from orchestrator.metrics.types import OTHER, UNMEASURED
from orchestrator.observers import Observer, Observers
from orchestrator.replicas.replica import Replica
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.committed import CommittedWeights
from rollout.config import EvaluationConfig
from rollout.errors import ConcordError
from rollout.evaluation.evaluator import EvaluationReport
from rollout.tasks import within
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

KEY = "evaluation.deadline_s"
NO_SCORE = {
    "eval_score": UNMEASURED,
    "eval_stderr": UNMEASURED,
    "eval_version": UNMEASURED,
    "eval_fingerprint_changed": 0.0,
}
"""Columns before the first evaluation, and of a run without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The newest score."""

    score: float
    stderr: float
    version: int


class Evaluation(Observer):
    """Owns when what is evaluated."""

    def __init__(
        self,
        *,
        config: EvaluationConfig,
        fleet: Fleet,
        replicas: Replicas,
        book: Book,
        weights: CommittedWeights,
        observers: Observers,
        fingerprints: Sequence[str] = (),
    ) -> None:
        """`fingerprints` are of the scores that the run had before this loop, in order: a configuration that a resume
        changes starts a series of its own, too."""
        self._config, self._fleet, self._replicas, self._book = config, fleet, replicas, book
        self._weights, self._observers = weights, observers
        self._bell = asyncio.Event()
        self._due = weights.policy.version
        self._asked = 0
        self._scored_whole = -1
        self._final: PolicyVersion | None = None
        self._finished = asyncio.Event()
        self._first_is_over = asyncio.Event()
        if self._due > 0:
            self._first_is_over.set()
        self.newest: Score | None = None
        self._fingerprint: str | None = None
        self.changes = 0
        """How often, since the run began, the configuration of an evaluation was another than that of the one
        before."""
        self.tokens = 0
        """Sampled by the engines for finished prompts of evaluations."""
        self.seconds = 0.0
        """In which a replica answered evaluations."""
        for fingerprint in fingerprints:
            self._under(fingerprint)

    def _under(self, fingerprint: str) -> None:
        self.changes += self._fingerprint not in (None, fingerprint)
        self._fingerprint = fingerprint

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        """A score may be due."""
        self._bell.set()

    def replica_serves(self, slot: int) -> None:
        """It may be asked."""
        self._bell.set()

    async def version_0_is_scored(self) -> None:
        """Return once it is, or cannot be: its evaluation failed, or has taken `evaluation.deadline_s`. At once in a
        run that goes on from a checkpoint."""
        if not self._first_is_over.is_set():
            self._book.progress.waits("publication", "the evaluation of version 0")
            with suppress(TimeoutError):  # what happened to it is reported where it ends
                async with asyncio.timeout(self._config.deadline_s):
                    await self._first_is_over.wait()
            self._first_is_over.set()
            self._book.progress.waits("publication", "")

    def columns(self) -> dict[str, float]:
        """The newest score as columns of a metric row."""
        newest = self.newest
        if newest is None:
            return NO_SCORE
        changes = float(self.changes)
        return {
            "eval_score": newest.score,
            "eval_stderr": newest.stderr,
            "eval_version": float(newest.version),
            "eval_fingerprint_changed": changes,
        }

    def configuration(self) -> str:
        """Label of the configuration in force: scores of two configurations are two series."""
        return str(self.changes) if str(self.changes) in CONFIGURATIONS else OTHER

    async def run(self) -> None:
        """Evaluate for ever, replacing the actor when it fails; ends by cancellation."""
        port: EvaluatorPort | None = None
        while True:
            await self._until_due()
            asked = self._weights.manifest
            try:
                if port is None:
                    starting = self._fleet.new_evaluator()
                    port = await within(starting, self._config.deadline_s, KEY, "the evaluation to start")
                    asked = self._weights.manifest  # which may have moved on meanwhile
                await self._evaluate(port, asked)
            except ConcordError as error:
                if port is not None:
                    await port.kill()
                    port = None
                await self._book.store.record_event(
                    "evaluation_failed", {"version": asked.policy.version, "reason": str(error)}
                )
            self._passed(asked.policy.version)

    async def last(self, policy: PolicyVersion, stop: asyncio.Event) -> None:
        """Training has ended with `policy`: wait for its score, for as long as one evaluation may take, and not beyond
        `stop`. One that it has counts."""
        if self._scored_whole == policy.version:
            return
        self._final = policy
        self._bell.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.deadline_s):
                await _first_of(self._finished, stop)
        if not self._finished.is_set():
            reason = (
                "the run was stopped"
                if stop.is_set()
                else f"no score after evaluation.deadline_s = {self._config.deadline_s:g}"
            )
            await self._book.store.record_event("evaluation_failed", {"version": policy.version, "reason": reason})

    async def _until_due(self) -> None:
        while not self._is_due(self._weights.policy) or not self._replicas.serving(self._weights.policy):
            self._bell.clear()
            await self._bell.wait()

    async def _evaluate(self, port: EvaluatorPort, asked: WeightManifest) -> None:
        replica = min(self._replicas.serving(self._weights.policy), key=lambda one: one.assigned, default=None)
        if replica is None:
            raise ConcordError(f"no engine replica serves {asked.policy.key} any more")
        self._asked += 1
        begun = time.monotonic()
        report = await within(
            _scored(port, replica, asked.policy, f"{asked.policy.key}-{self._asked}"),
            self._config.deadline_s,
            KEY,
            f"the evaluation of {asked.policy.key} on replica {replica.slot}",
        )
        self.seconds += time.monotonic() - begun
        self.tokens += report.tokens
        await self._take(report, asked, replica)

    def _is_due(self, policy: PolicyVersion) -> bool:
        return not self._finished.is_set() and (
            policy.version >= self._due or (self._final is not None and policy.version >= self._final.version)
        )

    def _passed(self, version: int) -> None:
        every = self._config.every_steps
        self._due = (version // every + 1) * every
        self._first_is_over.set()
        if self._final is not None and version >= self._final.version:
            self._finished.set()

    async def _take(self, report: EvaluationReport, asked: WeightManifest, replica: Replica) -> None:
        if report.score is None:
            reason = f"none of {report.failed} prompts was finished; the first: {report.failure}"
            await self._book.store.record_event(
                "evaluation_failed", {"version": asked.policy.version, "reason": reason}
            )
            return
        newest, mixed = report.policies[-1], len(report.policies) > 1
        if not mixed:
            self._scored_whole = newest.version
        self._under(report.fingerprint)
        self.newest = Score(score=report.score, stderr=report.stderr or 0.0, version=newest.version)
        manifests = {manifest.policy: manifest.digest for manifest in (asked, self._weights.manifest)}
        fields: dict[str, str | int | float | bool | None] = {
            "score": report.score,
            "stderr": report.stderr,
            "policy": newest.key,
            "version": newest.version,
            "oldest_version": report.policies[0].version,
            "mixed": mixed,
            "weights_digest": None if mixed else manifests.get(newest),
            "fingerprint": report.fingerprint,
            "prompts": report.prompts,
            "failed": report.failed,
            "failure": report.failure,
            "length_mean": report.length_mean,
            "tokens": report.tokens,
            "replica": replica.slot,
            "seconds": report.seconds,
            **{f"part_{name}": value for name, value in report.parts},
        }
        await self._book.store.record_event("evaluation", fields)
        await self._observers.score_taken()


async def _first_of(*events: asyncio.Event) -> None:
    """Return when one of them is set."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def _scored(port: EvaluatorPort, replica: Replica, policy: PolicyVersion, label: str) -> EvaluationReport:
    """The evaluation learns its engine when it asks: replicas that start never wait for it, and do not fail when it is
    gone."""
    if replica.port is None or replica.tag is None:
        raise ConcordError(f"engine replica {replica.slot} has no process; it is being restarted")
    await port.connect(replica.slot, replica.port, replica.tag)
    return await port.evaluate(replica.slot, policy, label)
