"""A rescorer that is a table, and short names for what an attribution is asked with and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import build_tag, build_trajectory

from rollout.types.trajectory import Trajectory
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.checks.gap import GapBaseline
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import Attribution, Check, CheckFinding, CheckSeverity, GapCause

V = [PolicyVersion(1, version) for version in range(6)]
LIMITS = GapLimits(mean_abs_warn=0.02, mean_abs_fail=0.05, k3_warn=1e-3, k3_fail=1e-2)
AS_LOGGED = ScoreOptions()
ROUTED = ScoreOptions(replay_routing=True)


class TableRescorer:
    """Answers every question with the log plus the table's gap: one number, or one a sampled token; a question outside
    the table changes nothing."""

    def __init__(self, table: Mapping[ScoreOptions, float | Sequence[float]]) -> None:
        self.table = dict(table)
        self.asked: list[ScoreOptions] = []
        self.tokens: list[int] = []

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        self.asked.append(options)
        self.tokens.append(sum(t.token_ids.size for t in trajectories))
        gap = self.table.get(options, self.table[AS_LOGGED])
        rows: list[NDArray[np.float32]] = []
        for trajectory in trajectories:
            row = trajectory.rollout_logprobs.astype(np.float64)
            row[trajectory.sampled] += gap
            rows.append(row.astype(np.float32))
        return rows


def trajectory(
    *spans: tuple[PolicyVersion, int], index: int = 0, routing: tuple[int, int] | None = None, **tag: Any
) -> Trajectory:
    """Sampled by version 3 unless spans are given, with a tag of a temperature-1 engine unless fields of it are."""
    built = build_trajectory(index=index, spans=spans or ((V[3], 8),), routing=routing)
    return replace(built, tag=replace(build_tag(), **tag))


def ask(
    rescorer: TableRescorer,
    *trajectories: Trajectory,
    facts: AttributionFacts | None = None,
    limits: GapLimits = LIMITS,
) -> Attribution:
    found = attribute(trajectories or (trajectory(),), facts or AttributionFacts(), rescorer, limits)
    assert found is not None
    assert sum(nats for _, nats in found.parts) + found.residual == pytest.approx(found.gap, rel=1e-12)
    return found


def parts(found: Attribution) -> dict[GapCause, Any]:
    return {cause: pytest.approx(nats, abs=1e-6) for cause, nats in found.parts}


def baseline(mean_abs: float, f2: float = 0.0) -> GapBaseline:
    return GapBaseline(engine="scripted", replica=0, mean_abs=mean_abs, k3=mean_abs**2, f2=f2, tokens=1000)


def failed(check: Check, severity: CheckSeverity = CheckSeverity.FAIL) -> CheckFinding:
    return CheckFinding(check=check, severity=severity, code="planted", detail="planted")


class DistributionRescorer:
    """Answers from one random distribution a token: [T, vocabulary] logits by trajectory id. It knows temperature,
    top_p, top_k and the likeliest token; other circumstances change nothing."""

    def __init__(self, vocab_size: int = 32, seed: int = 0) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self.asked: list[ScoreOptions] = []
        self.tokens: list[int] = []

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        self.asked.append(options)
        self.tokens.append(sum(t.token_ids.size for t in trajectories))
        return [np.where(t.sampled, self._row(t, options), 0.0).astype(np.float32) for t in trajectories]

    def _row(self, t: Trajectory, options: ScoreOptions) -> NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, int(t.token_ids.sum())])
        temperature = t.tag.temperature if options.temperature is None else options.temperature
        top_p = t.tag.top_p if options.top_p is None else options.top_p
        top_k = t.tag.top_k if options.top_k is None else options.top_k
        logits = 2.0 * rng.standard_normal((t.token_ids.size, self._vocab_size)) / temperature
        ordered = -np.sort(-logits, axis=1)
        mass = np.exp(ordered) / np.exp(ordered).sum(axis=1, keepdims=True)
        kept = np.ones(ordered.shape, dtype=np.bool_)
        if options.truncate and top_k:
            kept &= np.arange(self._vocab_size) < top_k
        if options.truncate and top_p < 1.0:
            share = np.where(kept, mass, 0.0) / np.where(kept, mass, 0.0).sum(axis=1, keepdims=True)
            kept &= share.cumsum(axis=1) - share < top_p
        chosen = ordered[:, 0] if options.token == "likeliest" else logits[np.arange(t.token_ids.size), t.token_ids]
        return chosen - np.log(np.where(kept, np.exp(ordered), 0.0).sum(axis=1))


def sampled_as(
    rescorer: DistributionRescorer, options: ScoreOptions, count: int = 12, tokens: int = 40, **tag: Any
) -> list[Trajectory]:
    """Trajectories of random tokens whose log is what `options` say, under a tag that says otherwise."""
    found: list[Trajectory] = []
    for index in range(count):
        one = trajectory((V[0], tokens), index=index, **tag)
        found.append(replace(one, rollout_logprobs=rescorer.score([one], options)[0]))
    rescorer.asked.clear()
    rescorer.tokens.clear()
    return found
