"""Where the repository's own data lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ROOT / "benchmarks" / "workload"
MODEL = WORKLOAD / "model"
GOLDEN_FOLDER = ROOT / "tests" / "golden"
