"""What a step did is seen from outside the trainer: healthy steps pass, and each planted mistake has its code."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainer.trainer_room import stored, write_model
from support.trainer.trainer_scenarios import build

from rollout.faults.config import FaultsConfig
from rollout.types.codec import decode
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import GrpoConfig, OptimizerConfig, RlooConfig, TrainerConfig
from trainer.consistency.checks.cusum import Cusum
from trainer.consistency.checks.step import evidence_against
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.scorer import Scorer
from trainer.consistency.service.report import StepAudit, StepToAudit
from trainer.consistency.service.step_audit import DeclaredTrainer, audit_step
from trainer.loss.loss_settings import LossSettings
from trainer.optim.optimizer import learning_rate
from trainer.types.step import StepRequest

DECLARED = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5, weight_decay=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audits")
    write_model(made / "dense")
    return made


def audits(
    folder: Path, name: str, steps: int, *plant: dict[str, Any], config: dict[str, Any] | None = None
) -> Iterator[StepAudit]:
    """Audits of the steps of a trainer with these faults, always on the same batch."""
    given = {"optimizer": DECLARED, "algorithm": GrpoConfig(), **(config or {})}
    settings = LossSettings(faults=FaultsConfig.model_validate({"plant": plant}))
    trainer = build(folder, name, config=given, settings=settings)
    weights = folder / f"weights-{name}"
    versions = HeldVersions(folder / "dense", weights, "float32", 64, 2, torch.device("cpu"))
    scorer, groups = Scorer(versions, 4096), stored(seed=3, lengths=(6, 11, 9), group_size=4, old_logprob=-3.0)
    declared = DeclaredTrainer(
        config=TrainerConfig.model_validate({"algorithm": given["algorithm"], "optimizer": DECLARED}),
        rate=partial(learning_rate, DECLARED, 10),
        is_moe=False,
    )
    ids = frozenset(t.trajectory_id for payload in groups.payloads for t in decode(payload).trajectories)
    try:
        trainer.publish(PolicyVersion(1, 0), weights / "e1-v0")
        for number in range(1, steps + 1):
            before, after = PolicyVersion(1, number - 1), PolicyVersion(1, number)
            report = trainer.step(groups, StepRequest(policy=after, oldest_version=0, audited=ids))
            trainer.publish(after, weights / after.key)
            step = StepToAudit(
                before=before, after=after, oldest_version=0, grad_norm=report.grad_norm, trained=report.audited
            )
            found = audit_step(groups, step, scorer, declared, ScoreOptions())
            assert found is not None
            yield found
    finally:
        trainer.close()


@pytest.mark.parametrize("algorithm", [GrpoConfig(), GrpoConfig(normalize_std=False), RlooConfig()], ids=str)
def test_healthy_steps_pass_and_go_with_their_rewards(folder: Path, algorithm: GrpoConfig | RlooConfig):
    name = f"healthy-{algorithm.type}-{getattr(algorithm, 'normalize_std', '')}"
    for found in audits(folder, name, 4, config={"algorithm": algorithm}):
        assert found.deviations == ()
        assert (found.rows, found.tokens) == (12, 4 * (6 + 11 + 9))
        assert found.gap_max < 1e-4
        assert found.drive > 1.0 and found.gain > 0.0
        assert 0.1 < found.update_rates < 1.05


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("flipped_advantages", "advantages"),
        ("swapped_advantages", "advantages"),
        ("shifted_loss_mask", "loss_positions"),
        ("shifted_inputs", "trainer_logprobs"),
        ("trainer_dropout", "trainer_logprobs"),
        ("frozen_block", "unmoved"),
        ("lost_update", "unmoved"),
    ],
)
def test_a_mistake_of_the_trainer_is_found_in_its_first_step(folder: Path, fault: str, code: str):
    found = next(audits(folder, fault, 1, {"type": fault}))
    assert code in [each.code for each in found.deviations], found


def test_a_learning_rate_other_than_declared_is_found_in_its_first_step(folder: Path):
    high = next(audits(folder, "high", 1, {"type": "high_lr", "factor": 1.5}))
    low = next(audits(folder, "low", 1, config={"optimizer": OptimizerConfig(learning_rate=5e-4)}))
    assert [each.code for each in (*high.deviations, *low.deviations)] == ["update_too_large", "update_too_small"]


def test_a_gradient_of_the_wrong_sign_goes_against_its_rewards(folder: Path):
    chart, crossed = Cusum(12.0), False
    for found in audits(folder, "flipped", 8, {"type": "flipped_gradient"}):
        assert found.deviations == ()
        assert found.drive < -1.0
        crossed |= chart.add(evidence_against(found.drive))
    assert crossed
