"""Trainer steps on the experts that the engine chose: aligned with its tokens, counted, and with a gradient through the
trainer's own gates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import BASE, build_dispatch, build_group, build_stored
from support.trainer import trainer_scenarios as scenarios
from support.trainer.trainer_room import VOCABULARY, write_model

from rollout.errors import UserError
from rollout.types.trajectory import RoutingTrace, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.scorer import Scorer
from trainer.step.policy_trainer import PolicyTrainer
from trainer.types.step import StepReport, StepRequest

EXPERTS, CELL = 12, (2, 2)
REQUEST = StepRequest(policy=PolicyVersion(1, 1), oldest_version=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    write_model(folder / "moe", moe=True, router_aux_loss_coef=0.0)
    write_model(folder / "dense")
    return folder


def groups() -> list[TrajectoryGroup]:
    """Two groups of unlike length, so that rows are padded."""
    return [
        build_group(
            build_dispatch(number),
            (1.0, 0.0, 0.5),
            prompt_tokens=2 + number,
            spans=((BASE, length),),
            seed=number,
            vocab_size=VOCABULARY,
        )
        for number, length in enumerate((5, 12))
    ]


def drawn(item: Trajectory, seed: int) -> NDArray[np.uint8]:
    """[T - 1, blocks, top_k] experts that no router chose."""
    rng = np.random.default_rng(seed)
    return np.array(
        [[rng.permutation(EXPERTS)[: CELL[1]] for _ in range(CELL[0])] for _ in range(item.token_ids.size - 1)],
        dtype=np.uint8,
    )


def traced(batch: Sequence[TrajectoryGroup], covered_share: float = 1.0) -> list[TrajectoryGroup]:
    """The same groups; of every trajectory the first `covered_share` of the rows have given experts."""
    result: list[TrajectoryGroup] = []
    for number, group in enumerate(batch):
        routed: list[Trajectory] = []
        for index, item in enumerate(group.trajectories):
            experts = drawn(item, 10 * number + index)
            covered = np.arange(experts.shape[0]) < covered_share * item.token_ids.size
            routed.append(replace(item, routing=RoutingTrace(experts=experts, covered=covered)))
        result.append(replace(group, trajectories=tuple(routed)))
    return result


def logged_as(batch: Sequence[TrajectoryGroup], options: ScoreOptions, folder: Path) -> list[TrajectoryGroup]:
    """The same groups, with log-probs as the consistency service computes them under `options`."""
    scorer = Scorer(HeldVersions(folder / "moe", folder, "float32", 8, 1, torch.device("cpu")), 1000)
    result: list[TrajectoryGroup] = []
    for group in batch:
        scores = scorer.score(group.trajectories, options)
        result.append(
            replace(
                group,
                trajectories=tuple(
                    replace(t, rollout_logprobs=s) for t, s in zip(group.trajectories, scores, strict=True)
                ),
            )
        )
    return result


def one_step(
    folder: Path, batch: Sequence[TrajectoryGroup], request: StepRequest = REQUEST, model: str = "moe", **config: object
) -> StepReport:
    trainer = trainer_of(folder, model, **config)
    try:
        return trainer.step(build_stored(batch), request)
    finally:
        trainer.close()


def trainer_of(folder: Path, model: str, **config: object) -> PolicyTrainer:
    return scenarios.build(
        folder,
        f"replay-{len(list(folder.glob('rendezvous-*')))}",
        model=model,
        config={"replay_routing": True, **config},
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 1000])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_each_token_runs_on_its_own_experts_whatever_stands_beside_it(
    folder: Path, micro_batch_tokens: int, activation_checkpointing: bool
):
    batch = logged_as(traced(groups(), 0.7), ScoreOptions(replay_routing=True), folder)
    settings: dict[str, Any] = {
        "micro_batch_tokens": micro_batch_tokens,
        "activation_checkpointing": activation_checkpointing,
    }
    replayed = one_step(folder, batch, **settings)
    native = one_step(folder, batch, replay_routing=False, **settings)
    assert replayed.mean_abs_logprob_difference < 1e-5
    assert native.mean_abs_logprob_difference > 0.1
    whole = one_step(folder, batch, micro_batch_tokens=1000)
    assert replayed.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert replayed.grad_norm != pytest.approx(native.grad_norm, rel=1e-2)


def test_replayed_and_fallen_back_inputs_are_counted(folder: Path):
    batch = traced(groups())
    second = replace(batch[1], trajectories=(batch[1].trajectories[0], *groups()[1].trajectories[1:]))
    report = one_step(folder, [batch[0], second])
    rows = [(t.token_ids.size - 1, t.routing is not None) for group in (batch[0], second) for t in group.trajectories]
    share = sum(count for count, given in rows if given) / sum(count for count, _ in rows)
    assert report.routing_replayed_fraction == pytest.approx(share)
    assert report.routing_fallback_fraction == pytest.approx(1 - share)
    nothing = one_step(folder, [batch[0], second], replay_routing=False)
    assert (nothing.routing_replayed_fraction, nothing.routing_fallback_fraction) == (0.0, 0.0)


def test_hollow_rows_fall_back_and_count_as_such(folder: Path):
    batch = traced(groups())
    for group in batch:
        for item in group.trajectories:
            assert item.routing is not None
            item.routing.experts[1:] = 3
    report = one_step(folder, batch)
    rows = [t.token_ids.size - 1 for group in batch for t in group.trajectories]
    assert report.routing_replayed_fraction == pytest.approx(len(rows) / sum(rows))


def test_a_step_without_a_token_in_the_loss_runs_its_filler(folder: Path):
    report = one_step(folder, traced(groups()), replace(REQUEST, oldest_version=9))
    assert (report.num_tokens, report.routing_replayed_fraction, report.routing_fallback_fraction) == (0, 0.0, 0.0)


def test_a_dense_model_is_refused_with_the_cure(folder: Path):
    with pytest.raises(UserError, match=r"not a mixture of experts; set it to false"):
        trainer_of(folder, "dense")
    with pytest.raises(UserError, match=r"not a mixture of experts"):  # the first one left its ranks
        trainer_of(folder, "dense")


def test_routing_of_another_model_is_refused(folder: Path):
    group = groups()[0]
    rows = group.trajectories[0].token_ids.size - 1
    wrong = RoutingTrace(experts=np.zeros((rows, 3, 2), dtype=np.uint8), covered=np.ones(rows, dtype=np.bool_))
    with pytest.raises(UserError, match=r"2 blocks, top_k 2"):
        one_step(folder, [replace(group, trajectories=tuple(replace(t, routing=wrong) for t in group.trajectories))])
