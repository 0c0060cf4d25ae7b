"""A run from its command to its end on real Ray, and what is there afterwards. One run serves all these tests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_record, events_of, summary_of
from support.servers.wandb_rows import rows_of
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from orchestrator.exporters.tracker_tags import tag_of
from orchestrator.exporters.wandb import STEP
from orchestrator.metrics.catalogue import COLUMNS
from orchestrator.run_dir.layout import RunDir
from rollout.types.weights import PolicyVersion

pytestmark = pytest.mark.timeout(3 * (START_S + STEP_S))  # the first test starts the run
STEPS, BATCH, GROUP = 12, 3, 2
SUMMARY_KEYS = {
    *(
        "steps",
        "version",
        "reward_first",
        "reward_last",
        "reward_moving_10",
        "dispatched",
        "trained",
        "rejected",
        "failed",
        "in_flight",
    ),
    *(
        "trajectories",
        "max_token_staleness",
        "mean_token_staleness",
        "mixed_version_trajectories",
        "mean_length",
        "weight_updates",
    ),
    *("update_pause_ms", "tokens_per_s", "samples_per_s", "engine_busy", "trainer_busy", "wall_s", "peak_rss_mb"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ConcordProcess, Path]]:
    """The process, which has exited, and its run directory. Four slots for up to eighteen samples: every update falls
    into a saturated engine."""
    folder = tmp_path_factory.mktemp("whole")
    trackers = ("--set", "trackers.tensorboard=true", "--set", 'trackers.wandb="offline"')
    process = ConcordProcess("run", write_config(folder), *trackers, folder=folder)
    try:
        process.until_step(1)
        process.take_note()
        process.until_step(STEPS)
        process.take_note()
        assert process.exit_status(STEP_S) == 0, process.errors
        yield process, folder / "runs" / "run"
    finally:
        process.close()


def run_to_end(folder: Path, *arguments: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and error output of a command that is over soon."""
    process = ConcordProcess(*arguments, folder=folder, environment=environment)
    try:
        return process.exit_status(STEP_S), "".join(process.output), process.errors
    finally:
        process.close()


def test_a_run_ends_with_status_0_and_leaves_no_process(finished: tuple[ConcordProcess, Path]) -> None:
    assert finished[0].left_of_it() == []


def test_prometheus_finds_a_run_no_longer_than_it_lasts(finished: tuple[ConcordProcess, Path]) -> None:
    assert not RunDir(finished[1]).prometheus_targets.exists()


def test_trackers_hold_every_step_of_a_run(finished: tuple[ConcordProcess, Path]) -> None:
    """The tracker's own processes outlive the cluster, which ends before the last rows are written."""
    process, run = finished
    assert not [line for line in process.lines if "missing" in line.get("event", "")]
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert [row[STEP] for row in rows_of(file)] == list(range(1, STEPS + 1))
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [each.step for each in events.Tensors(tag_of("concord_token_staleness_steps"))] == list(range(1, STEPS + 1))


def test_a_run_prints_one_json_line_a_step_and_the_summary(finished: tuple[ConcordProcess, Path]) -> None:
    process, run = finished
    assert process.steps == list(range(1, STEPS + 1))
    assert process.lines[-1] == {"summary": summary_of(run)}


def test_the_summary_has_every_key_and_its_counts_add_up(finished: tuple[ConcordProcess, Path]) -> None:
    summary = summary_of(finished[1])
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["trajectories"].keys() == {"trained", "masked", "dropped"}
    assert summary["mean_length"].keys() >= {"dispatched", "trained"}
    assert summary["update_pause_ms"].keys() == {"p50", "p99"}
    assert summary["peak_rss_mb"].keys() == {"driver", "store", "reward-0", "trainer-0", "engine-0", "episodes-0"}
    assert (summary["steps"], summary["version"], summary["trained"]) == (STEPS, STEPS, STEPS * BATCH)
    assert summary["failed"] == {}
    assert_counts_add_up(summary)


def test_weights_reach_an_engine_whose_slots_are_all_taken(finished: tuple[ConcordProcess, Path]) -> None:
    """An update under load neither hangs nor waits for the samples that run: they go on under the new version."""
    summary = summary_of(finished[1])
    assert summary["weight_updates"] >= STEPS - 2
    assert summary["mixed_version_trajectories"] > 0
    assert summary["max_token_staleness"] <= 2


def test_versions_rise_within_a_trajectory_and_start_at_the_committed_one(
    finished: tuple[ConcordProcess, Path],
) -> None:
    assert_record(finished[1], steps=STEPS, batch_groups=BATCH, max_staleness=2)


def test_the_metric_parts_have_the_columns_of_the_catalogue_and_one_row_a_step(
    finished: tuple[ConcordProcess, Path],
) -> None:
    parts = sorted((finished[1] / "metrics").glob("part-*.parquet"))
    rows = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(tuple(row) == COLUMNS for row in rows)
    assert all(value is not None and value == value for row in rows for value in row.values())


def test_the_run_directory_is_complete_and_nothing_in_it_is_half_written(finished: tuple[ConcordProcess, Path]) -> None:
    run = finished[1]
    assert {path.name for path in run.iterdir()} >= {
        "config.json",
        "events.jsonl",
        "store.sqlite",
        "tokens",
        "weights",
        "checkpoints",
        "metrics",
        "block_metrics",
        "histograms",
        "report.html",
        "summary.json",
    }
    assert [path for path in run.rglob("*") if path.name.endswith(".tmp")] == []
    assert json.loads((run / "config.json").read_text())["run"]["steps"] == STEPS
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["e1-v12", "e1-v8"]
    weights = {PolicyVersion.parse(path.name).version for path in (run / "weights").iterdir()}
    assert weights >= {0, 9, 10, 11, 12}


def explained_dispatch(run: Path) -> dict[str, Any]:
    return next(event for event in events_of(run) if event["kind"] == "settled")


def test_explain_shows_tokens_with_versions_log_probs_reward_and_outcome(finished: tuple[ConcordProcess, Path]) -> None:
    run = finished[1]
    dispatch_id = explained_dispatch(run)["dispatch_id"]
    status, output, errors = run_to_end(run.parent, "explain", run, f"{dispatch_id}-1", environment={"COLUMNS": "200"})
    assert status == 0, errors
    assert f"dispatch {dispatch_id}" in output
    assert f"trajectory {dispatch_id}-1  reward 0" in output
    assert "outcome: trained in step" in output
    assert "log-prob (nats)" in output
    assert "versions e1-v" in output
    token_rows = [line for line in output.splitlines() if line.startswith("│")]
    assert len(token_rows) == 6 + 8
    assert sum("given" in row for row in token_rows) == 6


def test_explain_names_what_it_does_not_know(finished: tuple[ConcordProcess, Path]) -> None:
    run = finished[1]
    status, _, errors = run_to_end(run.parent, "explain", run, "d99999999-0")
    assert status == 2
    assert "no trajectory or dispatch 'd99999999-0'" in errors


def test_a_run_name_that_exists_is_refused_with_the_way_to_resume_it(finished: tuple[ConcordProcess, Path]) -> None:
    run = finished[1]
    before = summary_of(run)
    status, _, errors = run_to_end(run.parent.parent, "run", run.parent.parent / "small.toml")
    assert status == 2
    assert f"concord resume {run}" in errors
    assert summary_of(run) == before
