"""Planted gradient faults in a live trainer: each does what it says in the step that it is due, and nothing else."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from support.builders import build_evidence, build_stored
from support.trainer.gradloc_live_room import healthy_groups, negative_places
from support.trainer.trainer_room import run_ranks, stored, write_model
from support.trainer.trainer_scenarios import SPIKES_THEN_NAN, build, step, tell_what_was_planted, two_ranks_are_hit

from rollout.errors import UserError
from rollout.faults.config import FaultConfig, FaultsConfig
from rollout.faults.gradient_config import (
    BlockExplosionFault,
    DiffuseSpikeFault,
    GradSpikeFault,
    NanTokenFault,
    RatioSpikeFault,
    TwoSpikesFault,
)
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.saved_steps import read_step
from trainer.config.consistency import TisConfig
from trainer.config.gradloc import GivenTau, GradLocConfig
from trainer.config.trainer import GrpoConfig, TrainerConfig
from trainer.loss.loss_settings import LossSettings
from trainer.replay.replay import ReplaySource, replay
from trainer.replay.report import ReplayVerdict
from trainer.types.evidence import encode_evidence
from trainer.types.gradloc import CulpritType
from trainer.types.step import OldLogprobSource, PlantedFault, StepReport, StepRequest

NEVER_CLIPS = GrpoConfig(clip_low=0.999, clip_high=1e9)
"""Log-probs of the test's batch are not the model's, and a clipped term has no gradient."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted")
    write_model(path / "dense")
    return path


def one_step(
    folder: Path,
    groups: StoredGroups,
    *faults: FaultConfig,
    settings: LossSettings | None = None,
    source: OldLogprobSource = OldLogprobSource.ROLLOUT,
    **config: object,
) -> StepReport:
    """The report of a fresh trainer's step 1 on these groups."""
    planted = settings or LossSettings(faults=FaultsConfig(plant=faults, seed=3))
    everything = {"algorithm": NEVER_CLIPS, "micro_batch_tokens": 42, **config}
    trainer = build(folder, f"planted-{next(_numbers)}", config=everything, settings=planted)
    try:
        return trainer.step(groups, StepRequest(policy=PolicyVersion(1, 1), oldest_version=0, old_logprobs=source))
    finally:
        trainer.close()


def first_step(
    folder: Path, *faults: FaultConfig, settings: LossSettings | None = None, **config: object
) -> StepReport:
    """The report of step 1 of a fresh trainer on the batch that most tests share."""
    return one_step(folder, stored(seed=1), *faults, settings=settings, source=OldLogprobSource.ROLLOUT, **config)


def test_a_grad_spike_scales_one_term_and_leaves_every_ratio_normal(folder: Path):
    healthy, spiked = first_step(folder), first_step(folder, GradSpikeFault(factor=1e5))
    (planted,) = spiked.planted
    assert (planted.fault, planted.factor, planted.missed) == ("grad_spike", 1e5, "")
    assert planted.trajectory_id.startswith("d-") and planted.position is not None
    assert spiked.grad_norm > 100 * healthy.grad_norm
    ratios = (
        "approx_kl",
        "mean_abs_logprob_difference",
        "mean_abs_rollout_difference",
        "correction_weight_mean",
        "num_tokens",
        "advantage_std",
    )
    assert [getattr(spiked, name) for name in ratios] == [getattr(healthy, name) for name in ratios]
    assert not healthy.planted and not spiked.skipped


def test_a_diffuse_spike_scales_the_whole_gradient(folder: Path):
    healthy, spiked = first_step(folder), first_step(folder, DiffuseSpikeFault())
    assert spiked.grad_norm == pytest.approx(100 * healthy.grad_norm, rel=1e-4)
    assert spiked.loss == pytest.approx(100 * healthy.loss, rel=1e-4)
    assert spiked.planted == (PlantedFault(fault="diffuse_spike", factor=100.0),)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_block_explosion_scales_one_block_alone(folder: Path, checkpointing: bool):
    for block in (0, 1):
        spiked = first_step(
            folder, BlockExplosionFault(block=block, factor=1e3), activation_checkpointing=checkpointing
        )
        healthy = dict(first_step(folder, activation_checkpointing=checkpointing).block_norms)
        name = f"model.layers.{block}"
        assert spiked.planted == (PlantedFault(fault="block_explosion", factor=1e3, block=name),)
        for each, norm in spiked.block_norms:
            assert norm == pytest.approx(healthy[each] * (1e3 if each == name else 1.0), rel=1e-3), each


def test_a_block_that_the_model_does_not_have_is_refused_at_the_start(folder: Path):
    with pytest.raises(UserError, match="got block = 2, but the model has 2 transformer blocks; set 0 to 1"):
        first_step(folder, BlockExplosionFault(block=2))


