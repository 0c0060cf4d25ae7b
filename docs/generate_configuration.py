"""Writes what the documents take from the code: `configuration.md`, `metrics.md`, and the tables of metrics and events
in `run_directory.md`.

python docs/generate_configuration.py            write them
python docs/generate_configuration.py --check    say which are not fresh; exit status 1 if any
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from orchestrator.config import RunConfig
from orchestrator.doctor.advice import ADVICE
from orchestrator.exporters.tracker_tags import LEFT_OUT
from orchestrator.metrics.catalogue import BLOCK_CATALOGUE, CATALOGUE, ROW_METRICS
from orchestrator.metrics.causes import LAYER, Cause
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.types import Label, Metric
from rollout.store.sqlite.journal import EventKind
from rollout.types.dispatch import FailReason, RejectReason

DOCS = Path(__file__).resolve().parent / "user"
INTRODUCTION = """\
<!-- Written by docs/generate_configuration.py from the config models. Change those, then run it again. -->
# Configuration

A run is described by one TOML file; `concord run CONFIG --set section.key=value` overrides single keys (the value in
TOML syntax; a bare word is a string). Every key has a default except those marked *required*, so an empty file is a
valid config. Unknown keys are errors that name the nearest known key. `concord run CONFIG --dry-run` prints the
resolved config and the resource plan and starts nothing.

Where a section comes in kinds, `type` chooses one; the keys of the other kinds are then unknown. Paths are relative
to the working directory. The models behind this page are `orchestrator/config/run.py`, `rollout/config.py`,
`trainer/config/trainer.py` and `actors/config.py`.
"""
TRACKERS_INTRODUCTION = """## What trackers do not get

