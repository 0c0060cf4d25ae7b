"""Sampled under truncation by a real engine, trained on by a real trainer: at lag 0 and equal weights the log ratio is
0 and nothing is clipped, whatever the sampling settings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import build_evidence, build_stored
from support.trainer import trainer_scenarios as scenarios
from support.trainer.gradloc_live_room import batch_of, take
from support.trainer.trainer_room import write_model
from support.trainer.truncated_room import sampled_groups

from rollout.config import SamplingConfig
from rollout.errors import UserError
from rollout.types.supports import SUPPORT_LIMIT
from rollout.types.trajectory import LogprobSemantics, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import NoCorrection
from trainer.config.trainer import GrpoConfig
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.scorer import Scorer
from trainer.gradloc.probe.step_terms import rank_terms, step_terms
from trainer.gradloc.probe.term_rows import RowsConfig, rank_passes
from trainer.loss.policy_loss import PolicyLoss, loss_tokens
from trainer.model.ranks import local_tensor
from trainer.types.evidence import encode_evidence
from trainer.types.step import MicroBatch, OldLogprobSource, StepReport, StepRequest

SETTINGS = {
    "top_k 3": SamplingConfig(top_k=3),
    "top_k 1": SamplingConfig(top_k=1),
    "top_k 100, too many to list": SamplingConfig(top_k=100),
    "top_p .9": SamplingConfig(top_p=0.9),
    "top_p .5, sharp": SamplingConfig(top_p=0.5, temperature=0.4),
    "top_p .95 of top_k 90": SamplingConfig(top_p=0.95, top_k=90, temperature=1.3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("truncated")
    write_model(place / "dense", vocab_size=300)
    return place


def trained(folder: Path, groups: Sequence[TrajectoryGroup], name: str, **config: object) -> StepReport:
    trainer = scenarios.build(folder, name, config={"algorithm": GrpoConfig(kl_coef=0.1), **config})
    try:
        return trainer.step(build_stored(groups), StepRequest(policy=PolicyVersion(1, 1), oldest_version=0))
    finally:
        trainer.close()


@pytest.mark.parametrize("lists", [True, False], ids=["listed", "recomputed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_at_lag_0_no_log_ratio_and_nothing_clipped(folder: Path, name: str, lists: bool):
    groups = sampled_groups(folder / "dense", SETTINGS[name], lists=lists)
    report = trained(folder, groups, f"{name}-{lists}", micro_batch_tokens=64, logprob_chunk_tokens=5)
    assert report.num_tokens == 3 * 4 * 12
    assert report.mean_abs_rollout_difference < 1e-5
    assert report.clip_fraction_low == report.clip_fraction_high == 0.0
    assert abs(report.reference_kl) < 1e-5, "version 0 is the reference, over the same support"
    if SETTINGS[name].top_k in (1, 3):
        assert report.policy_entropy <= np.log(SETTINGS[name].top_k) + 1e-6


def test_what_the_engine_lists_is_what_it_drew_from(folder: Path):
    counts: dict[str, NDArray[np.uint8]] = {}
    for name, sampling in SETTINGS.items():
        trajectories = [t for group in sampled_groups(folder / "dense", sampling) for t in group.trajectories]
        supports = [(t.supports, t.sampled) for t in trajectories if t.supports is not None]
        assert len(supports) == len(trajectories)
        counts[name] = np.concatenate([each.counts[sampled] for each, sampled in supports])
    assert set(counts["top_k 3"].tolist()) == {3}
    assert set(counts["top_k 100, too many to list"].tolist()) == {0}
    assert counts["top_p .9"].max() <= SUPPORT_LIMIT
    assert len(set(counts["top_p .5, sharp"].tolist())) > 2
    assert all(
        t.supports is None for group in sampled_groups(folder / "dense", SamplingConfig()) for t in group.trajectories
    )


@pytest.mark.parametrize("name", ["top_k 3", "top_k 100, too many to list", "top_p .9"])
def test_the_scorer_agrees_and_gate_mode_splits_nothing(folder: Path, name: str):
    """Recomputed log-probs are the engine's, so the engine's part is 0; the trainer's are the recomputed, so the stale
    part is, too."""
    groups = sampled_groups(folder / "dense", SETTINGS[name])
    versions = HeldVersions(folder / "dense", folder, "float32", 5, max_versions=1, device=torch.device("cpu"))
    scorer, verdicts = Scorer(versions, 100), list[bytes]()
    for group in groups:
        scores, evidence = scorer.score(group.trajectories, ScoreOptions()), build_evidence(group)
        for trajectory, values in zip(group.trajectories, scores, strict=True):
            np.testing.assert_allclose(values, trajectory.rollout_logprobs, rtol=0, atol=1e-5)
        judged = zip(evidence.trajectories, scores, strict=True)
        trajectories = tuple(replace(one, behaviour_logprobs=values) for one, values in judged)
        verdicts.append(encode_evidence(replace(evidence, trajectories=trajectories)))
    trainer = scenarios.build(folder, f"gate-{name}")
    try:
        report = take(trainer, build_stored(groups, verdicts), source=OldLogprobSource.RECOMPUTED)
    finally:
        trainer.close()
    assert report.mean_abs_engine_difference < 1e-5
    assert report.mean_abs_logprob_difference < 1e-5
    assert report.clip_fraction_low == report.clip_fraction_high == 0.0


def test_log_probs_of_another_distribution_are_refused_with_the_cure(folder: Path):
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, tag=replace(t.tag, logprob_semantics=LogprobSemantics.TEMPERATURE))
                for t in group.trajectories
            ),
        )
        for group in sampled_groups(folder / "dense", SETTINGS["top_k 3"])
    ]
    with pytest.raises(UserError, match="top_k 3; set its log-prob mode to processed"):
        trained(folder, groups, "foreign")


def test_a_gradient_search_runs_tokens_over_their_own_support(folder: Path):
    """Passes over some tokens, cut and packed anew: their gradients add up to that of the step."""
    groups = sampled_groups(folder / "dense", SamplingConfig(top_p=0.8, temperature=0.8))
    trainer = scenarios.build(
        folder, "search", config={"micro_batch_tokens": 64, "algorithm": GrpoConfig(entropy_coef=0.1)}
    )
    try:
        _, batch, micro_batches = batch_of(trainer, build_stored(groups))
        model, config = trainer._model, trainer._config.algorithm
        loss = PolicyLoss(config, trainer._algorithm, None, NoCorrection())
        table = step_terms([rank_terms(micro_batches)])
        parameters = list(model.parameters())

        def gradient(passes: Sequence[tuple[MicroBatch, NDArray[np.bool_] | None]]) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            for micro, chosen in passes:
                only = None if chosen is None else torch.as_tensor(np.flatnonzero(chosen[micro.loss_mask]))
                tokens = loss_tokens(micro, torch.device("cpu"))
                loss(model, tokens, batch.temperature, OldLogprobSource.ROLLOUT, only)[0].backward()
            return torch.cat([local_tensor(p.grad).flatten() for p in parameters if p.grad is not None]).double()

        whole = gradient([(micro, None) for micro in micro_batches])
        rows = RowsConfig(whole=False, coupled=False, cut=True)
        order = np.random.default_rng(4).permutation(table.rank.size)
        parts = [np.sort(order[:50]), np.sort(order[50:])]
        passes = [one for part in parts for one in rank_passes(part, table, rows, 0, micro_batches)]
        summed = gradient([(one.rows, one.chosen) for one in passes])
    finally:
        trainer.close()
    assert float((summed - whole).norm() / whole.norm()) < 1e-5
