"""A saved step runs again from its batch and its weights: the verdict, the block and the token; in a run, from the
fault to the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.loop.local_run import drive_to_its_end
from support.loop.run_record import events_of
from support.paths import MODEL
from support.trainer.trainer_room import stored, write_model
from support.trainer.trainer_scenarios import build, step

from orchestrator.commands.gradloc import show_searches
from orchestrator.commands.replay import replay_step
from orchestrator.config import parse_config
from rollout.errors import UserError
from rollout.faults.config import FaultsConfig
from rollout.faults.gradient_config import NanTokenFault
from rollout.types.prompts import Prompt
from rollout.types.trajectory import Trajectory
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.saved_steps import read_step
from trainer.config.trainer import TrainerConfig
from trainer.loss.loss_settings import LossSettings
from trainer.replay.replay import ReplaySource, replay
from trainer.replay.report import ReplayPlace, ReplayReport, ReplayVerdict
from trainer.types.step import StepReport, StepRequest

NAN_TOKEN = LossSettings(faults=FaultsConfig(plant=(NanTokenFault(),)))
SMALL: dict[str, Any] = {"micro_batch_tokens": 42}


def replayed(folder: Path, settings: LossSettings, config: dict[str, Any]) -> tuple[StepReport, ReplayReport]:
    """A step of a small model, saved as if it had not been finite, and its replay."""
    write_model(folder / "dense")
    trainer = build(folder, "saved", config=config, settings=settings)
    try:
        trainer.publish(PolicyVersion(1, 0), folder / "weights")
        report = step(trainer, 1)
        kept = (
            report
            if report.skipped
            else replace(report, skipped="non-finite gradient (norm nan)", grad_norm=float("nan"))
        )
        trainer.save_step(
            folder / "saved_steps", stored(seed=1), StepRequest(policy=PolicyVersion(1, 1), oldest_version=0), kept
        )
    finally:
        trainer.close()
    source = ReplaySource(
        saved=read_step(folder / "saved_steps" / "1"),
        weights_dir=folder / "weights",
        reference_dir=folder / "dense",
        config=TrainerConfig.model_validate(config),
        settings=replace(
            settings, faults=FaultsConfig()
        ),  # what was planted is in the saved step, and no draw makes it again
    )
    return report, replay(source)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_token_reproduces_and_is_named(tmp_path: Path, dtype: str):
    report, found = replayed(tmp_path, NAN_TOKEN, {**SMALL, "dtype": dtype})
    (planted,) = report.planted
    assert (found.verdict, found.reproduces, found.search) == (ReplayVerdict.BATCH, True, "located")
    assert [(culprit.trajectory_id, culprit.position) for culprit in found.culprits] == [
        (planted.trajectory_id, planted.position)
    ]
    assert [run.name for run in found.runs] == [
        "configured",
        "again",
        "deterministic",
        *(["float32"] if dtype == "bfloat16" else []),
    ]
    for run in found.runs:
        assert not run.finite
        # The term alone is bad: every block computes finite values forward, and what flows back to the head is not.
        assert planted.micro_batch is not None
        assert run.forward == ReplayPlace(micro_batch=planted.micro_batch, block="loss")
        assert run.backward == ReplayPlace(micro_batch=planted.micro_batch, block="loss", reached="head")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_batch_does_not_reproduce_and_comes_to_the_same_numbers(tmp_path: Path, dtype: str):
    report, found = replayed(tmp_path, LossSettings(), {**SMALL, "dtype": dtype})
    assert not report.skipped
    assert not found.reproduces and found.search == "" and not found.culprits
    assert all(run.finite and run.forward is None and run.backward is None for run in found.runs)
    assert found.runs[0].loss == pytest.approx(report.loss, rel=1e-5)
    assert dict(found.runs[0].block_norms) == pytest.approx(dict(report.block_norms), rel=1e-5)
    if dtype == "float32":
        assert found.verdict is ReplayVerdict.NOT_REPRODUCED


# --- a whole run
# -----------------------------------------------------------------------------------------------------------


def even_tokens(prompt: Prompt, completion: str, trajectory: Trajectory) -> float:
    """Something that the members of a group differ in."""
    return float((trajectory.token_ids[trajectory.sampled] % 2 == 0).mean())


even_tokens.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]


def run_with_fault(folder: Path, fault: dict[str, Any], steps: int, **trainer_config: object) -> Path:
    """The run directory of so many versions, whose steps the fault hits."""
    document: dict[str, Any] = {
        "run": {
            "dir": str(folder),
            "name": "run",
            "steps": steps,
            "batch_groups": 2,
            "group_size": 4,
            "seed": 7,
            "deterministic": True,
        },
        "model": {"type": "local", "path": str(MODEL)},
        "engine": {"type": "scripted", "latency_mean_s": 0.0},
        "reward": {"type": "python", "function": f"{__name__}:{even_tokens.__name__}"},
        "trainer": {"micro_batch_tokens": 64, **trainer_config},
        "consistency": {"mode": "off"},
        "staleness": {"max_staleness": 0, "order": "dispatch"},
        "faults": {"plant": [fault]},
    }
    return drive_to_its_end(parse_config(document, "test")).path


def test_a_run_skips_the_planted_step_keeps_it_and_goes_on_and_the_command_names_the_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = run_with_fault(tmp_path, {"type": "nan_token", "start_version": 3}, steps=4)
    events = events_of(run)
    (planted,) = [event for event in events if event["kind"] == "fault_planted"]
    (skipped,) = [event for event in events if event["kind"] == "step_skipped"]
    assert (planted["step"], skipped["step"], skipped["saved"], skipped["removed"]) == (3, 3, "3", "")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["version"], summary["skipped_steps"], summary["rejected"]) == (4, 1, {"non_finite": 2})
    # With eta 0, versions 3 and 4 alone would be kept besides 0: the saved step holds on to its own.
    assert (run / "weights" / "e1-v2").is_dir()

    replay_step(run, "3", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["reproduces"], document["weights"]) == ("batch", True, "e1-v2")
    assert [(token["trajectory_id"], token["position"]) for token in document["tokens"]] == [
        (planted["trajectory_id"], planted["position"])
    ]
    assert document["saved_loss"] == "nan" and "alone does it" in document["words"]

    replay_step(run, "3", as_json=False)
    said = capsys.readouterr().out
    assert "verdict batch\n  it reproduces with the fixed batch" in said
    assert f"at position {planted['position']} of {planted['trajectory_id']}" in said
    assert "note: the step had planted faults, which are planted again: nan_token" in said

    with pytest.raises(UserError, match=r"got step '2', but .* holds 3"):
        replay_step(run, "2", as_json=False)
    weights = run / "weights" / "e1-v2"
    file = sorted(weights.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(
        UserError, match=r"got weights with digest .*, expected .*: they were changed since; copy them back"
    ):
        replay_step(run, "3", as_json=False)
    weights.rename(run / "elsewhere")
    with pytest.raises(UserError, match="e1-v2 is gone; copy them back"):
        replay_step(run, "3", as_json=False)


def test_a_masked_spike_is_kept_where_the_config_says_so_and_its_replay_comes_to_the_same_norm_and_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    gradloc = {"action": "mask", "threshold": {"type": "calibrated", "warmup_steps": 3}}
    fault = {"type": "grad_spike", "start_version": 5, "factor": 1e6}
    never_clips = {
        "type": "grpo",
        "clip_low": 0.999,
        "clip_high": 1e9,
    }  # the scripted engine's log-probs are no policy's
    run = run_with_fault(
        tmp_path, fault, steps=6, gradloc=gradloc, saved_steps={"searched": True}, algorithm=never_clips
    )
    events = events_of(run)
    (planted,) = [event for event in events if event["kind"] == "fault_planted"]
    (searched,) = [event for event in events if event["kind"] == "gradloc"]
    assert (searched["step"], searched["outcome"], searched["acted"], searched["saved"], searched["removed"]) == (
        5,
        "located",
        "masked",
        "5",
        "",
    )
    assert (run / "weights" / "e1-v4").is_dir()
    assert json.loads((run / "summary.json").read_text())["skipped_steps"] == 0

    replay_step(run, "5", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["reproduces"], document["applied"], document["search"]) == (
        "batch",
        True,
        True,
        "located",
    )
    assert document["runs"][0]["grad_norm"] == pytest.approx(searched["grad_norm"], rel=1e-4)
    assert document["runs"][0]["loss"] == pytest.approx(searched["loss"], rel=1e-4)
    (token,) = document["tokens"]
    assert (token["trajectory_id"], token["position"]) == (planted["trajectory_id"], planted["position"])
    assert token["norm"] == pytest.approx(searched["norm"], rel=1e-4)

    replay_step(run, "5", as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "was kept for: its gradient was searched (threshold): located, masked" in said
    assert "note: the step was applied; what a search then took out of its loss is in this batch" in said
    show_searches(run, "5")
    assert "its batch is kept: concord replay RUN 5" in capsys.readouterr().out
