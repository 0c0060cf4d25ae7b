"""Planted spikes of known size at random places, and what the search says about them. Every function runs on all ranks
alike."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from harness.gradloc_planted import on_policy, places, plant, random_step, run_step, small_model, spiking_loss

from trainer.config.gradloc import GivenTau
from trainer.gradloc import GradLoc, GradLocConfig, GradLocReport
from trainer.gradloc.gradloc import TermPlace
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.loss.policy_loss import PolicyLoss
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.step import MicroBatch

TAU_MULTIPLE = 10.0
"""The step's threshold over the norm of its healthy gradient: that of a calibrated threshold by default."""
SMALLEST, LARGEST = 30.0, 1e4
"""Sizes of spikes over the step's threshold."""
CASES_A_STEP = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Room:
    """A model on this rank, and what watches it."""

    ranks: Ranks
    model: PolicyModel
    loss: PolicyLoss
    records: dict[str, BackwardRecord]
    """Of what backward tells: all of it, or without the pulls of terms."""
    rng: np.random.Generator
    """The same on all ranks."""
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A healthy step, and its threshold."""

    rows: tuple[MicroBatch, ...]
    tau: float
    threshold: float
    longest: int
    """Terms of the part of a rank and micro-batch that has most."""


Spot = tuple[int, tuple[int, int, int]]
"""Rank, and (micro-batch, row, position) there; the second is right on that rank only."""


def room(ranks: Ranks, moe: bool, micro_batches: int, seed: int) -> Room:
    torch.set_num_threads(1)
    model = small_model(ranks, moe=moe)
    rng = np.random.default_rng((seed, moe, micro_batches, ranks.world))
    records = {"savings": BackwardRecord(model, ranks), "no pulls": BackwardRecord(model, ranks, term_pulls=False)}
    return Room(ranks=ranks, model=model, loss=spiking_loss(), records=records, rng=rng, micro_batches=micro_batches)


def healthy_steps(at: Room) -> Iterator[Step]:
    """New rows for every `CASES_A_STEP` cases."""
    while True:
        first, width = int(at.rng.integers(1 << 30)), int(at.rng.integers(12, 41))
        drawn = random_step(
            first + at.ranks.rank, micro_batches=at.micro_batches, rows=2, width=width, denominator=at.ranks.world
        )
        rows = on_policy(at.model, at.ranks, drawn)
        ran = run_step(at.model, at.loss, at.ranks, rows)
        square = math.sqrt(total(at.ranks, ran.weight_square))
        tau = TAU_MULTIPLE * ran.norm / square
        longest = torch.tensor(
            [
                float(max(int(micro.loss_mask.sum()) for micro in rows)) if r == at.ranks.rank else 0.0
                for r in range(at.ranks.world)
            ]
        )
        step = Step(rows=rows, tau=tau, threshold=tau * square, longest=int(at.ranks.sum(longest).max()))
        yield from [step] * CASES_A_STEP


def total(ranks: Ranks, value: float) -> float:
    return float(ranks.sum(torch.tensor([value], dtype=torch.float64)).item())


def spot(at: Room, step: Step) -> Spot:
    """A random term of a random rank."""
    rank, share = int(at.rng.integers(at.ranks.world)), at.rng.random()
    every = places(step.rows)
    return rank, every[int(share * len(every))]


def planted(at: Room, step: Step, rows: Sequence[MicroBatch], where: Spot) -> tuple[MicroBatch, ...]:
    """`rows` with the term at `where` scaled so that its gradient is a random multiple of the step's threshold."""
    rank, place = where
    alone = [replace(micro, loss_mask=np.zeros_like(micro.loss_mask)) for micro in step.rows[:1]]
    if rank == at.ranks.rank:
        mask = np.zeros_like(step.rows[place[0]].loss_mask)
        mask[place[1], place[2]] = True
        alone = [replace(step.rows[place[0]], loss_mask=mask)]
    size = float(np.exp(at.rng.uniform(np.log(SMALLEST), np.log(LARGEST))))
    norm = run_step(at.model, at.loss, at.ranks, alone).norm
    return plant(rows, place, size * step.threshold / norm) if rank == at.ranks.rank else tuple(rows)


