"""How close the loop comes to its bound, and what asynchrony buys: scripted engine and trainer on real Ray.

16 slots (sigma 0.8), 16 groups of 8 a step, policy `drop`, generation and training equally long; then 32 slots with
sigma 1. bound = max(mean latency x samples / slots, training): no schedule does a step faster.
"""

import statistics
from typing import Any

from harness.runs import WORKLOAD, concord_run, parser, report

GROUPS, SIZE = 16, 8
WARM_STEPS = 6
"""Steps left out at the start, while the pipeline fills."""


def case(eta: int, slots: int, sigma: float, bound_s: float, steps: int) -> dict[str, Any]:
    """One run; generation and training both take `bound_s` a step on average."""
    run = concord_run(
        {
            "run.steps": steps,
            "run.batch_groups": GROUPS,
            "run.group_size": SIZE,
            "model.type": "local",
            "model.path": str(WORKLOAD / "model"),
            "engine.type": "scripted",
            "engine.slots": slots,
            "engine.latency_sigma": sigma,
            "engine.latency_mean_s": bound_s * slots / (GROUPS * SIZE),
            "trainer.type": "scripted",
            "consistency.mode": "off",
            "trainer.scripted_step_s": bound_s,
            "staleness.max_staleness": eta,
        }
    )
    times = [row["step_seconds"] for row in run.rows[WARM_STEPS:]]
    mean = statistics.fmean(times)
    return {
        "eta": eta,
        "step_s": mean,
        "step_over_bound": mean / bound_s,
        "step_s_stdev": statistics.stdev(times),
        "rejected": run.summary["rejected"],
        "dispatched": run.summary["dispatched"],
        "max_token_staleness": run.summary["max_token_staleness"],
        "mean_token_staleness": run.summary["mean_token_staleness"],
        "mixed_version_trajectories": run.summary["mixed_version_trajectories"],
        "mean_length": run.summary["mean_length"],
    }


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=46)
    arguments.add_argument("--bound", type=float, default=0.8, help="seconds of generation and of training a step")
    chosen = arguments.parse_args()
    results: dict[str, Any] = {}
    for slots, sigma in ((16, 0.8), (32, 1.0)):
        cases = [case(eta, slots, sigma, chosen.bound, chosen.steps) for eta in (0, 1, 2, 4, 8)]
        for one in cases:
            one["speedup_over_synchronous"] = cases[0]["step_s"] / one["step_s"]
        results[f"slots_{slots}_sigma_{sigma}"] = cases
    report({"bound_s": chosen.bound, "measured_steps": chosen.steps - WARM_STEPS, **results}, chosen)


if __name__ == "__main__":
    main()
