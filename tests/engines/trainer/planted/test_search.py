"""Planted gradient faults as a search and a replay meet them: in whatever rows they run, and block by block."""

import pytest
import torch
from support.trainer.gradloc_room import on_policy, random_step, run_step, spiking_loss, tau_of, watching

from rollout.faults.config import FaultConfig, FaultsConfig
from rollout.faults.gradient_config import BlockExplosionFault, GradSpikeFault, NanTokenFault, TwoSpikesFault
from trainer.algorithms.grpo import Grpo
from trainer.batching.batcher import build_batch
from trainer.config.trainer import GrpoConfig
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.planted.block_gradient import scaled_backward
from trainer.planted.due import DueFaults
from trainer.planted.loss import PlantedLoss
from trainer.planted.pull_meter import PullMeter
from trainer.replay.places import NonFinitePlaces
from trainer.types.step import MicroBatch, PlantedFault

NO_SAMPLES = build_batch([], Grpo(GrpoConfig()), 0, "token_mean")


def planted_step(
    model: PolicyModel, ranks: Ranks, micro_batches: tuple[MicroBatch, ...], fault: FaultConfig, version: int
) -> tuple[PlantedLoss, tuple[MicroBatch, ...], tuple[PlantedFault, ...]]:
    real = spiking_loss()
    loss = PlantedLoss(real, model)
    due = DueFaults(
        FaultsConfig(plant=(fault,)), loss, model, PullMeter(model, ranks), real=real, uncorrected=real, corrects=False
    )
    acted = due.begin(version, NO_SAMPLES, [micro_batches])
    return loss, tuple(acted.micro_batches[0]), acted.planted


@pytest.mark.parametrize("savings", [True, False])
@pytest.mark.parametrize("kind", [GradSpikeFault, TwoSpikesFault, NanTokenFault])
def test_a_search_finds_what_was_planted_whatever_rows_it_runs(
    model: PolicyModel, alone: Ranks, kind: type[GradSpikeFault | TwoSpikesFault | NanTokenFault], savings: bool
):
    micro_batches = on_policy(model, alone, random_step(4))
    tau = tau_of(run_step(model, spiking_loss(), alone, micro_batches))
    for version in (1, 2, 3):
        fault = kind.model_validate({"start_version": version} | ({} if kind is NanTokenFault else {"factor": 1e5}))
        loss, acted, planted = planted_step(model, alone, micro_batches, fault, version)
        ran = run_step(model, loss, alone, acted)
        report = watching(model, alone, tau, loss, cut_sequences=savings, budget_passes=200).observe(ran.norm, ran.data)
        assert report is not None and report.outcome == "located"
        found = {(hit.trajectory_id, hit.position, hit.micro_batch) for hit in report.hits}
        assert found == {(each.trajectory_id, each.position, each.micro_batch) for each in planted}
        assert len(found) == (2 if kind is TwoSpikesFault else 1)


def test_a_search_sees_the_exploded_block_in_every_term(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss, acted, _ = planted_step(model, alone, healthy, BlockExplosionFault(block=1), 1)
    ran = run_step(model, loss, alone, acted)
    report = watching(model, alone, 1e-9, loss, max_hits=64, budget_passes=2000).observe(ran.norm, ran.data)
    assert report is not None
    norms = [dict(hit.block_norms) for hit in report.hits]
    assert norms and all(each["model.layers.1"] > 10 * each["model.layers.0"] for each in norms)
    loss.clear()


def test_the_first_block_is_named_forward_and_backward(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    places, loss, block = NonFinitePlaces(model), spiking_loss(), model.blocks()[1]
    run_step(model, loss, alone, healthy)
    assert places.first_forward is None and places.first_backward is None

    handle = block.register_forward_pre_hook(lambda module, args: (args[0] * torch.inf, *args[1:]))
    run_step(model, loss, alone, healthy)
    handle.remove()
    assert places.first_forward is not None and places.first_forward.block == "model.layers.1"

    places.begin()
    handle = block.register_forward_pre_hook(lambda module, args: (scaled_backward(args[0], torch.inf), *args[1:]))
    run_step(model, loss, alone, healthy)
    handle.remove()
    assert places.first_forward is None and places.first_backward is not None
    assert (places.first_backward.block, places.first_backward.reached) == ("model.layers.1", "model.layers.0")

    model.zero_grad(set_to_none=True)
