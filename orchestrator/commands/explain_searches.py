"""In which gradient searches a trajectory was a culprit, in words for `concord explain`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.commands.gradloc import MISSING_THRESHOLD, number_text
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.search_records import readable_searches

ACTED = {
    "nothing": "nothing was done about it",
    "masked": "the step was computed again without the term",
    "skipped": "the step was not applied",
    "quarantined": "the step was computed again without the trajectory, which is out of training for good",
}
"""What became of the step, by `acted`."""


def culprit_lines(run: RunDir) -> tuple[Mapping[str, Sequence[str]], Sequence[str]]:
    """Trajectory -> one line for each time that a search named one of its tokens, in the order of the steps; and which
    files are left out, and why."""
    named, left_out = readable_searches(run.gradloc, _of_file)
    lines: dict[str, list[str]] = {}
    for trajectory_id, line in named:
        lines.setdefault(trajectory_id, []).append(line)
    return lines, [f"a gradient search is left out: {why}" for why in left_out]


def _of_file(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for search in document["searches"]:
        for culprit in search["culprits"]:
            yield culprit["trajectory_id"], _line(document["policy"], search, culprit)


def _line(policy: str, search: Mapping[str, Any], culprit: Mapping[str, Any]) -> str:
    what = "culprit" if search["outcome"] == "located" else "among the largest terms"
    norms = f"{number_text(culprit['norm'])} of the step's {number_text(search['grad_norm'])}"
    threshold = number_text(search["threshold"], MISSING_THRESHOLD)
    return (
        f"gradient search of step {policy} ({search['trigger']}): {search['outcome']}; {what}: token "
        f"{culprit['token_text']!r} at position {culprit['position']}, type {culprit['type']}, norm {norms} (threshold "
        f"{threshold}); action {search['action']}: {ACTED[search['acted']]}"
    )
