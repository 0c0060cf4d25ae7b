"""Quarantine by the gradient search: the verdict that keeps a culprit's trajectory out of training for good. Numpy
only."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.types.evidence import AuditedGroup, Check, CheckFinding, GroupEvidence, TrajectoryEvidence, encode_evidence
from trainer.types.gradloc import Acted, Culprit, GradLocEvidence, Quarantined
from trainer.types.step import Verdict

CODE = "gradient_spike"
"""Code of the finding."""


def quarantined(audited: Sequence[AuditedGroup], evidence: GradLocEvidence | None) -> tuple[Quarantined, ...]:
    """The new verdicts of the groups that a search took trajectories out of; what was found about them before stays."""
    if evidence is None or evidence.acted is not Acted.QUARANTINED:
        return ()
    culprits: dict[str, list[Culprit]] = {}
    for culprit in evidence.culprits:
        culprits.setdefault(culprit.trajectory_id, []).append(culprit)
    result: list[Quarantined] = []
    for group in audited:
        ids = tuple(t.trajectory_id for t in group.group.trajectories if t.trajectory_id in culprits)
        if ids:
            found = group.evidence or _unscored(group)
            kept = tuple(
                _out(each, culprits[each.trajectory_id]) if each.trajectory_id in ids else each
                for each in found.trajectories
            )
            verdict = encode_evidence(replace(found, trajectories=kept))
            result.append(Quarantined(dispatch_id=group.group.dispatch_id, trajectory_ids=ids, verdict=verdict))
    return tuple(result)


def quarantined_by_search(evidence: TrajectoryEvidence) -> bool:
    """Whether the gradient search took the trajectory out."""
    return evidence.verdict is Verdict.QUARANTINE and any(finding.code == CODE for finding in evidence.findings)


def groups_with_quarantines(audited: Sequence[AuditedGroup], now: Sequence[Quarantined]) -> frozenset[str]:
    """Dispatches of which a trajectory is quarantined, by whomever: before the step, or in it."""
    before = {
        group.group.dispatch_id
        for group in audited
        if group.evidence is not None
        and any(each.verdict is Verdict.QUARANTINE for each in group.evidence.trajectories)
    }
    return frozenset(before | {group.dispatch_id for group in now})


def keep_quarantines(found: GroupEvidence, before: GroupEvidence | None) -> GroupEvidence:
    """New evidence of a group, in which the trajectories that the gradient search quarantined stay so."""
    if before is None:
        return found
    spikes = {
        each.trajectory_id: tuple(finding for finding in each.findings if finding.code == CODE)
        for each in before.trajectories
    }
    kept = tuple(
        (
            replace(each, verdict=Verdict.QUARANTINE, findings=each.findings + spikes[each.trajectory_id])
            if spikes.get(each.trajectory_id)
            else each
        )
        for each in found.trajectories
    )
    return replace(found, trajectories=kept)


def _unscored(group: AuditedGroup) -> GroupEvidence:
    """Evidence of a group that the consistency service has not seen: all of it is accepted as logged."""
    trajectories = group.group.trajectories
    return GroupEvidence(
        dispatch_id=group.group.dispatch_id,
        replica=trajectories[0].tag.replica,
        policies=(),
        trajectories=tuple(
            TrajectoryEvidence(
                trajectory_id=trajectory.trajectory_id,
                scored=np.zeros(trajectory.token_ids.shape, dtype=np.bool_),
                behaviour_logprobs=np.zeros(trajectory.token_ids.shape, dtype=np.float32),
                verdict=Verdict.ACCEPT,
                masked=np.zeros(trajectory.token_ids.shape, dtype=np.bool_),
            )
            for trajectory in trajectories
        ),
    )


def _out(evidence: TrajectoryEvidence, culprits: Sequence[Culprit]) -> TrajectoryEvidence:
    detail = f"its gradient had norm {max(culprit.norm for culprit in culprits):.3g}"
    positions = tuple(culprit.position for culprit in culprits)
    finding = CheckFinding.failure(Check.GRADIENT, CODE, detail, positions)
    return replace(evidence, verdict=Verdict.QUARANTINE, findings=(*evidence.findings, finding))
