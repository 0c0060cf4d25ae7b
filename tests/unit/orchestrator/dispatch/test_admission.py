"""The entrance of the staleness window."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import GOLDEN_FOLDER

from orchestrator.dispatch.admission import spread
from orchestrator.dispatch.staleness import Window, capacity
from orchestrator.replicas.replicas import Replica
from rollout.types.dispatch import Counts

GOLDEN = json.loads((GOLDEN_FOLDER / "golden_vectors.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["V14_areal"])
def test_capacity_agrees_with_the_published_formula(case: dict[str, int]) -> None:
    """`accepted` counts all that ever came back: of it, v x B were trained at versions that the ledger has
    committed."""
    waiting = case["accepted"] - case["v"] * case["B"]
    counts = Counts(dispatched=case["running"], ready=max(waiting, 0), trained=case["v"] * case["B"])
    window = Window(max_staleness=case["eta"], batch_groups=case["B"], max_concurrent=case["max_concurrent"])
    assert capacity(window, counts, running=case["running"], uncommitted=0) == case["capacity"]


@given(
    st.integers(0, 4), st.integers(1, 8), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)
)
def test_admitting_the_capacity_never_overfills_the_window(
    eta: int, batch: int, running: int, ready: int, leased: int, uncommitted: int
) -> None:
    window = Window(max_staleness=eta, batch_groups=batch, max_concurrent=(eta + 1) * batch)
    room = capacity(window, Counts(dispatched=running, ready=ready, leased=leased), running, uncommitted)
    assert room >= 0
    if room:
        assert running + ready + leased + uncommitted + room <= (eta + 1) * batch


def test_a_trained_group_takes_room_until_its_version_is_committed() -> None:
    window = Window(max_staleness=0, batch_groups=4, max_concurrent=4)
    assert capacity(window, Counts(trained=4), running=0, uncommitted=4) == 0
    assert capacity(window, Counts(trained=4), running=0, uncommitted=0) == 4


def test_work_goes_to_the_replica_with_the_least_of_it() -> None:
    busy, idle = Replica(0), Replica(1)
    for _ in range(3):
        busy.takes_group()
    assert spread(range(4), [busy, idle]) == [1, 1, 1, 0]
