"""Muon: the iteration's golden values, torch's own Muon, which parameters it takes, and states that survive."""

import math
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

from rollout.errors import UserError
from trainer.config.trainer import OptimizerConfig
from trainer.model.blocks import EMBEDDINGS, HEAD, TIED, Block
from trainer.model.ranks import Ranks
from trainer.optim.muon import Muon, newton_schulz, orthogonalised, step_scale
from trainer.optim.optimizer import PolicyOptimizer, build_optimizers, learning_rate

CPU = torch.device("cpu")


def matrix(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, numbers: range) -> Tensor:
    for number in numbers:
        parameter.grad = matrix(*parameter.shape, seed=10 + number).detach()
        optimizer.step()
    return parameter.detach().clone()


def test_the_iteration_follows_its_vector(golden: dict[str, Any]):
    vector = golden["V11_muon"]
    diagonal = torch.diag(torch.tensor(vector["diag"], dtype=torch.float64))
    assert torch.diag(diagonal / diagonal.norm()).tolist() == pytest.approx(vector["normalised"], rel=1e-12)
    result = orthogonalised(diagonal, torch.float64)
    assert torch.diag(result).tolist() == pytest.approx(vector["ns5"], rel=1e-11)
    assert float((result - torch.diag(torch.diag(result))).abs().max()) < 1e-12
    assert float(newton_schulz(torch.tensor([[0.01]], dtype=torch.float64))) == pytest.approx(
        vector["ns5_of_0p01"], rel=1e-11
    )


def test_scales_of_the_rate_follow_the_vector(golden: dict[str, Any]):
    vector = golden["V11_muon"]
    assert step_scale(4096, 1024, "original") == vector["lr_original_4096x1024"]
    assert step_scale(1024, 4096, "original") == vector["lr_original_1024x4096"]
    assert step_scale(4096, 1024, "match_rms") == pytest.approx(vector["match_rms_4096x1024"], rel=1e-12)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5), (4, 6, 3)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, ...]):
    whole = matrix(*shape).detach().double() * 50
    result = orthogonalised(whole, torch.float64)
    u, _, v = torch.linalg.svd(whole, full_matrices=False)
    values = u.mT @ result @ v.mT
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert bool(((diagonal > 0.6) & (diagonal < 1.25)).all())
    torch.testing.assert_close(values, torch.diag_embed(diagonal), rtol=0, atol=1e-10)


def test_a_stack_of_matrices_is_orthogonalised_one_by_one_and_a_zero_stays_zero():
    stack = matrix(3, 5, 4).detach() * torch.tensor([1.0, 1e4, 0.0])[:, None, None]
    torch.testing.assert_close(
        orthogonalised(stack, torch.float32), torch.stack([orthogonalised(one, torch.float32) for one in stack])
    )
    assert not orthogonalised(stack, torch.float32)[2].any()


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
@pytest.mark.parametrize(("scale", "theirs"), [("match_rms", "match_rms_adamw"), ("original", "original")])
def test_steps_are_those_of_torchs_own_muon_to_bfloat16(shape: tuple[int, int], scale: Any, theirs: str):
    ours, reference = matrix(*shape), matrix(*shape)
    mine = Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.2, scale=scale)
    other = torch.optim.Muon([reference], lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn=theirs)
    start = ours.detach().clone()
    wanted = steps(other, reference, range(3))
    moved = steps(mine, ours, range(3))
    assert float((moved - wanted).norm()) < 0.02 * float((wanted - start).norm())


def test_a_vector_is_refused_with_the_cure():
    with pytest.raises(UserError, match=r"got a parameter of shape \(4,\) for Muon, .* give it to AdamW instead"):
        Muon([matrix(2, 2), matrix(4)], lr=0.1)


def blocks() -> list[Block]:
    return [
        Block(name=EMBEDDINGS, parameters=(matrix(6, 4),)),
        Block(name="layers.0", parameters=(matrix(4, 4), matrix(4), matrix(2, 4, 3))),
        Block(name=HEAD, parameters=(matrix(4), matrix(6, 4))),
    ]


