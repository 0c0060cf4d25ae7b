"""Which steps the consistency service looks at, on which trajectories, and what it found over time.

It chooses a few trajectories of each batch by their rewards, before the step; keeps the newest applied step until a
service has time for it; and adds up evidence that steps go against their rewards. It never asks the service.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.loop.measured_store import MeasuredStore
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.cusum import Cusum
from trainer.consistency.checks.step import evidence_against
from trainer.consistency.service.report import StepAudit, StepDeviation, StepToAudit
from trainer.types.step import StepReport, StepRequest

EVIDENCE_NATS = 12.0
"""Evidence at which steps are reported to go against their rewards: a false alarm in 160,000 audited steps at most."""
DISAGREES = ("trainer_logprobs", "loss_positions", "advantages")
"""Codes of deviations in what went into the step; the others are about what came out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AppliedStep:
    """One to look at."""

    dispatch_ids: tuple[str, ...]
    step: StepToAudit


class StepAudits:
    """The audits of steps, in either mode."""

    def __init__(self, store: MeasuredStore, rows: int, seed: int) -> None:
        """Look at `rows` trajectories of each step; 0: at none."""
        self._store, self._rows, self._seed = store, rows, seed
        self._against = Cusum(EVIDENCE_NATS)
        self._waiting: AppliedStep | None = None
        self.newest: StepAudit | None = None
        self.audited = 0
        self.skipped = 0
        """Applied steps that no service looked at, because it was busy or their weights were gone."""
        self.deviations: Counter[str] = Counter()
        """Steps by what deviated in them."""

    @property
    def evidence(self) -> float:
        """That steps go against their rewards, nats."""
        return self._against.value

    def choose(self, batch: Sequence[GroupHeader], step: int) -> frozenset[str]:
        """Trajectories of the step that produces version `step`: of groups drawn by a hash among those whose rewards
        differ, the one farthest from its group's mean each, then the next."""
        groups = sorted(
            (header for header in batch if len({one.reward for one in header.trajectories}) > 1),
            key=lambda header: self._draw(step, header.dispatch_id),
        )[: self._rows]
        ranked = [_by_distance(header) for header in groups]
        depth = max(map(len, ranked), default=0)
        return frozenset([ids[place] for place in range(depth) for ids in ranked if place < len(ids)][: self._rows])

    def applied(
        self, batch: Sequence[GroupHeader], before: PolicyVersion, request: StepRequest, report: StepReport
    ) -> None:
        """A step was applied and its weights are published; one that still waits is let go."""
        if not report.audited:
            return
        self.skipped += self._waiting is not None
        trained = {each.trajectory_id for each in report.audited}
        self._waiting = AppliedStep(
            dispatch_ids=tuple(
                header.dispatch_id
                for header in batch
                if any(one.trajectory_id in trained for one in header.trajectories)
            ),
            step=StepToAudit(
                before=before,
                after=request.policy,
                oldest_version=request.oldest_version,
                grad_norm=report.grad_norm,
                trained=report.audited,
            ),
        )

    def take(self) -> AppliedStep | None:
        """The newest applied step that nobody has looked at."""
        waiting, self._waiting = self._waiting, None
        return waiting

    async def found(self, audit: StepAudit | None) -> None:
        """What the service saw; None where it could not look."""
        if audit is None or not audit.tokens:
            self.skipped += 1
            return
        self.newest, self.audited = audit, self.audited + 1
        into = [each for each in audit.deviations if each.code in DISAGREES]
        out = [each for each in audit.deviations if each.code not in DISAGREES]
        if self._against.add(evidence_against(audit.drive)):
            out.append(
                StepDeviation(
                    code="against_rewards",
                    detail="step after step, trajectories with a positive advantage become less likely and those with "
                    f"a negative one likelier (drive {audit.drive:+.2f} in this step; above 0 expected)",
                )
            )
        self.deviations.update(each.code for each in (*into, *out))
        if into:
            await self._store.record_event("trainer_disagrees", {**_fields(audit, into)})
        if out:
            await self._store.record_event("update_differs", {**_fields(audit, out)})

    def _draw(self, step: int, dispatch_id: str) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{step}/{dispatch_id}".encode(), digest_size=8).digest()


def _by_distance(header: GroupHeader) -> list[str]:
    mean = sum(one.reward for one in header.trajectories) / len(header.trajectories)
    return [one.trajectory_id for one in sorted(header.trajectories, key=lambda one: -abs(one.reward - mean))]


def _fields(audit: StepAudit, deviations: Sequence[StepDeviation]) -> dict[str, str | int | float]:
    return {
        "step": audit.policy.version,
        "policy": audit.policy.key,
        "codes": ",".join(each.code for each in deviations),
        "trajectories": audit.rows,
        "tokens": audit.tokens,
        "gap_nats": audit.gap_mean,
        "drive": audit.drive,
        "update_rates": audit.update_rates,
        "detail": "; ".join(each.detail for each in deviations),
    }