def test_a_ratio_spike_shifts_one_log_prob_and_its_ratio_explodes(folder: Path):
    healthy, spiked = first_step(folder), first_step(folder, RatioSpikeFault())
    (planted,) = spiked.planted
    assert planted.factor == -10.0
    # pi_now / old is e^10 of what it was, on a token that no clip holds back.
    assert spiked.grad_norm > 20 * healthy.grad_norm
    assert abs(spiked.mean_abs_rollout_difference - healthy.mean_abs_rollout_difference) * healthy.num_tokens < 10.01
    corrected = LossSettings(correction=TisConfig(cap=2.0), faults=FaultsConfig(plant=(RatioSpikeFault(),), seed=3))
    capped = first_step(folder, settings=corrected)
    assert capped.planted == spiked.planted
    assert capped.grad_norm < spiked.grad_norm / 20


def test_the_search_of_a_step_reads_the_shifted_log_prob_as_a_token_mismatch(folder: Path):
    tau = GivenTau(tau=2.0 * first_step(folder).grad_norm)
    spiked = first_step(
        folder, RatioSpikeFault(), gradloc=GradLocConfig(threshold=tau, token_ratio_bounds=(0.0, 100.0))
    )
    assert spiked.gradloc is not None
    planted = (spiked.planted[0].trajectory_id, spiked.planted[0].position)
    (culprit,) = [each for each in spiked.gradloc.culprits if (each.trajectory_id, each.position) == planted]
    assert culprit.type is CulpritType.TOKEN_MISMATCH
    assert culprit.omega > 100


def test_a_nan_token_stops_its_step_and_no_later_one(folder: Path, tmp_path: Path):
    trainer = build(
        folder,
        f"planted-{next(_numbers)}",
        settings=LossSettings(faults=FaultsConfig(plant=(NanTokenFault(start_version=2),))),
    )
    try:
        before = trainer.publish(PolicyVersion(1, 0), tmp_path / "w0")
        assert step(trainer, 1).planted == ()
        published = trainer.publish(PolicyVersion(1, 1), tmp_path / "w1")
        report = step(trainer, 2)
        assert report.skipped.startswith("non-finite loss") and report.planted[0].factor is None
        request = StepRequest(policy=PolicyVersion(1, 2), oldest_version=0)
        assert trainer.save_step(tmp_path / "saved", stored(seed=2), request, report).saved == "2"
        (tmp_path / "no-folder").write_text("")
        refused = trainer.save_step(tmp_path / "no-folder", stored(seed=2), request, report)
        assert refused.saved == "" and "free space" in refused.not_saved
        unmoved = trainer.publish(PolicyVersion(1, 2), tmp_path / "w2")
        assert before is not None and published is not None and unmoved is not None
        assert before.digest != published.digest == unmoved.digest
        again = step(trainer, 2)
        assert again.planted == () and not again.skipped
    finally:
        trainer.close()


def test_what_cannot_be_planted_is_told(folder: Path):
    report = first_step(folder, TwoSpikesFault(), micro_batch_tokens=10_000)
    assert (
        report.planted[0].missed == "all terms with a gradient stand in one micro-batch of one rank, and it needs two"
    )
    assert report.grad_norm == first_step(folder, micro_batch_tokens=10_000).grad_norm


CLIPS = GrpoConfig()


def clipped(num_left: int = 0) -> tuple[StoredGroups, set[tuple[str, int]]]:
    """A batch whose every ratio lies where the surrogate clips it, but for the last `num_left` tokens of the best
    trajectory of each group; and those.

    The middle trajectory of each group has no advantage.
    """
    groups, left = healthy_groups(1), set[tuple[str, int]]()
    for group in groups:
        ranking = np.argsort([reward.total for reward in group.rewards])
        worst, _, best = (group.trajectories[int(index)] for index in ranking)
        worst.rollout_logprobs[worst.sampled] = -1e-3
        best.rollout_logprobs[best.sampled] = -30.0
        for at in np.flatnonzero(best.sampled)[best.num_sampled - num_left :].tolist():
            best.rollout_logprobs[at] = -1e-3
            left.add((best.trajectory_id, at))
    return build_stored(groups), left


@pytest.mark.parametrize("kind", [GradSpikeFault, TwoSpikesFault])
def test_a_spike_is_planted_on_terms_that_the_clip_has_not_cut_off(
    folder: Path, kind: type[GradSpikeFault | TwoSpikesFault]
):
    groups, left = clipped(num_left=4)
    healthy = one_step(folder, groups, algorithm=CLIPS)
    hit: set[tuple[str, int | None]] = set()
    for seed in range(8):
        spiked = one_step(
            folder,
            groups,
            settings=LossSettings(faults=FaultsConfig(plant=(kind(factor=1e5),), seed=seed)),
            algorithm=CLIPS,
        )
        hit |= {(planted.trajectory_id, planted.position) for planted in spiked.planted}
        assert spiked.grad_norm > 1000 * healthy.grad_norm, (seed, spiked.planted)
    assert len(hit) > 3 and hit <= left


