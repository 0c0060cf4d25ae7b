"""Probes and QK-Clip in a trainer's step: their values are those of the plain model, whatever the ranks and
micro-batches; other results stay as they are."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trainer import trainer_scenarios as scenarios
from support.trainer import watch_scenarios
from support.trainer.trainer_room import run_ranks, stored, write_model
from support.trainer.watch_scenarios import LIMIT
from transformers import AutoModelForCausalLM

from rollout.errors import UserError
from rollout.types.codec import decode
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import TrainerConfig
from trainer.model.policy_model import PolicyModel
from trainer.optim.qk_clip import QkClip

pytestmark = pytest.mark.timeout(240)
BLOCKS = ("model.layers.0", "model.layers.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank did and what two did with the same batch."""
    folder = tmp_path_factory.mktemp("watch")
    write_model(folder / "moe", moe=True)
    for key_heads in (4, 2):
        watch_scenarios.write_llama(folder / f"llama-{key_heads}", key_heads)
    watch_scenarios.all_together(0, 1, folder)
    run_ranks(2, watch_scenarios.all_together, folder, deadline_s=200)
    return folder


def report(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def rows() -> list[torch.Tensor]:
    """[1, T - 1] what the model reads of each trajectory of the batch."""
    groups = [decode(payload) for payload in stored(seed=1).payloads]
    return [torch.tensor(t.token_ids[None, :-1], dtype=torch.int64) for group in groups for t in group.trajectories]


def forward_values(directory: Path) -> dict[tuple[str, str], float]:
    """The probes of the forward pass, from the library's own model and one row at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    outputs: dict[str, list[np.ndarray[Any, Any]]] = defaultdict(list)
    chosen: dict[str, list[np.ndarray[Any, Any]]] = defaultdict(list)
    for name, block in zip(BLOCKS, model.model.layers, strict=True):
        block.register_forward_hook(lambda _m, _a, out, name=name: outputs[name].append(out.double().numpy().ravel()))
        block.mlp.gate.register_forward_hook(lambda _m, _a, out, name=name: chosen[name].append(out[2].numpy().ravel()))
    with torch.no_grad():
        for ids in rows():
            model(input_ids=ids, use_cache=False)
    values: dict[tuple[str, str], float] = {}
    for name in BLOCKS:
        square = np.concatenate(outputs[name]) ** 2
        load = np.bincount(np.concatenate(chosen[name]), minlength=12)
        share = load[load > 0] / load.sum()
        values["activation_rms", name] = square.mean() ** 0.5
        values["activation_kurtosis", name] = (square**2).mean() / square.mean() ** 2
        values["router_load_max", name] = load.max() / load.mean()
        values["router_load_entropy", name] = -(share * np.log(share)).sum()
    return values


def update_ratios(before: Path, after: Path) -> dict[tuple[str, str], float]:
    squares: dict[str, np.ndarray[Any, Any]] = defaultdict(lambda: np.zeros(2))
    old, new = scenarios.tensors(before), scenarios.tensors(after)
    assert old.keys() == new.keys()
    for name, value in new.items():
        block = next((one for one in BLOCKS if name.startswith(one + ".")), "embeddings" if "embed" in name else "head")
        squares[block] += (
            np.square(value - old[name].astype(np.float64)).sum(),
            np.square(value.astype(np.float64)).sum(),
        )
    return {("update_ratio", block): (change / weight) ** 0.5 for block, (change, weight) in squares.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_probes_are_those_of_the_plain_model_on_any_ranks_and_micro_batches(folder: Path, world: int):
    measured = {(probe, block): value for probe, block, value in report(folder, f"probed-w{world}")["probes"]}
    expected = forward_values(folder / "moe") | update_ratios(folder / "moe", folder / f"probed-w{world}")
    assert measured == pytest.approx(expected, rel=2e-4)


def test_a_step_with_probes_moves_the_weights_as_one_without(folder: Path):
    config = {"micro_batch_tokens": scenarios.SMALL}
    watch_scenarios.run_step(folder, "moe", "unprobed", 1, 0, config)
    assert report(folder, "unprobed")["probes"] == []
    probed, plain = scenarios.tensors(folder / "probed-w1"), scenarios.tensors(folder / "unprobed")
    assert all(np.array_equal(value, probed[name]) for name, value in plain.items())


def largest_logits(directory: Path) -> dict[str, list[float]]:
    """Of every head over the whole batch, from the library's own model and one row at a time."""
    model = PolicyModel(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa"), 64
    )
    clip = QkClip(model, 1e9)
    with torch.no_grad(), clip.recording():
        for ids in rows():
            model(ids, torch.arange(1), ids[0, :1], 1.0)
    return {block: list(heads) for block, heads in clip.apply().items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_published_weights_are_the_steps_with_heads_above_the_limit_scaled_down(
    folder: Path, key_heads: int, world: int
):
    name = f"llama-{key_heads}"
    logits = report(folder, f"{name}-clipped-w{world}")["logits"]
    for block, heads in largest_logits(folder / name).items():
        assert logits[block] == pytest.approx(heads, rel=1e-5)
    scales = {block: np.minimum(1.0, LIMIT / np.array(heads)) for block, heads in logits.items()}
    assert all(scale.min() < 1 == scale.max() for scale in scales.values())
    clipped, plain = (
        scenarios.tensors(folder / f"{name}-clipped-w{world}"),
        scenarios.tensors(folder / f"{name}-plain-w{world}"),
    )
    for path, value in plain.items():
        block = path.rpartition(".self_attn")[0]
        own_keys = key_heads == 4
        if ".q_proj" in path or (own_keys and ".k_proj" in path):
            gamma = scales[block] ** 0.5 if own_keys else scales[block]
            np.testing.assert_allclose(clipped[path], value * gamma.repeat(4)[:, None], rtol=1e-5, err_msg=path)
        else:
            assert np.array_equal(clipped[path], value), path


def test_a_step_that_is_not_applied_clips_no_head_and_leaves_nothing_behind(folder: Path):
    name, config = "llama-4", {"optimizer": {"qk_clip": {"enabled": True, "threshold": LIMIT}}}
    trainer = scenarios.build(folder, "not-applied", 0, 1, name, config)
    try:
        groups = stored(seed=1, old_logprob=float("-inf"))
        skipped = trainer.step(groups, scenarios.StepRequest(policy=PolicyVersion(1, 1), oldest_version=0))
        assert skipped.skipped and skipped.attention_logits == ()
        trainer.publish(PolicyVersion(1, 1), folder / "not-applied")
        before, after = scenarios.tensors(folder / name), scenarios.tensors(folder / "not-applied")
        assert all(np.array_equal(value, after[path]) for path, value in before.items())
        assert dict(scenarios.step(trainer, 1).attention_logits).keys() == set(BLOCKS)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"optimizer": {"qk_clip": {"enabled": True}}},
            r"QK-norm \(q_norm\).*set trainer.optimizer.qk_clip.enabled = false",
        ),
        ({"probes": {"router_load": True}}, "is not a mixture of experts; set it to false"),
    ],
)
def test_what_the_model_does_not_have_is_refused_at_load(tmp_path: Path, config: dict[str, Any], message: str):
    write_model(tmp_path / "dense")
    with pytest.raises(UserError, match=message):
        scenarios.build(tmp_path, "refused", config=config)


@pytest.mark.parametrize("asked", [{"probes": {"activations": True}}, {"optimizer": {"qk_clip": {"enabled": True}}}])
def test_the_scripted_trainer_has_no_model_to_watch(asked: dict[str, Any]):
    with pytest.raises(ValueError, match=r'set trainer\.type = "fsdp" or leave it out'):
        TrainerConfig.model_validate({"type": "scripted", **asked})
