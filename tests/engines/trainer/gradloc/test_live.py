"""The gradient search in the trainer's step: what each action leaves, and that observing leaves no trace."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.builders import build_routing, build_stored
from support.trainer.gradloc_live_room import (
    NOT_A_NUMBER,
    SPIKE,
    digest,
    evidence_of,
    found,
    healthy_groups,
    live_trainer,
    negative_places,
    never_had,
    plant,
    spiked,
    take,
    usual_tau,
)
from support.trainer.trainer_room import write_model

from trainer.batching.batcher import build_batch
from trainer.types.evidence import audited_group
from trainer.types.gradloc import Acted
from trainer.types.step import StepReport, Verdict


def numbers_of(report: StepReport) -> dict[str, Any]:
    return asdict(replace(report, phases_s=(), gradloc=None))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_observing_leaves_weights_reports_and_random_state_bit_for_bit(folder: Path, seed: int):
    # Invariant 6. Every step is searched, the spiking one to its token, the healthy ones in vain.
    results: list[tuple[str, list[dict[str, Any]], bytes]] = []
    places = negative_places(healthy_groups(seed))
    steps = [
        build_stored(healthy_groups(seed)),
        spiked(seed, places[seed * 3]),
        build_stored(healthy_groups(seed + 10)),
    ]
    for name, gradloc in (
        ("never", {"enabled": False}),
        ("always", {"threshold": {"type": "given", "tau": 1e-6}, "budget_passes": 30}),
    ):
        with live_trainer(folder, name, gradloc) as trainer:
            reports = [take(trainer, groups, number) for number, groups in enumerate(steps, 1)]
            assert all(
                (report.gradloc is not None and report.gradloc.passes > 0) == (name == "always") for report in reports
            )
            results.append(
                (
                    digest(trainer, folder, name),
                    [numbers_of(report) for report in reports],
                    torch.get_rng_state().numpy().tobytes(),
                )
            )
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("nats", [SPIKE, NOT_A_NUMBER])
def test_a_masked_step_is_the_one_that_never_had_the_term(folder: Path, given: dict[str, Any], seed: int, nats: float):
    places = negative_places(healthy_groups(seed))
    place = places[int(np.random.default_rng(seed).integers(len(places)))]
    with live_trainer(
        folder,
        "masking",
        {"threshold": given, "action": "mask"},
        optimizer={"clip": {"type": "layerclip", "warmup_steps": 1}},
    ) as trainer:
        take(trainer, build_stored(healthy_groups(seed + 5)), 1)
        report = take(trainer, spiked(seed, place, nats=nats), 2)
        masked, memory = digest(trainer, folder, "masked"), trainer._optimizer.clip.state_dict()
    with live_trainer(
        folder, "plain", {"enabled": False}, optimizer={"clip": {"type": "layerclip", "warmup_steps": 1}}
    ) as trainer:
        take(trainer, build_stored(healthy_groups(seed + 5)), 1)
        plain = never_had(trainer, spiked(seed, place, nats=nats), [place], number=2)
        assert digest(trainer, folder, "plain") == masked
        assert trainer._optimizer.clip.state_dict() == memory
    evidence = evidence_of(report)
    assert found(report) == [place]
    assert (evidence.outcome, evidence.acted, evidence.removed_terms) == ("located", Acted.MASKED, 1)
    assert evidence.trigger == ("threshold" if nats > NOT_A_NUMBER else "non_finite")
    assert report.grad_norm == evidence.grad_norm_after == plain.optimizer.grad_norm
    assert not evidence.grad_norm <= evidence.threshold and not evidence.exceeds_after and not report.skipped
    assert report.num_tokens == plain.totals["tokens"] and report.loss == plain.totals["loss"]
    assert place.trajectory_id in report.masked_ids & report.trained_ids


def test_two_culprits_are_masked_together(folder: Path, given: dict[str, Any]):
    every = negative_places(healthy_groups(1))
    places = [every[0], every[-1]]
    with live_trainer(folder, "masking", {"threshold": given, "action": "mask"}) as trainer:
        report = take(trainer, spiked(1, *places))
        masked = digest(trainer, folder, "masked")
        assert trainer._gradient.search is not None
        (remembered,) = trainer._gradient.search.state()["gradloc"]["history"]
    assert remembered == pytest.approx(report.grad_norm * (report.num_tokens + 2) / math.sqrt(report.num_tokens)), (
        "N stays, two terms are gone"
    )
    with live_trainer(folder, "plain", {"enabled": False}) as trainer:
        never_had(trainer, spiked(1, *places), places)
        assert digest(trainer, folder, "plain") == masked
    assert sorted(found(report), key=str) == sorted(places, key=str) and evidence_of(report).removed_terms == 2


def test_a_skipped_step_moves_no_weight_and_teaches_nothing(folder: Path, given: dict[str, Any]):
    place = negative_places(healthy_groups(1))[4]
    calibrated = {"type": "calibrated", "warmup_steps": 1, "multiple": 3.0}
    with live_trainer(
        folder,
        "skipping",
        {"threshold": calibrated, "action": "skip"},
        optimizer={"clip": {"type": "zclip", "warmup_steps": 2}},
    ) as trainer:
        take(trainer, build_stored(healthy_groups(1)), 1)
        search = trainer._gradient.search
        assert search is not None
        before, state, memory = digest(trainer, folder, "before"), search.state(), trainer._optimizer.clip.state_dict()
        report = take(trainer, spiked(1, place), 2)
        assert digest(trainer, folder, "after") == before
        after = search.state()
        assert (after["gradloc"]["history"], after["blocks"]) == (state["gradloc"]["history"], state["blocks"])
        assert trainer._optimizer.clip.state_dict() == memory
    assert evidence_of(report).acted is Acted.SKIPPED
    assert place.trajectory_id in report.skipped and f"token {place.position}" in report.skipped
    assert report.block_scales == () and not report.quarantined


def test_a_step_that_the_optimizer_refuses_teaches_the_search_nothing(folder: Path):
    with live_trainer(folder, "refused", {}, optimizer={"learning_rate": 1e39}) as trainer:
        search = trainer._gradient.search
        assert search is not None
        before = search.state()
        report = take(trainer, build_stored(healthy_groups(1)))
        assert "non-finite update" in report.skipped and report.gradloc is None
        assert search.state() == before


def test_groups_whose_rewards_are_all_alike_teach_the_search_nothing(folder: Path):
    alike = [replace(group, rewards=(group.rewards[0],) * len(group.rewards)) for group in healthy_groups(1)]
    with live_trainer(folder, "alike", {}) as trainer:
        search = trainer._gradient.search
        assert search is not None
        before = search.state()
        report = take(trainer, build_stored(alike))
        assert not report.skipped and report.grad_norm == 0 and report.num_tokens > 0
        assert search.state() == before


def test_a_quarantined_trajectory_leaves_the_step_and_every_later_one(folder: Path, given: dict[str, Any]):
    place = negative_places(healthy_groups(1))[7]
    groups = spiked(1, place)
    with live_trainer(folder, "quarantining", {"threshold": given, "action": "quarantine"}) as trainer:
        report = take(trainer, groups)
        weights = digest(trainer, folder, "quarantined")
    with live_trainer(folder, "plain", {"enabled": False}) as trainer:
        plain = never_had(trainer, groups, trajectories=[place.trajectory_id])
        assert digest(trainer, folder, "plain") == weights
        (quarantined,) = report.quarantined
        later = audited_group(groups.payloads[groups.dispatch_ids.index(quarantined.dispatch_id)], quarantined.verdict)
        ids = {
            sample.trajectory_id
            for sample in build_batch([later], trainer._algorithm, 0, "token_mean").samples
            if sample.loss_mask.any()
        }
    assert quarantined.trajectory_ids == (place.trajectory_id,)
    assert ids == {t.trajectory_id for t in later.group.trajectories} - {place.trajectory_id}
    assert later.evidence is not None
    verdicts = {each.trajectory_id: each for each in later.evidence.trajectories}
    assert verdicts[place.trajectory_id].verdict is Verdict.QUARANTINE
    assert verdicts[place.trajectory_id].findings[0].positions == (place.position,)
    assert report.trained_ids.isdisjoint({place.trajectory_id}) and place.trajectory_id in report.masked_ids
    assert report.num_tokens == plain.totals["tokens"]
    assert evidence_of(report).acted is Acted.QUARANTINED


def test_a_step_that_is_taken_again_with_its_quarantines_is_the_step_that_found_them(
    folder: Path, given: dict[str, Any]
):
    # Invariant 8: a crash behind the step, and a resume from before it. The verdict is durable; nothing spikes the
    # second time.
    groups, results = spiked(1, negative_places(healthy_groups(1))[7]), []
    for name in ("found", "again"):
        with live_trainer(folder, name, {"threshold": given, "action": "quarantine"}) as trainer:
            report = take(trainer, groups)
            results.append((digest(trainer, folder, name), replace(report, phases_s=(), gradloc=None, quarantined=())))
        new = {group.dispatch_id: group.verdict for group in report.quarantined}
        groups = replace(
            groups, verdicts=tuple(new.get(i, old) for i, old in zip(groups.dispatch_ids, groups.verdicts, strict=True))
        )
    assert report.gradloc is None and not report.quarantined and len(report.quarantined_groups) == 1
    assert results[0] == results[1]


def test_nothing_is_done_about_a_step_whose_culprit_was_not_located(folder: Path):
    with live_trainer(
        folder, "vain", {"threshold": {"type": "given", "tau": 1e-6}, "action": "mask", "budget_passes": 20}
    ) as trainer:
        report = take(trainer, build_stored(healthy_groups(1)))
        weights = digest(trainer, folder, "vain")
    with live_trainer(folder, "plain", {"enabled": False}) as trainer:
        take(trainer, build_stored(healthy_groups(1)))
        assert digest(trainer, folder, "plain") == weights
    assert evidence_of(report).outcome in ("diffuse", "inconclusive")
    assert (evidence_of(report).acted, evidence_of(report).removed_terms, evidence_of(report).grad_norm_after) == (
        Acted.NOTHING,
        0,
        None,
    )


def test_a_step_that_still_exceeds_after_the_mask_is_applied_unsearched_and_says_so(
    folder: Path, given: dict[str, Any]
):
    places = negative_places(healthy_groups(1))
    groups = healthy_groups(1)
    plant(groups, places[4], NOT_A_NUMBER)
    plant(groups, places[-2], SPIKE)
    with live_trainer(folder, "exceeding", {"threshold": given, "action": "mask"}) as trainer:
        report = take(trainer, build_stored(groups))
    assert found(report) == [places[4]], "the search for what is not finite names nothing else"
    assert evidence_of(report).exceeds_after and not report.skipped
    assert evidence_of(report).grad_norm_after == report.grad_norm > evidence_of(report).threshold


def test_a_non_finite_step_that_is_only_observed_is_not_applied(folder: Path, given: dict[str, Any]):
    place = negative_places(healthy_groups(1))[3]
    with live_trainer(folder, "watching", {"threshold": given}) as trainer:
        before = digest(trainer, folder, "before")
        report = take(trainer, spiked(1, place, nats=NOT_A_NUMBER))
        assert digest(trainer, folder, "after") == before
    assert report.skipped.startswith("non-finite")
    assert (
        found(report) == [place]
        and evidence_of(report).trigger == "non_finite"
        and evidence_of(report).acted is Acted.NOTHING
    )


def test_a_search_runs_on_the_experts_that_the_step_ran_on(models: Path, folder: Path):
    if not (models / "moe").exists():
        write_model(models / "moe", moe=True, tie_word_embeddings=False)
    (folder / "moe").symlink_to(models / "moe")
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, routing=build_routing(t.token_ids.size - 1, seed=index))
                for index, t in enumerate(group.trajectories)
            ),
        )
        for group in healthy_groups(2)
    ]
    place = negative_places(groups)[9]
    plant(groups, place)
    given = {"type": "given", "tau": usual_tau(folder, "usual", multiple=30.0)}
    weights: list[str] = []
    for name, gradloc in (("masking", {"threshold": given, "action": "mask"}), ("plain", {"enabled": False})):
        with live_trainer(folder, name, gradloc, model="moe", replay_routing=True) as trainer:
            if name == "masking":
                report = take(trainer, build_stored(groups))
                assert found(report) == [place] and evidence_of(report).outcome == "located"
                assert report.routing_replayed_fraction > 0.5
            else:
                never_had(trainer, build_stored(groups), [place])
            weights.append(digest(trainer, folder, name))
    assert weights[0] == weights[1]
