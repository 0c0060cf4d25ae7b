"""The report: what it reads back from a run directory, what it draws of it, and what it says where something is
missing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from plotly import graph_objects
from pyarrow import parquet
from support.loop.loop_case import MODEL
from support.loop.report_room import plant_event, plant_gap, plant_histograms, scripted_run
from support.trainer.search_evidence import build_search

from orchestrator.metrics.distributions import Distributions
from orchestrator.report.attribution import attributed
from orchestrator.report.distributions import ratio_labels, whole_numbers
from orchestrator.report.drawing import MOST_POINTS, bin_size, thinned
from orchestrator.report.make import make_report
from orchestrator.report.page import Page, script_json
from orchestrator.report.record import read_record
from orchestrator.report.sections import page_of
from orchestrator.report.timeline import PANELS, layer_of, marks_of
from orchestrator.report.work import endings
from orchestrator.run_dir.histogram_writer import HistogramRecorder
from orchestrator.run_dir.histograms import read_histograms
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.search_records import SearchRecords
from rollout.errors import UserError
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.dispatch import Counts
from rollout.types.weights import PolicyVersion

STEPS = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return scripted_run(tmp_path_factory.mktemp("report"))


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    """A copy to be spoilt."""
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def figures_of(page: Page) -> dict[str, Any]:
    return {figure.key: figure for row in page.rows for section in row for figure in section.figures}


def text_of(run: RunDir) -> str:
    """The page without plotly's own code."""
    return re.sub(r"<script>/\*.*?</script>", "", make_report(run.path).path.read_text(), flags=re.DOTALL)


def test_a_finished_run_is_read_whole_and_lacks_nothing(finished: RunDir):
    record = read_record(finished.path)
    assert record.notes == ()
    assert record.rows.column("step").tolist() == list(range(1, STEPS + 1))
    assert record.counts is not None and record.counts.trained == STEPS * 3
    assert not [
        event for event in record.events if event.kind in ("dispatched", "ready", "leased", "settled", "rejected")
    ]


def test_every_figure_is_one_that_plotly_accepts(run: RunDir):
    plant_gap(run, 5, routing=0.02, unknown=0.001)
    plant_event(run, "evaluation", 6, score=0.5, fingerprint="a")
    plant_histograms(run)
    figures = figures_of(page_of(read_record(run.path)))
    assert figures.keys() == {"timeline", "staleness", "ratios", "attribution-0", "phases", "dispatches"}
    for figure in figures.values():
        graph_objects.Figure(figure.spec())


def test_the_curves_are_one_panel_a_layer_and_hold_the_values_of_the_parts(finished: RunDir):
    record = read_record(finished.path)
    assert [panel.layer for panel in PANELS] == [1, 2, 3, 4]
    traces = figures_of(page_of(record))["timeline"].traces
    norm = next(trace for trace in traces if trace.get("yaxis") == "y3")
    assert norm["x"] == list(range(1, STEPS + 1))
    assert norm["y"] == pytest.approx(record.rows.column("grad_norm").tolist(), rel=1e-5)


def test_an_event_lies_where_it_happened_between_the_steps(run: RunDir):
    plant_event(run, "replica_failed", 7, replica=0, reason="gone")
    found = read_record(run.path).events_of("replica_failed")
    assert [event.place for event in found] == pytest.approx([7.5], abs=1e-3)


def test_the_check_of_prompts_is_a_mark_of_layer_one(finished: RunDir):
    record = read_record(finished.path)
    (event,) = record.events_of("prompts_checked")
    assert layer_of(event) == 1
    assert event not in marks_of(record), "it found nothing"


def test_a_score_stands_at_the_version_that_it_scores_and_configurations_share_no_line(run: RunDir):
    plant_event(run, "evaluation", 4, score=0.5, version=3, fingerprint="a")
    plant_event(run, "evaluation", 7, score=0.6, version=6, fingerprint="a")
    plant_event(run, "evaluation", 10, score=0.2, version=9, fingerprint="b")
    figure = figures_of(page_of(read_record(run.path)))["timeline"]
    assert [(trace["x"], trace["y"]) for trace in figure.traces if trace.get("name") == "evaluation"] == [
        ([3, 6], [0.5, 0.6]),
        ([9], [0.2]),
    ]
    assert "2 configurations were in force" in text_of(run)


def test_events_stand_in_words_below_the_curves(run: RunDir):
    plant_event(run, "replica_failed", 7, replica=1, reason="its engine core is dead")
    text = text_of(run)
    assert "Events in words (3)" in text, "the doctor found hard prompts, too, and the run ended"
    assert "<td>replica failed</td><td>replica 1, reason its engine core is dead</td>" in text


