"""The quickstart's real run, cold (no tiny model in the cache) and warm: when it is up, how long it trains, what it
learns."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness.runs import Run, concord_run, parser, report

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart.toml"


def described(run: Run) -> dict[str, Any]:
    """What the issue of the quickstart asks."""
    first_ten = [row["reward_mean"] for row in run.rows[:10]]
    kept = (
        "steps",
        "reward_first",
        "reward_moving_10",
        "max_token_staleness",
        "mean_token_staleness",
        "mixed_version_trajectories",
        "update_pause_ms",
        "wall_s",
        "rejected",
        "engine_busy",
        "trainer_busy",
        "tokens_per_s",
        "peak_rss_mb",
    )
    reached = [row["wall_seconds"] for row in run.rows if row["step"] >= 10 and row["reward_moving_10"] >= 0.9]
    return {
        "command_to_end_s": run.wall_s,
        "command_to_first_step_s": run.step_at_s[1],
        "reward_first_ten": sum(first_ten) / len(first_ten),
        "training_s_until_0.9": reached[0] if reached else None,
        "tree_peak_rss_mb": run.peak_rss_mb,
        **{key: run.summary[key] for key in kept},
    }


def main() -> None:
    chosen = parser(str(__doc__)).parse_args()
    cache = tempfile.mkdtemp(prefix="concord-bench-cache-")
    os.environ["XDG_CACHE_HOME"] = cache
    cold = described(concord_run({}, CONFIG))
    warm = described(concord_run({}, CONFIG))
    shutil.rmtree(cache)
    report({"cold": cold, "warm": warm}, chosen)


if __name__ == "__main__":
    main()
