"""What a declared signal is: type, unit, labels, buckets, and how many series it may have at most. It knows no
particular signal."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


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


MAX_REWARD_PARTS = 16
"""Names of reward parts that are told apart; the reward function chooses them, so what comes later is summed up as
`other`."""
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
class Metric:
    """One declared signal."""

    name: str
    """Prometheus name: `concord_`, base units, `_total` for counters."""
    type: MetricType
    unit: str
    help: str
    diagnosis_layer: int
    """1 data and reward, 2 policy change, 3 numerical updates, 4 training system."""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets, rising; the one above all is implied."""
    in_rows: bool = False
    """A number of every step, so a column of the metric parts."""
    measured_by: str = ""
    """The column that is -1 in the rows where nothing was measured; Prometheus then gets no sample."""

    def __post_init__(self) -> None:
        if (self.type is MetricType.COUNTER) != self.name.endswith("_total"):
            raise ValueError(f"{self.name} is a {self.type}; `_total` ends the names of counters, and of nothing else")
        if (self.type is MetricType.HISTOGRAM) != bool(self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(
                f"{self.name} is a {self.type} with buckets {self.buckets}; a histogram, and nothing else, has some, "
                "each above the one before"
            )
        if self.in_rows and (self.type is not MetricType.GAUGE or self.labels):
            raise ValueError(f"{self.name} cannot be a column: that is one number a step, so a gauge without labels")

    @property
    def column(self) -> str:
        """Name in the metric parts."""
        return self.name.removeprefix("concord_")

    def measured(self, row: Mapping[str, float]) -> bool:
        """Whether a row has a value of this column."""
        return self.column in row and (not self.measured_by or row.get(self.measured_by) != UNMEASURED)

    @property
    def label_names(self) -> tuple[str, ...]:
        """In the order of the values of a series."""
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


def column(name: str, unit: str, diagnosis_layer: int, help: str) -> Metric:
    """A number of every step: a gauge, and a column of the metric parts."""
    return Metric(
        name=f"concord_{name}",
        type=MetricType.GAUGE,
        unit=unit,
        help=help,
        diagnosis_layer=diagnosis_layer,
        in_rows=True,
    )


def optional_column(name: str, unit: str, diagnosis_layer: int, help: str, measured_by: str = "") -> Metric:
    """A column that says -1 where nothing was measured.

    Args:
        measured_by: for values that may be -1, the column that tells; its own are never negative.
    """
    return replace(column(name, unit, diagnosis_layer, help), measured_by=measured_by or name)


def gauge(name: str, unit: str, diagnosis_layer: int, help: str, *labels: Label) -> Metric:
    """A value that has labels, or that changes between steps."""
    return Metric(
        name=f"concord_{name}",
        type=MetricType.GAUGE,
        unit=unit,
        help=help,
        diagnosis_layer=diagnosis_layer,
        labels=labels,
    )


def counter(name: str, unit: str, diagnosis_layer: int, help: str, *labels: Label) -> Metric:
    """A count since the process began; `name` without its `_total`."""
    return Metric(
        name=f"concord_{name}_total",
        type=MetricType.COUNTER,
        unit=unit,
        help=help,
        diagnosis_layer=diagnosis_layer,
        labels=labels,
    )


def histogram(
    name: str, unit: str, diagnosis_layer: int, help: str, buckets: tuple[float, ...], *labels: Label
) -> Metric:
    """A distribution since the process began."""
    return Metric(
        name=f"concord_{name}",
        type=MetricType.HISTOGRAM,
        unit=unit,
        help=help,
        diagnosis_layer=diagnosis_layer,
        labels=labels,
        buckets=buckets,
    )
