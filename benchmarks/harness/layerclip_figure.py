"""Areas under reward curves with their intervals, and the curves as an SVG. It starts no run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Seeds -> quantile .975 of Student's t with one degree of freedom fewer."""
COLOURS = ("#444444", "#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and half the width of its 95 % interval."""
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if len(values) in STUDENT else None
    return {"mean": statistics.fmean(values), "half_width_95": half}


def table(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Area under the reward curve by arm, a step's share: the mean reward over all steps; and its difference from the
    healthy run of the same seed."""
    areas = {arm: [statistics.fmean(curve) for curve in each] for arm, each in curves.items()}
    lost = {
        arm: [mine - other for mine, other in zip(each, areas["healthy"], strict=True)]
        for arm, each in areas.items()
        if arm != "healthy"
    }
    return {
        "area": {arm: interval(each) for arm, each in areas.items()},
        "area_less_healthy": {arm: interval(each) for arm, each in lost.items()},
        "curves": {arm: [statistics.fmean(step) for step in zip(*each, strict=True)] for arm, each in curves.items()},
    }


def drawn(curves: Mapping[str, Sequence[float]], every: int) -> str:
    """An SVG: reward over steps, a line an arm, a dashed one at each explosion."""
    width, height, left, top = 900, 420, 60, 20
    steps, low, high = max(map(len, curves.values())), min(map(min, curves.values())), max(map(max, curves.values()))

    def at(step: float, reward: float) -> str:
        across = left + (width - left - 140) * step / steps
        down = top + (height - top - 40) * (1 - (reward - low) / max(1e-9, high - low))
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">'
    ]
    for step in range(every, steps + 1, every):
        parts.append(
            f'<polyline points="{at(step, low)} {at(step, high)}" stroke="#bbbbbb" stroke-dasharray="4" fill="none"/>'
        )
    for number, (arm, curve) in enumerate(curves.items()):
        points = " ".join(at(step, reward) for step, reward in enumerate(curve, start=1))
        parts.append(f'<polyline points="{points}" stroke="{COLOURS[number]}" stroke-width="1.5" fill="none"/>')
        parts.append(f'<text x="{width - 130}" y="{top + 20 * (number + 1)}" fill="{COLOURS[number]}">{arm}</text>')
    for reward in (low, high):
        parts.append(f'<text x="5" y="{at(0, reward).split(",")[1]}">{reward:.3f}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 10}">step 1 to {steps}; dashed: the block explodes; mean reward over'
        " seeds</text></svg>"
    )
    return "\n".join(parts) + "\n"
