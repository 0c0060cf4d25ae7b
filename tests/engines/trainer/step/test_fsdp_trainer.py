"""One rank on real models: what it computes, what it refuses, what it publishes."""

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.builders import build_dispatch, build_group, build_stored
from support.published import verify_directory
from support.trainer import trainer_scenarios as scenarios
from support.trainer.trainer_room import VOCABULARY, stored, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from rollout.errors import UserError
from rollout.published.manifest import read_manifest
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.config.trainer import GrpoConfig, OptimizerConfig, ScheduleConfig
from trainer.optim.optimizer import learning_rate
from trainer.step.policy_trainer import PolicyTrainer
from trainer.types.histograms import LOG_RATIO_EDGES
from trainer.types.step import StepRequest

VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "moe": {"moe": True, "tie_word_embeddings": False},
}


@contextmanager
def trainer_of(folder: Path, model: str = "dense", **config: object) -> Generator[PolicyTrainer, None, None]:
    if not (folder / model).exists():
        write_model(folder / model, **VARIANTS.get(model, {}))
    number = len(list(folder.glob("rendezvous-*")))
    trainer = scenarios.build(folder, f"{model}-{number}", model=model, config=config)
    try:
        yield trainer
    finally:
        trainer.close()


def reference_logprobs(
    directory: Path, ids: np.ndarray[Any, Any], dtype: torch.dtype = torch.float32
) -> np.ndarray[Any, Any]:
    """[T - 1] by transformers' own loading and logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    rows = torch.tensor(ids, dtype=torch.int64)[None]
    with torch.no_grad():
        logits = model(rows).logits.float()
    return torch.log_softmax(logits, dim=-1)[0, :-1].gather(1, rows[0, 1:, None]).squeeze(1).numpy()


IDS = np.random.default_rng(0).integers(VOCABULARY, size=19, dtype=np.int32)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_scores_are_those_of_transformers(tmp_path: Path, variant: str):
    with trainer_of(tmp_path, variant) as trainer:
        np.testing.assert_allclose(
            trainer.score(IDS), reference_logprobs(tmp_path / variant, IDS), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_publication_is_a_complete_model_with_every_trained_parameter(tmp_path: Path, variant: str):
    with trainer_of(tmp_path, variant) as trainer:
        scenarios.step(trainer, 1)
        manifest = trainer.publish(PolicyVersion(1, 1), tmp_path / "w" / "e1-v1")
        scores = trainer.score(IDS)
    assert manifest is not None
    published = tmp_path / "w" / "e1-v1"
    verify_directory(manifest)
    assert read_manifest(published).digest == manifest.digest
    np.testing.assert_allclose(reference_logprobs(published, IDS), scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        reference_logprobs(published, manifest.canary.token_ids), manifest.canary.logprobs, rtol=1e-5, atol=1e-5
    )
    assert AutoTokenizer.from_pretrained(published).convert_tokens_to_ids("b") == 1
    assert scenarios.tensors(published).keys() == scenarios.tensors(tmp_path / variant).keys(), (
        "names are those of the model directory"
    )
    assert ("lm_head.weight" in {entry.name for entry in manifest.tensors}) == (variant != "tied")
    assert len(list(published.glob("model-*.safetensors"))) > 1, "the shard size cuts this model"
    assert not list((tmp_path / "w").glob(".partial*"))


def test_no_published_file_is_larger_than_a_shard_unless_one_tensor_is(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        manifest = trainer.publish(PolicyVersion(1, 0), tmp_path / "w")
    assert manifest is not None
    for path in (tmp_path / "w").glob("*.safetensors"):
        sizes = [tensor.numel() * tensor.element_size() for tensor in load_file(path).values()]
        assert sum(sizes) <= 4000 or len(sizes) == 1
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == manifest.num_bytes


def test_a_second_publication_carries_the_same_side_files(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        for version in (0, 1):
            trainer.publish(PolicyVersion(1, version), tmp_path / f"w{version}")
            scenarios.step(trainer, version + 1)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "w0" / name).read_bytes() == (tmp_path / "w1" / name).read_bytes()
    assert read_manifest(tmp_path / "w0").digest != read_manifest(tmp_path / "w1").digest


def test_bfloat16_publishes_bfloat16_and_trains_float32_masters(tmp_path: Path):
    with trainer_of(tmp_path, dtype="bfloat16") as trainer:
        before = trainer.publish(PolicyVersion(1, 0), tmp_path / "w0")
        report = scenarios.step(trainer, 1)
        after = trainer.publish(PolicyVersion(1, 1), tmp_path / "w1")
        assert {parameter.dtype for parameter in trainer._model.parameters()} == {torch.float32}
    assert before is not None
    assert after is not None
    assert not report.skipped
    assert {entry.dtype for entry in before.tensors} == {"BF16"}
    assert before.digest != after.digest
    assert json.loads((tmp_path / "w1" / "config.json").read_text())["dtype"] == "bfloat16"
    np.testing.assert_allclose(
        reference_logprobs(tmp_path / "w1", after.canary.token_ids, torch.bfloat16), after.canary.logprobs, atol=0.1
    )


def test_the_same_inputs_give_the_same_bits(tmp_path: Path):
    digests: list[str] = []
    numbers: list[dict[str, Any]] = []
    for run in range(2):
        with trainer_of(tmp_path, micro_batch_tokens=scenarios.SMALL) as trainer:
            reports = [scenarios.step(trainer, number) for number in (1, 2)]
            manifest = trainer.publish(PolicyVersion(1, 2), tmp_path / f"w-{run}")
        assert manifest is not None
        digests.append(manifest.digest)
        numbers.extend(asdict(replace(report, phases_s=())) for report in reports)
    assert digests[0] == digests[1]
    assert numbers[:2] == numbers[2:]


def test_scoring_and_publishing_between_steps_change_no_bit(tmp_path: Path):
    digests: list[str] = []
    for busy in (False, True):
        with trainer_of(tmp_path) as trainer:
            for number in (1, 2):
                scenarios.step(trainer, number)
                if busy:
                    trainer.score(IDS)
                    trainer.publish(PolicyVersion(1, number), tmp_path / f"extra-{number}")
            manifest = trainer.publish(PolicyVersion(1, 3), tmp_path / f"w-{busy}")
        assert manifest is not None
        digests.append(manifest.digest)
    assert digests[0] == digests[1]


def test_activation_checkpointing_and_micro_batches_change_only_rounding(tmp_path: Path):
    reports = []
    configs: tuple[dict[str, object], ...] = ({}, {"activation_checkpointing": True}, {"micro_batch_tokens": 1})
    for config in configs:
        with trainer_of(tmp_path, "dense", **config) as trainer:
            reports.append(scenarios.step(trainer, 1))
    for report in reports[1:]:
        np.testing.assert_allclose([report.loss, report.grad_norm], [reports[0].loss, reports[0].grad_norm], rtol=1e-5)
    assert reports[2].num_micro_batches == 9


def test_on_policy_the_ratio_is_one(tmp_path: Path):
    """The log-probs of the loss are those of `score`, at the temperature of the samples: fed back as the old ones they
    leave no difference."""
    with trainer_of(tmp_path) as trainer:
        group = build_group(
            build_dispatch(0), (1.0, 0.0, 0.5), spans=((PolicyVersion(1, 0), 9),), vocab_size=VOCABULARY
        )
        for trajectory in group.trajectories:
            own = np.concatenate(([0.0], trainer.score(trajectory.token_ids))).astype(np.float32)
            trajectory.rollout_logprobs[:] = np.where(trajectory.sampled, own, 0)
        report = trainer.step(build_stored([group]), StepRequest(policy=PolicyVersion(1, 1), oldest_version=0))
    assert report.mean_abs_logprob_difference < 1e-6
    assert report.approx_kl < 1e-9
    assert report.clip_fraction_low == report.clip_fraction_high == 0.0
    assert report.loss == pytest.approx(0.0, abs=1e-6)  # advantages of a group sum to 0, lengths are alike
    assert report.grad_norm > 1e-3
    ((part, ratios),) = report.log_ratios
    assert (part, sum(ratios.counts)) == ("total", report.num_tokens)
    assert ratios.counts[len(LOG_RATIO_EDGES) // 2] == report.num_tokens, "all between 1 / 1.001 and 1.001"


def test_logprobs_are_taken_at_the_temperature_of_the_samples(tmp_path: Path):
    group = build_group(build_dispatch(0), (1.0, 0.0), spans=((PolicyVersion(1, 0), 9),), vocab_size=VOCABULARY)
    model = write_model(tmp_path / "dense")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trajectories = []
    for trajectory in group.trajectories:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)
        with torch.no_grad():
            cooled = (
                torch.log_softmax(network(ids[None]).logits[0, :-1] / 0.5, dim=-1)
                .gather(1, ids[1:, None])
                .squeeze(1)
                .numpy()
            )
        old = np.where(trajectory.sampled, np.concatenate(([0.0], cooled)), 0).astype(np.float32)
        trajectories.append(replace(trajectory, rollout_logprobs=old, tag=replace(trajectory.tag, temperature=0.5)))
    with trainer_of(tmp_path) as trainer:
        report = trainer.step(
            build_stored([replace(group, trajectories=tuple(trajectories))]),
            StepRequest(policy=PolicyVersion(1, 1), oldest_version=0),
        )
    assert report.mean_abs_logprob_difference < 1e-5


def test_a_report_counts_terms_masks_and_clips(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        report = trainer.step(
            stored(lengths=(4, 2), old_logprob=-30.0), StepRequest(policy=PolicyVersion(1, 1), oldest_version=1)
        )
    assert report.num_tokens == 3 * 2 + 3 * 1
    assert report.masked_ids == report.trained_ids == {f"d-{group}/{index}" for group in range(2) for index in range(3)}
    # Every ratio is huge; of three rewards 0, 1/3, 2/3 one advantage is positive and one is 0.
    assert report.clip_fraction_high == pytest.approx(1 / 3)
    assert report.clip_fraction_low == 0.0
    assert report.statistics == (("clip_fraction_low", 0.0), ("clip_fraction_high", report.clip_fraction_high))
    assert report.zero_variance_groups == 0
    assert report.policy_entropy > 0


def test_a_step_that_is_not_finite_is_not_applied_and_training_goes_on(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        before = trainer.publish(PolicyVersion(1, 0), tmp_path / "w0")
        report = trainer.step(stored(old_logprob=-1e4), StepRequest(policy=PolicyVersion(1, 1), oldest_version=0))
        after = trainer.publish(PolicyVersion(1, 1), tmp_path / "w1")
        healthy = scenarios.step(trainer, 1)
    assert before is not None
    assert after is not None
    assert "non-finite loss" in report.skipped  # of both, the cause is named
    assert not math.isfinite(report.grad_norm)
    assert before.digest == after.digest
    assert not healthy.skipped
    assert math.isfinite(healthy.grad_norm)


def test_a_batch_without_a_term_moves_nothing(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        scenarios.step(trainer, 1)  # momentum and weight decay must not act either
        before = trainer.publish(PolicyVersion(1, 1), tmp_path / "w1")
        report = trainer.step(stored(), StepRequest(policy=PolicyVersion(1, 2), oldest_version=9))
        after = trainer.publish(PolicyVersion(1, 2), tmp_path / "w2")
    assert before is not None
    assert after is not None
    assert (report.num_tokens, report.trained_ids, report.loss) == (0, frozenset(), 0.0)
    assert before.digest == after.digest


def test_the_reference_is_the_frozen_version_0(tmp_path: Path):
    with trainer_of(tmp_path, algorithm=GrpoConfig(kl_coef=0.5, kl_estimator="k1")) as trainer:
        reports = [scenarios.step(trainer, number) for number in (1, 2, 3)]
    kls = [report.reference_kl for report in reports]
    assert [dict(report.reference_kls)["k1"] for report in reports] == kls
    assert dict(reports[2].reference_kls)["k3"] > 0.0
    assert kls[0] == pytest.approx(0.0, abs=1e-7)
    assert all(abs(kl) > 1e-3 for kl in kls[1:])
    with trainer_of(tmp_path) as trainer:
        reports = [scenarios.step(trainer, number) for number in (1, 2)]
    assert [(report.reference_kl, report.reference_kls) for report in reports] == [(0.0, ())] * 2


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        scenarios.step(trainer, 1)
        trainer.save_checkpoint(tmp_path / "c", CheckpointState(policy=PolicyVersion(1, 1), seed=5, weights_digest=""))
        scenarios.step(trainer, 2)
        unbroken = trainer.publish(PolicyVersion(1, 2), tmp_path / "unbroken")
    with trainer_of(tmp_path) as trainer:
        assert trainer.load_checkpoint(tmp_path / "c").policy == PolicyVersion(1, 1)
        scenarios.step(trainer, 2)
        resumed = trainer.publish(PolicyVersion(2, 2), tmp_path / "resumed")
    assert unbroken is not None
    assert resumed is not None
    assert unbroken.digest == resumed.digest


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_from_before_parameters_were_grouped_by_decay_continues(tmp_path: Path, kind: str):
    """All moments find their parameters, and the decay is the config's: an older checkpoint has one group for all."""
    moving = {"type": kind, "learning_rate": 1e-2, "max_grad_norm": 0.5}
    with trainer_of(tmp_path, optimizer={**moving, "decay": "all"}) as trainer:
        scenarios.step(trainer, 1)
        trainer.save_checkpoint(tmp_path / "c", CheckpointState(policy=PolicyVersion(1, 1), seed=5, weights_digest=""))
        scenarios.step(trainer, 2)
        unbroken = trainer.publish(PolicyVersion(1, 2), tmp_path / "unbroken")
    with trainer_of(tmp_path, optimizer=moving) as trainer:
        trainer.load_checkpoint(tmp_path / "c")
        scenarios.step(trainer, 2)
        resumed = trainer.publish(PolicyVersion(2, 2), tmp_path / "resumed")
    assert unbroken is not None and resumed is not None
    assert unbroken.digest == resumed.digest
    with trainer_of(tmp_path, optimizer={**moving, "weight_decay": 0.3}) as trainer:
        trainer.load_checkpoint(tmp_path / "c")
        groups = [group for each in trainer._optimizer.optimizers for group in each.param_groups]
        assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    with trainer_of(tmp_path) as trainer:
        trainer.save_checkpoint(tmp_path / "c", CheckpointState(policy=PolicyVersion(1, 1), seed=5, weights_digest=""))
        for path in (tmp_path / "c" / "tensors").glob("*.distcp"):
            path.unlink()
        with pytest.raises(UserError, match="cannot load checkpoint"):
            trainer.load_checkpoint(tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    write_model(tmp_path / "wide", hidden_size=24)
    with trainer_of(tmp_path, "wide") as trainer:
        trainer.save_checkpoint(tmp_path / "c", CheckpointState(policy=PolicyVersion(1, 1), seed=5, weights_digest=""))
    with trainer_of(tmp_path) as trainer, pytest.raises(UserError, match="of another model"):
        trainer.load_checkpoint(tmp_path / "c")


def test_a_model_that_changes_its_logits_is_refused_by_name(tmp_path: Path):
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    for name, model in (
        ("softcap", Gemma2ForCausalLM(Gemma2Config(**shape))),
        ("scale", Cohere2ForCausalLM(Cohere2Config(**shape))),
    ):
        write_model(tmp_path / name)
        model.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=f"{type(model).__name__} changes its logits"):
            scenarios.build(tmp_path, name, model=name)
        # The refused trainer had joined its group; nothing of it is left.
        assert not torch.distributed.is_initialized()


def rewrite(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(model / "model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"lacks 1 tensors of Qwen3ForCausalLM \(first model.norm.weight\)"),
        ({"model.extra.weight": torch.zeros(2)}, r"does not know \(first model.extra.weight\)"),
        ({"model.norm.weight": torch.zeros(3)}, r"model.norm.weight.*shape \(3,\), expected \(20,\)"),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
):
    rewrite(write_model(tmp_path / "dense"), changes)
    with pytest.raises(UserError, match=message):
        scenarios.build(tmp_path, "unfit")


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_learning_rates_warm_up_and_end_at_their_final_fraction(
    kind: Literal["constant", "linear", "cosine"], rates: list[float]
):
    schedule = ScheduleConfig(type=kind, warmup_steps=2, final_fraction=0.1)
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule)
    np.testing.assert_allclose([learning_rate(config, 5, step) for step in (1, 2, 3, 4, 5)], rates, rtol=1e-9)
    assert learning_rate(config, 5, 50) == rates[-1]
