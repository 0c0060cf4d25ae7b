"""Named blocks of a model, and norms by block."""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.trainer_room import write_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rollout.errors import UserError
from trainer.config.trainer import TrainerConfig
from trainer.model.blocks import EMBEDDINGS, HEAD, TIED, Block, block_norms, gradients_of, named_blocks
from trainer.model.loading import load_policy, meta_model
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import join_ranks, leave_ranks

CPU = torch.device("cpu")


def meta_policy(folder: Path, **changes: Any) -> PolicyModel:
    return PolicyModel(meta_model(write_model(folder / "model", **changes)), 8)


def paths(model: PolicyModel, blocks: tuple[Block, ...]) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in model.causal_lm.named_parameters()}
    return {block.name: [names[id(parameter)] for parameter in block.parameters] for block in blocks}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Path, TrainerConfig]]:
    """A process group of one rank, and its config."""
    yield tmp_path, TrainerConfig()
    leave_ranks()


@pytest.mark.parametrize("moe", [False, True])
def test_blocks_are_the_layers_in_order_between_embeddings_and_head(tmp_path: Path, moe: bool):
    model = meta_policy(tmp_path, moe=moe, tie_word_embeddings=False)
    found = paths(model, named_blocks(model))
    assert list(found) == [EMBEDDINGS, "model.layers.0", "model.layers.1", HEAD]
    assert found[EMBEDDINGS] == ["model.embed_tokens.weight"]
    assert found[HEAD] == ["model.norm.weight", "lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in found["model.layers.1"])
    assert sorted(chain.from_iterable(found.values())) == sorted(name for name, _ in model.causal_lm.named_parameters())


def test_tied_embeddings_and_head_are_one_block(tmp_path: Path):
    model = meta_policy(tmp_path, tie_word_embeddings=True)
    found = paths(model, named_blocks(model))
    assert list(found) == [TIED, "model.layers.0", "model.layers.1"]
    assert found[TIED] == ["model.embed_tokens.weight", "model.norm.weight"]


def test_position_embeddings_are_embeddings():
    with torch.device("meta"):
        model = PolicyModel(
            GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=5, tie_word_embeddings=False)), 8
        )
    found = paths(model, named_blocks(model))
    assert list(found) == [EMBEDDINGS, "transformer.h.0", HEAD]
    assert found[EMBEDDINGS] == ["transformer.wte.weight", "transformer.wpe.weight"]


def test_parameters_that_take_no_gradient_are_in_no_block(tmp_path: Path):
    model = meta_policy(tmp_path, tie_word_embeddings=False)
    model.causal_lm.get_submodule("model.layers.0").requires_grad_(False)
    model.causal_lm.get_submodule("lm_head").requires_grad_(False)
    found = paths(model, named_blocks(model))
    assert list(found) == [EMBEDDINGS, "model.layers.1", HEAD]
    assert found[HEAD] == ["model.norm.weight"]


def test_a_model_without_named_blocks_is_refused():
    with pytest.raises(UserError, match=r"names no transformer blocks .* use another architecture"):
        named_blocks(PolicyModel(nn.Linear(2, 2), 8))


def test_a_sharded_model_has_the_blocks_of_the_bare_one(alone: tuple[Path, TrainerConfig]):
    folder, config = alone
    bare = meta_policy(folder, tie_word_embeddings=False)
    sharded, _ = load_policy(folder / "model", config, join_ranks(config, 0, f"file://{folder / 'rendezvous'}"))
    assert paths(sharded, named_blocks(sharded)) == paths(bare, named_blocks(bare))


def test_norms_are_those_of_each_blocks_gradients_together():
    generator = torch.Generator().manual_seed(1)
    blocks = [
        Block(name=str(size), parameters=tuple(nn.Parameter(torch.zeros(size, part)) for part in (1, 3)))
        for size in (2, 5)
    ]
    for block in blocks:
        for parameter in block.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    blocks[1].parameters[0].grad = None
    wanted = [math.sqrt(sum(float(g.double().square().sum()) for g in gradients)) for gradients in gradients_of(blocks)]
    assert block_norms(gradients_of(blocks), CPU) == pytest.approx(wanted, rel=1e-6)


def test_a_block_without_a_gradient_has_norm_zero_and_a_broken_one_spoils_no_other():
    assert block_norms([[], []], CPU) == (0.0, 0.0)
    norms = block_norms([[torch.tensor([3.0, 4.0])], [], [torch.tensor([math.nan])], [torch.tensor([math.inf])]], CPU)
    assert norms[:2] == (5.0, 0.0)
    assert not any(math.isfinite(norm) for norm in norms[2:])
