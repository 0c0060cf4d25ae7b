"""What trainer ranks do in tests, importable by the processes that run them. Results are files below `folder`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from support.trainer.trainer_room import stored

from rollout.faults.config import FaultsConfig
from rollout.faults.gradient_config import GradSpikeFault, NanTokenFault, RatioSpikeFault, TwoSpikesFault
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.config.trainer import GrpoConfig, OptimizerConfig, RlooConfig, TrainerConfig, WeightsConfig
from trainer.loss.loss_settings import LossSettings
from trainer.step.assembly import policy_trainer
from trainer.step.policy_trainer import PolicyTrainer
from trainer.types.step import StepReport, StepRequest

SPIKES_THEN_NAN = LossSettings(
    faults=FaultsConfig(plant=(TwoSpikesFault(start_version=2, factor=1e5), NanTokenFault(start_version=3)), seed=2)
)
SMALL = 42
"""Micro-batch tokens that cut the test's batch into micro-batches of unequal length, an odd number of them alone."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "token_mean": ("dense", {"algorithm": GrpoConfig(aggregation="token_mean")}),
    "sequence_mean": ("dense", {"algorithm": GrpoConfig(aggregation="sequence_mean"), "micro_batch_tokens": SMALL}),
    # Every row alone: nine rows, so one of two ranks runs a filler.
    "experts": ("moe", {"algorithm": GrpoConfig(), "micro_batch_tokens": 1}),
    "every_term": (
        "dense",
        {
            "algorithm": RlooConfig(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01),
            "activation_checkpointing": True,
            "logprob_chunk_tokens": 7,
            "micro_batch_tokens": SMALL,
        },
    ),
    "truncated": (
        "dense",
        {
            "algorithm": RlooConfig(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01),
            "logprob_chunk_tokens": 7,
            "micro_batch_tokens": SMALL,
        },
    ),
}
"""Name -> (model directory below the folder, trainer config); the groups of `truncated` are."""


def build(
    folder: Path,
    name: str,
    rank: int = 0,
    world: int = 1,
    model: str = "dense",
    config: Mapping[str, object] = MappingProxyType({}),
    settings: LossSettings | None = None,
) -> PolicyTrainer:
    """One rank with a learning rate that moves a small model. `name` is that of its rendezvous, used once for each
    world."""
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, weight_decay=0.01)
    return policy_trainer(
        model_dir=folder / model,
        config=TrainerConfig.model_validate({"ranks": world, "optimizer": optimizer, **config}),
        weights=WeightsConfig(shard_bytes=4000),
        total_steps=10,
        seed=5,
        rank=rank,
        init_method=f"file://{folder / f'rendezvous-{name}-{world}'}",
        settings=settings or LossSettings(),
    )


def step(trainer: PolicyTrainer, number: int, *, truncated: bool = False) -> StepReport:
    """Optimizer step `number` (from 1) on a seeded batch."""
    groups = stored(seed=number, truncated=truncated)
    return trainer.step(groups, StepRequest(policy=PolicyVersion(1, number), oldest_version=0))


