"""What a declared signal is: type, unit, labels, buckets, how many series it may have at most, and the accessor of its
values. It knows no particular signal.

A metric is one attribute of a `CatalogueSection` and the text below it:

    class System(CatalogueSection, layer=4):
        weight_updates = column("updates", lambda now: now.loop.accounts.weight_updates)
        \"\"\"Committed publications since the loop began.\"\"\"

Rows, exports, trackers, files and documents follow from that.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from textwrap import dedent
from typing import ClassVar

from orchestrator.metrics.state import Ended, LabelValues, Moment, Series
from trainer.types.step import StepReport


class MetricType(StrEnum):
    """Prometheus types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """Starts at 0 with the process, and only rises."""
    HISTOGRAM = "histogram"
    """Counts by bucket since the process began."""


class Extent(StrEnum):
    """Sets of label values whose size is fixed when a run starts."""

    REPLICAS = "engine replicas"
    ACTORS = "actors"
    BLOCKS = "blocks of the model"
    HEADS = "attention heads of a block"
    ENVIRONMENTS = "environments"
    REWARD_PARTS = "parts of the reward"
    STATISTICS = "statistics of the algorithm"
    FACTS = "one value, of the config"


MAX_REWARD_PARTS = 16
"""Parts of the reward that have series of their own. The reward function chooses their names, so what comes later is
summed up as `other`."""
MAX_STATISTICS = 16
"""Statistics that an algorithm may declare."""
NAMED_UNITS = ("seconds", "bytes", "ratio", "nats", "tokens")
"""Units that the name of a metric ends with. What is counted (groups, steps, restarts) is in the name itself; a reward,
a loss and a norm have no unit."""
UNMEASURED = -1.0
"""In a row: nothing was measured."""
OTHER = "other"
"""Label value of what has no declared value of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label with a bounded set of values; never an id."""

    name: str
    values: tuple[str, ...] = ()
    """All of them, where the code knows them."""
    extent: Extent | None = None
    """Else the set of the run that they come from."""

    def size(self, sizes: Mapping[Extent, int]) -> int:
        """Most values in a run of these sizes."""
        return len(self.values) if self.extent is None else sizes[self.extent]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A metric without its name, its help and its layer, which come from where it stands."""

    type: MetricType
    unit: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets, rising; the one above all is implied."""
    in_rows: bool = False
    """A number of every step, so a column of the metric parts; a counter then stands there as the total."""
    optional: bool | str = False
    """A column that says -1 where nothing was measured; for values that may be -1, the column that says so. Prometheus
    then gets no sample."""
    at_step: Callable[[Ended], Series] | None = None
    """Its values at the end of a step, which stand until the next."""
    of_blocks: Callable[[StepReport], Series] | None = None
    """The same of a signal of blocks, which the block parts take from the report alone."""
    grows: bool = False
    """Seconds that go by by themselves: a scrape adds those since the values were taken, so that a loop that hangs does
    not look like one that waits."""
    now: Callable[[Moment], Series] | None = None
    """Its values at any time. A histogram has neither: its source observes single values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Declared):
    """One declared signal."""

    name: str
    """Prometheus name: `concord_`, the unit where it is one of `NAMED_UNITS`, `_total` for counters."""
    column: str
    """Name in the metric parts and in trackers, which does not end with the unit."""
    help: str
    diagnosis_layer: int
    """1 data and reward, 2 policy change, 3 numerical updates, 4 training system."""

    def __post_init__(self) -> None:
        if (self.type is MetricType.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name} is a {self.type}; `_total` ends the names of counters, and of nothing else")
        if (self.type is MetricType.HISTOGRAM) != bool(self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(
                f"{self.name} is a {self.type} with buckets {self.buckets}; a histogram, and nothing else, has some, "
                "each above the one before"
            )
        if self.in_rows and (self.type is MetricType.HISTOGRAM or self.labels):
            raise ValueError(f"{self.name} cannot be a column: that is one number a step, without labels")

    @property
    def measured_by(self) -> str:
        """The column that is -1 in the rows where nothing was measured; empty where something always is."""
        return self.optional if isinstance(self.optional, str) else self.column if self.optional else ""

    def measured(self, row: Mapping[str, float]) -> bool:
        """Whether a row has a value of this column."""
        return self.column in row and (not self.measured_by or row.get(self.measured_by) != UNMEASURED)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in the order of the values of a series."""
        return tuple(label.name for label in self.labels)

    def max_series(self, sizes: Mapping[Extent, int]) -> int:
        """Most series in a run of these sizes. A histogram has one a bucket and one above all; a sum and a count only
        where no value can be negative."""
        combinations = 1
        for label in self.labels:
            combinations *= label.size(sizes)
        if self.buckets:
            combinations *= len(self.buckets) + (1 if self.buckets[0] < 0 else 3)
        return combinations


