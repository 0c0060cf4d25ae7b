"""The training loop: batch -> step -> commit record -> published weights -> (sometimes) checkpoint.

Consumes what the gate lets through; produces versions. Waits for ready groups only: engines apply weights while the
next step runs. With a GPU transport it also waits until the engines have the weights, before the next step changes
them.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from actors.ports import TrainerPort
from orchestrator.config import DeadlinesConfig
from orchestrator.dispatch.book import Book
from orchestrator.dispatch.staleness import Gate
from orchestrator.loop.auditing import Consistency
from orchestrator.loop.step_log import StepLog
from orchestrator.observers import StepDone, StepPhases
from orchestrator.weight_sync.publication import Publisher
from rollout.errors import ConcordError
from rollout.tasks import within
from rollout.types.dispatch import Ending, RejectReason, StepCommit
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion, WeightManifest
from trainer.types.gradloc import Acted
from trainer.types.step import OldLogprobSource, StepReport, StepRequest

MAX_SKIPPED_IN_A_ROW = 10
"""Steps in a row that may be skipped before the run ends with the reason."""


class Checkpoints(Protocol):
    """Saves a version and makes its steps final."""

    async def save(self, policy: PolicyVersion) -> None:
        """Write the checkpoint of `policy`."""
        ...


class Training:
    """Owns the trainer's version."""

    def __init__(
        self,
        *,
        trainer: TrainerPort,
        book: Book,
        gate: Gate,
        publisher: Publisher,
        checkpoints: Checkpoints,
        deadlines: DeadlinesConfig,
        log: StepLog,
        consistency: Consistency | None = None,
    ) -> None:
        self._trainer, self._book, self._gate, self._publisher = trainer, book, gate, publisher
        self._checkpoints, self._deadlines, self._log, self._consistency = checkpoints, deadlines, log, consistency
        self.manifest = publisher.committed
        self.policy = self.manifest.policy
        self.skipped = 0
        self._saved = self.policy
        self._why_skipped = ""
        self._first_saved = ""
        self._waits_since: float | None = None

    @property
    def batch_wait_s(self) -> float:
        """For how long it has been waiting for a batch now; 0 while it works."""
        return 0.0 if self._waits_since is None else time.monotonic() - self._waits_since

    async def run(self, steps: int, checkpoint_every: int, stop: asyncio.Event) -> None:
        """Train up to version `steps`, or until `stop`; the last version is always checkpointed."""
        skipped_in_a_row = 0
        while self.policy.version < steps and not stop.is_set():
            begun = time.monotonic()
            self._waits_since = begun
            batch = await self._batch(stop)
            self._waits_since = None
            if not batch:
                break
            done = await self._step(batch, waited_s=time.monotonic() - begun)
            self._book.progress.beat()
            skipped_in_a_row = 0 if done else skipped_in_a_row + 1
            if done:
                self._first_saved = ""
            if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise ConcordError(
                    f"{skipped_in_a_row} steps in a row were not applied, the last one for a {self._why_skipped}; "
                    f"{self._cure()}"
                )
            if done is None:
                continue
            if self.policy.version % checkpoint_every == 0:
                done = await self._checkpointed(done)
            self._book.progress.beat()
            await self._log.applied(done)
        if self._saved != self.policy:
            await self._checkpoint()

    async def _batch(self, stop: asyncio.Event) -> tuple[GroupHeader, ...]:
        book = self._book
        while not stop.is_set():
            committed = self._publisher.committed.policy.version
            selection = self._gate.select(book.pool, self.policy.version, committed, book.unverified())
            if selection.stale:
                await book.reject(
                    selection.stale,
                    RejectReason.STALE,
                    f"older than {self._gate.max_staleness} steps at trainer version {self.policy.version}",
                )
                continue
            if selection.batch:
                return selection.batch
            await book.progress.until(book.train_bell, "training", selection.waits_for)
            book.train_bell.clear()
        return ()

    async def _step(self, batch: Sequence[GroupHeader], waited_s: float) -> StepDone | None:
        book, begun = self._book, time.monotonic()
        source = OldLogprobSource.ROLLOUT if self._consistency is None else self._consistency.source_of(batch)
        version = self.policy.version + 1
        request = StepRequest(
            policy=PolicyVersion(book.epoch, version),
            oldest_version=self._floor(),
            old_logprobs=source,
            audited=frozenset() if self._consistency is None else self._consistency.steps.choose(batch, version),
        )
        if self._consistency is not None:
            await self._consistency.step_taken(batch, source, request.policy.version)
        ids = [header.dispatch_id for header in batch]
        book.leave(ids)
        what = f"the trainer to finish step {request.policy.version}"
        book.progress.waits("training", what)
        stepping, limit_s = self._trainer.step(book.epoch, ids, request), self._deadlines.step_s
        report = await within(stepping, limit_s, "deadlines.step_s", what)
        book.progress.waits("training", "")
        train_s = time.monotonic() - begun
        await self._log.taken(request.policy, report)
        if report.skipped:
            await self._skipped(ids, request.policy, report)
            return None
        facts = book.accounts.step(batch, report, request)
        begun = time.monotonic()
        manifest, _ = await asyncio.gather(self._publish(request.policy), self._acknowledge(batch, report, request))
        before, self.policy, self.manifest = self.policy, request.policy, manifest
        self._publisher.offer(manifest)
        if self._consistency is not None:
            self._consistency.step_applied(batch, before, request, report)
        await self._transferred()
        publish_s = time.monotonic() - begun
        book.accounts.trainer_worked(train_s + publish_s)
        phases = StepPhases(wait_s=waited_s, train_s=train_s, publish_s=publish_s)
        return StepDone(report=report, facts=facts, phases=phases)

    def _cure(self) -> str:
        """What to do about steps that are not applied, by why they were not."""
        if not self._why_skipped.startswith("non-finite"):
            return (
                "the gradient search takes ordinary steps for spikes, or each is one: look at `concord gradloc RUN`, "
                "and raise trainer.gradloc.threshold if the tokens are ordinary"
            )
        batch = f" (`concord replay RUN {self._first_saved}` runs the first one's batch)" if self._first_saved else ""
        return (
            f"find where it comes from{batch}, then resume from a checkpoint before it; do not change the learning "
            "rate before you know"
        )

    async def _skipped(self, ids: Sequence[str], policy: PolicyVersion, report: StepReport) -> None:
        self.skipped += 1
        self._why_skipped = report.skipped
        self._first_saved = self._first_saved or report.saved
        await self._log.skipped(policy, report)
        spike = report.gradloc is not None and report.gradloc.acted is Acted.SKIPPED and math.isfinite(report.grad_norm)
        reason = RejectReason.GRADIENT_SPIKE if spike else RejectReason.NON_FINITE
        await self._book.end_leased(
            [Ending(dispatch_id=i, reason=reason, detail=report.skipped, readmit=False) for i in ids]
        )

    def _floor(self) -> int:
        """The oldest token version that step v + 1 may train on."""
        return max(0, self.policy.version - self._gate.max_staleness)

    async def _publish(self, policy: PolicyVersion) -> WeightManifest:
        publishing, limit_s = self._trainer.publish(policy), self._deadlines.checkpoint_s
        return await within(publishing, limit_s, "deadlines.checkpoint_s", f"the trainer to publish {policy.key}")

    async def _transferred(self) -> None:
        progress = self._book.progress
        progress.waits("training", f"the engines to receive {self.policy.key} from the trainer")
        await self._publisher.transferred()
        progress.waits("training", "")

    async def _acknowledge(self, batch: Sequence[GroupHeader], report: StepReport, request: StepRequest) -> None:
        book = self._book
        trained = [h for h in batch if any(t.trajectory_id in report.trained_ids for t in h.trajectories)]
        empty = [h for h in batch if not any(t.trajectory_id in report.trained_ids for t in h.trajectories)]
        commit = StepCommit(
            policy=request.policy,
            dispatch_ids=tuple(h.dispatch_id for h in trained),
            trajectories_trained=len(report.trained_ids),
            trajectories_masked=len(report.masked_ids),
            trajectories_dropped=sum(len(h.trajectories) for h in batch) - len(report.trained_ids),
        )
        book.trained(request.policy.version, len(trained))
        book.recounts(await book.store.acknowledge(commit))
        await book.end_leased([_untrained(header.dispatch_id, report) for header in empty])
        book.ring()

    async def _checkpointed(self, done: StepDone) -> StepDone:
        begun = time.monotonic()
        await self._checkpoint()
        phases = replace(done.phases, checkpoint_s=time.monotonic() - begun)
        return replace(done, phases=phases, checkpointed=True)

    async def _checkpoint(self) -> None:
        saving, limit_s = self._checkpoints.save(self.policy), self._deadlines.checkpoint_s
        await within(saving, limit_s, "deadlines.checkpoint_s", f"the checkpoint of {self.policy.key}")
        self._saved = self.policy


def _untrained(dispatch_id: str, report: StepReport) -> Ending:
    """The end of a group in an applied step that nothing was trained on; its prompt comes again, unless the group was
    sound and had nothing to say."""
    if dispatch_id in report.dropped_groups:
        detail = "all of its advantages are 0"
        return Ending(dispatch_id=dispatch_id, reason=RejectReason.NO_DIFFERENCE, detail=detail, readmit=False)
    reason = RejectReason.QUARANTINED if dispatch_id in report.quarantined_groups else RejectReason.ALL_MASKED
    return Ending(dispatch_id=dispatch_id, reason=reason, detail="no token of it was left in the loss", readmit=True)