def tensors(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Everything in the weight files of a directory."""
    return {name: value for path in sorted(directory.glob("*.safetensors")) for name, value in load_file(path).items()}


def run_case(rank: int, world: int, folder: Path, name: str) -> None:
    """Three steps; then weights `NAME-wWORLD` and reports `NAME-wWORLD.json`."""
    model, config = CASES[name]
    trainer = build(folder, name, rank, world, model, config)
    reports = [step(trainer, number, truncated=name == "truncated") for number in (1, 2, 3)]
    trainer.publish(PolicyVersion(1, 3), folder / f"{name}-w{world}")
    trainer.close()
    if rank == 0:
        numbers = [
            {key: value for key, value in asdict(report).items() if isinstance(value, int | float)}
            for report in reports
        ]
        (folder / f"{name}-w{world}.json").write_text(json.dumps(numbers))


def begin_alone(folder: Path) -> None:
    """One rank: a step, checkpoint `saved-w1`, another step, weights `unbroken-2`, a third step, weights
    `unbroken-3`."""
    trainer = build(folder, "begin")
    step(trainer, 1)
    trainer.save_checkpoint(
        folder / "saved-w1", CheckpointState(policy=PolicyVersion(1, 1), seed=5, weights_digest="w1")
    )
    for number in (2, 3):
        step(trainer, number)
        trainer.publish(PolicyVersion(1, number), folder / f"unbroken-{number}")
    trainer.close()


def continue_together(rank: int, world: int, folder: Path) -> None:
    """Several ranks: go on from `saved-w1` with step 2, weights `resumed-2`, checkpoint `saved-many`."""
    trainer = build(folder, "continue", rank, world)
    state = trainer.load_checkpoint(folder / "saved-w1")
    assert (state.policy, state.weights_digest) == (PolicyVersion(1, 1), "w1")
    step(trainer, 2)
    trainer.publish(PolicyVersion(1, 2), folder / "resumed-2")
    trainer.save_checkpoint(
        folder / "saved-many", CheckpointState(policy=PolicyVersion(1, 2), seed=5, weights_digest="")
    )
    trainer.close()


def fail_together(rank: int, world: int, folder: Path) -> None:
    """Several ranks whose publication cannot be written: every one gets the error, none waits."""
    trainer = build(folder, "fail", rank, world)
    (folder / "taken").mkdir(exist_ok=True)
    try:
        trainer.publish(PolicyVersion(1, 0), folder / "taken")
    except Exception as error:  # noqa: BLE001
        (folder / f"failure-{rank}").write_text(str(error))
    trainer.close()


def all_together(rank: int, world: int, folder: Path) -> None:
    """Everything that several ranks do in one start of their processes."""
    for name in CASES:
        run_case(rank, world, folder, name)
    continue_together(rank, world, folder)
    fail_together(rank, world, folder)


ONE_OF_EACH = LossSettings(faults=FaultsConfig(plant=(GradSpikeFault(), RatioSpikeFault(), NanTokenFault()), seed=4))


def tell_what_was_planted(rank: int, world: int, folder: Path) -> None:
    """A step with `ONE_OF_EACH`, under a clip that cuts off a part of the terms: (fault, trajectory, position) of each
    in `planted-wWORLD-RANK.json`."""
    trainer = build(folder, "tell", rank, world, config={"micro_batch_tokens": SMALL}, settings=ONE_OF_EACH)
    report = step(trainer, 1)
    trainer.close()
    told = [(planted.fault, planted.trajectory_id, planted.position) for planted in report.planted]
    (folder / f"planted-w{world}-{rank}.json").write_text(json.dumps(told))


def two_ranks_are_hit(rank: int, world: int, folder: Path) -> None:
    """A healthy step; `two_spikes` in step 2: the same draw on both ranks, on different ranks and micro-batches, and
    the norm shows it on both.

    `nan_token` in step 3: no rank applies it, and rank 0 keeps it in `saved_steps/3` with its weights in
    `kept-weights`.
    """
    config = {"algorithm": GrpoConfig(clip_low=0.999, clip_high=1e9), "micro_batch_tokens": 24}
    trainer = build(folder, "hit", rank, world, config=config, settings=SPIKES_THEN_NAN)
    healthy, spiked = step(trainer, 1), step(trainer, 2)
    first, second = spiked.planted
    assert {first.rank, second.rank} == {0, 1} and first.micro_batch != second.micro_batch
    assert spiked.grad_norm > 100 * healthy.grad_norm
    trainer.publish(PolicyVersion(1, 2), folder / "kept-weights")
    report = step(trainer, 3)
    assert report.skipped == "non-finite loss (nan)"
    if rank == 0:
        trainer.save_step(
            folder / "saved_steps", stored(seed=3), StepRequest(policy=PolicyVersion(1, 3), oldest_version=0), report
        )
    assert step(trainer, 3).skipped == ""
    trainer.close()