def shapes(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    muon, adamw = build_optimizers(blocks(), OptimizerConfig(type="muon"), CPU)
    assert isinstance(muon, Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert shapes(muon) == [(4, 4), (2, 4, 3)]
    assert sorted(shapes(adamw)) == [(4,), (4,), (6, 4), (6, 4)]
    (alone,) = build_optimizers(blocks(), OptimizerConfig(), CPU)
    assert isinstance(alone, torch.optim.AdamW)
    assert len(shapes(alone)) == 6


def decays(config: OptimizerConfig, parts: list[Block]) -> dict[int, float]:
    """Place of each parameter in the model -> its weight decay."""
    places = {id(p): place for place, p in enumerate(p for block in parts for p in block.parameters)}
    return {
        places[id(parameter)]: group["weight_decay"]
        for optimizer in build_optimizers(parts, config, CPU)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_norms_biases_and_embeddings_do_not_decay_unless_all_is_asked_for(kind: Literal["adamw", "muon"]):
    """Embedding; matrix, norm and experts of a block; final norm and head."""
    config = OptimizerConfig(type=kind, weight_decay=0.1)
    assert decays(config, blocks()) == {0: 0.0, 1: 0.1, 2: 0.0, 3: 0.1, 4: 0.0, 5: 0.1}
    assert set(decays(config.model_copy(update={"decay": "all"}), blocks()).values()) == {0.1}
    tied = [Block(name=TIED, parameters=(matrix(6, 4), matrix(4))), blocks()[1]]
    assert decays(config, tied) == {0: 0.0, 1: 0.0, 2: 0.1, 3: 0.0, 4: 0.1}


def test_a_step_without_a_gradient_shrinks_matrices_alone():
    config = OptimizerConfig(weight_decay=0.1, learning_rate=0.5)
    parts = [
        Block(name=EMBEDDINGS, parameters=(matrix(2, 2),)),
        Block(name="layers.0", parameters=(matrix(2, 2), matrix(2))),
    ]
    before = [p.detach().clone() for block in parts for p in block.parameters]
    for optimizer in build_optimizers(parts, config, CPU):
        for block in parts:
            for parameter in block.parameters:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    shrunk = [
        float((p.detach() / old).mean())
        for p, old in zip((p for b in parts for p in b.parameters), before, strict=True)
    ]
    assert shrunk == pytest.approx([1.0, 0.95, 1.0], rel=1e-6)


def test_a_model_without_matrices_in_its_blocks_is_refused_for_muon():
    with pytest.raises(UserError, match='set it to "adamw"'):
        build_optimizers([Block(name="layers.0", parameters=(matrix(4),))], OptimizerConfig(type="muon"), CPU)


def test_every_optimizer_follows_the_schedule():
    config = OptimizerConfig.model_validate(
        {"type": "muon", "learning_rate": 0.5, "schedule": {"warmup_steps": 2}, "muon_scale": "original"}
    )
    parts = [Block(name="layers.0", parameters=(nn.Parameter(torch.eye(2)), nn.Parameter(torch.ones(2))))]
    alone = Ranks(rank=0, world=1, device=CPU, mesh=cast(Any, None))
    optimizer = PolicyOptimizer(parts, config, alone, partial(learning_rate, config, 10))
    for parameter in parts[0].parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.ndim == 1 else torch.eye(2)
    optimizer.apply(1, optimizer.measure())
    assert [group["lr"] for each in optimizer.optimizers for group in each.param_groups] == [0.25, 0.25]
    grown = float(newton_schulz(torch.eye(2) / math.sqrt(2))[0, 0])
    assert float(parts[0].parameters[0].detach()[0, 0]) == pytest.approx(1 - 0.25 * grown, rel=1e-5)
    assert parts[0].parameters[1].tolist() == pytest.approx([0.75, 0.75], rel=1e-5)


def test_muon_goes_on_from_its_state():
    unbroken, broken = matrix(4, 3), matrix(4, 3)
    expected = steps(Muon([unbroken], lr=0.1), unbroken, range(4))
    first = Muon([broken], lr=0.1)
    steps(first, broken, range(2))
    second = Muon([broken], lr=0.9)
    second.load_state_dict(first.state_dict())
    assert torch.equal(steps(second, broken, range(2, 4)), expected)
