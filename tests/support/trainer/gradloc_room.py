"""Searches over small sharded models with planted spikes, for tests of the gradient search; and what a second rank
runs."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.gradloc_planted import (
    Ran,
    Spiking,
    on_policy,
    places,
    plant,
    random_step,
    run_step,
    small_model,
    spiking_loss,
    tau_of,
)
from trainer.config.gradloc import GivenTau, GradLocConfig
from trainer.config.trainer import TrainerConfig
from trainer.gradloc import GradLoc, GradLocReport
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, join_ranks, leave_ranks
from trainer.types.gradloc import Outcome
from trainer.types.step import MicroBatch

__all__ = [
    "Ran",
    "Spiking",
    "hybrid_ranks_find_the_same",
    "located",
    "on_policy",
    "one_rank",
    "places",
    "plant",
    "random_step",
    "ranks_find_what_was_planted",
    "run_step",
    "small_model",
    "spiking_loss",
    "tau_of",
    "two_ranks_know_the_norms_of_parts",
    "watching",
]


def located(report: GradLocReport | None) -> list[tuple[int, int, int]]:
    assert report is not None and report.outcome is Outcome.LOCATED, report
    return [(hit.micro_batch, hit.row, hit.position) for hit in report.hits]


def watching(
    model: PolicyModel, ranks: Ranks, tau: float, loss: Any = None, dtype: torch.dtype = torch.float32, **config: Any
) -> GradLoc:
    return GradLoc(
        GradLocConfig(threshold=GivenTau(tau=tau), **config), model, loss or spiking_loss(), ranks, dtype=dtype
    )


@contextmanager
def one_rank(folder: Path) -> Generator[Ranks]:
    yield join_ranks(TrainerConfig(), 0, f"file://{folder / 'rendezvous'}")
    leave_ranks()


def ranks_find_what_was_planted(rank: int, world: int, folder: Path) -> None:
    """One spike on each rank, in different micro-batches: every rank's report has all of them."""
    ranks = join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous'}")
    _find_one_on_each(ranks)
    leave_ranks()


def hybrid_ranks_find_the_same(rank: int, world: int, folder: Path) -> None:
    """The same on a mesh that holds every shard twice as on a flat one: norms count each parameter once."""
    flat = join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous'}")
    hybrid = replace(flat, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    norms, reports = zip(*(_find_one_on_each(ranks) for ranks in (flat, hybrid)), strict=True)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
    for one, other in zip(*(report.hits for report in reports), strict=True):
        assert (one.micro_batch, one.rank, one.row, one.position) == (
            other.micro_batch,
            other.rank,
            other.row,
            other.position,
        )
        np.testing.assert_allclose(
            [norm for _, norm in one.block_norms], [norm for _, norm in other.block_norms], rtol=1e-3
        )
    leave_ranks()


def _find_one_on_each(ranks: Ranks) -> tuple[float, GradLocReport]:
    """The norm of the spiking step, and the report that names one token of each rank. In the last micro-batch the first
    rank has no term."""
    world, rank = ranks.world, ranks.rank
    model, loss = small_model(ranks), spiking_loss()
    healthy = on_policy(model, ranks, random_step(rank, denominator=world))
    if ranks.first:
        healthy = (*healthy[:-1], without(healthy[-1]))
    ran = run_step(model, loss, ranks, healthy)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    tau = 3 * ran.norm / square**0.5
    gradloc = GradLoc(GradLocConfig(threshold=GivenTau(tau=tau), budget_passes=200), model, loss, ranks)
    mine = next(place for place in places(healthy)[7 * rank + 4 :] + places(healthy) if place[0] == rank % len(healthy))
    ran = run_step(model, loss, ranks, plant(healthy, mine, 3e4))
    report = gradloc.observe(ran.norm, ran.data)
    assert report is not None and report.outcome == "located", report
    assert len(report.hits) == world
    found = {hit.rank: (hit.micro_batch, hit.row, hit.position) for hit in report.hits}
    assert found[rank] == mine, (found, mine)
    assert all(hit.trajectory_id.startswith(f"t-{hit.rank}-") for hit in report.hits)
    assert ranks.sum(torch.tensor([float(report.passes)])).item() == world * report.passes
    return ran.norm, report


def two_ranks_know_the_norms_of_parts(rank: int, world: int, folder: Path) -> None:
    """Each rank's part of each micro-batch has the norm that it has when the other rank's terms are not in the loss; a
    search uses them."""
    ranks = join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous'}")
    model, loss = small_model(ranks), spiking_loss()
    record = BackwardRecord(model, ranks, term_pulls=False)
    healthy = on_policy(model, ranks, random_step(rank, denominator=world))
    ran = run_step(model, loss, ranks, healthy, record)
    measured = record.part_norms(len(healthy))
    assert measured is not None
    for number, micro in enumerate(healthy):
        for one in range(world):
            part = micro if one == rank else without(micro)
            assert measured[number, one] == pytest.approx(run_step(model, loss, ranks, [part]).norm, rel=1e-5)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    gradloc = watching(model, ranks, 3 * ran.norm / square**0.5, loss)
    planted = plant(healthy, places(healthy)[11], 1e5) if rank == 1 else healthy
    ran = run_step(model, loss, ranks, planted, record)
    report = gradloc.observe(ran.norm, ran.data, record=record)
    assert located(report) == [places(random_step(1))[11]] and report is not None and report.hits[0].rank == 1
    terms = max(int(micro.loss_mask.sum()) for r in range(world) for micro in random_step(r))
    assert report.passes <= 2 * int(np.ceil(np.log2(terms))) + 1
    leave_ranks()


def without(micro: MicroBatch) -> MicroBatch:
    return replace(micro, loss_mask=np.zeros_like(micro.loss_mask))


def two_ranks_share_their_pulls(rank: int, world: int, folder: Path) -> None:
    """A spike on the second rank is the first term that both look at."""
    ranks = join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous'}")
    model, loss = small_model(ranks), spiking_loss()
    record = BackwardRecord(model, ranks)
    healthy = on_policy(model, ranks, random_step(rank, denominator=world))
    ran = run_step(model, loss, ranks, healthy, record)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    gradloc = watching(model, ranks, 3 * ran.norm / square**0.5, loss)
    planted = plant(healthy, places(healthy)[11], 1e5) if rank == 1 else healthy
    ran = run_step(model, loss, ranks, planted, record)
    report = gradloc.observe(ran.norm, ran.data, record=record)
    assert (
        located(report) == [places(random_step(1))[11]]
        and report is not None
        and report.hits[0].rank == 1
        and report.passes <= 2
    )
    leave_ranks()
