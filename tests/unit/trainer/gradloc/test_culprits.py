"""What is odd about a culprit, what is usual for a block, and the verdict that keeps a trajectory out for good."""

import json
import math

import pytest
from support.builders import build_evidence, build_group
from support.trainer.search_evidence import build_culprit, build_search

from orchestrator.config import parse_config
from rollout.errors import UserError
from trainer.batching.quarantine import keep_quarantines, quarantined
from trainer.config.gradloc import GradLocConfig
from trainer.config.trainer import LayerClipConfig, TrainerConfig
from trainer.gradloc.block_history import MIN_STEPS, WINDOW_STEPS, BlockHistory
from trainer.gradloc.culprits import culprit_type
from trainer.optim.clipping import foresee
from trainer.optim.layerclip import LayerClip
from trainer.types.evidence import AuditedGroup, decode_evidence
from trainer.types.gradloc import Acted, CulpritType
from trainer.types.step import Verdict

NAN = math.nan


@pytest.mark.parametrize(
    ("omega", "sequence", "blocks", "expected"),
    [
        (2.01, 1.0, (), CulpritType.TOKEN_MISMATCH),
        (0.49, 1.5, (100.0, 1.0), CulpritType.TOKEN_MISMATCH),
        (2.0, 1.11, (), CulpritType.SEQUENCE_MISMATCH),
        (0.5, 0.89, (100.0, 1.0), CulpritType.SEQUENCE_MISMATCH),
        (1.0, 1.1, (10.1, 1.0), CulpritType.BLOCK_HETEROGENEITY),
        (1.0, 0.9, (11.0, 11.0, 1.0, 9.9), CulpritType.BLOCK_HETEROGENEITY),
        (1.0, 1.0, (11.0, 11.0, 11.0, 9.9), CulpritType.UNCLASSIFIED),
        (1.0, 1.0, (10.0, 1.0), CulpritType.UNCLASSIFIED),
        (1.0, 1.0, (), CulpritType.UNCLASSIFIED),
        (1.0, 1.0, (NAN, 100.0, 1.0), CulpritType.UNCLASSIFIED),
        (NAN, NAN, (), CulpritType.UNCLASSIFIED),
        (math.inf, 1.0, (), CulpritType.TOKEN_MISMATCH),
    ],
)
def test_a_culprit_is_named_by_the_first_oddity(
    omega: float, sequence: float, blocks: tuple[float, ...], expected: CulpritType
):
    assert culprit_type(GradLocConfig(), omega, sequence, blocks) is expected


def test_bounds_of_the_types_are_configurable():
    config = GradLocConfig(token_ratio_bounds=(0.9, 1.1), sequence_ratio_bounds=(0.99, 1.01), block_factor=2.0)
    assert culprit_type(config, 1.2, 1.0, ()) is CulpritType.TOKEN_MISMATCH
    assert culprit_type(config, 1.0, 1.02, ()) is CulpritType.SEQUENCE_MISMATCH
    assert culprit_type(config, 1.0, 1.0, (2.1, 1.0)) is CulpritType.BLOCK_HETEROGENEITY


def test_nothing_is_usual_before_enough_steps_and_one_spike_changes_no_median():
    history = BlockHistory()
    for _ in range(MIN_STEPS - 1):
        history.remember((2.0, 4.0))
    assert history.ratios((2.0, 4.0)) == ()
    history.remember((2e6, 4e6))
    assert history.ratios((20.0, 4.0)) == (10.0, 1.0)


def test_a_block_that_never_had_a_gradient_is_told_from_one_that_has_none_now():
    history = BlockHistory()
    for _ in range(MIN_STEPS):
        history.remember((0.0, 1.0))
    assert history.ratios((0.0, 0.0)) == (1.0, 0.0)
    assert history.ratios((1e-3, 1.0)) == (math.inf, 1.0)


def test_the_history_is_bounded_and_survives_a_checkpoint_as_json():
    history, again = BlockHistory(), BlockHistory()
    for step in range(WINDOW_STEPS + 30):
        history.remember((float(step), 1.0))
    assert len(history.state()) == WINDOW_STEPS
    again.load_state(json.loads(json.dumps(history.state())))
    assert (
        again.ratios((50.0, 1.0)) == history.ratios((50.0, 1.0)) == (pytest.approx(50 / (29.5 + WINDOW_STEPS / 2)), 1.0)
    )


