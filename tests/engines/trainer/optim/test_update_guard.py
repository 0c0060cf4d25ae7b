"""An update that could leave a parameter that is not finite is refused before it is applied; one that is let through
leaves none."""

import math
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from trainer.config.trainer import OptimizerConfig
from trainer.model.blocks import Block
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import OptimizerReport, PolicyOptimizer, learning_rate

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), mesh=cast(Any, None))
ADAMW: dict[str, Any] = {"weight_decay": 0.1}
MUON: dict[str, Any] = {"type": "muon", "weight_decay": 0.1}


def optimizer_of(parameters: float = 1.0, **config: Any) -> tuple[PolicyOptimizer, list[nn.Parameter]]:
    held = [nn.Parameter(torch.full(shape, parameters)) for shape in ((4, 6), (3,))]
    settings = OptimizerConfig.model_validate(config)
    blocks = [Block(name="model.layers.0", parameters=tuple(held))]
    return PolicyOptimizer(blocks, settings, ALONE, partial(learning_rate, settings, 10)), held


def take(optimizer: PolicyOptimizer, held: list[nn.Parameter], gradient: float = 0.5) -> OptimizerReport:
    for parameter in held:
        parameter.grad = torch.full_like(parameter, gradient)
    return optimizer.apply(1, optimizer.measure())


def finite(held: list[nn.Parameter]) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in held)


@pytest.mark.parametrize("kind", [ADAMW, MUON])
def test_ordinary_updates_are_let_through(kind: dict[str, Any]):
    for parameters, gradient, rate in ((1.0, 0.5, 3e-4), (1e6, 1e6, 10.0), (0.0, 1e-30, 1e-9)):
        optimizer, held = optimizer_of(parameters, learning_rate=rate, **kind)
        assert take(optimizer, held, gradient).skipped == "" and finite(held)


@pytest.mark.parametrize("kind", [ADAMW, MUON])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_parameter_or_a_moment_that_is_not_finite_stops_the_update(kind: dict[str, Any], value: float):
    optimizer, held = optimizer_of(**kind)
    take(optimizer, held)
    moved = [parameter.detach().clone() for parameter in held]
    for one in optimizer.optimizers:
        for state in one.state.values():
            for name in ("exp_avg", "exp_avg_sq", "momentum"):
                if name not in state:
                    continue
                kept = state[name].clone()
                state[name].view(-1)[1] = value
                assert take(optimizer, held).skipped.startswith("non-finite optimizer state")
                state[name].copy_(kept)
    for before, parameter in zip(moved, held, strict=True):
        torch.testing.assert_close(parameter.detach(), before, rtol=0, atol=0)
    with torch.no_grad():
        held[0][1, 2] = value
    assert take(optimizer, held).skipped.startswith("non-finite parameters")
    with torch.no_grad():
        held[0][1, 2] = moved[0][1, 2]
    assert take(optimizer, held).skipped == ""


@pytest.mark.parametrize("kind", [ADAMW, MUON])
def test_a_learning_rate_that_overflows_moves_nothing_and_teaches_no_moment(kind: dict[str, Any]):
    optimizer, held = optimizer_of(learning_rate=1e38, **kind)
    report = take(optimizer, held)
    assert report.skipped.startswith("non-finite update") and report.learning_rate == 1e38
    assert all(bool((parameter == 1.0).all()) and parameter.grad is None for parameter in held)
    assert not any(one.state for one in optimizer.optimizers)


@pytest.mark.parametrize("kind", [ADAMW, MUON])
def test_whatever_is_let_through_leaves_every_parameter_finite(kind: dict[str, Any]):
    rng, let_through, stopped = np.random.default_rng(0), 0, 0
    for _ in range(300):
        rate, parameters, gradient, limit, epsilon = (
            10.0 ** rng.uniform(low, high) for low, high in ((-6, 38), (-3, 18), (-20, 18), (-3, 18), (-30, 0))
        )
        optimizer, held = optimizer_of(parameters, learning_rate=rate, max_grad_norm=limit, epsilon=epsilon, **kind)
        for _ in range(3):
            skipped = take(optimizer, held, float(gradient)).skipped
            let_through, stopped = let_through + (not skipped), stopped + bool(skipped)
            assert finite(held), (rate, parameters, gradient, limit, epsilon)
    assert let_through > 100 and stopped > 100
