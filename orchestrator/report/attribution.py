"""The gap between engine and trainer, taken apart: a waterfall from the causes to what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.metrics.layers import LAYERS
from orchestrator.report.drawing import INK, Figure, Trace, axis, layout_of, plain
from orchestrator.run_dir.record import RunEvent

UNKNOWN = "unknown"
SUFFIX = "_nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributed:
    """One finding whose gap was taken apart; `parts` and `unknown` add up to `gap`."""

    replica: str
    policy: str
    gap: float
    """Mean |d_engine|, nats."""
    parts: tuple[tuple[str, float], ...]
    """Nats by cause, the largest first."""
    unknown: float


def attributed(findings: Sequence[RunEvent]) -> list[Attributed]:
    """The finding with the largest gap that has parts, for each replica."""
    worst: dict[str, Attributed] = {}
    for event in findings:
        nats = {
            key.removesuffix(SUFFIX): value
            for key, value in event.fields.items()
            if key.endswith(SUFFIX) and isinstance(value, int | float)
        }
        gap = nats.pop("gap", None)
        if gap is None or not nats:
            continue
        unknown = nats.pop(UNKNOWN, 0.0)
        parts = tuple(sorted(nats.items(), key=lambda part: -part[1]))
        replica, policy = str(event.fields.get("replica")), str(event.fields.get("policy"))
        found = Attributed(replica=replica, policy=policy, gap=gap, parts=parts, unknown=unknown)
        if found.replica not in worst or worst[found.replica].gap < gap:
            worst[found.replica] = found
    return [worst[replica] for replica in sorted(worst)]


def waterfall(found: Attributed) -> Figure:
    """Causes, what is left, and the gap that they add up to."""
    steps = [*found.parts, (UNKNOWN, found.unknown), ("measured gap", found.gap)]
    bars: Trace = {
        "type": "waterfall",
        "x": [plain(name.replace("_", " ")) for name, _ in steps],
        "y": [nats for _, nats in steps],
        "measure": [*("relative" for _ in steps[:-1]), "total"],
        "text": [f"{nats:.3g}" for _, nats in steps],
        "textposition": "outside",
        "cliponaxis": False,
        "increasing": {"marker": {"color": LAYERS[4].colour}},
        "decreasing": {"marker": {"color": "#9fb3c8"}},
        "totals": {"marker": {"color": INK}},
        "connector": {"line": {"color": "#9fb3c8", "width": 1}},
        "hovertemplate": "%{x}: %{text} nats<extra></extra>",
    }
    layout = layout_of(
        320,
        xaxis=axis(type="category"),
        yaxis=axis("nats a token, mean |d|", rangemode="tozero"),
        margin={"l": 60, "r": 12, "t": 24, "b": 30},
    )
    return Figure(key=f"attribution-{found.replica}", traces=[bars], layout=layout)