def test_asking_a_clip_teaches_it_nothing():
    clip = LayerClip(["one", "two"], LayerClipConfig(warmup_steps=1))
    clip.decide([1.0, 1.0])
    before = json.dumps(clip.state_dict())
    asked = foresee(clip, [1.0, 50.0])
    assert json.dumps(clip.state_dict()) == before
    assert asked == clip.decide([1.0, 50.0]) and asked.scales[1] < 0.1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('trainer.gradloc.threshold={type="given", tau=0.0}', "expected a positive number"),
        ('trainer.gradloc.threshold={type="given", tau=-3.0}', "expected a positive number"),
        ("trainer.gradloc.budget_passes=0", "trainer.gradloc.budget_passes"),
        ("trainer.gradloc.scale_floor=1.0", "trainer.gradloc.scale_floor"),
        ("trainer.gradloc.token_ratio_bounds=[1.5, 2.0]", "a ratio of 1 is agreement"),
        ("trainer.gradloc.sequence_ratio_bounds=[0.9, 0.95]", "a ratio of 1 is agreement"),
        ("trainer.gradloc.action=drop", "trainer.gradloc.action"),
        ("trainer.gradloc.tau=3", "unknown key"),
    ],
)
def test_a_search_that_cannot_work_is_refused_with_the_cure(override: str, said: str):
    with pytest.raises(UserError) as caught:
        parse_config({}, "test", [override])
    assert said in str(caught.value) and "trainer.gradloc" in str(caught.value)


def test_the_search_is_on_by_default_and_only_observes():
    config = TrainerConfig().gradloc
    assert config.enabled and config.action == "observe" and config.threshold.type == "calibrated"


@pytest.mark.parametrize(
    ("after", "threshold", "exceeds"),
    [(None, 2.0, False), (2.0, 2.0, False), (2.1, 2.0, True), (NAN, 2.0, True), (2.1, NAN, False)],
)
def test_a_repeated_step_exceeds_only_what_is_known(after: float | None, threshold: float, exceeds: bool):
    assert build_search(grad_norm_after=after, threshold=threshold).exceeds_after is exceeds


def culprits_group(*, scored: bool) -> AuditedGroup:
    group = build_group(rewards=(1.0, 0.5, 0.0))
    return AuditedGroup(group=group, evidence=build_evidence(group, shift=0.1) if scored else None)


@pytest.mark.parametrize("scored", [True, False])
def test_a_quarantine_adds_to_what_was_found_before(scored: bool):
    audited = culprits_group(scored=scored)
    out = audited.group.trajectories[1].trajectory_id
    search = build_search(
        acted=Acted.QUARANTINED,
        culprits=(build_culprit(trajectory_id=out, position=6, norm=3.0), build_culprit(trajectory_id=out)),
    )
    (found,) = quarantined([culprits_group(scored=True) if scored else audited], search)
    assert (found.dispatch_id, found.trajectory_ids) == (audited.group.dispatch_id, (out,))
    evidence = decode_evidence(found.verdict)
    assert [each.verdict for each in evidence.trajectories] == [Verdict.ACCEPT, Verdict.QUARANTINE, Verdict.ACCEPT]
    assert [f.positions for f in evidence.trajectories[1].findings] == [(6, 5)]
    assert evidence.trajectories[1].reasons == ("gradient_spike",)
    assert bool(evidence.trajectories[0].scored.any()) is scored
    AuditedGroup(group=audited.group, evidence=evidence)


@pytest.mark.parametrize("acted", [Acted.NOTHING, Acted.MASKED, Acted.SKIPPED])
def test_no_other_action_quarantines(acted: Acted):
    audited = culprits_group(scored=True)
    search = build_search(
        acted=acted, culprits=(build_culprit(trajectory_id=audited.group.trajectories[0].trajectory_id),)
    )
    assert quarantined([audited], search) == quarantined([audited], None) == ()


def test_a_new_audit_does_not_lift_a_quarantine_of_the_gradient_search():
    audited = culprits_group(scored=False)
    out = audited.group.trajectories[2].trajectory_id
    (found,) = quarantined(
        [audited], build_search(acted=Acted.QUARANTINED, culprits=(build_culprit(trajectory_id=out),))
    )
    again = build_evidence(audited.group, shift=0.2)
    kept = keep_quarantines(again, decode_evidence(found.verdict))
    assert [each.verdict for each in kept.trajectories] == [Verdict.ACCEPT, Verdict.ACCEPT, Verdict.QUARANTINE]
    assert kept.trajectories[2].behaviour_logprobs.any() and kept.trajectories[2].reasons == ("gradient_spike",)
    assert keep_quarantines(again, None) is again
    plain = build_evidence(audited.group, verdicts=(Verdict.QUARANTINE, Verdict.ACCEPT, Verdict.ACCEPT))
    assert [each.verdict for each in keep_quarantines(again, plain).trajectories] == [Verdict.ACCEPT] * 3, (
        "verdicts of the service are its own to change"
    )
