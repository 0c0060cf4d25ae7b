"""QK-Clip: exact logits, heads that come down to the limit, models on which it would do nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.trainer_room import write_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollout.errors import ConcordError, UserError
from trainer.config.trainer import TrainerConfig
from trainer.model.loading import load_policy, meta_model
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import join_ranks, leave_ranks, reshard
from trainer.optim.qk_clip import QkClip, head_scales, largest_logits

IDS = torch.arange(24).reshape(2, 12) * 7 % 24


def llama(key_heads: int = 4, bias: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
        initializer_range=0.5,
        attention_bias=bias,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def recorded(model: PolicyModel, clip: QkClip, lengths: list[int] | None = None) -> None:
    with torch.no_grad(), clip.recording(lengths):
        model(IDS, torch.arange(4), IDS.flatten()[:4], 1.0)


def whole_logits(query: Tensor, key: Tensor) -> Tensor:
    """[B, heads, T, T], the causal half."""
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2) * 0.5
    return logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)


def test_scales_of_heads_follow_the_vector(golden: dict[str, Any]):
    vector = golden["V11_qkclip"]
    largest = torch.tensor(vector["S"], dtype=torch.float64)
    gammas = head_scales(largest, vector["tau"])
    assert gammas.tolist() == pytest.approx(vector["gamma"], rel=1e-12)
    assert gammas.sqrt().tolist() == pytest.approx(vector["mha_scale_Wq_Wk"], rel=1e-12)
    assert (largest * gammas).tolist() == pytest.approx(vector["logit_after"], rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 255, 256, 600])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_chunks_find_the_largest_logit_of_the_whole(tokens: int, key_heads: int):
    generator = torch.Generator().manual_seed(tokens)
    query, key = (
        torch.randn(2, 4, tokens, 3, generator=generator),
        torch.randn(2, key_heads, tokens, 3, generator=generator),
    )
    torch.testing.assert_close(largest_logits(query, key, 0.5), whole_logits(query, key).amax(dim=(0, 2, 3)))


def test_padding_and_the_future_are_not_asked():
    query, key = torch.ones(2, 1, 5, 1), torch.ones(2, 1, 5, 1)
    query[0, 0, 3:], key[0, 0, 3:], query[1, 0, 0], key[1, 0, 4] = 100.0, 100.0, 10.0, 7.0
    assert largest_logits(query, key, 1.0, [3, 5]).tolist() == [10.0]
    assert largest_logits(query, key, 1.0).tolist() == [10000.0]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_above_the_limit_come_down_to_it_and_others_keep_their_bits(key_heads: int, bias: bool):
    causal_lm = llama(key_heads, bias)
    model = PolicyModel(causal_lm, 8)
    recorded(model, first := QkClip(model, 1e9))
    before = torch.tensor(first.apply()["model.layers.0"])
    limit = float(before.sort().values[1:3].mean())
    queries, keys = (causal_lm.get_parameter(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qk")
    held_queries, held_keys = queries.detach().clone(), keys.detach().clone()
    clip = QkClip(model, limit)
    recorded(model, clip)
    clip.apply()
    recorded(model, clip)
    after = torch.tensor(clip.apply()["model.layers.0"])
    torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-5, atol=1e-6)
    changed = torch.ne(queries, held_queries).reshape(4, -1).any(dim=1)
    assert changed.tolist() == (before > limit).tolist()
    assert torch.equal(keys, held_keys) == (key_heads == 2), "shared keys are left alone"


def test_recording_changes_no_bit_of_the_result_and_ends():
    model = PolicyModel(llama(), 8)
    clip = QkClip(model)
    arguments = (IDS, torch.arange(4), IDS.flatten()[:4], 1.0)
    with torch.no_grad():
        plain = model(*arguments)
        with clip.recording():
            noted = model(*arguments)
        assert all(torch.equal(one, other) for one, other in zip(plain, noted, strict=True))
        clip.apply()
        model(*arguments)
    with pytest.raises(ConcordError, match="run a forward pass inside `recording`"):
        clip.apply()


def test_the_largest_of_several_passes_counts():
    model = PolicyModel(llama(), 8)
    clip = QkClip(model, 1e9)
    recorded(model, clip, [3, 3])
    few = clip.apply()
    recorded(model, clip, [12, 12])
    recorded(model, clip, [3, 3])
    both = clip.apply()
    recorded(model, clip)
    assert both == clip.apply()
    assert both != few


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[PolicyModel]:
    config = TrainerConfig()
    write_model(tmp_path / "model")
    llama().save_pretrained(tmp_path / "model")
    try:
        yield load_policy(tmp_path / "model", config, join_ranks(config, 0, f"file://{tmp_path / 'rendezvous'}"))[0]
    finally:
        leave_ranks()


def test_a_sharded_model_is_scaled_as_the_bare_one(sharded: PolicyModel):
    bare = PolicyModel(llama(), 8)
    seen = []
    for model in (bare, sharded):
        clip = QkClip(model, 0.5)
        for _ in range(2):
            recorded(model, clip)
            reshard(model)
            seen.append(list(clip.apply().values()))
    torch.testing.assert_close(torch.tensor(seen[:2]), torch.tensor(seen[2:]))
    assert float(torch.tensor(seen[1]).max()) < float(torch.tensor(seen[0]).max())


def test_a_model_with_qk_norm_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(UserError, match=r"QK-norm \(q_norm\): it undoes every scaling"):
        QkClip(PolicyModel(meta_model(write_model(tmp_path / "model")), 8))


def test_a_limit_that_no_logit_could_meet_is_refused():
    with pytest.raises(UserError, match="got max_logit = 0, expected a logit above 0; set it to 100"):
        QkClip(PolicyModel(llama(), 8), 0.0)
