"""Whether memory grows with steps: the quickstart's run, longer; resident memory of all its processes together at a few
steps."""

import statistics
from pathlib import Path

from harness.runs import concord_run, parser, report

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart.toml"
WINDOW_S = 10.0
"""A reading is the mean over this long before the end of its step: samples come and go with requests."""


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--from-step", type=int, default=50, help="growth is counted from here")
    chosen = arguments.parse_args()
    run = concord_run({"run.steps": chosen.steps}, CONFIG, timeout_s=3600.0)

    def rss_mb(step: int) -> float:
        end = run.step_at_s[step]
        return statistics.fmean(rss for at_s, rss in run.rss_samples if end - WINDOW_S <= at_s <= end)

    marks = sorted({chosen.from_step, *range(100, chosen.steps, 100), chosen.steps})
    readings = {str(step): round(rss_mb(step), 1) for step in marks}
    growth = readings[str(chosen.steps)] / readings[str(chosen.from_step)] - 1.0
    report(
        {
            "steps": chosen.steps,
            "rss_mb_at_step": readings,
            "growth": growth,
            "peak_rss_mb": run.summary["peak_rss_mb"],
        },
        chosen,
    )


if __name__ == "__main__":
    main()
