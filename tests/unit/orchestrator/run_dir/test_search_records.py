"""What a run keeps of its gradient searches, what `concord gradloc` shows of them, and what the loop does with a
quarantine."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.loop.loop_case import MODEL, Case, assert_accounted
from support.trainer.search_evidence import Searching, build_culprit, build_search

from orchestrator.commands.explain import explain_trajectory
from orchestrator.commands.gradloc import show_searches
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.search_records import SearchRecords
from rollout.errors import UserError
from rollout.store.sqlite.reader import open_reader
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import decode_evidence
from trainer.types.gradloc import Acted, GradLocEvidence
from trainer.types.step import Verdict

NAN = math.nan


def records(folder: Path) -> SearchRecords:
    return SearchRecords(folder, lambda: load_tokenizer(MODEL))


def empty_run(tmp_path: Path) -> RunDir:
    return Case(tmp_path).run


def test_a_file_holds_the_culprit_in_its_text_and_every_search_of_its_step(tmp_path: Path):
    kept, tokenizer = records(tmp_path / "gradloc"), load_tokenizer(MODEL)
    ids = tokenizer.encode("1+2=37")
    culprit = build_culprit(
        token_id=int(ids[4]), position=9, context_start=5, context_token_ids=tuple(int(i) for i in ids)
    )
    kept.keep(PolicyVersion(1, 12), build_search(culprits=(culprit,), acted=Acted.SKIPPED))
    kept.keep(PolicyVersion(1, 12), build_search(outcome="diffuse", culprits=(), passes=20, seconds=1.5))
    document = json.loads((tmp_path / "gradloc" / "e1-v12.json").read_text())
    first, second = document["searches"]
    (shown,) = first["culprits"]
    assert (shown["text_before"], shown["token_text"], shown["text_after"]) == ("1+2=", "3", "7")
    assert shown["block_norms"] == {"embeddings": 3.0, "model.layers.0": 12.0} and shown["policy"] == "e1-v2"
    assert (second["outcome"], second["culprits"]) == ("diffuse", [])
    assert (kept.outcomes, kept.passes, kept.seconds) == (Counter(located=1, diffuse=1), 29, 2.0)
    assert [path.name for path in (tmp_path / "gradloc").iterdir()] == ["e1-v12.json"]


def test_what_is_not_finite_is_null_and_never_breaks_the_json(tmp_path: Path):
    culprit = build_culprit(
        norm=NAN,
        block_norms=(("embeddings", NAN), ("head", 1.0)),
        block_ratios=(),
        omega=math.inf,
        d_engine=None,
        d_stale=None,
    )
    search = build_search(
        grad_norm=NAN, threshold=NAN, tau=NAN, explained=NAN, culprits=(culprit,), trigger="non_finite"
    )
    event = records(tmp_path / "gradloc").keep(PolicyVersion(2, 3), search)
    stored = json.loads((tmp_path / "gradloc" / "e2-v3.json").read_text())["searches"][0]
    assert (
        stored["grad_norm"],
        stored["tau"],
        stored["culprits"][0]["omega"],
        stored["culprits"][0]["block_norms"]["embeddings"],
    ) == (None,) * 4
    assert json.loads(json.dumps(event, allow_nan=False))["norm"] is None


def test_the_event_is_one_flat_row_with_the_first_culprit(tmp_path: Path):
    event = records(tmp_path / "gradloc").keep(
        PolicyVersion(1, 4), build_search(culprits=(build_culprit(), build_culprit(position=6)))
    )
    assert event["step"] == 4 and event["culprits"] == 2 and event["position"] == 5
    assert event["outcome"] == "located" and event["trajectory_id"] == "d00000001-0" and event["type"] == "A1"
    assert all(value is None or isinstance(value, str | int | float | bool) for value in event.values())


def test_all_searches_are_listed_and_one_is_shown_with_its_culprit_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = empty_run(tmp_path)
    kept, ids = records(run.gradloc), load_tokenizer(MODEL).encode("1+2=37")
    culprit = build_culprit(
        token_id=int(ids[4]), position=4, context_start=0, context_token_ids=tuple(int(i) for i in ids)
    )
    kept.keep(PolicyVersion(1, 9), build_search(outcome="diffuse", culprits=()))
    kept.keep(
        PolicyVersion(1, 10),
        build_search(culprits=(culprit,), acted=Acted.MASKED, removed_terms=1, grad_norm_after=1.5),
    )
    show_searches(run.path, None)
    listed = capsys.readouterr().out
    assert listed.index("e1-v9") < listed.index("e1-v10") and "diffuse" in listed and "located" in listed
    show_searches(run.path, "10")
    shown = capsys.readouterr().out
    assert "1+2=>>3<<7" in shown and "type A1" in shown and "replica 1" in shown
    assert "1 term left the loss" in shown and "still above" not in shown
    bars = {
        name: line.count("█")
        for line in shown.splitlines()
        for name in ("embeddings", "model.layers.0")
        if name in line
    }
    assert bars["model.layers.0"] > bars["embeddings"] > 0
    show_searches(run.path, "e1-v10", as_json=True)
    assert json.loads(capsys.readouterr().out)["searches"][0]["culprits"][0]["token_text"] == "3"
    show_searches(run.path, None, as_json=True)
    assert [each["policy"] for each in json.loads(capsys.readouterr().out)] == ["e1-v9", "e1-v10"]


def test_a_culprit_whose_old_logprob_is_not_finite_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = empty_run(tmp_path)
    records(run.gradloc).keep(PolicyVersion(1, 9), build_search(culprits=(build_culprit(old_logprob=NAN),)))
    show_searches(run.path, "9")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " old_logprob " in line]
    assert "not finite" in line


def test_a_step_number_means_the_newest_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = empty_run(tmp_path)
    for epoch, norm in ((1, 13.0), (2, 14.0)):
        records(run.gradloc).keep(PolicyVersion(epoch, 3), build_search(grad_norm=norm))
    show_searches(run.path, "3", as_json=True)
    assert json.loads(capsys.readouterr().out)["searches"][0]["grad_norm"] == 14.0


def test_no_search_and_an_unknown_step_are_reported_with_the_cure(tmp_path: Path):
    run = empty_run(tmp_path)
    with pytest.raises(UserError, match=r"has no gradient search.*lower trainer.gradloc.threshold.multiple"):
        show_searches(run.path, None)
    records(run.gradloc).keep(PolicyVersion(1, 9), build_search())
    with pytest.raises(UserError, match=r"got step '11', which was not searched; searched steps: e1-v9"):
        show_searches(run.path, "11")
    with pytest.raises(UserError, match="is not a run directory"):
        show_searches(tmp_path / "nothing", None)


def test_a_search_whose_passes_ended_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = empty_run(tmp_path)
    records(run.gradloc).keep(PolicyVersion(1, 9), build_search(outcome="inconclusive", culprits=()))
    show_searches(run.path, "9")
    assert "raise trainer.gradloc.budget_passes" in capsys.readouterr().out


def test_a_step_that_was_not_searched_says_so_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = empty_run(tmp_path)
    event = records(run.gradloc).keep(
        PolicyVersion(1, 9), build_search(outcome="not_searched", culprits=(), passes=0, explained=NAN, threshold=NAN)
    )
    assert (event["outcome"], event["passes"], event["culprits"]) == ("not_searched", 0, 0)
    show_searches(run.path, "9")
    shown = " ".join(capsys.readouterr().out.split())
    assert "step e1-v9: not searched, though threshold asked for it; gradient norm 13, threshold not known" in shown
    assert "had spent trainer.gradloc.spike_passes" in shown


def events_of(case: Case, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (case.run.path / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_searched_step_leaves_a_file_an_event_and_columns(tmp_path: Path):
    case = Case(tmp_path)
    not_searched: dict[str, dict[str, Any]] = {
        "located": {},
        "not_searched": {"culprits": (), "passes": 0, "seconds": 0.0},
    }
    outcomes = iter(("located", "located", "not_searched"))
    case.trainer = Searching(
        case,
        lambda tries: tries in (2, 5, 8),
        lambda group: build_search(outcome=(outcome := next(outcomes)), **not_searched[outcome]),
    )
    case.drive()
    assert [event["step"] for event in events_of(case, "gradloc")] == [2, 5, 8]
    assert sorted(path.name for path in case.run.gradloc.iterdir()) == ["e1-v2.json", "e1-v5.json", "e1-v8.json"]
    rows = {int(row["step"]): row for row in case.reporter.rows}
    assert [rows[step]["gradloc_runs_located"] for step in (1, 2, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [rows[step]["gradloc_runs_not_searched"] for step in (7, 8)] == [0, 1]
    assert (rows[8]["gradloc_passes"], rows[8]["gradloc_seconds"], rows[8]["gradloc_runs_diffuse"]) == (18, 1.0, 0)


def test_a_quarantined_trajectory_keeps_its_verdict_in_the_store_and_its_prompt_does_not_come_again(tmp_path: Path):
    case = Case(tmp_path)
    gone: list[str] = []

    def search(group: Any) -> GradLocEvidence:
        gone.append(group.trajectories[0].trajectory_id)
        return build_search(
            action="quarantine", acted=Acted.QUARANTINED, culprits=(build_culprit(trajectory_id=gone[0]),)
        )

    case.trainer = Searching(case, lambda tries: tries == 3, search)
    summary = case.drive()
    assert [event["trajectory_id"] for event in events_of(case, "gradloc_quarantined")] == gone
    reader = open_reader(case.run.path)
    try:
        dispatch_id = reader.dispatch_of_trajectory(gone[0])
        assert dispatch_id is not None
        (annotation,) = reader.annotations(dispatch_id)
        verdicts = {each.trajectory_id: each.verdict for each in decode_evidence(annotation.payload).trajectories}
    finally:
        reader.close()
    assert verdicts.pop(gone[0]) is Verdict.QUARANTINE and set(verdicts.values()) == {Verdict.ACCEPT}
    assert "quarantined" not in summary["rejected"] and summary["trajectories"]["dropped"] == 1
    assert_accounted(summary)


def test_a_group_that_loses_all_its_trajectories_ends_as_quarantined_and_its_prompt_comes_again(tmp_path: Path):
    case = Case(tmp_path)

    def search(group: Any) -> GradLocEvidence:
        culprits = tuple(build_culprit(trajectory_id=trajectory.trajectory_id) for trajectory in group.trajectories)
        return build_search(action="quarantine", acted=Acted.QUARANTINED, culprits=culprits)

    case.trainer = Searching(case, lambda tries: tries == 3, search)
    summary = case.drive()
    assert summary["rejected"]["quarantined"] == 1
    assert len(events_of(case, "gradloc_quarantined")) == 2
    assert_accounted(summary)


def test_a_culprit_is_explained_with_its_searches_and_its_quarantine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    case = Case(tmp_path)
    named: list[str] = []

    def search(group: Any) -> GradLocEvidence:
        named.extend(trajectory.trajectory_id for trajectory in group.trajectories)
        culprits = (build_culprit(trajectory_id=named[0], position=4), build_culprit(trajectory_id=named[0], norm=NAN))
        return build_search(action="quarantine", acted=Acted.QUARANTINED, culprits=culprits)

    case.trainer = Searching(case, lambda tries: tries == 3, search)
    case.drive()
    explain_trajectory(case.run.path, named[0])
    said = " ".join(capsys.readouterr().out.split())
    assert "gradient search of step e1-v3 (threshold): located; culprit: token " in said
    assert (
        "at position 4, type A1, norm 12.5 of the step's 13 (threshold 2); action quarantine: the step was computed "
        "again without the trajectory" in said
    )
    assert "at position 5, type A1, norm not finite of the step's 13" in said
    assert "verdict quarantine (gradient_spike)" in said
    explain_trajectory(case.run.path, named[1])
    assert "gradient search" not in capsys.readouterr().out
    for name, content in (("e1-v2.json", "{"), ("e1-v4.json", '{"policy": "e1-v4", "step": 4, "searches": [{}]}')):
        (case.run.gradloc / name).write_text(content)
    shutil.copy(case.run.gradloc / "e1-v3.json", case.run.gradloc / "e1-v3 (copy).json")
    explain_trajectory(case.run.path, named[0])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("a gradient search is left out: cannot read ") == 3
    # The console breaks lines anywhere within a path.
    assert all(
        name in said.replace(" ", "") for name in ("e1-v2.json", "e1-v4.json", "e1-v3(copy).json", "movethefileaway")
    )
    assert said.count("gradient search of step e1-v3 (threshold)") == 2
    with pytest.raises(UserError, match=r"cannot read .*e1-v2.json .copy the run directory again"):
        show_searches(case.run.path, None)


def test_a_skipped_spike_ends_its_groups_under_its_own_name(tmp_path: Path):
    case = Case(tmp_path)
    case.trainer = Searching(
        case,
        lambda tries: tries == 2,
        lambda group: build_search(action="skip", acted=Acted.SKIPPED),
        skipped="gradient spike",
    )
    summary = case.drive()
    assert summary["rejected"]["gradient_spike"] == 3 and summary["skipped_steps"] == 1 and summary["version"] == 8
    assert json.loads((case.run.gradloc / "e1-v2.json").read_text())["searches"][0]["acted"] == "skipped"
    assert_accounted(summary)