def searched(
    at: Room, step: Step, rows: Sequence[MicroBatch], *, record: str = "savings", suspects: Sequence[Spot] = ()
) -> GradLocReport | None:
    """One step on `rows` and what a search finds in it, with the record of this name; without any, every other saving
    is off too."""
    kept = at.records.get(record)
    savings = kept is not None
    config = GradLocConfig(threshold=GivenTau(tau=step.tau), budget_passes=200, cut_sequences=savings)
    gradloc = GradLoc(config, at.model, at.loss, at.ranks)
    ran = run_step(at.model, at.loss, at.ranks, rows, kept)
    mine = [TermPlace(micro_batch=m, row=r, position=p) for rank, (m, r, p) in suspects if rank == at.ranks.rank]
    return gradloc.observe(ran.norm, ran.data, suspects=mine, record=kept)


def exact(at: Room, report: GradLocReport | None, spots: Sequence[Spot]) -> bool:
    """Whether the report says `located` and names these terms and no other. Each rank knows its own."""
    if report is None or report.outcome != "located":
        return False
    mine = {place for rank, place in spots if rank == at.ranks.rank}
    found = {(hit.micro_batch, hit.row, hit.position) for hit in report.hits if hit.rank == at.ranks.rank}
    return total(at.ranks, float(mine != found)) == 0


def published_passes(micro_batches: int, world: int, num_tokens: int) -> int:
    """M + 2 log2 W + 2 log2 L + 1 passes for one hit, logarithms rounded up."""
    return micro_batches + 2 * math.ceil(math.log2(world)) + 2 * math.ceil(math.log2(max(1, num_tokens))) + 1


