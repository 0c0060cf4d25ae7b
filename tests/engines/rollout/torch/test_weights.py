"""Weights that do not fit are refused by name, and an engine that holds a mixture samples no more. Routing and
directories."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainer.torch_models import (
    Reference,
    by_sample,
    core_of,
    manifest_of,
    request_of,
    run_dry,
    save_random_model,
    tokens_of,
)

from rollout.errors import EngineError, UserError
from rollout.types.generation import PauseMode, SamplingParams


def altered(source: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a model directory with tensors put in, replaced or (None) left out."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors") | {
        name: tensor for name, tensor in change.items() if tensor is not None
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in change or change[name] is not None},
        target / "model.safetensors",
    )
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lack 1 of 36 parameters: model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, "model.layers.9.mlp.up_proj.weight has no place"),
        ({"model.norm.weight": torch.zeros(95)}, r"model.norm.weight has shape \(95,\); the model has \(96,\)"),
        ({"lm_head.weight": torch.zeros(32, 96)}, "another name of the same parameter, with other values"),
    ],
)
def test_weights_that_do_not_fit_break_the_engine_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
):
    base = save_random_model(tmp_path / "base", 0)
    core = core_of(base)
    core.submit(request_of("a", [3, 4]))
    core.step()
    core.pause(PauseMode.RECOMPUTE)
    with pytest.raises(EngineError, match=message):
        core.apply(manifest_of(altered(base, tmp_path / "bad", change), 1))
    core.resume()
    assert not core.can_step
    with pytest.raises(EngineError, match="the engine is broken"):
        core.submit(request_of("b", [3, 4]))


def test_a_tied_head_may_arrive_under_both_names_when_they_agree(tmp_path: Path):
    base = save_random_model(tmp_path / "base", 0)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    core = core_of(altered(base, tmp_path / "both", {"lm_head.weight": embedding.clone()}))
    ids = np.array([3, 4, 5, 6], dtype=np.int32)
    assert np.abs(core.score(ids) - Reference(base).logprobs([3], ids[1:])).max() < 5e-5


def test_an_untied_head_must_arrive(tmp_path: Path):
    base = save_random_model(tmp_path / "base", 0, tied=False)
    with pytest.raises(EngineError, match=r"lack 1 of 36 parameters: lm_head.weight"):
        core_of(altered(base, tmp_path / "bad", {"lm_head.weight": None}))


def test_one_expert_that_does_not_arrive_is_missed(tmp_path: Path):
    base = save_random_model(tmp_path / "base", 0, moe=True)
    with pytest.raises(EngineError, match=r"lack 1 of \d+ parameters: model.layers.2.mlp.experts.gate_up_proj"):
        core_of(altered(base, tmp_path / "bad", {"model.layers.2.mlp.experts.3.up_proj.weight": None}))


def test_weights_that_are_not_finite_do_not_start(tmp_path: Path):
    base = save_random_model(tmp_path / "base", 0)
    with pytest.raises(UserError, match="not finite"):
        core_of(altered(base, tmp_path / "bad", {"model.norm.weight": torch.full((96,), torch.nan)}))


def test_a_directory_without_a_model_is_a_users_error(tmp_path: Path):
    base = save_random_model(tmp_path / "base", 0)
    manifest = manifest_of(base, 0)
    (base / "config.json").unlink()
    with pytest.raises(UserError, match="expected a Hugging Face directory"):
        core_of(Path(manifest.location))


def test_a_context_beyond_the_models_own_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="max_model_len = 513; the model was made for 512"):
        core_of(save_random_model(tmp_path / "base", 0), max_model_len=513)


def test_routing_of_a_dense_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="not a mixture of experts"):
        core_of(save_random_model(tmp_path / "base", 0), return_routing=True)


def test_routing_names_the_experts_of_every_input_token(tmp_path: Path):
    directory = save_random_model(tmp_path / "moe", 0, moe=True)
    core, reference = core_of(directory, return_routing=True), Reference(directory)
    prompts = {"a": [3, 4, 12, 5, 6, 14], "b": [7, 2, 12]}
    for name, prompt in prompts.items():
        core.submit(request_of(name, prompt, sampling=SamplingParams(max_new_tokens=6, ignore_eos=True)))
    done = by_sample(run_dry(core))
    assert len(done) == 4
    for (name, _), chunks in done.items():
        ids = torch.tensor([prompts[name] + tokens_of(chunks).tolist()])
        with torch.no_grad():
            logits = reference.model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
        expected = torch.stack([block.topk(2, dim=-1).indices for block in logits], dim=1).numpy()[:-1]
        trace = chunks[-1].routing
        assert trace is not None and trace.covered.all()
        assert trace.experts.dtype == np.uint8
        assert np.array_equal(np.sort(trace.experts, axis=-1), np.sort(expected, axis=-1))


def test_routing_noted_before_an_update_stays_that_of_the_old_weights(tmp_path: Path):
    directories = [save_random_model(tmp_path / str(seed), seed, moe=True) for seed in (0, 1)]
    traces: list[np.ndarray] = []
    for update in (False, True):
        core = core_of(directories[0], return_routing=True)
        core.submit(request_of("a", [3, 4, 12], seeds=(4,), sampling=SamplingParams(max_new_tokens=8, ignore_eos=True)))
        for _ in range(4):
            core.step()
        if update:
            core.pause(PauseMode.RECOMPUTE)
            core.apply(manifest_of(directories[1], 1))
            core.resume()
        trace = by_sample(run_dry(core))["a", 0][-1].routing
        assert trace is not None
        traces.append(trace.experts)
    inputs_before = 3 + 3
    assert np.array_equal(traces[0][:inputs_before], traces[1][:inputs_before])
    assert traces[1].shape == (10, 3, 2) and not np.array_equal(traces[0], traces[1])