@pytest.mark.parametrize("fault", [GradSpikeFault(), TwoSpikesFault(), DiffuseSpikeFault(), BlockExplosionFault()])
def test_a_step_in_which_no_term_has_a_gradient_is_missed_with_the_reason(folder: Path, fault: FaultConfig):
    report = one_step(folder, clipped()[0], fault, algorithm=CLIPS)
    (planted,) = report.planted
    assert "no term of the step has a gradient" in planted.missed
    assert report.grad_norm == 0 and planted == PlantedFault(fault=fault.type, missed=planted.missed)


def test_a_ratio_spike_lifts_its_ratio_over_the_clip_and_needs_no_gradient_before(folder: Path):
    report = one_step(folder, clipped()[0], RatioSpikeFault(), algorithm=CLIPS)
    assert report.planted[0].factor == -10.0 and report.grad_norm > 0


def test_a_nan_token_stops_its_step_where_no_term_has_a_gradient(folder: Path):
    report = one_step(folder, clipped()[0], NanTokenFault(), algorithm=CLIPS)
    assert report.planted[0].trajectory_id and report.skipped == "non-finite loss (nan)"


def test_a_ratio_spike_beside_recomputed_log_probs_stands_where_the_clip_has_not_cut_off_the_surrogate(folder: Path):
    groups = healthy_groups(1)
    worst = negative_places(groups)
    verdicts = [encode_evidence(build_evidence(group)) for group in groups]
    for number, group in enumerate(groups):
        evidence = build_evidence(group)
        for each in evidence.trajectories:
            # Of the worst trajectories only the first sampled token is not beyond the lower bound.
            first = int(np.argmax(each.scored))
            each.behaviour_logprobs[first + 1 :] = -1e-3
            each.behaviour_logprobs[first] = -20.0
        verdicts[number] = encode_evidence(evidence)
    first_of = {
        place.trajectory_id: min(each.position for each in worst if each.trajectory_id == place.trajectory_id)
        for place in worst
    }
    for seed in range(8):
        settings = LossSettings(
            correction=TisConfig(cap=2.0), faults=FaultsConfig(plant=(RatioSpikeFault(),), seed=seed)
        )
        report = one_step(
            folder,
            build_stored(groups, verdicts),
            settings=settings,
            source=OldLogprobSource.RECOMPUTED,
            algorithm=CLIPS,
        )
        (planted,) = report.planted
        assert planted.position == first_of[planted.trajectory_id]


def test_measuring_what_has_a_gradient_leaves_the_step_as_it_is(folder: Path):
    """A fault that cannot act: the step is bit for bit that without the fault."""
    steps = [first_step(folder, *faults, micro_batch_tokens=10_000) for faults in ((), (TwoSpikesFault(),))]
    assert steps[1].planted[0].missed
    assert (steps[0].loss, steps[0].grad_norm, steps[0].block_norms) == (
        steps[1].loss,
        steps[1].grad_norm,
        steps[1].block_norms,
    )


def test_one_rank_and_two_plant_on_the_same_tokens(folder: Path):
    tell_what_was_planted(0, 1, folder)
    run_ranks(2, tell_what_was_planted, folder)
    alone, *both = [json.loads((folder / f"planted-{name}.json").read_text()) for name in ("w1-0", "w2-0", "w2-1")]
    assert [fault for fault, _, _ in alone] == ["ratio_spike", "grad_spike", "nan_token"]
    assert all(trajectory_id for _, trajectory_id, _ in alone) and both == [alone, alone]


def test_two_ranks_are_hit_alike_and_the_step_that_they_keep_is_replayed_on_one(folder: Path):
    run_ranks(2, two_ranks_are_hit, folder)
    saved = read_step(folder / "saved_steps" / "3")
    config = TrainerConfig(micro_batch_tokens=24, algorithm=NEVER_CLIPS)
    found = replay(
        ReplaySource(
            saved=saved,
            weights_dir=folder / "kept-weights",
            reference_dir=folder / "dense",
            config=config,
            settings=SPIKES_THEN_NAN,
        )
    )
    (planted,) = saved.planted
    assert saved.ranks == 2 and found.verdict is ReplayVerdict.BATCH
    assert [(culprit.trajectory_id, culprit.position) for culprit in found.culprits] == [
        (planted.trajectory_id, planted.position)
    ]