def all_cases(ranks: Ranks, count: int, seed: int) -> dict[str, dict[str, Any]]:
    """`count` single spikes, a fifth of that in pairs and diffuse steps, and as many healthy steps, over dense and MoE,
    one and four micro-batches.

    Counts are sums; what ends in "at most" is the worst.
    """
    kinds = {
        "single": (single_spikes, count),
        "two": (two_spikes, count // 5),
        "healthy": (healthy_batches, count),
        "diffuse": (diffuse_batches, count // 5),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (work, number) in kinds.items():
        answers = [
            work(ranks, moe, micro_batches, math.ceil(number / 4), seed)
            for moe in (False, True)
            for micro_batches in (1, 4)
        ]
        found[name] = merged(answers)
    return found


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums, and of what ends in "at most" the largest; misses one after the other."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for answer in answers for key in answer):
        values = [answer[key] for answer in answers if key in answer]
        found[key] = (
            list(chain.from_iterable(values)) if key == "misses" else (max if key.endswith("at most") else sum)(values)
        )
    return found


def miss(case: int, report: GradLocReport | None, spots: Sequence[Spot], at: Room) -> dict[str, Any]:
    """What a case of `exact` that is not says."""
    said = (
        {}
        if report is None
        else {
            "outcome": report.outcome,
            "explained": report.explained,
            "passes": report.passes,
            "grad_norm": report.grad_norm,
        }
    )
    hits = (
        [] if report is None else [(hit.rank, hit.micro_batch, hit.row, hit.position, hit.norm) for hit in report.hits]
    )
    shape = {"world": at.ranks.world, "micro_batches": at.micro_batches, "case": case, "model": at.model.architecture}
    return {
        **shape,
        "planted": spots,
        "hits": hits,
        "threshold": math.nan if report is None else report.threshold,
        **said,
    }


def single_spikes(ranks: Ranks, moe: bool, micro_batches: int, count: int, seed: int) -> dict[str, Any]:
    """One spike a step, found with the pulls of terms and without; every fifth also without any saving and with a right
    suspect."""
    at, seen = room(ranks, moe, micro_batches, seed), Counter[str]()
    over: dict[str, list[int]] = {"savings": [], "no pulls": [], "published": [], "suspect": []}
    misses: list[dict[str, Any]] = []
    for case, step in zip(range(count), healthy_steps(at), strict=False):
        where = spot(at, step)
        rows = planted(at, step, step.rows, where)
        levels = math.ceil(math.log2(step.longest))
        tries: list[tuple[str, dict[str, Any], int]] = [
            ("savings", {}, 2),
            ("no pulls", {"record": "no pulls"}, 2 * levels + 1),
        ]
        if case % 5 == 0:
            tries.append(("published", {"record": "none"}, published_passes(micro_batches, ranks.world, step.longest)))
            tries.append(("suspect", {"record": "no pulls", "suspects": [where]}, 2))
        for name, settings, bound in tries:
            report = searched(at, step, rows, **settings)
            right = exact(at, report, [where])
            seen[f"{name} cases"] += 1
            seen[f"{name} exact"] += right
            misses += [] if right else [miss(case, report, [where], at)]
            over[name].append(0 if report is None else report.passes - bound)
    return {
        **seen,
        **{f"{name} passes over the bound, at most": max(each) for name, each in over.items() if each},
        "misses": misses,
    }


def two_spikes(ranks: Ranks, moe: bool, micro_batches: int, count: int, seed: int) -> dict[str, Any]:
    """Two spikes a step, anywhere."""
    at, seen = room(ranks, moe, micro_batches, seed), Counter[str]()
    over: dict[str, list[int]] = {"savings": [], "no pulls": []}
    misses: list[dict[str, Any]] = []
    for case, step in zip(range(count), healthy_steps(at), strict=False):
        first, second = spot(at, step), spot(at, step)
        while first == second:
            second = spot(at, step)
        rows = planted(at, step, planted(at, step, step.rows, first), second)
        for name, each in over.items():
            report = searched(at, step, rows, record=name)
            right = exact(at, report, [first, second])
            seen[f"{name} cases"] += 1
            seen[f"{name} exact"] += right
            misses += [] if right else [miss(case, report, [first, second], at)]
            each.append(0 if report is None else report.passes - 2 * (2 * math.ceil(math.log2(step.longest)) + 1))
    return {
        **seen,
        **{f"{name} passes over the bound, at most": max(each) for name, each in over.items()},
        "misses": misses,
    }


def healthy_batches(ranks: Ranks, moe: bool, micro_batches: int, count: int, seed: int) -> dict[str, Any]:
    """A stream of healthy steps under the default thresholds."""
    at, seen = room(ranks, moe, micro_batches, seed), Counter[str](cases=0, searches=0, located=0)
    gradloc = GradLoc(GradLocConfig(), at.model, at.loss, ranks)
    for _ in range(count):
        first, width = int(at.rng.integers(1 << 30)), int(at.rng.integers(12, 41))
        drawn = random_step(
            first + ranks.rank, micro_batches=micro_batches, rows=2, width=width, denominator=ranks.world
        )
        ran = run_step(at.model, at.loss, ranks, on_policy(at.model, ranks, drawn))
        report = gradloc.observe(ran.norm, ran.data)
        seen["cases"] += 1
        seen["searches"] += report is not None
        seen["located"] += report is not None and report.outcome == "located"
    return dict(seen)


def diffuse_batches(ranks: Ranks, moe: bool, micro_batches: int, count: int, seed: int) -> dict[str, Any]:
    """Steps whose every term is scaled by 100."""
    at, seen = room(ranks, moe, micro_batches, seed), Counter[str](cases=0, located=0)
    for _, step in zip(range(count), healthy_steps(at), strict=False):
        rows = [
            replace(micro, rollout_logprobs=np.where(micro.loss_mask, np.float32(100), micro.rollout_logprobs))
            for micro in step.rows
        ]
        report = searched(at, step, rows)
        seen["cases"] += 1
        seen[str(report.outcome) if report is not None else "no search"] += 1
    return dict(seen)