class CatalogueSection:
    """A part of the catalogue: each attribute declares the metric of its name, and the text below it is its help."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """Its metrics, in the order in which they are declared."""

    def __init_subclass__(cls, *, layer: int) -> None:
        helps = _texts_below(dedent(inspect.getsource(cls)))
        cls.metrics = tuple(
            _metric(one, name, helps[name], layer) for name, one in vars(cls).items() if isinstance(one, Declared)
        )


def _metric(declared: Declared, name: str, help: str, layer: int) -> Metric:
    total = "_total" if declared.type is MetricType.COUNTER else ""
    given = {each.name: getattr(declared, each.name) for each in fields(Declared)}
    column = name if declared.in_rows else f"{name}{total}"
    exported = f"concord_{with_unit(name, declared.unit)}{total}"
    return Metric(name=exported, column=column, help=help, diagnosis_layer=layer, **given)


def with_unit(name: str, unit: str) -> str:
    """The name that Prometheus gets: it says the unit, where that is one of `NAMED_UNITS`, and a fraction is a ratio.

    Source: Prometheus documentation, "Metric and label naming".
    """
    stem = name.replace("_fraction", "") if unit == "ratio" else name
    return f"{stem}_{unit}" if unit in NAMED_UNITS and unit not in stem.split("_") else stem


def _texts_below(source: str) -> dict[str, str]:
    """Attribute -> the string that follows its assignment in a class."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        one.targets[0].id: " ".join(below.value.value.split())
        for one, below in pairwise(definition.body)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def column(unit: str, value: Callable[[Moment], float], optional: bool | str = False) -> Declared:
    """A number of every step, a column of the metric parts, read off the loop."""
    return Declared(type=MetricType.GAUGE, unit=unit, in_rows=True, optional=optional, now=lambda now: {(): value(now)})


def step_column(unit: str, value: Callable[[Ended], float], optional: bool | str = False) -> Declared:
    """The same, read off the step that ended."""
    return Declared(
        type=MetricType.GAUGE, unit=unit, in_rows=True, optional=optional, at_step=lambda step: {(): value(step)}
    )


def total_column(unit: str, value: Callable[[Moment], float]) -> Declared:
    """The same of a count since the process began, which is a counter; the `_total` of its name is added."""
    return Declared(type=MetricType.COUNTER, unit=unit, in_rows=True, now=lambda now: {(): value(now)})


def gauge(unit: str, value: Callable[[Moment], Series], *labels: Label) -> Declared:
    """A value that has labels, or that changes between steps."""
    return Declared(type=MetricType.GAUGE, unit=unit, labels=labels, now=value)


def age(value: Callable[[Moment], float]) -> Declared:
    """Seconds since something, by the clock of this process, which goes on between two looks at the loop."""
    return Declared(type=MetricType.GAUGE, unit="seconds", grows=True, now=lambda now: {(): value(now)})


def step_gauge(unit: str, value: Callable[[Ended], Series], *labels: Label) -> Declared:
    """The same, read off the step that ended."""
    return Declared(type=MetricType.GAUGE, unit=unit, labels=labels, at_step=value)


def block_gauge(unit: str, value: Callable[[StepReport], Series], *labels: Label) -> Declared:
    """A value of each block, or of each head of one."""
    return Declared(
        type=MetricType.GAUGE, unit=unit, labels=labels, at_step=lambda step: value(step.report), of_blocks=value
    )


def counter(unit: str, value: Callable[[Moment], Series], *labels: Label) -> Declared:
    """A count since the process began; the `_total` of its name is added."""
    return Declared(type=MetricType.COUNTER, unit=unit, labels=labels, now=value)


def histogram(unit: str, buckets: tuple[float, ...], *labels: Label) -> Declared:
    """A distribution since the process began."""
    return Declared(type=MetricType.HISTOGRAM, unit=unit, labels=labels, buckets=buckets)


def labels_text(names: Iterable[str], values: LabelValues) -> str:
    """`name=value`, joined by commas: a series where its name is a text."""
    return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def single(value: float) -> Series:
    """The series of a metric without labels."""
    return {(): value}


def by(values: Iterable[str], counts: Mapping[str, float]) -> Series:
    """A series for each of `values`, 0 where nothing was counted."""
    return {(str(value),): counts.get(value, 0) for value in values}