def test_a_search_that_located_nothing_names_no_token(run: RunDir):
    SearchRecords(run.gradloc, lambda: load_tokenizer(MODEL)).keep(PolicyVersion(1, 7), build_search(outcome="diffuse"))
    section = next(
        section for row in page_of(read_record(run.path)).rows for section in row if section.key == "gradloc"
    )
    assert section.cards == () and "1 search, 0 tokens located" in section.intro


def test_a_version_that_the_engines_took_over_is_a_tick(finished: RunDir):
    record = read_record(finished.path)
    committed = record.events_of("version_committed")
    ticks = next(trace for trace in figures_of(page_of(record))["timeline"].traces if trace["yaxis"] == "y5")
    assert len(committed) > 2
    assert len(ticks["x"]) == len(committed)


def test_text_of_the_run_cannot_become_markup(run: RunDir):
    plant_event(run, "replica_failed", 7, reason="</script><script>alert(1)</script>")
    text = text_of(run)
    assert "alert(1)" in text
    assert "<script>alert" not in text and "</script><script>alert" not in text


def test_what_became_of_every_dispatch_adds_up_to_all_of_them(finished: RunDir):
    record = read_record(finished.path)
    assert record.counts is not None
    bars = figures_of(page_of(record))["dispatches"].traces[0]
    assert sum(bars["x"]) == record.counts.total > STEPS * 3


def test_counts_on_disk_are_those_of_the_run_and_add_up_over_parts(finished: RunDir):
    histograms = read_histograms(finished.histograms, Lineage({}))
    of_lengths = histograms.of("response_length_tokens")[""]
    assert of_lengths.sum() == STEPS * 3 * 2
    assert histograms.uppers("response_length_tokens")[-1] == float("inf")
    assert len(list(finished.histograms.iterdir())) > 1, "a part ends at every checkpoint"


def test_parts_of_a_waterfall_and_what_is_left_are_those_of_the_largest_gap(run: RunDir):
    plant_gap(run, 3, precision=0.001)
    plant_gap(run, 5, routing=0.02, precision=0.005, unknown=0.001)
    (found,) = attributed(read_record(run.path).events_of("consistency_finding"))
    assert (found.parts, found.unknown, found.policy) == ((("routing", 0.02), ("precision", 0.005)), 0.001, "e1-v5")
    assert found.gap == pytest.approx(0.026)


def test_a_run_that_still_goes_on_is_marked_partial(run: RunDir):
    run.summary.unlink()
    (note,) = read_record(run.path).notes
    assert note.startswith(
        "there is no summary.json: the run still goes on, or an error ended it, and its newest event is of "
    )
    assert note in text_of(run)


def test_a_run_before_its_first_part_has_a_page_that_says_so(run: RunDir):
    run.summary.unlink()
    shutil.rmtree(run.metrics)
    shutil.rmtree(run.histograms)
    text = text_of(run)
    assert f"steps 1 to {STEPS} are in no metric part yet" in text
    assert "No step is on disk yet." in text


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_shown(run: RunDir):
    (run.metrics / "part-9.parquet").write_bytes(b"PAR1 half a part")
    record = read_record(run.path)
    assert len(record.rows) == STEPS
    assert any(
        note.startswith("metrics/part-9.parquet cannot be read, what it holds is missing") for note in record.notes
    )


def test_missing_files_are_named_and_the_rest_is_shown(run: RunDir):
    run.events.unlink()
    for path in run.path.glob("store.sqlite*"):
        path.unlink()
    notes = read_record(run.path).notes
    assert any("events.jsonl is missing" in note for note in notes)
    assert any("the accounting of dispatches is missing" in note for note in notes)
    assert "The store of this run cannot be read." in text_of(run)


def test_findings_of_the_doctor_are_cards_with_advice(run: RunDir):
    fields = {
        "replica": 1,
        "policy": "e1-v7",
        "gap_nats": None,
        "explained": 1.0,
        "codes": "canary",
        "detail": "other bytes",
    }
    plant_event(run, "consistency_finding", 7, cause="weight_sync", **fields)
    section = next(
        section for row in page_of(read_record(run.path)).rows for section in row if section.key == "findings"
    )
    card = next(card for card in section.cards if card.title.startswith("weight sync, since step"))
    assert card.tag == "critical · 4 training system"
    assert card.lines[-2].startswith("Do: ") and card.lines[-1].startswith("Do not ")
    assert "do not trust entropy, KL, clip fractions" in section.intro


