"""`concord gradloc`: the gradient searches of a run, and one of them with its culprits in their text, their ratios, and
a bar for each block."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.commands.tables import say, table_of
from orchestrator.doctor.findings import counted
from orchestrator.run_dir.layout import open_run_dir
from orchestrator.run_dir.search_records import read_searches
from rollout.errors import UserError

BAR_CELLS = 24
MISSING_THRESHOLD = "not known"
"""In the place of a threshold: the search ran before the calibration had one."""
MEANINGS = {
    "omega": "importance ratio pi_now / pi_rollout",
    "sequence_ratio": "its geometric mean over the trajectory",
    "d_engine": "nats: trainer - engine, at the version that sampled",
    "d_stale": "nats: now - the version that sampled",
    "logprob": "nats, the trainer's, before the step",
    "rollout_logprob": "nats, the engine's",
    "old_logprob": "nats, what the ratio starts from",
    "advantage": "of the trajectory",
    "entropy": "nats, of the distribution it was drawn from",
    "norm": "of the gradient of its term alone",
}
"""Evidence of a culprit that the table shows, in its order."""


def show_searches(path: Path, step: str | None, *, as_json: bool = False) -> None:
    """Print all searches of a run, or those of one step (a number such as 12, or a key such as e1-v12).

    Raises:
        UserError: there is no such run, search or step.
    """
    run, _ = open_run_dir(path)
    found = read_searches(run)
    chosen = found if step is None else [_of_step(found, step)]
    console = Console()
    if as_json:
        console.file.write(json.dumps(chosen if step is None else chosen[0], indent=2) + "\n")
    elif step is None:
        console.print(_list(chosen))
    else:
        for search in chosen[0]["searches"]:
            _show(chosen[0]["policy"], search)


def _of_step(found: list[dict[str, Any]], step: str) -> dict[str, Any]:
    """The search of a step by its key, or by its number: then the newest epoch's."""
    matching = [each for each in found if step in (each["policy"], str(each["step"]))]
    if not matching:
        known = ", ".join(each["policy"] for each in found[-20:])
        raise UserError(f"got step {step!r}, which was not searched; searched steps: {known}")
    return matching[-1]


def _list(found: list[dict[str, Any]]) -> Table:
    table = Table(title="gradient searches")
    for header in ("step", "outcome", "acted"):
        table.add_column(header, no_wrap=True)
    for header in ("norm", "threshold"):
        table.add_column(header, justify="right")
    table.add_column("culprits", overflow="fold")
    for each in found:
        for search in each["searches"]:
            culprits = "\n".join(
                f"{c['token_text']!r} at {c['position']} of {c['trajectory_id']} ({c['type']})"
                for c in search["culprits"]
            )
            numbers = (number_text(search["grad_norm"]), number_text(search["threshold"], MISSING_THRESHOLD))
            table.add_row(each["policy"], search["outcome"], search["acted"], *numbers, Text(culprits))
    return table


def _show(policy: str, search: dict[str, Any]) -> None:
    if search["outcome"] == "not_searched":
        norms = (
            f"gradient norm {number_text(search['grad_norm'])}, threshold "
            f"{number_text(search['threshold'], MISSING_THRESHOLD)}"
        )
        say(f"step {policy}: not searched, though {search['trigger']} asked for it; {norms}")
        say(
            "  the steps before had spent trainer.gradloc.spike_passes, and this one was taken as it was; raise it, or "
            "mend what makes every step spike"
        )
        return
    say(
        f"step {policy}: {search['outcome']}, triggered by {search['trigger']}; action {search['action']}, "
        f"{search['acted']}"
    )
    threshold, tau = (number_text(search[name], MISSING_THRESHOLD) for name in ("threshold", "tau"))
    say(
        f"  gradient norm {number_text(search['grad_norm'])}, threshold {threshold} (tau {tau} a token); culprits "
        f"explain {number_text(search['explained'], 'a share not measured')} of the squared norm; "
        f"{counted(search['passes'], 'pass', 'passes')}, {search['tokens_forwarded']} tokens, "
        f"{search['seconds']:.3g} s"
    )
    if search["removed_terms"]:
        above = ", still above the threshold" if search["exceeds_after"] else ""
        terms = counted(search["removed_terms"], "term")
        say(
            f"  {terms} left the loss; norm of the step that was applied instead "
            f"{number_text(search['grad_norm_after'])}{above}"
        )
    if search["saved"]:
        say(f"  its batch is kept: concord replay RUN {search['saved']}")
    if search["outcome"] == "inconclusive" and search["trigger"] != "suspects":
        say("  the passes ended before the search did; raise trainer.gradloc.budget_passes")
    if search["outcome"] != "located" and search["culprits"]:
        say("  what was found does not explain the norm; the tokens below are only the largest parts seen")
    for culprit in search["culprits"]:
        _show_culprit(culprit)


def _show_culprit(culprit: dict[str, Any]) -> None:
    console = Console()
    console.print()
    where = (
        f"{culprit['trajectory_id']} position {culprit['position']}, sampled under {culprit['policy']} by replica "
        f"{culprit['replica']}"
    )
    say(f"culprit of type {culprit['type']}: token {culprit['token_id']} of {where}")
    token = f">>{culprit['token_text']}<<"
    console.print(
        Text.assemble("  ", culprit["text_before"], (token, "bold white on red"), culprit["text_after"]),
        highlight=False,
    )
    table = table_of("of the token", "", "what it is", right=("",))
    for name, meaning in MEANINGS.items():
        if name not in culprit:
            continue  # of a version that did not write it
        missing = "not scored" if name.startswith("d_") else "not finite"
        table.add_row(name, number_text(culprit[name], missing), meaning)
    console.print(table)
    console.print(_blocks(culprit))


def _blocks(culprit: dict[str, Any]) -> Table:
    """A bar for each block: the norm of the token's gradient in it, and how that stands to the block's usual norm."""
    norms: dict[str, float | None] = culprit["block_norms"]
    largest = max((norm for norm in norms.values() if norm is not None), default=0.0)
    table = Table(title="norm of its gradient by block")
    for header in ("block", "norm", "x usual", ""):
        table.add_column(header, justify="left" if header in ("block", "") else "right", no_wrap=True)
    for block, norm in norms.items():
        cells = BAR_CELLS if norm is None else round(BAR_CELLS * norm / largest) if largest else 0
        ratio = number_text(culprit["block_ratios"][block]) if block in culprit["block_ratios"] else ""
        table.add_row(block, number_text(norm), ratio, Text("█" * cells, style="red" if norm is None else "cyan"))
    return table


def number_text(value: float | None, missing: str = "not finite") -> str:
    """A number of a search, or what its absence means."""
    return missing if value is None else f"{value:.4g}"
