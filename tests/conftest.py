"""What every suite shares: one thread a process, no network, seeded property tests, GPU tests skipped where there is no
GPU, the golden vectors."""

import json
import os
from pathlib import Path
from typing import Any

# Before any library reads them. A suite is a set of small processes on few cores, and nothing here may reach the
# network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("seeded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # only now: the other suites must not pay for it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """All golden vectors by name (`V14_areal`, …): inputs and outputs in float64, to compare at relative 1e-9."""
    folder = Path(__file__).parent / "golden"
    parts = [json.loads((folder / name).read_text()) for name in ("golden_vectors.json", "extra_vectors.json")]
    return {key: value for part in parts for key, value in part.items()}
