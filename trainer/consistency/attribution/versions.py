"""Whether tokens were sampled under other weights than the log says: the replica's fault, or the log's. Pure numpy.

It owns the question which version each token fits best; what counts as an explanation is the inquiry's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.attribution.inquiry import CLOSED_SHARE, KEPT_SHARE, Answer, Inquiry
from trainer.types.evidence import GapCause

NEAR = (-1, 1, -2, 2)
FAR = (-3, 3, -4, 4)
"""Versions that a tag may be off by; the far ones are asked about where a near one helped."""


def ask_identity(inquiry: Inquiry) -> bool:
    """Other weights than published, by the canary; else the versions that the tokens fit."""
    facts = inquiry.facts
    if not facts.canary_holds:
        own = 0.0 if facts.baseline is None else facts.baseline.mean_abs
        return inquiry.explain(GapCause.WEIGHT_SYNC, inquiry.gap - own)
    return inquiry.keep(GapCause.VERSION_TAG, _nearby(inquiry), CLOSED_SHARE) or inquiry.keep(
        GapCause.VERSION_TAG, inquiry.best_of(_everywhere(inquiry), CLOSED_SHARE), CLOSED_SHARE
    )


def _nearby(inquiry: Inquiry) -> Answer | None:
    """Each token at the version near its own that fits, where versions only rise along a span: a tag is late or early,
    or a whole span has the version at its begin or its end."""
    newest = max(span.policy.version for t in inquiry.trajectories for span in t.version_spans)
    answers, best = {0: inquiry.now}, None
    for offset in (*NEAR, *FAR):
        if newest + offset < 0:
            continue
        if offset in FAR and (best is None or inquiry.closes(best) < KEPT_SHARE * inquiry.now.left):
            break
        answers[offset] = inquiry.ask(replace(inquiry.now.options, version_offset=offset))
        best = _rising(inquiry, answers)
        if inquiry.closes(best) >= CLOSED_SHARE * inquiry.now.left:
            break
    return best


def _rising(inquiry: Inquiry, answers: dict[int, Answer]) -> Answer:
    """Each token by one of `answers` (offset -> answer), offsets rising along each span, with the least gap left. A
    change within a span must close more than a limit that fails, so that noise makes none."""
    offsets = sorted(answers)
    gaps = np.stack([answers[offset].gaps for offset in offsets])
    values = np.stack([answers[offset].values for offset in offsets])
    chosen = np.full(inquiry.now.gaps.size, offsets.index(0))
    change = inquiry.limits.mean_abs_fail
    for start, end in inquiry.spans():
        if inquiry.now.gaps[start:end].sum() > change:
            chosen[start:end] = _cheapest_rise(gaps[:, start:end], change)
    tokens = np.arange(chosen.size)
    taken = np.array(offsets)[chosen]
    return Answer(
        options=inquiry.now.options,
        values=values[chosen, tokens],
        gaps=gaps[chosen, tokens],
        reading=_offsets_in_words(taken, inquiry.spans()),
    )


def _cheapest_rise(costs: NDArray[np.float64], change: float) -> NDArray[np.int64]:
    """[n] row of `costs` [k, n] at each place, rows never falling, with the least sum; a change costs `change`."""
    n = costs.shape[1]
    total = np.empty(costs.shape)
    came = np.zeros(costs.shape, dtype=np.int64)
    total[:, 0] = costs[:, 0]
    rows: NDArray[np.int64] = np.arange(len(costs))
    for place in range(1, n):
        lowest = np.minimum.accumulate(total[:, place - 1])
        source = np.maximum.accumulate(np.where(total[:, place - 1] == lowest, rows, 0))
        rises = lowest + change < total[:, place - 1]
        came[:, place] = np.where(rises, source, rows)
        total[:, place] = costs[:, place] + np.where(rises, lowest + change, total[:, place - 1])
    chosen = np.empty(n, dtype=np.int64)
    chosen[-1] = total[:, -1].argmin()
    for place in range(n - 1, 0, -1):
        chosen[place - 1] = came[chosen[place], place]
    return chosen


def _offsets_in_words(taken: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> str:
    share = float((taken != 0).mean())
    named = ", ".join(f"{offset:+d}" for offset in sorted(set(taken[taken != 0].tolist()), key=abs))
    inside = [taken[start:end] for start, end in spans if len(set(taken[start:end].tolist())) > 1]
    where = ""
    if inside:
        late = np.mean([row[-1] == 0 for row in inside])
        where = "; within spans, " + (
            "which have the version at their end" if late > 0.5 else "which have the version at their begin"
        )
    return f"versions off by {named} at {share:.0%} of the tokens{where}"


def _everywhere(inquiry: Inquiry) -> Iterator[Answer]:
    """One version for all: the base model, where no update ever arrived; the newest, where log-probs were computed
    after the fact."""
    policies = {span.policy for t in inquiry.trajectories for span in t.version_spans}
    newest = max(policies)
    candidates: dict[PolicyVersion, str] = {}
    if newest.version > max(NEAR):
        candidates[PolicyVersion(newest.trainer_epoch, 0)] = "weights of version 0 throughout: no update arrived"
    if len(policies) > 1:
        candidates[newest] = f"weights of {newest.key}, the newest here, throughout"
    for policy, reading in candidates.items():
        relabelled = [_all_of(trajectory, policy) for trajectory in inquiry.trajectories]
        yield inquiry.ask(inquiry.now.options, relabelled, reading)


def _all_of(trajectory: Trajectory, policy: PolicyVersion) -> Trajectory:
    spans = tuple(VersionSpan(policy, span.start, span.end) for span in trajectory.version_spans)
    return replace(trajectory, version_spans=spans)
