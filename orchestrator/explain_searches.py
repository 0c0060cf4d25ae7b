"""In which gradient searches a trajectory was a culprit, in words for `concord explain`."""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.run_dir import RunDir
from orchestrator.search_show import MISSING_THRESHOLD, number_text, stored_searches

ACTED = {
    "nothing": "nothing was done about it",
    "masked": "the step was computed again without the term",
    "skipped": "the step was not applied",
    "quarantined": "the step was computed again without the trajectory, which is out of training for good",
}
"""What became of the step, by `acted`."""


def culprit_lines(run: RunDir) -> Mapping[str, Sequence[str]]:
    """Trajectory -> one line for each time that a search named one of its tokens, in the order of the steps.

    Raises:
        UserError: a file of `gradloc/` is broken.
    """
    lines: dict[str, list[str]] = {}
    for each in stored_searches(run):
        for search in each["searches"]:
            for culprit in search["culprits"]:
                lines.setdefault(culprit["trajectory_id"], []).append(_line(each["policy"], search, culprit))
    return lines


def _line(policy: str, search: Mapping[str, Any], culprit: Mapping[str, Any]) -> str:
    what = "culprit" if search["outcome"] == "located" else "among the largest terms"
    norms = f"{number_text(culprit['norm'])} of the step's {number_text(search['grad_norm'])}"
    threshold = number_text(search["threshold"], MISSING_THRESHOLD)
    return (
        f"gradient search of step {policy} ({search['trigger']}): {search['outcome']}; {what}: token {culprit['token_text']!r} at position "
        f"{culprit['position']}, type {culprit['type']}, norm {norms} (threshold {threshold}); action {search['action']}: {ACTED[search['acted']]}"
    )
