"""What a run writes beside its accounting: a disk that refuses it is reported and counted, keeps what it can for later,
and ends no training."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.loop.loop_case import Case, assert_accounted
from support.loop.run_record import events_of
from support.trainer.search_evidence import Searching, build_search

from orchestrator.metrics.blocks import BlockValue
from orchestrator.metrics.distributions import Distributions
from orchestrator.run_dir.histogram_writer import HistogramRecorder
from orchestrator.run_dir.metrics_writer import MOST_HELD_STEPS, BlockRecorder
from orchestrator.run_dir.search_records import SearchRecords
from orchestrator.run_dir.side_files import SideFileError, SideFiles
from rollout.types.protocols import EventFields
from rollout.types.weights import PolicyVersion

parquet: Any = pq


def reported_by(side_files: SideFiles, reported: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    asyncio.run(side_files.report())
    return reported


def recording() -> tuple[SideFiles, list[tuple[str, Any]]]:
    reported: list[tuple[str, Any]] = []

    async def record_event(kind: str, fields: EventFields) -> None:
        reported.append((kind, fields))

    return SideFiles(record_event), reported


def replaced_by_a_file(folder: Path) -> Callable[[], None]:
    """Nothing can be written below `folder` until the answer is called."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.write_text("no folder")

    def restore() -> None:
        folder.unlink()
        aside.rename(folder)

    return restore


def test_trouble_is_counted_every_time_and_reported_again_only_after_it_worked():
    side_files, reported = recording()
    for error in (OSError("full"), SideFileError("broken"), None, OSError("full again")):
        with side_files.spared("metrics"):
            if error is not None:
                raise error
    with side_files.spared("gradloc"):
        raise OSError("no folder")
    assert side_files.failures == 4
    reasons = [(kind, fields["what"], fields["reason"]) for kind, fields in reported_by(side_files, reported)]
    assert reasons == [
        ("side_file_failed", *each)
        for each in (("metrics", "full"), ("metrics", "full again"), ("gradloc", "no folder"))
    ]
    assert side_files.take_unreported() == []
    with pytest.raises(ZeroDivisionError), side_files.spared("metrics"):
        raise ZeroDivisionError


def test_rows_that_the_disk_refuses_are_in_the_next_part(tmp_path: Path):
    recorder = BlockRecorder(tmp_path / "parts", steps_per_part=2)
    restore = replaced_by_a_file(tmp_path / "parts")
    value = BlockValue(signal="block_grad_norm", block="head", value=1.0)
    recorder.add(PolicyVersion(1, 1), [value, value])
    with pytest.raises(OSError, match="parts"):
        recorder.add(PolicyVersion(1, 2), [value])
    recorder.add(PolicyVersion(1, 3), [value])
    restore()
    recorder.flush()
    (part,) = (tmp_path / "parts").glob("part-*.parquet")
    assert parquet.read_table(part).column("step").to_pylist() == [1, 1, 2, 3]


def test_of_rows_that_wait_the_oldest_go_first(tmp_path: Path):
    recorder = BlockRecorder(tmp_path / "parts", steps_per_part=10 * MOST_HELD_STEPS)
    for step in range(1, MOST_HELD_STEPS + 3):
        recorder.add(PolicyVersion(1, step), [BlockValue(signal="block_grad_norm", block="head", value=1.0)])
    recorder.flush()
    (part,) = (tmp_path / "parts").glob("part-*.parquet")
    assert parquet.read_table(part).column("step").to_pylist() == list(range(3, MOST_HELD_STEPS + 3))


def test_counts_that_the_disk_refuses_are_in_the_next_part(tmp_path: Path):
    counted = Distributions()
    counted.observe("concord_token_staleness_steps", 1.0, times=10)
    recorder = HistogramRecorder(tmp_path / "parts", counted, PolicyVersion(1, 0))
    restore = replaced_by_a_file(tmp_path / "parts")
    with pytest.raises(OSError, match="parts"):
        recorder.flush()
    restore()
    recorder.flush()
    recorder.flush()
    (part,) = (tmp_path / "parts").glob("part-*.parquet")
    assert sum(parquet.read_table(part).column("count").to_pylist()) == 10


def test_a_broken_file_of_a_search_stays_as_it_is_and_is_reported(tmp_path: Path):
    side_files, reported = recording()
    (tmp_path / "gradloc").mkdir()
    (tmp_path / "gradloc" / "e1-v4.json").write_text("{")
    event = SearchRecords(tmp_path / "gradloc", side_files=side_files).keep(PolicyVersion(1, 4), build_search())
    assert event["outcome"] == "located" and (tmp_path / "gradloc" / "e1-v4.json").read_text() == "{"
    ((_, fields),) = reported_by(side_files, reported)
    assert fields["what"] == "gradloc/e1-v4.json" and "stays as it is" in fields["reason"]


def test_a_run_whose_side_files_cannot_be_written_goes_on_and_says_so(tmp_path: Path):
    case = Case(tmp_path)
    case.trainer = Searching(case, lambda tries: tries == 5, lambda group: build_search())

    def at_step(step: int) -> None:
        if step == 2:
            case.run.gradloc.write_text("no folder")
            replaced_by_a_file(case.run.metrics)

    case.reporter.on_step = at_step
    summary = case.drive()
    assert summary["version"] == 8
    assert_accounted(summary)
    events = events_of(case.run.path)
    failed = [event["what"] for event in events if event["kind"] == "side_file_failed"]
    assert "gradloc/e1-v5.json" in failed and "metrics" in failed
    assert [event["outcome"] for event in events if event["kind"] == "gradloc"] == ["located"], (
        "the event has what the file lacks"
    )
    assert case.reporter.rows[-1]["side_file_failures"] >= 2
    assert json.loads(case.run.summary.read_text())["version"] == 8


@pytest.mark.parametrize("content", ['{"format": 1}', '{"format": 2}', "["])
def test_a_saved_step_that_cannot_be_read_keeps_all_weights_and_ends_no_training(tmp_path: Path, content: str):
    case = Case(tmp_path, "run.steps=20")
    broken = case.run.saved_steps / "1" / "step.json"
    kept: list[set[str]] = []

    def at_step(step: int) -> None:
        kept.append({path.name for path in case.run.weights.iterdir()})
        if step == 2:
            broken.parent.mkdir(parents=True)
            broken.write_text(content)
        elif step == 16:
            broken.unlink()

    case.reporter.on_step = at_step
    summary = case.drive()
    assert summary["version"] == 20
    assert kept[1] < kept[15], "nothing is removed while the step is there"
    assert "e1-v1" in kept[15] and not (case.run.weights / "e1-v1").exists()
    (failed,) = [event for event in events_of(case.run.path) if event["kind"] == "side_file_failed"]
    assert failed["what"] == "weights that nothing refers to any more"
    assert str(case.run.saved_steps) in failed["reason"] and "remove" in failed["reason"]
