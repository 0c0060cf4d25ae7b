"""The tiny model: what is built, its tokenizer, its cache. The full warm start is measured elsewhere; here it takes a
few steps."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.paths import WORKLOAD
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.errors import UserError
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.model import tiny_architecture
from trainer.tiny.optimizer import OrthogonalMomentum
from trainer.tiny.tiny import build_tiny, default_cache_dir, tiny_digest
from trainer.tiny.training import Recipe, doubts, encode, warm_start

RANDOM = TinyModelConfig(target_accuracy=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(RANDOM, tmp_path_factory.mktemp("cache"))


def test_the_tokenizer_is_that_of_the_fixed_workload(tiny: Path):
    ours, theirs = AutoTokenizer.from_pretrained(tiny), AutoTokenizer.from_pretrained(WORKLOAD / "model")
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.pad_token_id, ours.eos_token_id, len(ours)) == (0, 1, 32)
    for text in ("12+34=", "99-07=", "a=b*c"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text


def test_sums_are_encoded_as_the_fixed_workload_does():
    with (WORKLOAD / "prompts.jsonl").open() as lines:
        rows = [json.loads(next(lines)) for _ in range(200)]
    pairs = np.array([int(row["prompt"][:2]) * 100 + int(row["prompt"][3:5]) for row in rows])
    ids = encode(pairs, pairs // 100 + pairs % 100)
    for row, encoded in zip(rows, ids.tolist(), strict=True):
        assert [token for token in encoded if token] == row["prompt_token_ids"] + row["answer_token_ids"]


def test_the_dense_model_has_the_shape_of_the_fixed_workloads(tiny: Path):
    ours, theirs = load_file(tiny / "model.safetensors"), load_file(WORKLOAD / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def test_a_seed_fixes_the_model_and_another_seed_changes_it(tiny: Path, tmp_path: Path):
    torch.rand(5)  # what was drawn before does not matter
    again, other = build_tiny(RANDOM, tmp_path), build_tiny(RANDOM.model_copy(update={"seed": 1}), tmp_path)
    assert again.name == tiny.name != other.name
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_building_leaves_the_callers_random_numbers_and_threads_alone(tmp_path: Path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    build_tiny(RANDOM, tmp_path)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_cached_model_is_not_built_again(tmp_path: Path):
    built = build_tiny(RANDOM, tmp_path)
    (built / "mark").touch()
    assert build_tiny(RANDOM, tmp_path) == built and (built / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [tiny_digest(RANDOM)]


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_every_variant_loads_as_a_hugging_face_model(tmp_path: Path, moe: bool, tied: bool):
    directory = build_tiny(TinyModelConfig(target_accuracy=0, moe=moe, tie_embeddings=tied), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM")
    assert ("lm_head.weight" in load_file(directory / "model.safetensors")) == (not tied)


def test_the_first_of_two_builders_wins_and_the_other_takes_its_model(tmp_path: Path):
    winners: list[Path] = []

    def meanwhile(_: str) -> None:
        if not winners:
            winners.append(build_tiny(RANDOM, tmp_path))
            (winners[0] / "first").touch()

    assert build_tiny(RANDOM, tmp_path, meanwhile) == winners[0]
    assert (winners[0] / "first").exists() and len(list(tmp_path.iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    class Interrupted(Exception):
        pass

    def interrupt(_: str) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        build_tiny(RANDOM, tmp_path, interrupt)
    assert not list(tmp_path.iterdir())


def test_a_warm_start_learns_and_says_what_it_reached():
    torch.manual_seed(0)
    lines: list[str] = []
    model = tiny_architecture(RANDOM)
    reached = warm_start(model, 0.002, 0, lines.append, Recipe(max_steps=60, batch=64))
    assert reached.sampled_accuracy >= 0.002
    assert len(lines) == reached.steps // 10 and lines[-1].startswith(
        f"warm start: step {reached.steps}, sampled accuracy 0.0"
    )


def test_the_labels_are_what_noisy_sums_are_on_average():
    rng = np.random.default_rng(0)
    wrong, digits_match = rng.random(400_000) < 0.5, rng.random((400_000, 2)) < 0.1
    right = ~wrong[:, None] | digits_match
    seen = [wrong.mean(), wrong[right[:, 0]].mean(), wrong[right.all(axis=1)].mean()]
    assert doubts(0.5)[:3] == pytest.approx(seen, abs=0.005)
    assert doubts(0.0) == [0.0] * 4


def test_a_target_out_of_reach_is_a_users_error():
    with pytest.raises(UserError, match=r"did not reach target_accuracy 0.9 in 2 steps"):
        warm_start(tiny_architecture(RANDOM), 0.9, 0, lambda _: None, Recipe(max_steps=2, check_steps=1, batch=8))


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (4, 96, 128)])
def test_an_orthogonalised_step_moves_all_directions_alike(shape: tuple[int, ...]):
    torch.manual_seed(0)
    parameter = torch.zeros(shape)
    parameter.grad = torch.randn(shape) * 10.0 ** torch.linspace(0, -1, shape[-1])
    OrthogonalMomentum([parameter]).step(0.1)
    values = torch.linalg.svdvals(parameter) / (0.1 * max(1.0, shape[-2] / shape[-1]) ** 0.5)
    low, high = values.min().item(), values.max().item()
    assert low > 0.3 and high < 1.3
    assert (parameter * parameter.grad).sum() < 0


def test_models_are_cached_in_the_users_cache_folder():
    assert default_cache_dir().parts[-2:] == ("concord", "tiny")