def test_culprits_of_a_gradient_search_stand_in_their_text(run: RunDir):
    kept = SearchRecords(run.gradloc, lambda: load_tokenizer(MODEL))
    kept.keep(PolicyVersion(1, 7), build_search())
    kept.keep(PolicyVersion(1, 8), build_search(outcome="not_searched", culprits=(), passes=0))
    (run.gradloc / "e1-v9.json").write_text("{}")
    section = next(
        section for row in page_of(read_record(run.path)).rows for section in row if section.key == "gradloc"
    )
    assert (
        "1 search and 1 step that asked for one when trainer.gradloc.spike_passes were spent, 1 token located"
        in section.intro
    )
    assert "1 files of gradloc/ cannot be read" in section.intro
    (card,) = section.cards
    assert card.token is not None and len(card.token.text) == 1
    assert f"{card.token.before}<mark>{card.token.text}</mark>{card.token.after}" in text_of(run)


def test_lines_that_are_no_events_are_counted_and_a_last_line_that_is_being_written_is_not(run: RunDir):
    with run.events.open("a") as file:
        file.write('not json\n{"kind": "x"}\n{"number": 9')
    (note,) = read_record(run.path).notes
    assert note.startswith("2 lines of events.jsonl cannot be read and are left out (the first at byte ")


def test_columns_of_a_newer_version_are_named(run: RunDir):
    for path in run.metrics.iterdir():
        table = parquet.read_table(path)
        parquet.write_table(
            table.append_column("brilliance", pa.array([1.0] * table.num_rows)).drop_columns(["loss"]), path
        )
    record = read_record(run.path)
    assert any("1 columns that this version of Concord does not know (brilliance)" in note for note in record.notes)
    assert np.isnan(record.rows.column("loss")).all()


def test_a_config_of_another_version_is_refused_with_the_cure(run: RunDir):
    document = json.loads(run.config.read_text())
    document["telepathy"] = {}
    run.config.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"another version of Concord wrote .*open it with the version that wrote it"):
        make_report(run.path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="is not a run directory"):
        make_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_series_is_thinned_to_means_that_skip_what_was_not_measured():
    assert bin_size(MOST_POINTS) == 1
    assert bin_size(MOST_POINTS + 1) == 2
    values = np.array([1.0, 3.0, np.nan, 4.0, np.nan, np.nan, 7.0])
    found = thinned(values, 2, lambda block: float(block.mean()))
    assert np.array_equal(found, [2.0, 4.0, np.nan, 7.0], equal_nan=True)


def test_buckets_have_readable_names():
    assert whole_numbers((0.0, 1.0, 3.0, float("inf"))) == ["0", "1", "2-3", "above 3"]
    assert ratio_labels((float(np.log(0.5)), 0.0, float(np.log(2)), float("inf"))) == [
        "to 0.5",
        "0.5-1.000",
        "1.000-2",
        "above 2",
    ]


def test_parts_of_histograms_hold_what_was_counted_since_the_part_before(tmp_path: Path):
    counted = Distributions()
    recorder = HistogramRecorder(tmp_path, counted, PolicyVersion(1, 0), steps_per_part=2)
    for step in range(1, 6):
        counted.observe("concord_token_staleness_steps", 1.0, times=10)
        recorder.add(PolicyVersion(1, step))
    recorder.flush()
    recorder.flush()
    tables = [parquet.read_table(tmp_path / f"part-{number}.parquet").to_pylist() for number in range(3)]
    assert [(rows[0]["last_step"], sum(row["count"] for row in rows)) for rows in tables] == [(2, 20), (4, 20), (5, 10)]
    assert len(list(tmp_path.iterdir())) == 3
    assert read_histograms(tmp_path, Lineage({})).of("token_staleness_steps")[""].tolist()[:3] == [0, 50, 0]


def test_what_was_counted_in_steps_that_a_resume_took_back_does_not_count(tmp_path: Path):
    for epoch, steps in ((1, (1, 2, 3, 4)), (2, (3, 4))):
        counted = Distributions()
        recorder = HistogramRecorder(tmp_path, counted, PolicyVersion(epoch, steps[0] - 1))
        for step in steps:
            counted.observe("concord_token_staleness_steps", float(epoch), times=10)
            recorder.add(PolicyVersion(epoch, step))
            if step % 2 == 0:
                recorder.flush()
    assert read_histograms(tmp_path, Lineage({1: 0, 2: 2})).of("token_staleness_steps")[""].tolist()[:4] == [
        0,
        20,
        20,
        0,
    ]


def test_groups_that_wait_for_a_checkpoint_are_trained_and_not_in_flight():
    counts = Counts(
        total=20,
        dispatched=3,
        leased=1,
        trained_held=((7, 4),),
        trained=8,
        rejected=(("stale", 3),),
        failed=(("engine", 1),),
    )
    found = {ending.name: ending.groups for ending in endings(counts)}
    assert found == {"trained": 12, "in flight": 4, "rejected: stale": 3, "failed: engine": 1}


def test_data_in_the_page_cannot_end_its_script():
    assert script_json({"text": "</script>"}) == '{"text":"\\u003c/script>"}'
