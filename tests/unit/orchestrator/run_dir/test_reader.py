"""The doctor reads run directories: whole, unfinished, damaged, of another version; and looks again without reading
anything twice."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.loop.doctor_runs import MadeUpRun, healthy
from typer.testing import CliRunner

from orchestrator.commands.doctor import examine
from orchestrator.commands.main import app
from orchestrator.config import RunConfig
from orchestrator.doctor.diagnosis import diagnose
from orchestrator.metrics.blocks import BlockValue
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.layout import RunDir, create_run_dir
from orchestrator.run_dir.metrics_writer import BlockRecorder, MetricsRecorder
from orchestrator.run_dir.reader import RunReader
from rollout.errors import UserError
from rollout.store.sqlite.schema import FILE_NAME, open_for_writing
from rollout.types.weights import PolicyVersion


class Written:
    """A run directory with the rows of a made-up run."""

    def __init__(self, tmp_path: Path, run: MadeUpRun) -> None:
        self.run_dir: RunDir = create_run_dir(
            RunConfig.model_validate({"run": {"dir": str(tmp_path), "name": "run", "steps": 120}}), "run"
        )
        open_for_writing(self.run_dir.path / FILE_NAME, "process").close()
        self.number = 0
        self.made = run
        self.recorder = MetricsRecorder(self.run_dir.metrics)

    def rows(self, first: int, last: int) -> None:
        self.version = last
        for row in self.made.rows[first:last]:
            self.event("step_committed", policy=f"e1-v{int(row['step'])}")
            self.recorder.add(row)
        self.recorder.flush()

    def event(self, kind: str, **fields: Any) -> None:
        self.number += 1
        self.line({"number": self.number, "at_s": 0.0, "kind": kind, **fields})

    def line(self, event: dict[str, Any]) -> None:
        with (self.run_dir.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def finish(self) -> None:
        self.run_dir.summary.write_text(json.dumps({"version": self.version}))

    @property
    def path(self) -> Path:
        return self.run_dir.path


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path, healthy(0))


def test_a_whole_run_is_read_without_a_remark(written: Written):
    written.rows(0, 120)
    written.finish()
    record, partial = RunReader(written.path).read()
    assert (record.steps.tolist(), partial) == (list(range(1, 121)), ())
    assert record.column("max_attention_logit").tolist() != [-1.0] * 120, "what was not measured is a gap, not -1"


def test_failures_are_counted_up_to_the_step_in_which_they_happened(written: Written):
    written.rows(0, 2)
    written.event("failed", dispatch_id="d1", reason="engine")
    written.event("failed", dispatch_id="d2", reason="engine")
    written.rows(2, 4)
    written.finish()
    record, _ = RunReader(written.path).read()
    assert record.tally("failed:engine").tolist() == [0.0, 0.0, 2.0, 2.0]


def test_a_running_run_is_answered_in_part_and_says_which(written: Written):
    written.rows(0, 50)
    written.event("step_committed", policy="e1-v53")
    record, partial = RunReader(written.path).read()
    assert record.last_step == 50
    assert any("steps 51 to 53" in one for one in partial)
    assert any("no summary.json" in one for one in partial)


def test_a_run_before_its_first_part_is_answered_in_part(written: Written):
    record, partial = RunReader(written.path).read()
    assert diagnose(record).findings == ()
    assert any("no metric part" in one for one in partial)
    assert any("events.jsonl is missing" in one for one in partial)


def test_a_second_look_reads_only_what_is_new(written: Written):
    written.rows(0, 50)
    reader = RunReader(written.path)
    assert reader.read()[0].last_step == 50
    part = written.run_dir.metrics / "part-0.parquet"
    part.write_bytes(b"would fail if it were read again")
    written.event("replica_failed", replica=0, reason="gone")
    written.rows(50, 100)
    record, _ = reader.read()
    assert record.last_step == 100
    assert [event.step for event in record.of_kind("replica_failed")] == [50]


def test_a_line_that_is_being_written_waits_for_the_next_look(written: Written):
    reader = RunReader(written.path)
    events = written.path / "events.jsonl"
    events.write_text('{"number": 1, "at_s": 0, "kind": "worker_lost", "det')
    assert reader.read()[0].events == ()
    events.write_text('{"number": 1, "at_s": 0, "kind": "worker_lost", "detail": "killed"}\n')
    assert [event.text("detail") for event in reader.read()[0].events] == ["killed"]


def test_a_repeated_event_counts_once(written: Written):
    for _ in range(2):
        written.line({"number": 1, "at_s": 0.0, "kind": "worker_lost", "detail": "killed"})
    assert len(RunReader(written.path).read()[0].events) == 1


def test_of_a_step_that_was_trained_again_the_later_epoch_counts(written: Written):
    written.recorder.add({**written.made.rows[0], "trainer_epoch": 2.0, "reward_mean": 0.9})
    written.recorder.flush()
    written.recorder.add({**written.made.rows[0], "trainer_epoch": 1.0, "reward_mean": 0.1})
    written.recorder.flush()
    assert RunReader(written.path).read()[0].column("reward_mean").tolist() == [0.9]


def test_steps_that_a_resume_took_back_do_not_count(written: Written):
    written.event("epoch_opened", trainer_epoch=1, resumed_version=0)
    written.rows(0, 60)
    written.event("epoch_opened", trainer_epoch=2, resumed_version=40)
    written.event("replica_failed", replica=0, reason="gone")
    reader = RunReader(written.path)
    record, _ = reader.read()
    assert (record.last_step, record.of_kind("replica_failed")[0].step) == (40, 40)
    for row in written.made.rows[40:42]:
        written.recorder.add({**row, "trainer_epoch": 2.0, "reward_mean": 0.9})
    written.recorder.flush()
    record, _ = reader.read()
    assert record.steps.tolist() == list(range(1, 43))
    assert record.column("reward_mean")[40:].tolist() == [0.9, 0.9]


def test_without_events_rows_tell_where_a_resume_took_over(written: Written):
    for epoch, step in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 3)):
        written.recorder.add({**written.made.rows[step - 1], "trainer_epoch": epoch, "loss": step + 10 * epoch})
    written.recorder.flush()
    record, _ = RunReader(written.path).read()
    assert record.steps.tolist() == [1, 2, 3]
    assert record.column("loss").tolist() == [11, 12, 23]


def test_values_of_blocks_of_steps_that_a_resume_took_back_do_not_count(written: Written):
    written.event("epoch_opened", trainer_epoch=1, resumed_version=0)
    written.rows(0, 3)
    blocks = BlockRecorder(written.run_dir.block_metrics)
    for epoch, steps in ((1, (1, 2, 3)), (2, (2,))):
        for step in steps:
            blocks.add(
                PolicyVersion(epoch, step),
                [BlockValue(signal="block_grad_norm", block="head", value=step + 10.0 * epoch)],
            )
    blocks.flush()
    written.event("epoch_opened", trainer_epoch=2, resumed_version=1)
    written.recorder.add({**written.made.rows[1], "trainer_epoch": 2.0})
    written.recorder.flush()
    record, _ = RunReader(written.path).read()
    assert record.of_blocks("block_grad_norm")["head"].tolist() == [11.0, 22.0]


def test_what_was_scored_or_skipped_in_steps_that_a_resume_took_back_does_not_count(written: Written):
    written.event("epoch_opened", trainer_epoch=1, resumed_version=0)
    written.rows(0, 60)
    written.event("evaluation", version=40, score=0.5)
    written.event("evaluation", version=50, score=0.6)
    written.event("step_skipped", step=55, reason="non-finite gradient")
    written.event("epoch_opened", trainer_epoch=2, resumed_version=40)
    written.event("evaluation", version=50, score=0.7)
    record, _ = RunReader(written.path).read()
    assert [event.number("score") for event in record.of_kind("evaluation")] == [0.5, 0.7]
    assert record.of_kind("step_skipped") == []


def test_an_event_without_its_fields_is_reported_with_its_place(written: Written):
    written.line({"number": 1, "at_s": 0.0, "kind": "step_committed"})
    written.line({"number": 2, "at_s": 0.0, "kind": "worker_lost", "detail": "killed"})
    record, partial = RunReader(written.path).read()
    assert "1 line of events.jsonl cannot be read and is left out (the first at byte 0)" in partial
    assert [event.kind for event in record.events] == ["worker_lost"]


def test_values_of_blocks_are_read(written: Written):
    written.rows(0, 2)
    blocks = BlockRecorder(written.run_dir.block_metrics)
    of_head = BlockValue(signal="block_max_attention_logit", block="a", head=0, value=1.0)
    blocks.add(PolicyVersion(1, 2), [BlockValue(signal="block_grad_norm", block="head", value=3.0), of_head])
    blocks.flush()
    found = RunReader(written.path).read()[0].of_blocks("block_grad_norm")
    assert {block: values.tolist()[1:] for block, values in found.items()} == {"head": [3.0]}


def test_a_folder_that_is_no_run_is_refused_with_the_cure(tmp_path: Path):
    with pytest.raises(UserError, match="give the folder that `concord run` printed"):
        RunReader(tmp_path)


def test_a_config_that_is_no_json_is_refused(written: Written):
    written.run_dir.config.write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        RunReader(written.path)


@pytest.mark.parametrize(("content", "got"), [("[]", "list"), ("3", "int")])
def test_a_config_that_is_no_config_is_refused_with_the_cure(written: Written, content: str, got: str):
    written.run_dir.config.write_text(content)
    with pytest.raises(UserError, match=rf"config\.json holds {got}, expected .*; restore it"):
        RunReader(written.path)


def test_a_config_whose_sections_are_none_of_this_version_is_read_past(written: Written):
    written.run_dir.config.write_text('{"run": []}')
    written.rows(0, 2)
    assert RunReader(written.path).read()[0].last_step == 2


def test_a_run_of_a_newer_format_is_refused_with_the_cure(written: Written):
    connection = open_for_writing(written.path / FILE_NAME, "process")
    connection.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")
    connection.close()
    with pytest.raises(UserError, match=r"schema 99.*with the version that wrote it"):
        RunReader(written.path)


def test_a_store_that_is_damaged_is_reported_and_the_rest_is_read(written: Written):
    written.rows(0, 4)
    (written.path / FILE_NAME).write_bytes(b"no database" * 100)
    record, partial = RunReader(written.path).read()
    assert record.steps.size == 4
    assert any(one.startswith("the store cannot be read: ") for one in partial)


def test_many_damaged_parts_are_one_remark(written: Written):
    for first in range(0, 6, 2):
        written.rows(first, first + 2)
    for number in (0, 1):
        (written.run_dir.metrics / f"part-{number}.parquet").write_bytes(b"no parquet")
    _, partial = RunReader(written.path).read()
    assert [one for one in partial if one.startswith("metrics/part-0.parquet and 1 more cannot be read")]


def test_a_run_that_has_not_ended_says_when_it_was_last_heard_of(written: Written):
    written.line({"number": 1, "at_s": 1_800_000_000.0, "kind": "worker_lost"})
    _, partial = RunReader(written.path).read()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_800_000_000.0))
    assert (
        f"there is no summary.json: the run still goes on, or an error ended it, and its newest event is of {when}"
        in partial
    )


def test_a_run_whose_driver_was_killed_is_not_taken_for_one_that_goes_on(written: Written):
    written.rows(0, 50)
    gone = {"pid": os.getpid() + 10_000_000, "host": socket.gethostname(), "started_s": 0.0}
    written.run_dir.driver.write_text(json.dumps(gone))
    record, partial = RunReader(written.path).read()
    assert any(one.startswith("the run ended early (lost): process ") for one in partial)
    primary = diagnose(record).primary
    assert primary is not None and (primary.cause, primary.since) == (Cause.DRIVER_LOST, 50)


def test_columns_of_another_version_are_noted_and_not_guessed(written: Written):
    written.run_dir.metrics.mkdir(exist_ok=True)
    table = pa.table({"step": [1.0], "trainer_epoch": [1.0], "reward_mean": [0.5], "reward_of_tomorrow": [1.0]})
    pq.write_table(table, written.run_dir.metrics / "part-0.parquet")
    _, partial = RunReader(written.path).read()
    assert any("lack" in one for one in partial)
    assert any("reward_of_tomorrow" in one for one in partial)


def test_a_damaged_part_is_named_and_the_rest_is_read(written: Written):
    written.rows(0, 2)
    written.rows(2, 4)
    (written.run_dir.metrics / "part-0.parquet").write_bytes(b"no parquet")
    record, partial = RunReader(written.path).read()
    assert record.steps.tolist() == [3, 4]
    assert any(one.startswith("metrics/part-0.parquet cannot be read, what it holds is missing") for one in partial)


def test_a_file_that_is_named_almost_like_a_part_is_reported_and_neither_read_nor_counted(written: Written):
    written.rows(0, 2)
    parts = written.run_dir.metrics
    for name in ("part-0 (copy).parquet", "part-07.parquet"):
        (parts / name).write_bytes((parts / "part-0.parquet").read_bytes())
    written.rows(2, 4)
    assert (parts / "part-1.parquet").is_file()
    record, partial = RunReader(written.path).read()
    assert record.steps.tolist() == [1, 2, 3, 4]
    assert (
        "metrics/part-0 (copy).parquet and 1 more is left out: a part is named part-N.parquet; rename it, or move it "
        "away" in partial
    )
    resumed = MetricsRecorder(parts)
    resumed.add(written.made.rows[4])
    resumed.flush()
    assert (parts / "part-2.parquet").is_file()


def test_the_command_answers_with_one_json_document(written: Written):
    written.rows(0, 120)
    written.event(
        "consistency_finding",
        cause="weight_sync",
        replica=1,
        policy="e1-v60",
        gap_nats=None,
        explained=1.0,
        codes="canary",
        detail="other bytes",
    )
    written.finish()
    done = CliRunner().invoke(app, ["doctor", str(written.path), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert (document["primary"], document["diagnosis_layer"], document["partial"]) == ("weight_sync", 4, [])
    finding = document["findings"][0]
    assert finding["do"] and finding["do_not"] and finding["evidence"][0]["numbers"]["largest gap in nats"] is None
    assert "approx_kl" in document["untrusted"]


def test_a_number_that_is_not_finite_leaves_the_document_valid(written: Written):
    written.rows(0, 120)
    written.event(
        "consistency_finding",
        cause="weight_sync",
        replica=1,
        gap_nats=float("inf"),
        explained=float("nan"),
        codes="canary",
    )
    done = CliRunner().invoke(app, ["doctor", str(written.path), "--json"])
    document = json.loads(done.output, parse_constant=pytest.fail)
    assert document["findings"][0]["evidence"][0]["numbers"]["largest gap in nats"] is None


def test_the_tables_show_evidence_advice_and_what_is_missing(written: Written):
    written.rows(0, 50)
    written.event("worker_lost", worker=0, detail="killed by a signal")
    done = CliRunner().invoke(app, ["doctor", str(written.path)])
    assert done.exit_code == 0, done.output
    for expected in (
        "primary finding: worker_lost, layer 4",
        "partial:",
        "killed by a signal",
        "do not",
        "do not trust entropy",
    ):
        assert expected in done.output
    assert "Do not" not in done.output


def test_watching_prints_what_changes_and_ends_with_the_run(written: Written, capfd: pytest.CaptureFixture[str]):
    written.rows(0, 50)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        written.event("step_committed", policy="e1-v51")  # goes on, and nothing new is found
        if len(waits) == 2:
            written.rows(50, 60)
            written.finish()

    examine(written.path, json_lines=True, watch=True, wait=wait)
    shown = [json.loads(line)["last_step"] for line in capfd.readouterr().out.splitlines()]
    assert (shown, len(waits)) == ([50, 60], 2)