[TensorBoard and Weights & Biases](operations.md#tensorboard-and-weights--biases) get all of these signals at the end
of every step, but for those that say nothing of a step, or the same as another one:
"""
METRICS_INTRODUCTION = """\
<!-- Written by docs/generate_configuration.py from orchestrator/metrics. Change that, then run it again. -->
# Metrics

What `concord run` serves to Prometheus while it runs: at the address that it prints, that `summary.json` has as
`metrics_url`, and that `.prometheus/RUN.json` beside the run directory names in the form of Prometheus' file-based
service discovery; `RUNS/.prometheus/*.json` is the pattern that finds every run of a folder, as
`deploy/prometheus/prometheus.yml` does. `[exporter]` in [configuration](configuration.md) chooses host and port. Values
are read from the loop every two seconds and at the end of every step; a scrape gets the newest ones and never makes the
loop wait. `concord_last_step_age_seconds` alone goes on between two looks, so a loop that hangs does not look like one
that is well. A run that an error ends serves its last state until two scrapes have taken it, at most 30 seconds.

A name ends with its unit where that is seconds, bytes, ratio, nats or tokens, and with `_total` where it counts. What
has a *column* is one number a step and stands in `metrics/part-N.parquet` too, under the name that is given, without
unit and `_total`; where a row says -1 because nothing was measured, Prometheus gets no sample. Counters and histograms
start at 0 with the process; totals of a run over its resumes are gauges. No label holds an id: every set of label
values is fixed when a run starts. The layer of diagnosis says where to look first when a signal moves. With
`engine.serve_metrics`, vLLM's own metrics are on an endpoint of each replica, which the same file names.

Alert rules on these names are in `deploy/prometheus`; [the runbook](runbook.md) says what to do about each.
"""


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the documents")
    chosen = parser.parse_args()
    stale = 0
    for path, text in fresh_documents(chosen.docs).items():
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        if chosen.check:
            sys.stderr.write(f"{path} is not fresh; run: python docs/generate_configuration.py\n")
        else:
            path.write_text(text)
            sys.stdout.write(f"wrote {path}\n")
    return int(chosen.check and stale > 0)


def fresh_documents(docs: Path) -> dict[Path, str]:
    """The text that each document should have."""
    run_directory = docs / "run_directory.md"
    text = run_directory.read_text()
    tables = {
        "metrics": metrics_table(),
        "block_metrics": block_metrics_table(),
        "events": events_table(),
        "reasons": reasons_table(),
    }
    for name, table in tables.items():
        text = replaced(text, name, table)
    doctor = docs / "doctor.md"
    return {
        docs / "configuration.md": configuration_page(),
        docs / "metrics.md": metrics_page(),
        run_directory: text,
        doctor: replaced(doctor.read_text(), "causes", causes_table()),
    }


def replaced(text: str, name: str, table: str) -> str:
    """`text` with the part between the markers of `name` replaced."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"a page has no part between {begin} and {end}; put the markers back")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text)


def configuration_page() -> str:
    """The whole page."""
    return "\n".join(
        [INTRODUCTION, *(block for name, _ in RunConfig.model_fields.items() for block in section(name, RunConfig))]
    )


def section(name: str, parent: type[BaseModel], path: str = "", depth: int = 2) -> Iterator[str]:
    """The blocks of the section `name` of `parent`: heading, kinds, tables, and the sections inside it."""
    field, here = parent.model_fields[name], f"{path}{name}"
    models = list(models_in(field.annotation))
    if len(models) == 1:
        yield f"{'#' * depth} `[{here}]`\n\n{described(models[0])}\n\n{table_of(models[0])}\n"
    else:
        kinds = ", ".join(f"`{kind_of(model)}`" for model in models)
        default = f"; the default is `{kind_of(type(field.default))}`" if isinstance(field.default, BaseModel) else ""
        yield f"{'#' * depth} `[{here}]`\n\n`type` chooses a kind: {kinds}{default}.\n"
        for model in models:
            yield (
                f"{'#' * (depth + 1)} `[{here}]` with `type ="
                f' "{kind_of(model)}"`\n\n{described(model)}\n\n{table_of(model)}\n'
            )
    for model in models:
        for inner in model.model_fields:
            if any(models_in(model.model_fields[inner].annotation)):
                yield from section(inner, model, f"{here}.", depth + 1)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The config models that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def kind_of(model: type[BaseModel]) -> str:
    """The value of `type` that chooses `model`."""
    return str(model.model_fields["type"].default)


def described(model: type[BaseModel]) -> str:
    """The docstring of a model, for Markdown."""
    return inspect.cleandoc(model.__doc__ or "")


def table_of(model: type[BaseModel]) -> str:
    """One row a key. A key that chooses the kind, or that is a section of its own, is described elsewhere."""
    meanings = field_meanings(model)
    schema: dict[str, Any] = model.model_json_schema()
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if any(models_in(field.annotation)) or len(get_args(field.annotation)) == 1:
            continue
        if name not in meanings:
            raise SystemExit(f"{model.__name__}.{name} has no docstring; say below the field what it means")
        default = "*required*" if field.default is PydanticUndefined else shown(field.default)
        rows.append(f"| `{name}` | {values_of(schema['properties'][name])} | {default} | {cell(meanings[name])} |")
    return "\n".join(rows) if len(rows) > 2 else "It has no further keys."


def field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Key -> the string literal below its field, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= literals_below(ast.parse(textwrap.dedent(inspect.getsource(base))).body[0])
    return found


def literals_below(node: ast.stmt) -> dict[str, str]:
    """Name -> string literal that follows its assignment in a class."""
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for one, following in zip(node.body, node.body[1:], strict=False):
        target = (
            one.target if isinstance(one, ast.AnnAssign) else one.targets[0] if isinstance(one, ast.Assign) else None
        )
        literal = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            found[target.id] = " ".join(literal.value.split())
    return found


def values_of(schema: dict[str, Any]) -> str:
    """What a key accepts, in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join("nothing" if one.get("type") == "null" else values_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("format", schema["type"]))
    words = {"boolean": "true, false", "integer": "whole number"}.get(kind, kind)
    limits = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {schema[limit]:g}" for limit, sign in limits.items() if limit in schema]
    return " ".join([words, *([", ".join(bounds)] if bounds else [])])


def shown(value: object) -> str:
    """A default in TOML syntax."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if isinstance(value, int | float) else f'`"{value}"`'


def cell(text: str) -> str:
    """Text that does not break a table."""
    return text.replace("|", "\\|")


def metrics_table() -> str:
    """One row a column of the metric parts."""
    rows = ["| column | unit | layer | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join(
        rows
        + [
            f"| `{m.column}` | {m.unit} | {m.diagnosis_layer} {LAYERS[m.diagnosis_layer].name} | {cell(m.help)} |"
            for m in ROW_METRICS
        ]
    )


def metrics_page() -> str:
    """The whole catalogue, a table a layer."""
    blocks = [METRICS_INTRODUCTION]
    for layer, name in ((each.number, each.name) for each in LAYERS.values()):
        rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
        rows += [
            f"| `{m.name}` | {kind_of_metric(m)}, {m.unit} | {labels_of(m)} | {cell(m.help)} |"
            for m in CATALOGUE
            if m.diagnosis_layer == layer
        ]
        blocks.append(f"## Layer {layer}: {name}\n\n" + "\n".join(rows) + "\n")
    rows = ["| metric | why |", "| --- | --- |", *(f"| `{name}` | {reason} |" for name, reason in LEFT_OUT.items())]
    return "\n".join([*blocks, TRACKERS_INTRODUCTION, "\n".join(rows) + "\n"])


def kind_of_metric(metric: Metric) -> str:
    """Prometheus type, and whether it is a column."""
    return f"{metric.type}, *column* `{metric.column}`" if metric.in_rows else str(metric.type)


def labels_of(metric: Metric) -> str:
    """Each label with the set that its values come from."""

    def described_label(label: Label) -> str:
        return f"`{label.name}`: " + (str(label.extent) if label.extent else ", ".join(label.values))

    return "; ".join(map(described_label, metric.labels))


def block_metrics_table() -> str:
    """One row a signal of the block parts."""
    rows = ["| `signal` | unit | of each | layer | meaning |", "| --- | --- | --- | --- | --- |"]
    for m in BLOCK_CATALOGUE:
        rows.append(
            f"| `{m.column}` | {m.unit} | {', '.join(m.label_names)} | {m.diagnosis_layer} "
            f"{LAYERS[m.diagnosis_layer].name} | {cell(m.help)} |"
        )
    return "\n".join(rows)


def events_table() -> str:
    """One row a kind of event that the store writes."""
    rows = ["| kind | meaning |", "| --- | --- |"]
    return "\n".join(rows + [f"| `{kind}` | {meaning} |" for kind, meaning in enum_meanings(EventKind).items()])


def reasons_table() -> str:
    """One row a reason for which a dispatch ends without being trained on."""
    rows = ["| ends as | reason | meaning |", "| --- | --- | --- |"]
    for state, reasons in (("rejected", RejectReason), ("failed", FailReason)):
        rows += [f"| {state} | `{reason}` | {meaning} |" for reason, meaning in enum_meanings(reasons).items()]
    return "\n".join(rows)


def causes_table() -> str:
    """One row a cause of the doctor, in causal order."""
    rows = ["| layer | cause | what it means | first thing to do | what not to do |", "| --- | --- | --- | --- | --- |"]
    for cause, meaning in enum_meanings(Cause).items():
        advice, layer = ADVICE[Cause(cause)], LAYER[Cause(cause)]
        rows.append(
            f"| {layer} {LAYERS[layer].name} | `{cause}` | {meaning} | {cell(advice.do[0])} | "
            f"{cell(' '.join(advice.do_not))} |"
        )
    return "\n".join(rows)


def enum_meanings(enum: type[StrEnum]) -> dict[str, str]:
    """Value -> the string literal below its member, for a table."""
    found = literals_below(ast.parse(textwrap.dedent(inspect.getsource(enum))).body[0])
    missing = [member.name for member in enum if member.name not in found]
    if missing:
        raise SystemExit(f"{enum.__name__}: {', '.join(missing)} have no docstring; say below the member what it means")
    return {member.value: cell(found[member.name]) for member in enum}


if __name__ == "__main__":
    sys.exit(main())
