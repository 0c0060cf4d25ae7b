"""From this rank's micro-batches to an applied update, or to the reason why there is none. It knows no group, no file
and no version.

    (forward, backward) a micro-batch -> sums over ranks -> norms, unclipped -> search, where a norm asks for it
    -> (all again without culprits) -> clip, update
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, cast

import torch

from trainer.batching.batcher import TrainingBatch
from trainer.config.gradloc import GradLocConfig
from trainer.gradloc.probe.probe import TokenLoss, draws_random_numbers
from trainer.gradloc.probe.random_states import RandomState
from trainer.loss.policy_loss import loss_tokens
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import OptimizerReport, PolicyOptimizer
from trainer.optim.probes import Probed
from trainer.optim.step_watch import HeadLogits, StepWatch
from trainer.step.batch_replay import BatchReplay
from trainer.step.gradient_search import Attempt, GradientSearch
from trainer.types.evidence import AuditedGroup
from trainer.types.gradloc import Acted, GradLocEvidence
from trainer.types.step import MicroBatch, PlantedFault, StepBatches

ROUTING_SUMS = ("routing_expected", "routing_replayed")
"""What ranks sum up in a step beside the sums of the loss: of a replay, the inputs that predict something and those of
them that ran on the engine's experts."""


class PhaseClock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.phases: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """The phase that began when the one before ended is over."""
        now = perf_counter()
        self.phases.append((phase, now - self._last))
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """What `GradientStep.run` did; the same on all ranks."""

    totals: Mapping[str, float]
    """Sums of the loss and `ROUTING_SUMS`, over all ranks, of the pass that counts."""
    optimizer: OptimizerReport
    evidence: GradLocEvidence | None
    """What the gradient search found, where one took place."""
    removed: Mapping[str, int]
    """Trajectory -> terms that left the loss because of it, over all ranks."""
    probes: tuple[Probed, ...]
    attention_logits: HeadLogits
    """Before the heads were scaled."""
    planted: tuple[PlantedFault, ...] = ()
    """Gradient faults that the step was due."""


class GradientSeam(Protocol):
    """What a trainer's step runs: a `GradientStep`, or a wrapper round one."""

    @property
    def search(self) -> GradientSearch | None:
        """The gradient search, None where it is off."""
        ...

    def run(
        self, step: int, packed: StepBatches, batch: TrainingBatch, audited: Sequence[AuditedGroup], clock: PhaseClock
    ) -> GradientReport:
        """Compute the gradient of this rank's micro-batches and apply it as optimizer step `step` (from 1).

        Args:
            packed: the micro-batches of all ranks.
            audited: the groups that `batch` was built from, with their evidence.
        """
        ...


