"""Rows go to the trackers under the catalogue's names; what fails there is told once and never ends a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from local_fleet import QuietReporter
from loop_case import config_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from orchestrator.metrics import COLUMNS
from orchestrator.run_dir import RunDir
from orchestrator.trackers import FINISH_S, TAGS, TensorBoardTracker, Tracked, measured, tracked

ROW = {column: float(number) for number, column in enumerate(COLUMNS)} | {"step": 3.0, "consistency_gap_mean": -1.0}


class Saying(QuietReporter):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class Failing:
    def __init__(self) -> None:
        self.steps = 0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.steps += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def test_tags_group_columns_by_layer_of_diagnosis():
    assert TAGS["reward_mean"] == "1 data and reward/reward_mean"
    assert TAGS.keys() == set(COLUMNS)


def test_what_was_not_measured_is_not_sent():
    values = measured(ROW)
    assert TAGS["consistency_gap_mean"] not in values
    assert len(values) == len(COLUMNS) - 1


def test_tensorboard_reads_back_every_value_with_its_meaning(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    for step in (1, 2):
        tracker.step(step, {TAGS["reward_mean"]: 0.25 * step, TAGS["grad_norm"]: 3.0})
    tracker.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.tensor_proto.float_val[0]) for each in read.Tensors(TAGS["reward_mean"])] == [(1, 0.25), (2, 0.5)]
    assert "Mean reward of the trained groups. Unit: reward." in read.SummaryMetadata(TAGS["reward_mean"]).summary_description


def test_a_point_of_tensorboard_takes_less_room_than_its_description(tmp_path: Path):
    sizes: list[int] = []
    for steps in (100, 200):
        folder = tmp_path / str(steps)
        tracker = TensorBoardTracker(folder)
        for step in range(steps):
            tracker.step(step, {TAGS["eval_fingerprint_changed"]: 0.0})
        tracker.close()
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    assert (sizes[1] - sizes[0]) / 100 < 150


def test_a_run_without_trackers_keeps_its_reporter(tmp_path: Path):
    reporter = QuietReporter()
    assert tracked(config_of(tmp_path), RunDir(tmp_path), reporter) is reporter


def test_a_run_with_tensorboard_writes_its_rows_below_its_folder(tmp_path: Path):
    reporter = tracked(config_of(tmp_path, "trackers.tensorboard=true"), RunDir(tmp_path), QuietReporter())
    reporter.step(ROW, 8)
    reporter.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags: Any = read.Tags()
    assert set(tags["tensors"]) == set(measured(ROW))


def test_a_tracker_that_fails_is_told_once_and_dropped():
    reporter, failing = Saying(), Failing()
    both = Tracked(reporter, [("TensorBoard", failing)])
    both.step(ROW, 8)
    both.step(ROW, 8)
    assert (failing.steps, len(reporter.rows)) == (1, 2)
    assert reporter.said == ["TensorBoard: OSError: disk full; nothing more goes to TensorBoard, the training goes on"]
    both.close()
    assert len(reporter.said) == 1


def test_a_tracker_that_cannot_be_closed_is_told():
    reporter = Saying()
    Tracked(reporter, [("TensorBoard", Failing())]).close()
    assert reporter.said == ["TensorBoard: OSError: disk full; the last rows may be missing in TensorBoard"]


def test_another_kind_of_wandb_is_refused(tmp_path: Path):
    with pytest.raises(Exception, match=r"trackers\.wandb"):
        config_of(tmp_path, "trackers.wandb=sometimes")


def test_wandb_offline_keeps_the_rows_and_a_resume_goes_on_with_the_same_run(tmp_path: Path):
    config = config_of(tmp_path, 'trackers.wandb="offline"')
    for step in (1.0, 2.0):
        reporter: Any = tracked(config, RunDir(tmp_path), QuietReporter())
        settings = reporter._trackers["Weights & Biases"]._run.settings
        assert (settings.finish_timeout, settings.finish_timeout_raises) == (FINISH_S, True), "an upload must not keep a run from ending"
        reporter.step(ROW | {"step": step}, 8)
        reporter.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == 1
    assert all(TAGS["reward_mean"].encode() in file.read_bytes() for file in files)


def test_scores_of_another_configuration_of_the_evaluation_are_another_curve():
    before, after = (measured({"step": 3.0, "eval_score": 0.5, "eval_stderr": 0.1, "eval_fingerprint_changed": changes}) for changes in (0.0, 1.0))
    assert TAGS["eval_score"] in before and TAGS["eval_stderr"] in before
    assert {tag for tag in after if "eval_s" in tag} == {f"{TAGS[column]}_configuration_1" for column in ("eval_score", "eval_stderr")}
