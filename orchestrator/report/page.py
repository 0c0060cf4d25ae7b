"""The page: sections in the order in which they are read, and the one file that holds everything they need."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path

import jinja2
from markupsafe import Markup

from orchestrator.metrics.layers import LAYERS, DiagnosisLayer
from orchestrator.report.drawing import Figure
from rollout.errors import ConcordError


@dataclass(frozen=True, slots=True)
class Tile:
    """A number of the head."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class TokenInContext:
    """A token with the text on either side of it."""

    before: str
    text: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Something that was found."""

    tag: str
    title: str
    colour: str
    lines: tuple[str, ...] = ()
    token: TokenInContext | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; unless it says otherwise, all columns but the first are numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""
    """What stands in its place until the reader opens it; empty: it is open."""
    text: bool = False
    """All columns are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """One part of the page. Without figures, cards and table its intro says why it is empty."""

    key: str
    title: str
    intro: str
    figures: tuple[Figure, ...] = ()
    cards: tuple[Card, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole report."""

    name: str
    what: str
    """One line: model, engine, batch."""
    tiles: tuple[Tile, ...]
    notes: tuple[str, ...]
    """What is missing, and why."""
    rows: tuple[tuple[PageSection, ...], ...]
    """Sections of a row stand beside each other where there is room."""
    layers: tuple[DiagnosisLayer, ...] = tuple(LAYERS.values())


def html_of(page: Page) -> str:
    """The file: text, style, data and plotly itself, and a policy that lets a browser load nothing else.

    Raises:
        ConcordError: plotly is not installed.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        resources.files("orchestrator.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    figures = {figure.key: figure.spec() for row in page.rows for section in row for figure in section.figures}
    return template.render(page=page, plotly_js=Markup(plotly_script()), figures_json=Markup(script_json(figures)))


def plotly_script() -> str:
    """plotly.js, read from the package without importing it.

    Raises:
        ConcordError: it is not there.
    """
    spec = util.find_spec("plotly")
    origin = None if spec is None else spec.origin
    script = Path(origin or ".").parent / "package_data" / "plotly.min.js"
    if origin is None or not script.is_file():
        raise ConcordError(
            "the Python package plotly is not installed, or has no plotly.min.js; expected version 7 beside Concord: "
            "run `make setup`"
        )
    return script.read_text(encoding="utf-8").replace("</script", "<\\/script")


def script_json(value: Mapping[str, object]) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