class GradientStep:
    """One rank's part; every method is collective."""

    def __init__(
        self,
        model: PolicyModel,
        loss: TokenLoss,
        optimizer: PolicyOptimizer,
        ranks: Ranks,
        *,
        watch: StepWatch,
        replay: BatchReplay | None = None,
        gradloc: GradLocConfig,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of the forward and backward pass."""
        self._model, self._loss, self._optimizer, self._ranks = model, loss, optimizer, ranks
        self._watch, self._replay = watch, replay
        self._totals = (*loss.sums, *ROUTING_SUMS)
        self._random = draws_random_numbers(model)
        self.search = (
            GradientSearch(gradloc, model, loss, ranks, context=self._context, dtype=dtype) if gradloc.enabled else None
        )

    def run(
        self, step: int, packed: StepBatches, batch: TrainingBatch, audited: Sequence[AuditedGroup], clock: PhaseClock
    ) -> GradientReport:
        """As `GradientSeam.run`."""
        done = _Done(attempt=self._attempt(packed[self._ranks.rank], batch))
        clock.end("forward_backward")
        if self.search is not None and batch.num_tokens:
            done = self._searched(self.search, done.attempt, batch, audited)
        clock.end("gradloc")
        with self._watch.updating():
            optimizer = self._end(step, done.attempt, _refusal(done))
            attention_logits = self._watch.clip_heads(applied=optimizer.applied)
        probes = self._watch.take()
        if self.search is not None:
            self._remember(self.search, done, batch, applied=not optimizer.skipped)
        clock.end("optimizer")
        return GradientReport(
            totals=done.attempt.totals,
            optimizer=optimizer,
            evidence=done.evidence,
            removed=done.removed,
            probes=probes,
            attention_logits=attention_logits,
        )

    def _attempt(self, micro_batches: Sequence[MicroBatch], batch: TrainingBatch) -> Attempt:
        """Add the gradients of this rank's micro-batches to what is there, and measure the whole."""
        sums = torch.zeros(len(self._totals), dtype=torch.float64, device=self._ranks.device)
        random_states: list[RandomState] = []
        for number, micro in enumerate(micro_batches):
            if self._random:
                random_states.append(RandomState.take(self._ranks.device))
            with self._context(micro) as (expected, replayed):
                with self._watch.forward(micro):
                    loss, added = self._loss(
                        self._model, loss_tokens(micro, self._ranks.device), batch.temperature, batch.old_logprob_source
                    )
                with nullcontext() if self.search is None else self.search.backward(number):
                    loss.backward()  # pyright: ignore[reportUnknownMemberType]
            sums += torch.cat((added, added.new_tensor((expected, replayed))))
        totals: list[float] = cast(Any, self._ranks.sum(sums)).tolist()
        return Attempt(
            micro_batches=micro_batches,
            totals=dict(zip(self._totals, totals, strict=True)),
            norms=self._optimizer.measure(),
            random_states=random_states,
        )

    def _searched(
        self, search: GradientSearch, attempt: Attempt, batch: TrainingBatch, audited: Sequence[AuditedGroup]
    ) -> "_Done":
        """Look at an attempt, and compute the step again where the search says without what."""
        found = search.look(attempt, batch, audited, self._optimizer.smallest_scale(attempt.norms))
        if found is None or found.micro_batches is None:
            return _Done(attempt=attempt, evidence=None if found is None else found.evidence)
        self._optimizer.zero()
        if attempt.random_states:
            attempt.random_states[0].put_back(self._ranks.device)
        again = self._attempt(found.micro_batches, batch)
        evidence = replace(found.evidence, grad_norm_after=again.norms.total)
        return _Done(attempt=again, evidence=evidence, removed=found.removed, again=True)

    def _end(self, step: int, attempt: Attempt, refusal: str) -> OptimizerReport:
        """Apply the attempt, or drop it: with a reason, or because no term is left."""
        if refusal or not attempt.totals["tokens"]:
            return self._optimizer.drop(step, attempt.norms, refusal)
        return self._optimizer.apply(step, attempt.norms)

    def _remember(self, search: GradientSearch, done: "_Done", batch: TrainingBatch, *, applied: bool) -> None:
        """Only what is applied makes history, and of that only gradients; a step without a term was not looked at."""
        if batch.num_tokens and (not applied or done.again):
            search.amend(done.attempt if applied else None, batch, done.removed)
        if applied and done.attempt.norms.total > 0:
            search.applied(done.attempt.norms)

    def _context(self, micro: MicroBatch) -> AbstractContextManager[tuple[int, int]]:
        """Forward and backward of a micro-batch run inside it; yields what it adds to `ROUTING_SUMS`."""
        return nullcontext((0, 0)) if self._replay is None else self._replay.using(micro)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Done:
    attempt: Attempt
    """The one that counts."""
    evidence: GradLocEvidence | None = None
    """What its search found, or that of the attempt before."""
    removed: Mapping[str, int] = field(default_factory=dict[str, int])
    again: bool = False
    """Whether it is a repetition."""


def _refusal(done: _Done) -> str:
    """Why the attempt must not be applied; empty where it may."""
    attempt, evidence = done.attempt, done.evidence
    if not math.isfinite(attempt.totals["loss"]):
        return f"non-finite loss ({attempt.totals['loss']})"
    if not math.isfinite(attempt.norms.total):
        return f"non-finite gradient (norm {attempt.norms.total})"
    if evidence is not None and evidence.acted is Acted.SKIPPED:
        tokens = ", ".join(f"token {culprit.position} of {culprit.trajectory_id}" for culprit in evidence.culprits)
        return f"gradient spike (norm {evidence.grad_norm:.3g}, threshold {evidence.threshold:.3g}) of {tokens}"
    return ""
