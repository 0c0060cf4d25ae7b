"""Steps that were not applied, on disk: complete or absent, few, and whole when they come back; and what their replays
mean."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.trainer.search_evidence import build_search
from support.trainer.trainer_room import stored

from rollout.errors import UserError
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.saved_steps import (
    SavedStep,
    read_step,
    reason_to_keep,
    save_step,
    saved_steps,
    weights_in_use,
)
from trainer.config.trainer import SavedStepsConfig, TrainerConfig
from trainer.replay.report import ReplayRun, ReplayVerdict, shows_again, verdict_of
from trainer.step.scripted import ScriptedTrainer
from trainer.types.gradloc import Acted
from trainer.types.step import OldLogprobSource, PlantedFault, StepRequest


def saved(
    version: int = 5,
    loss: float = math.nan,
    grad_norm: float = math.inf,
    reason: str = "non-finite loss (nan)",
    *,
    applied: bool = False,
) -> SavedStep:
    groups = stored()
    return SavedStep(
        groups=replace(groups, verdicts=(b"", b"some bytes", b"")),
        request=StepRequest(
            policy=PolicyVersion(2, version), oldest_version=3, old_logprobs=OldLogprobSource.RECOMPUTED
        ),
        random_state=np.arange(9, dtype=np.uint8),
        seed=7,
        dtype="bfloat16",
        ranks=2,
        weights=PolicyVersion(2, version - 1),
        weights_digest="d" * 64,
        reason=reason,
        applied=applied,
        loss=loss,
        grad_norm=grad_norm,
        tau=40.5,
        planted=(PlantedFault(fault="nan_token", trajectory_id="d-0/1", position=4, micro_batch=0, rank=1),),
    )


def test_a_saved_step_comes_back_whole(tmp_path: Path):
    assert save_step(tmp_path, saved(), keep=4) == ("5", ())
    back, gone = read_step(tmp_path / "5"), saved()
    assert back.groups.dispatch_ids == gone.groups.dispatch_ids and back.groups.verdicts == gone.groups.verdicts
    for mine, theirs in zip(back.groups.payloads, gone.groups.payloads, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(back.random_state, gone.random_state)
    assert math.isnan(back.loss) and back.grad_norm == math.inf
    same = ("request", "seed", "dtype", "ranks", "weights", "weights_digest", "reason", "applied", "tau", "planted")
    assert [getattr(back, name) for name in same] == [getattr(gone, name) for name in same]
    assert json.loads(
        (tmp_path / "5" / "step.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )


def test_a_version_that_is_tried_again_gets_a_folder_of_its_own(tmp_path: Path):
    assert [save_step(tmp_path, saved(), keep=4)[0] for _ in range(3)] == ["5", "5-2", "5-3"]


def test_no_more_are_kept_than_asked_for_and_the_oldest_go_first(tmp_path: Path):
    removed = [save_step(tmp_path, saved(version), keep=2)[1] for version in (9, 5, 7, 6)]
    assert removed == [(), (), ("9",), ("5",)]
    assert [path.name for path in saved_steps(tmp_path)] == ["7", "6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]
    assert weights_in_use(tmp_path) == {PolicyVersion(2, 6), PolicyVersion(2, 5)}


def test_of_a_version_that_is_tried_again_and_again_the_first_try_stays(tmp_path: Path):
    named = [save_step(tmp_path, saved(), keep=3)[0] for _ in range(10)]
    assert named[0] == "5"
    assert [path.name for path in saved_steps(tmp_path)] == ["5", "5-9", "5-10"]
    assert read_step(tmp_path / "5").request.policy.version == 5


def test_what_a_crash_left_half_written_is_no_saved_step_and_is_removed_by_the_next(tmp_path: Path):
    (tmp_path / ".partial-5").mkdir()
    assert saved_steps(tmp_path) == []
    save_step(tmp_path, saved(6), keep=4)
    assert [path.name for path in tmp_path.iterdir()] == ["6"]


def test_a_step_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path):
    save_step(tmp_path, saved(), keep=4)
    with pytest.raises(UserError, match=r"got step '6', but .* holds 5; a step is kept when"):
        read_step(tmp_path / "6")
    with pytest.raises(UserError, match="holds no step"):
        read_step(tmp_path / "nothing" / "6")


def test_steps_that_were_applied_take_no_room_from_those_that_were_not(tmp_path: Path):
    for version in (1, 2):
        save_step(tmp_path, saved(version), keep=2)
    removed = [
        save_step(tmp_path, saved(version, loss=0.5, grad_norm=9.0, applied=True), keep=2)[1] for version in (3, 4, 5)
    ]
    assert removed == [(), (), ("3",)]
    assert save_step(tmp_path, saved(6), keep=2)[1] == ("1",)
    assert [path.name for path in saved_steps(tmp_path)] == ["2", "4", "5", "6"]


@pytest.mark.parametrize("searched", [True, False])
def test_searched_steps_are_kept_where_the_config_says_so_and_others_when_they_were_not_applied(searched: bool):
    config = SavedStepsConfig(searched=searched)
    plain = ScriptedTrainer(TrainerConfig(type="scripted")).step(
        stored(), StepRequest(policy=PolicyVersion(1, 5), oldest_version=0)
    )
    assert reason_to_keep(plain, config) == ""
    assert reason_to_keep(replace(plain, skipped="non-finite loss (nan)"), config) == "non-finite loss (nan)"
    found = replace(plain, gradloc=build_search(action="mask", acted=Acted.MASKED))
    assert reason_to_keep(found, config) == (
        "its gradient was searched (threshold): located, masked" if searched else ""
    )
    assert (
        reason_to_keep(replace(plain, gradloc=build_search(outcome="not_searched", culprits=(), passes=0)), config)
        == ""
    )


def test_a_broken_one_is_an_error(tmp_path: Path):
    save_step(tmp_path, saved(), keep=4)
    (tmp_path / "5" / "batch.npz").write_bytes(b"not a batch")
    with pytest.raises(UserError, match="is broken"):
        read_step(tmp_path / "5")


# --- what replays mean
# ---------------------------------------------------------------------------------------------------

BAD, FINE = math.nan, 2.0


def runs(configured: float, again: float, deterministic: float, single: float | None = None) -> dict[str, ReplayRun]:
    norms = {"configured": configured, "again": again, "deterministic": deterministic} | (
        {} if single is None else {"float32": single}
    )
    return {
        name: ReplayRun(
            name=name,
            dtype="float32",
            deterministic=name == "deterministic",
            loss=0.0,
            grad_norm=norm,
            block_norms=(("head", norm),),
            forward=None,
            backward=None,
        )
        for name, norm in norms.items()
    }


@pytest.mark.parametrize(
    ("norms", "verdict"),
    [
        ((BAD, BAD, BAD), ReplayVerdict.BATCH),
        ((BAD, BAD, BAD, BAD), ReplayVerdict.BATCH),
        ((BAD, BAD, BAD, FINE), ReplayVerdict.LOW_PRECISION),
        ((BAD, FINE, FINE), ReplayVerdict.KERNEL),
        ((BAD, BAD, FINE), ReplayVerdict.KERNEL),
        ((FINE, FINE, BAD, FINE), ReplayVerdict.KERNEL),
        ((FINE, FINE, FINE, BAD), ReplayVerdict.LOW_PRECISION),
        ((FINE, FINE, FINE, FINE * 1.2), ReplayVerdict.LOW_PRECISION),
        ((FINE, FINE, FINE * 1.02, FINE), ReplayVerdict.KERNEL),
        ((FINE, FINE, FINE, FINE * 1.05), ReplayVerdict.NOT_REPRODUCED),
        ((FINE, FINE, FINE), ReplayVerdict.NOT_REPRODUCED),
    ],
)
def test_the_verdict_follows_from_what_reproduces(norms: tuple[float, ...], verdict: ReplayVerdict):
    assert verdict_of(runs(*norms), saved()) is verdict


def test_a_finite_spike_reproduces_by_its_norm_and_a_refused_update_never():
    run = runs(3.0, 3.0, 3.0)["configured"]
    assert shows_again(run, saved(loss=1.0, grad_norm=3.1, reason="gradient search"))
    assert not shows_again(run, saved(loss=1.0, grad_norm=30.0, reason="gradient search"))
    refused = saved(loss=1.0, grad_norm=3.0, reason="non-finite optimizer state (norm inf)")
    assert not shows_again(run, refused)
    assert verdict_of(runs(3.0, 3.0, 3.0), refused) is ReplayVerdict.OPTIMIZER_STATE
