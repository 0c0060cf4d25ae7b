"""Rehearsals in one process: a fault that is planted into a running system is found in time, on its replica, under its
right name. One seed; the whole table is `benchmarks/rehearsal.py`."""

import contextlib
from pathlib import Path

import pytest
from support.loop.local_run import drive_to_its_end

from benchmarks.harness.rehearsal_cases import CASES, document, findings, model_of, problem, read_events
from orchestrator.config import RunConfig, parse_config
from rollout.errors import WeightSyncError

SUBSET = (
    "healthy",
    "stale_replica",
    "bf16_logprobs",
    "raw_logprobs",
    "kv_kept",
    "tokenizer_swap",
    "routing_perturbed",
    "version_off_by_one",
    "short_logprobs",
)
SEED = 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each case, all of them built before the first run: transformers switches initialisation off for all
    threads of a process while one loads."""
    folder = tmp_path_factory.mktemp("models")
    return {name: model_of(CASES[name], SEED, folder) for name in SUBSET}


def drive_to_the_end(config: RunConfig) -> Path:
    """The run directory of a rehearsal. One whose replica never passes its canary again ends with the reason, as it
    should."""
    with contextlib.suppress(WeightSyncError):
        drive_to_its_end(config)
    return config.run.dir / "run"


@pytest.mark.parametrize("name", SUBSET)
def test_a_planted_fault_is_found_in_time_on_its_replica_under_its_right_name(
    tmp_path: Path, models: dict[str, Path], name: str
) -> None:
    config = parse_config({**document(CASES[name], SEED, models[name], tmp_path)}, name)
    found = findings(read_events(drive_to_the_end(config)))
    assert problem(CASES[name], found) == ""
