"""The gradient search in the trainer's step: what starts it, what it costs, and what the report says of a culprit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.builders import build_stored
from support.trainer.gradloc_live_room import (
    evidence_of,
    found,
    healthy_groups,
    live_trainer,
    negative_places,
    scored,
    spiked,
    take,
)

from rollout.errors import UserError
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.types.gradloc import CulpritType
from trainer.types.step import OldLogprobSource


def test_the_report_says_everything_of_a_culprit(folder: Path, given: dict[str, Any]):
    groups = healthy_groups(1)
    place = negative_places(groups)[9]
    trajectory = next(t for group in groups for t in group.trajectories if t.trajectory_id == place.trajectory_id)
    with live_trainer(folder, "watching", {"threshold": given}) as trainer:
        logprobs = trainer.score(trajectory.token_ids)
        report = take(trainer, spiked(1, place))
    (culprit,) = evidence_of(report).culprits
    assert culprit.token_id == trajectory.token_ids[place.position]
    assert (
        culprit.policy.version == trajectory.token_versions()[place.position]
        and culprit.replica == trajectory.tag.replica
    )
    assert culprit.context_token_ids[place.position - culprit.context_start] == culprit.token_id
    assert culprit.logprob == pytest.approx(float(logprobs[place.position - 1]), abs=1e-4)
    assert culprit.omega == pytest.approx(math.exp(culprit.logprob - culprit.rollout_logprob))
    assert culprit.rollout_logprob == pytest.approx(-13.0)
    assert (culprit.d_engine, culprit.d_stale) == (None, None)
    assert culprit.type is CulpritType.TOKEN_MISMATCH and culprit.advantage < 0 and culprit.entropy > 0
    mine = logprobs[np.flatnonzero(trajectory.sampled) - 1] - np.where(
        np.flatnonzero(trajectory.sampled) == place.position, -13.0, -3.0
    )
    assert culprit.sequence_ratio == pytest.approx(math.exp(float(mine.mean())), rel=1e-4)
    assert culprit.norm == pytest.approx(report.grad_norm, rel=0.05)
    assert len(culprit.block_norms) == 3 and culprit.block_ratios == ()
    assert evidence_of(report).seconds > 0 and evidence_of(report).tokens_forwarded > 0


def test_engine_and_staleness_are_told_apart_where_the_token_was_scored(folder: Path, given: dict[str, Any]):
    groups = healthy_groups(1)
    place = negative_places(groups)[9]
    with live_trainer(folder, "watching", {"threshold": given}) as trainer:
        report = take(trainer, scored(groups, place, suspect=True, nats=-10.0), source=OldLogprobSource.RECOMPUTED)
    (culprit,) = evidence_of(report).culprits
    assert culprit.d_engine == pytest.approx(-9.9, abs=1e-5)
    assert culprit.d_stale is not None and culprit.d_engine is not None
    assert culprit.d_stale + culprit.d_engine == pytest.approx(math.log(culprit.omega), abs=1e-6)
    assert evidence_of(report).passes == 1, "a right suspect is confirmed by the pass that measures it"


def test_without_a_suspect_the_same_search_takes_longer(folder: Path, given: dict[str, Any]):
    groups = healthy_groups(1)
    place = negative_places(groups)[9]
    with live_trainer(folder, "watching", {"threshold": given, "term_pulls": False}) as trainer:
        report = take(trainer, scored(groups, place, suspect=False, nats=-10.0), source=OldLogprobSource.RECOMPUTED)
    assert found(report) == [place] and evidence_of(report).passes > 2


def test_a_block_that_the_clip_would_scale_far_down_starts_a_search(folder: Path):
    place = negative_places(healthy_groups(1))[9]
    clip = {"clip": {"type": "layerclip", "warmup_steps": 2}}
    high = {"type": "given", "tau": 1e9}
    for name, floor, trigger in (("floor", 0.1, "scale"), ("none", 0.0, "")):
        with live_trainer(folder, name, {"threshold": high, "scale_floor": floor}, optimizer=clip) as trainer:
            for number in (1, 2):
                assert take(trainer, build_stored(healthy_groups(1)), number).gradloc is None
            report = take(trainer, spiked(1, place), 3)
        assert (report.gradloc.trigger if report.gradloc else "") == trigger
        assert min(scale for _, scale in report.block_scales) < 0.1, "the clip acts as ever"
        if report.gradloc:
            assert found(report) == [place]


def test_a_checkpoint_keeps_what_the_search_remembers(folder: Path):
    calibrated = {"threshold": {"type": "calibrated", "warmup_steps": 3, "multiple": 3.0}}
    place = negative_places(healthy_groups(1))[9]
    with live_trainer(folder, "first", calibrated) as trainer:
        for number in (1, 2, 3):
            assert take(trainer, build_stored(healthy_groups(number)), number).gradloc is None
        trainer.save_checkpoint(
            folder / "saved", CheckpointState(policy=PolicyVersion(1, 3), seed=5, weights_digest="")
        )
        unbroken = evidence_of(take(trainer, spiked(1, place), 4))
    with live_trainer(folder, "second", calibrated) as trainer:
        trainer.load_checkpoint(folder / "saved")
        resumed = evidence_of(take(trainer, spiked(1, place), 4))
    assert replace(resumed, seconds=0.0) == replace(unbroken, seconds=0.0)
    assert unbroken.threshold > 0


def test_a_budget_below_the_micro_batches_is_refused_with_the_cure(folder: Path):
    with (
        live_trainer(folder, "poor", {"budget_passes": 1}) as trainer,
        pytest.raises(UserError, match=r"set it to \d+ or more"),
    ):
        take(trainer, build_stored(healthy_groups(1)))


def test_what_backward_leaves_behind_saves_passes(folder: Path, given: dict[str, Any]):
    place = negative_places(healthy_groups(1))[7]
    passes: list[int] = []
    for number, known in enumerate(
        ({"part_norms": False, "term_pulls": False}, {"term_pulls": False}, {"part_norms": False})
    ):
        with live_trainer(folder, f"known-{number}", {"threshold": given, **known}) as trainer:
            report = take(trainer, spiked(1, place))
        assert report.num_micro_batches > 2
        assert found(report) == [place]
        passes.append(evidence_of(report).passes)
    assert passes[0] > passes[1] > passes[2] == 1


def test_a_step_without_a_trigger_runs_no_pass_more(folder: Path, given: dict[str, Any]):
    counts: list[tuple[int, int]] = []
    for name, gradloc in (("never", {"enabled": False}), ("watching", {"threshold": given})):
        with live_trainer(folder, name, gradloc) as trainer:
            passes: list[int] = []
            trainer._model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            report = take(trainer, build_stored(healthy_groups(1)))
            assert report.gradloc is None
            counts.append((len(passes), report.num_micro_batches))
    assert counts[0] == counts[1] and counts[0][0] == counts[0][1] > 1
