"""The optimizer behind its clips: what reaches AdamW, what the report says, and which steps teach the clip."""

import math
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from trainer.config.trainer import LayerClipConfig, OptimizerConfig
from trainer.model.blocks import Block, block_norms, gradients_of
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import PolicyOptimizer, learning_rate

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), mesh=cast(Any, None))
CLIP = LayerClipConfig(alpha=2.0, warmup_steps=1, eps=0.0)


class Recording(PolicyOptimizer):
    """Remembers the gradients that its clips let through."""

    seen: tuple[float, ...] = ()

    def _scale(self, gradients: Any, norms: Any, scales: Any) -> None:
        super()._scale(gradients, norms, scales)
        self.seen = block_norms(gradients, ALONE.device)


def optimizer_of(**config: Any) -> Recording:
    blocks = [
        Block(name=name, parameters=(nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))))
        for name in ("one", "two")
    ]
    settings = OptimizerConfig.model_validate({"clip": CLIP, "max_grad_norm": 1e9, **config})
    return Recording(blocks, settings, ALONE, partial(learning_rate, settings, 10))


def weights(optimizer: PolicyOptimizer) -> list[Tensor]:
    return [parameter.detach().clone() for block in optimizer._blocks for parameter in block.parameters]


def give(optimizer: PolicyOptimizer, *norms: float) -> None:
    """Gradients with these norms by block."""
    for block, norm in zip(optimizer._blocks, norms, strict=True):
        elements = sum(parameter.numel() for parameter in block.parameters)
        for parameter in block.parameters:
            parameter.grad = torch.full_like(parameter, norm / math.sqrt(elements))
    assert block_norms(gradients_of(optimizer._blocks), ALONE.device) == pytest.approx(norms, nan_ok=True)


def test_an_exploding_block_is_scaled_and_the_others_keep_their_gradient():
    optimizer = optimizer_of()
    give(optimizer, 1.0, 1.0)
    first = optimizer.apply(1, optimizer.measure())
    assert first.block_scales == (("one", 1.0), ("two", 1.0))
    assert first.block_thresholds == (("one", None), ("two", None))
    give(optimizer, 1.5, 1000.0)
    report = optimizer.apply(2, optimizer.measure())
    assert report.block_norms == (("one", pytest.approx(1.5)), ("two", pytest.approx(1000.0)))
    assert report.block_scales == (("one", 1.0), ("two", pytest.approx(0.002)))
    assert report.block_thresholds == (("one", pytest.approx(2.0)), ("two", pytest.approx(2.0)))
    assert report.grad_norm == pytest.approx(math.hypot(1.5, 1000.0))
    assert optimizer.seen == pytest.approx((1.5, 2.0))


def test_the_global_clip_acts_on_what_the_clip_by_block_leaves():
    optimizer = optimizer_of(max_grad_norm=1.25)
    give(optimizer, 1.5, 2.0)
    optimizer.apply(1, optimizer.measure())
    assert optimizer.seen == pytest.approx((0.75, 1.0))
    give(optimizer, 3.0, 1000.0)
    report = optimizer.apply(2, optimizer.measure())
    assert report.block_scales == (("one", 1.0), ("two", pytest.approx(0.004)))
    assert optimizer.seen == pytest.approx((0.75, 1.0))


def test_the_global_clip_alone_scales_all_blocks_alike():
    optimizer = optimizer_of(max_grad_norm=2.5, clip={"type": "global"})
    give(optimizer, 3.0, 4.0)
    report = optimizer.apply(1, optimizer.measure())
    assert report.grad_norm == pytest.approx(5.0)
    assert report.block_scales == (("one", 1.0), ("two", 1.0))
    assert report.block_thresholds == (("one", None), ("two", None))
    assert optimizer.seen == pytest.approx((1.5, 2.0))


def test_a_gradient_below_every_limit_keeps_its_bits():
    optimizer = optimizer_of()
    give(optimizer, 0.3, 0.7)
    before = [gradient.clone() for block in gradients_of(optimizer._blocks) for gradient in block]
    optimizer._scale(gradients_of(optimizer._blocks), (0.3, 0.7), (1.0, 1.0))
    after = [gradient for block in gradients_of(optimizer._blocks) for gradient in block]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(("norm", "apply"), [(math.nan, True), (math.inf, True), (7.0, False)])
def test_a_step_that_is_not_applied_moves_no_weight_and_teaches_the_clip_nothing(norm: float, apply: bool):
    optimizer = optimizer_of()
    give(optimizer, 1.0, 1.0)
    optimizer.apply(1, optimizer.measure())
    state, held = optimizer.clip.state_dict(), weights(optimizer)
    give(optimizer, 1.0, norm)
    norms = optimizer.measure()
    report = optimizer.apply(2, norms) if apply else optimizer.drop(2, norms)
    assert report.block_norms[0] == ("one", pytest.approx(1.0))
    assert report.block_scales == report.block_thresholds == ()
    assert bool(report.skipped) == apply
    assert optimizer.clip.state_dict() == state
    assert all(torch.equal(one, other) for one, other in zip(held, weights(optimizer), strict=True))
    assert gradients_of(optimizer._blocks) == [[], []]
