"""`concord replay`: runs the fixed batch of a saved step again, and says where the cause lies."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np
import typer
from rich.console import Console

from orchestrator.commands.run import prepare_model
from orchestrator.commands.tables import say, table_of
from orchestrator.run_dir.layout import open_run_dir
from rollout.errors import UserError
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.tokenization.tokenizer import load_tokenizer
from trainer.checkpointing.saved_steps import SavedStep, read_step
from trainer.config.trainer import TrainerConfig
from trainer.loss.loss_settings import LossSettings
from trainer.replay.report import MEANINGS, ReplayCulprit, ReplayReport, ReplayRun


def replay_step(path: Path, name: str, *, as_json: bool) -> None:
    """Replay a saved step of a run in this process, and print what it came to.

    Raises:
        UserError: there is no such run or saved step, or its weights are gone or are others.
    """
    run, config = open_run_dir(path)
    saved = read_step(run.saved_steps / name)
    weights = run.weights_of(saved.weights)
    check_weights(weights, saved)
    from trainer.replay.replay import ReplaySource, replay

    settings = LossSettings(correction=config.consistency.correction, faults=config.faults)
    reference = prepare_model(config.model) if config.trainer.algorithm.kl_coef > 0 else weights
    report = replay(
        ReplaySource(
            saved=saved, weights_dir=weights, reference_dir=reference, config=config.trainer, settings=settings
        )
    )
    document = replay_document(name, saved, report, weights) | {"notes": notes(config.trainer, saved, report)}
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    else:
        _show(document, report)


def check_weights(directory: Path, saved: SavedStep) -> None:
    """The published weights that a saved step started from are there, and are the same.

    Raises:
        UserError: they are not; with what was found, what was expected, and the cure.
    """
    cure = "copy them back from where the run directory was copied to, or replay another saved step"
    if not directory.is_dir():
        raise UserError(f"the step started from weights {saved.weights.key}, and {directory} is gone; {cure}")
    found = manifest_digest(digest_directory(directory))
    if found != saved.weights_digest:
        raise UserError(
            f"got weights with digest {found[:12]}… in {directory}, expected {saved.weights_digest[:12]}…, which the "
            f"saved step started from: they were changed since; {cure}"
        )


def replay_document(name: str, saved: SavedStep, report: ReplayReport, weights: Path) -> dict[str, object]:
    """The report as JSON: numbers that are not finite are text."""
    return {
        "step": name,
        "policy": saved.request.policy.key,
        "weights": saved.weights.key,
        "weights_digest": saved.weights_digest,
        "kept_for": saved.reason,
        "applied": saved.applied,
        "saved_loss": _number(saved.loss),
        "saved_grad_norm": _number(saved.grad_norm),
        "device": report.device,
        "verdict": str(report.verdict),
        "reproduces": report.reproduces,
        "words": "; ".join(words(report)),
        "runs": [_run(run) for run in report.runs],
        "search": report.search,
        "tokens": [_token(culprit, weights) for culprit in report.culprits],
    }


def notes(config: TrainerConfig, saved: SavedStep, report: ReplayReport) -> list[str]:
    """What the reader of a verdict should know besides."""
    said: list[str] = []
    planted = [planted.fault for planted in saved.planted if not planted.missed]
    if planted:
        said.append(f"the step had planted faults, which are planted again: {', '.join(planted)}")
    if saved.applied:
        said.append(
            "the step was applied; what a search then took out of its loss is in this batch, and in the norms above"
        )
    if config.num_gpus > 0 and report.device == "cpu":
        said.append("the run trained on GPUs and this process sees none: kernels are others than the run's")
    return said


def words(report: ReplayReport) -> list[str]:
    """The verdict, and what it rests on."""
    again = "it reproduces with the fixed batch" if report.reproduces else "it does not reproduce with the fixed batch"
    parts = [f"{again}: {MEANINGS[report.verdict]}"]
    first = report.runs[0]
    if first.forward is not None:
        parts.append(
            f"forward, the first that is not finite is {first.forward.block} (micro-batch {first.forward.micro_batch})"
        )
    if first.backward is not None:
        parts.append(
            f"backward, the first gradient that is not finite comes out of {first.backward.block} and reaches "
            f"{first.backward.reached} (micro-batch {first.backward.micro_batch})"
        )
    if report.culprits:
        places = ", ".join(f"{culprit.trajectory_id} position {culprit.position}" for culprit in report.culprits)
        norms = ", ".join(f"{culprit.norm:.4g}" for culprit in report.culprits)
        parts.append(f"the loss term of {places} alone does it" + (f" (gradient norm {norms})" if first.finite else ""))
    elif report.search:
        parts.append(f"the search for a token ended {report.search}")
    return parts


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _run(run: ReplayRun) -> dict[str, object]:
    norms = {block: _number(norm) for block, norm in run.block_norms}
    numbers = {"loss": _number(run.loss), "grad_norm": _number(run.grad_norm), "block_norms": norms}
    return {**asdict(run), "finite": run.finite, **numbers}


def _token(culprit: ReplayCulprit, weights: Path) -> dict[str, object]:
    ids = np.array([culprit.token_id], dtype=np.int32)
    return {
        **asdict(culprit),
        "norm": _number(culprit.norm),
        "text": load_tokenizer(weights).decode(ids, skip_special_tokens=False),
    }


def _show(document: Mapping[str, object], report: ReplayReport) -> None:
    console = Console()
    say(
        f"step {document['step']}, from {document['weights']} to {document['policy']}, was kept for: "
        f"{document['kept_for']}"
    )
    heads = ("run", "dtype", "deterministic", "loss", "gradient norm", "first not finite, forward", "backward")
    table = table_of(*heads, title=f"the fixed batch, on {report.device}")
    for run in report.runs:
        places = [f"{place.block} ({place.micro_batch})" if place else "" for place in (run.forward, run.backward)]
        table.add_row(
            run.name, run.dtype, "yes" if run.deterministic else "", f"{run.loss:.6g}", f"{run.grad_norm:.6g}", *places
        )
    console.print(table)
    say(f"verdict {document['verdict']}")
    for line in words(report):
        say(f"  {line}")
    for token in cast("list[dict[str, object]]", document["tokens"]):
        say(
            f"  token {token['token_id']} {token['text']!r} at position {token['position']} of {token['trajectory_id']}"
        )
    for note in cast("list[str]", document["notes"]):
        say(f"  note: {note}")
