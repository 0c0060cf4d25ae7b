"""Steps go to the trackers under the catalogue's names; what fails or hangs there is reported once, and neither ends
nor delays a run."""

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import wandb
from support.loop.every_signal import snapshot_of_everything
from support.loop.local_fleet import QuietReporter
from support.loop.loop_case import Case, config_of
from support.servers.served_run import BATCH, GROUP, drive_served
from support.servers.wandb_rows import rows_of
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from orchestrator.exporters.tensorboard import TensorBoardTracker
from orchestrator.exporters.tracker_tags import STEPS, Points, TrackedSignals, meaning_of, tag_of
from orchestrator.exporters.trackers import CLOSE_S, Trackers, open_trackers
from orchestrator.exporters.wandb import FINISH_S, STEP, WandbTracker
from orchestrator.metrics.catalogue import BY_COLUMN
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.run_dir.layout import RunDir
from orchestrator.signals.observer import Sinks
from rollout.errors import ConcordError
from rollout.types.trajectory import StoredGroups
from trainer.step.scripted import ScriptedTrainer
from trainer.types.step import StepReport, StepRequest

REWARD, STALENESS = tag_of("concord_reward_mean"), tag_of("concord_token_staleness_steps")
make_ndarray: Any = tensor_util.make_ndarray
service: Any = wandb


class Keeping:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.points: list[Points] = []
        self.arrived = threading.Semaphore(0)

    def take(self, points: Points) -> None:
        self.points.append(points)
        self.arrived.release()

    def close(self) -> None:
        return None


class Failing(Keeping):
    def take(self, points: Points) -> None:
        super().take(points)
        raise OSError("disk full")


