"""The trainer's forward pass under given experts: exact where they are native, by hand where they are not,
differentiable, and the same in a recomputation."""

import copy
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.engines.torch.moe_routers import expert_counts, find_routers
from rollout.errors import ConcordError, UserError
from trainer.config.trainer import TinyModelConfig, TrainerConfig
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, join_ranks, leave_ranks, shard_model
from trainer.model.routing_capture import RecordedRouting, RoutingRecorder
from trainer.model.routing_replay import RoutingReplay, recomputed_gates
from trainer.tiny.model import tiny_architecture

COUNTS = (4, 2)
IDS = torch.arange(24).view(2, 12) * 7 % 30 + 2
ROWS = IDS.numel()
EVERY = torch.ones(ROWS, dtype=torch.bool)


@pytest.fixture
def model() -> PreTrainedModel:
    """A random MoE with three blocks of four experts, far from uniform."""
    torch.manual_seed(0)
    model = tiny_architecture(TinyModelConfig(moe=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture
def perturbed(model: PreTrainedModel) -> RecordedRouting:
    """The routing of the same model with other routers."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in find_routers(other):
            weight = next(router.parameters())
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std())
    return recorded(other)


class GivenRouter(nn.Module):
    """The reference: a router that has its choice from a table and weighs it one token at a time."""

    def __init__(self, weight: Tensor, experts: np.ndarray) -> None:
        super().__init__()
        self.weight, self.experts = nn.Parameter(weight.detach().clone()), experts

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.t()
        gates: list[Tensor] = []
        for row, chosen in zip(logits, self.experts.tolist(), strict=True):
            exponentials = [torch.exp(row[expert]) for expert in chosen]
            gates.append(torch.stack(exponentials) / torch.stack(exponentials).sum())
        return logits, torch.stack(gates), torch.from_numpy(self.experts.astype(np.int64))


def hand_routed(model: PreTrainedModel, experts: np.ndarray) -> PreTrainedModel:
    """A copy whose blocks [rows, blocks, top_k] use these experts."""
    twin: Any = copy.deepcopy(model)
    for number, layer in enumerate(twin.model.layers):
        layer.mlp.gate = GivenRouter(layer.mlp.gate.weight, experts[:, number])
    return twin


def recorded(model: PreTrainedModel, ids: Tensor = IDS) -> RecordedRouting:
    recorder = RoutingRecorder(model, *COUNTS)
    with recorder.recording(), torch.no_grad():
        model(input_ids=ids)
    return recorder.take()


def as_tensor(experts: np.ndarray) -> Tensor:
    return torch.from_numpy(experts.copy())


def logprobs(model: nn.Module) -> Tensor:
    return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits.float(), dim=-1)


def router_grads(model: nn.Module) -> list[Tensor]:
    grads = [next(router.parameters()).grad for router in find_routers(model)]
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
    return [grad for grad in grads if grad is not None]


def test_replayed_gates_are_the_golden_ones(golden: dict[str, Any]):
    vector = golden["V13_r3_gate"]
    logits = torch.tensor([vector["train_logits"]], dtype=torch.float64)
    for choice, gates in (("infer_topk", "gates_replay"), ("train_topk", "gates_native")):
        expected = [vector[gates][str(expert)] for expert in vector[choice]]
        chosen = torch.tensor([vector[choice]])
        assert recomputed_gates(logits, chosen, renormalise=True)[0].tolist() == pytest.approx(expected, rel=1e-9)
        among_all = recomputed_gates(logits, chosen, renormalise=False)
        assert vector["softmax_then_renorm_same"] == 1
        assert (among_all / among_all.sum())[0].tolist() == pytest.approx(expected, rel=1e-9)


def test_gates_of_half_precision_logits_are_computed_in_float():
    logits = torch.tensor([[1.0, 2.0, 0.5, 1.9]], dtype=torch.bfloat16)
    assert recomputed_gates(logits, torch.tensor([[1, 2]]), renormalise=True).dtype == torch.float32


def test_gates_of_experts_that_the_trainer_finds_impossible_are_finite():
    logits = torch.tensor([[500.0, 400.0, 0.0, 1.0]])
    assert torch.isfinite(recomputed_gates(logits, torch.tensor([[2, 3]]), renormalise=True)).all()


def test_recorded_routing_is_the_top_of_the_routers_logits(model: PreTrainedModel):
    routing = recorded(model)
    with torch.no_grad():
        logits: tuple[Tensor, ...] = model(input_ids=IDS, output_router_logits=True).router_logits
    for block, rows in enumerate(logits):
        ranked = rows.sort(dim=-1, descending=True)
        assert np.array_equal(routing.experts[:, block], ranked.indices[:, :2].numpy())
        np.testing.assert_allclose(
            routing.gate_gap[:, block], (ranked.values[:, 1] - ranked.values[:, 2]).numpy(), rtol=1e-6
        )
    assert (routing.experts.dtype, routing.gate_gap.dtype, routing.experts.shape) == (
        np.uint8,
        np.float32,
        (ROWS, 3, 2),
    )


def test_nothing_is_recorded_outside_recording_and_nothing_twice(model: PreTrainedModel):
    recorder = RoutingRecorder(model, *COUNTS)
    logprobs(model)
    with pytest.raises(ConcordError, match="no routing of 3 of 3 MoE blocks"):
        recorder.take()
    with recorder.recording():
        logprobs(model)
    recorder.take()
    with pytest.raises(ConcordError, match="no routing of 3"):
        recorder.take()


def test_replaying_native_routing_changes_no_bit(model: PreTrainedModel):
    routing, native = recorded(model), logprobs(model)
    replay = RoutingReplay(model, *COUNTS)
    for experts in (routing.experts, routing.experts[:, :, ::-1]):
        with replay.using(as_tensor(experts), EVERY) as rows:
            assert torch.equal(logprobs(model), native)
        assert rows.replaced().tolist() == [0, 0, 0]
    assert torch.equal(logprobs(model), native)


def test_a_perturbed_routing_gives_what_hand_computed_gates_give(model: PreTrainedModel, perturbed: RecordedRouting):
    native, reference = logprobs(model), logprobs(hand_routed(model, perturbed.experts))
    with RoutingReplay(model, *COUNTS).using(as_tensor(perturbed.experts), EVERY) as rows:
        replayed = logprobs(model)
    torch.testing.assert_close(replayed, reference, rtol=1e-4, atol=1e-5)
    assert (replayed - native).abs().max() > 0.1
    assert (rows.replaced() > ROWS // 8).all() and (rows.num_rows, rows.num_covered) == (ROWS, ROWS)


def test_gradients_flow_through_the_replayed_gates(model: PreTrainedModel, perturbed: RecordedRouting):
    reference = hand_routed(model, perturbed.experts)
    logprobs(reference)[..., 5].sum().backward()
    with RoutingReplay(model, *COUNTS).using(as_tensor(perturbed.experts), EVERY):
        logprobs(model)[..., 5].sum().backward()
    for ours, theirs in zip(router_grads(model), router_grads(reference), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_uncovered_rows_stay_native_whatever_they_hold(model: PreTrainedModel, perturbed: RecordedRouting):
    native = logprobs(model)
    covered = torch.zeros(ROWS, dtype=torch.bool)
    covered[5:12] = True  # of the first row of two
    experts = as_tensor(perturbed.experts)
    experts[~covered] = 99
    replay = RoutingReplay(model, *COUNTS)
    with replay.using(experts, covered) as rows:
        replayed = logprobs(model)
    assert torch.equal(replayed[0, :5], native[0, :5]) and torch.equal(replayed[1], native[1])
    assert (replayed[0, 5:] - native[0, 5:]).abs().max() > 0.01
    assert rows.num_covered == 7
    with replay.using(experts, torch.zeros_like(covered)):
        assert torch.equal(logprobs(model), native)


def test_load_balance_statistics_stay_on_native_routing(model: PreTrainedModel, perturbed: RecordedRouting):
    """The first block sees the same input with and without a replay, so its statistics must be the same."""
    plain = model(input_ids=IDS, output_router_logits=True)
    with RoutingReplay(model, *COUNTS).using(as_tensor(perturbed.experts), EVERY):
        recorder = RoutingRecorder(model, *COUNTS)
        with recorder.recording():
            replayed = model(input_ids=IDS, output_router_logits=True)
    assert torch.equal(replayed.router_logits[0], plain.router_logits[0])
    assert np.array_equal(recorder.take().experts[:, 0], plain.router_logits[0].topk(2, dim=-1).indices.numpy())


def test_a_recomputation_in_backward_sees_the_replay_of_its_forward(model: PreTrainedModel, perturbed: RecordedRouting):
    """Two forward passes under different routings are in flight, and backward runs after both have ended."""
    routings = [as_tensor(perturbed.experts), as_tensor(perturbed.experts).flip(0)]
    grads: list[list[Tensor]] = []
    for checkpointed in (False, True):
        twin = copy.deepcopy(model)
        policy = PolicyModel(twin, chunk_tokens=8)
        if checkpointed:
            policy.checkpoint_activations()
        replay = RoutingReplay(policy, *COUNTS)
        losses: list[Tensor] = []
        for experts in routings:
            with replay.using(experts, EVERY):
                losses.append(policy(IDS, torch.arange(ROWS), IDS.flatten(), 1.0)[0].sum())
        losses[0].backward()
        losses[1].backward()
        grads.append(router_grads(twin))
    assert all(torch.equal(plain, again) for plain, again in zip(*grads, strict=True))


@pytest.fixture
def alone(tmp_path: Path) -> Generator[Ranks]:
    """A process group of one rank."""
    yield join_ranks(TrainerConfig(), 0, f"file://{tmp_path / 'rendezvous'}")
    leave_ranks()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_and_checkpointed_model_replays(
    model: PreTrainedModel, perturbed: RecordedRouting, alone: Ranks, dtype: torch.dtype
):
    reference = PolicyModel(hand_routed(model, perturbed.experts), chunk_tokens=8)
    policy = PolicyModel(model, chunk_tokens=8)
    replay = RoutingReplay(policy, *COUNTS)
    policy.checkpoint_activations()
    shard_model(policy, alone, dtype)
    where = (IDS, torch.arange(ROWS), IDS.flatten(), 1.0)
    expected = reference(*where)[0]
    native = policy(*where)[0]
    with replay.using(as_tensor(perturbed.experts), EVERY):
        replayed = policy(*where)[0]
    replayed.sum().backward()
    gap, native_gap = ((values - expected).abs().mean() for values in (replayed, native))
    assert gap < (1e-5 if dtype == torch.float32 else native_gap / 5)
    assert native_gap > 0.1
    assert router_grads(policy)


def test_given_rows_must_fit_the_model_and_the_batch(model: PreTrainedModel, perturbed: RecordedRouting):
    replay, experts = RoutingReplay(model, *COUNTS), as_tensor(perturbed.experts)
    for wrong, covered in (
        (experts[:, :2], EVERY),
        (experts[:5], EVERY),
        (experts.float(), EVERY),
        (experts, EVERY.long()),
    ):
        with pytest.raises(ValueError, match="expected integers"), replay.using(wrong, covered):
            pass
    with (
        pytest.raises(ValueError, match="sees 24 rows, but a routing was given for 23"),
        replay.using(experts[1:], EVERY[1:]),
    ):
        logprobs(model)


@pytest.mark.parametrize("cell", [[1, 1], [0, 4]])
def test_padding_that_claims_to_be_covered_is_refused(
    model: PreTrainedModel, perturbed: RecordedRouting, cell: list[int]
):
    experts = as_tensor(perturbed.experts)
    experts[3, 1] = torch.tensor(cell, dtype=torch.uint8)
    with (
        pytest.raises(ConcordError, match="leave it out of `covered`"),
        RoutingReplay(model, *COUNTS).using(experts, EVERY),
    ):
        pass


def test_a_replay_that_no_router_saw_is_an_error(model: PreTrainedModel, perturbed: RecordedRouting):
    copy_without_hooks = copy.deepcopy(model)
    replay = RoutingReplay(model, *COUNTS)
    with (
        pytest.raises(ConcordError, match="3 MoE blocks, but 0 of their routers ran"),
        replay.using(as_tensor(perturbed.experts), EVERY),
    ):
        logprobs(copy_without_hooks)


class SigmoidRouter(nn.Module):
    """Gates that are no softmax."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.t()
        gates, experts = logits.sigmoid().topk(2, dim=-1)
        return logits, gates / gates.sum(dim=-1, keepdim=True), experts


def test_routers_whose_gates_are_no_softmax_are_refused(model: PreTrainedModel, perturbed: RecordedRouting):
    layers: Any = model.model.layers
    layers[1].mlp.gate = SigmoidRouter(layers[1].mlp.gate.weight)
    with (
        pytest.raises(UserError, match=r"MoE block 1: the router's gates differ by .* from a softmax"),
        RoutingReplay(model, *COUNTS).using(as_tensor(perturbed.experts), EVERY),
    ):
        logprobs(model)


def test_a_dense_model_has_nothing_to_record_or_replay():
    dense = tiny_architecture(TinyModelConfig())
    assert expert_counts(dense.config) is None
    for kind in (RoutingRecorder, RoutingReplay):
        with pytest.raises(UserError, match="has no router"):
            kind(dense, *COUNTS)


def test_expert_counts_come_from_the_models_config(model: PreTrainedModel):
    assert expert_counts(model.config) == COUNTS