class Hanging(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def take(self, points: Points) -> None:
        self.released.wait()


class Saying(QuietReporter):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class DiesOnce(ScriptedTrainer):
    """Its sixth step fails, once: two steps above the last checkpoint."""

    died = False

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        if request.policy.version == 6 and not self.died:
            self.died = True
            raise ConcordError("the trainer is gone")
        return super().step(groups, request)


def points_of(step: int, reward: float) -> Points:
    return Points(step=step, series=STEPS, numbers={REWARD: reward}, bars={})


def at_step(step: int) -> Snapshot:
    return Snapshot(numbers={"concord_step": {(): float(step)}}, distributions={})


def read(folder: Path) -> Any:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def curve(accumulator: Any, tag: str) -> list[tuple[int, float]]:
    return [(each.step, float(make_ndarray(each.tensor_proto))) for each in accumulator.Tensors(tag)]


def metric_rows(run: RunDir) -> list[dict[str, Any]]:
    parts = sorted(run.metrics.glob("part-*.parquet"), key=lambda path: int(path.stem.removeprefix("part-")))
    return [row for part in parts for row in parquet.read_table(part).to_pylist()]


def test_tensorboard_reads_back_every_signal_of_every_step_with_its_kind_and_meaning(tmp_path: Path):
    tracker, signals, counted = TensorBoardTracker(tmp_path), TrackedSignals(), Distributions()
    given = [points for step in (1, 2) for points in signals.of_step(snapshot_of_everything(step, counted))]
    for points in given:
        tracker.take(points)
    tracker.close()
    found = read(tmp_path)
    assert set(found.Tags()["tensors"]) == {tag for points in given for tag in (*points.numbers, *points.bars)}
    for tag in given[0].numbers:
        assert curve(found, tag) == [(1, 1.0), (2, 2.0)]
        metadata = found.SummaryMetadata(tag)
        assert (metadata.plugin_data.plugin_name, metadata.summary_description) == ("scalars", meaning_of(tag))
    for tag in given[0].bars:
        assert found.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
        for points, event in zip(given, found.Tensors(tag), strict=True):
            lefts, rights, counts = make_ndarray(event.tensor_proto).T.tolist()
            assert (*lefts, rights[-1]) == points.bars[tag].edges
            assert tuple(counts) == points.bars[tag].counts


def test_a_step_is_on_disk_when_tensorboard_has_taken_it(tmp_path: Path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.take(points_of(1, 0.5))
    assert curve(read(tmp_path), REWARD) == [(1, 0.5)]
    tracker.close()


def test_a_point_of_tensorboard_takes_less_room_than_its_description(tmp_path: Path):
    sizes: list[int] = []
    for steps in (100, 200):
        tracker = TensorBoardTracker(tmp_path / str(steps))
        for step in range(steps):
            tracker.take(points_of(step, 0.5))
        tracker.close()
        sizes.append(sum(file.stat().st_size for file in (tmp_path / str(steps)).iterdir()))
    assert (sizes[1] - sizes[0]) / 100 < 120


def test_a_run_gives_each_step_of_its_metric_parts_and_its_histograms_to_tensorboard(tmp_path: Path):
    with Trackers([("TensorBoard", TensorBoardTracker(tmp_path / "tensorboard"))], lambda text: None) as trackers:
        run, _ = drive_served(tmp_path, None, 5, shift_nats=0.005, trackers=trackers)
    rows, found = metric_rows(run), read(tmp_path / "tensorboard")
    for column in ("reward_mean", "wall_seconds", "in_flight", "consistency_gap_mean", "engine_busy"):
        measured = [(int(row["step"]), row[column]) for row in rows if row[column] != -1.0]
        assert curve(found, tag_of(BY_COLUMN[column].name)) == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in measured
        ]
    shown = [
        make_ndarray(each.tensor_proto)[:, 2].sum() for each in found.Tensors(tag_of("concord_response_length_tokens"))
    ]
    assert shown == [BATCH * GROUP] * 5
    assert curve(found, tag_of("concord_diagnosis", ("1",)))[0][0] == 1
    assert tag_of("concord_replica_gap_nats", ("0", "p99")) in found.Tags()["tensors"]
    assert tag_of("concord_consistency_routing_coverage_ratio") not in found.Tags()["tensors"], "its column says -1"


def drive_until_it_dies_and_again(tmp_path: Path, *overrides: str) -> Case:
    """Eight steps with a checkpoint after the third; the sixth step fails, and a resume repeats the fourth and
    fifth."""
    case = Case(tmp_path, *overrides, trainer=None)
    case.trainer = DiesOnce(case.config.trainer)
    said: list[str] = []
    for _ in range(2):
        with open_trackers(case.config, case.run, said.append) as trackers:
            case.sinks = Sinks(trackers=trackers)
            if case.reporter.rows:
                case.drive()
            else:
                with pytest.raises(ConcordError, match="the trainer is gone"):
                    case.drive()
    assert [int(row["step"]) for row in case.reporter.rows] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert said == []
    return case


def test_tensorboard_shows_a_resumed_run_once_with_the_steps_that_count(tmp_path: Path):
    case = drive_until_it_dies_and_again(tmp_path, "trackers.tensorboard=true")
    kept = {int(row["step"]): row["wall_seconds"] for row in case.reporter.rows}
    shown = curve(read(case.run.tensorboard), tag_of("concord_wall_seconds"))
    assert shown == [(step, pytest.approx(kept[step], rel=1e-6)) for step in range(1, 9)]


def test_wandb_goes_on_with_the_same_run_and_repeats_no_step(tmp_path: Path):
    case = drive_until_it_dies_and_again(tmp_path, 'trackers.wandb="offline"')
    service.teardown()  # which waits until the files are whole, as the end of a process does
    files = sorted(case.run.wandb.glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2 and len({file.stem for file in files}) == 1
    assert [[row[STEP] for row in rows_of(file) if STEP in row] for file in files] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    row, bars = case.reporter.rows[0], rows_of(files[0])[0][STALENESS]
    assert rows_of(files[0])[0][REWARD] == pytest.approx(row["reward_mean"])
    assert bars["_type"] == "histogram" and len(bars["bins"]) == len(bars["values"]) + 1
    assert sum(bars["values"]) == pytest.approx(row["tokens_per_second"] * row["step_seconds"])


def test_wandb_does_not_keep_a_run_from_ending(tmp_path: Path):
    tracker: Any = WandbTracker(RunDir(tmp_path), config_of(tmp_path), "offline")
    settings = tracker._run.settings
    tracker.close()
    assert (settings.finish_timeout, settings.finish_timeout_raises) == (FINISH_S, True)
    assert FINISH_S < CLOSE_S


def test_a_tracker_that_fails_is_reported_once_and_the_run_and_the_other_tracker_go_on(tmp_path: Path):
    reporter, failing, keeping = Saying(), Failing(), Keeping()
    with Trackers([("TensorBoard", failing), ("Weights & Biases", keeping)], reporter.say) as trackers:
        _, summary = drive_served(tmp_path, None, 5, reporter=reporter, trackers=trackers)
    assert summary["steps"] == 5
    assert [points.step for points in keeping.points] == [1, 2, 3, 4, 5]
    assert len(failing.points) == 1
    assert [text.partition(";")[0] for text in reporter.said if "TensorBoard" in text] == [
        "TensorBoard: OSError: disk full"
    ]


def test_a_tracker_that_hangs_delays_no_step_and_is_reported():
    said: list[str] = []
    hanging, keeping = Hanging(), Keeping()
    trackers = Trackers([("Weights & Biases", hanging), ("TensorBoard", keeping)], said.append, most_waiting=3)
    for step in range(1, 11):
        trackers.step(at_step(step))
        assert keeping.arrived.acquire(timeout=10.0)
    trackers.close()
    hanging.released.set()
    assert said == [
        "Weights & Biases: 3 steps wait for it; nothing more goes to Weights & Biases, the training goes on"
    ]
    assert [points.step for points in keeping.points] == list(range(1, 11))


def test_a_tracker_that_does_not_close_is_reported_and_not_waited_for():
    said: list[str] = []
    hanging = Hanging()
    with Trackers([("TensorBoard", hanging)], said.append, close_s=0.01) as trackers:
        trackers.step(at_step(1))
    hanging.released.set()
    assert said == ["TensorBoard: it was not done after 0.01 s; the last steps may be missing in TensorBoard"]


def test_a_run_without_trackers_feeds_none(tmp_path: Path):
    assert not open_trackers(config_of(tmp_path), RunDir(tmp_path), lambda text: None)


def test_another_kind_of_wandb_is_refused(tmp_path: Path):
    with pytest.raises(Exception, match=r"trackers\.wandb"):
        config_of(tmp_path, "trackers.wandb=sometimes")
