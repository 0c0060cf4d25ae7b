"""What one batch of groups becomes in the service: evidence, verdicts, gaps; with a scorer whose answers are given."""

from dataclasses import replace

import numpy as np
import pytest
from support.builders import BASE, build_dispatch, build_group, build_stored
from support.consistency.audit_fakes import ScriptedScorer, scripted_auditor
from support.trainer.search_evidence import build_culprit, build_search

from rollout.types.trajectory import TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.batching.quarantine import quarantined
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.checks.gap import GapBaseline
from trainer.consistency.service.prompts import PromptReader
from trainer.consistency.service.report import AuditContext, AuditReport, ReplicaFacts
from trainer.types.evidence import AuditedGroup, GapCause, GroupEvidence, decode_evidence
from trainer.types.gradloc import Acted
from trainer.types.step import Verdict

V1 = PolicyVersion(1, 1)


def facts(replica: int = 0, canary_gap: float = 0.0, baseline: float | None = None) -> ReplicaFacts:
    measured = (
        None
        if baseline is None
        else GapBaseline(engine="scripted", replica=replica, mean_abs=baseline, k3=0.0, f2=0.0, tokens=100)
    )
    return ReplicaFacts(replica=replica, canary_gap=canary_gap, canary_tolerance=1e-5, baseline=measured)


def audit(
    *groups: TrajectoryGroup,
    scorer: ScriptedScorer | None = None,
    on_fail: str = "quarantine",
    about: tuple[ReplicaFacts, ...] = (facts(),),
    committed: tuple[PolicyVersion, ...] = (BASE,),
) -> tuple[AuditReport, list[GroupEvidence]]:
    auditor = scripted_auditor(ConsistencyConfig.model_validate({"on_fail": on_fail}), scorer)
    report, annotations = auditor.audit(
        build_stored(groups), AuditContext(committed=frozenset(committed), replicas=about), "verdict"
    )
    assert [a.kind for a in annotations] == ["verdict"] * len(groups)
    return report, [decode_evidence(a.payload) for a in annotations]


def on_replica(group: TrajectoryGroup, replica: int) -> TrajectoryGroup:
    return replace(
        group, trajectories=tuple(replace(t, tag=replace(t.tag, replica=replica)) for t in group.trajectories)
    )


def test_a_healthy_group_is_accepted_and_every_sampled_token_is_scored():
    group = build_group()
    report, (evidence,) = audit(group)
    assert report.groups[0].verdicts == (Verdict.ACCEPT, Verdict.ACCEPT)
    assert report.groups[0].complete
    assert report.gaps[0].attribution is None
    for found, trajectory in zip(evidence.trajectories, group.trajectories, strict=True):
        np.testing.assert_array_equal(found.scored, trajectory.sampled)
        np.testing.assert_array_equal(found.behaviour_logprobs, trajectory.rollout_logprobs)


@pytest.mark.parametrize(
    ("on_fail", "verdict"),
    [("observe", Verdict.ACCEPT), ("reject", Verdict.REJECT), ("quarantine", Verdict.QUARANTINE)],
)
def test_a_trajectory_that_its_policy_does_not_explain_gets_what_the_config_says(on_fail: str, verdict: Verdict):
    scorer = ScriptedScorer(lambda t, o: 0.1 if t.trajectory_id.endswith("/1") else 0.0)
    report, (evidence,) = audit(build_group(), scorer=scorer, on_fail=on_fail)
    assert report.groups[0].verdicts == (Verdict.ACCEPT, verdict)
    assert "gap_mean" in evidence.trajectories[1].reasons
    assert evidence.trajectories[0].attribution is None
    assert evidence.trajectories[1].attribution is not None


def test_only_the_replica_at_fault_is_blamed():
    groups = [build_group(build_dispatch(0)), on_replica(build_group(build_dispatch(1)), 1)]
    scorer = ScriptedScorer(lambda t, o: 0.1 if t.tag.replica == 1 else 0.0)
    report, _ = audit(*groups, scorer=scorer, about=(facts(0), facts(1, canary_gap=0.2)))
    healthy, faulty = sorted(report.gaps, key=lambda gap: gap.replica)
    assert healthy.attribution is None
    assert faulty.attribution is not None
    assert faulty.attribution.first is GapCause.WEIGHT_SYNC
    assert faulty.attribution.explained >= 0.8


def test_a_version_that_the_ledger_does_not_know_fails_however_well_it_scores():
    group = build_group(spans=((BASE, 4), (V1, 4)))
    report, _ = audit(group)
    assert set(report.groups[0].verdicts) == {Verdict.QUARANTINE}
    assert "unknown_version" in report.groups[0].reasons
    known, _ = audit(group, committed=(BASE, V1))
    assert set(known.groups[0].verdicts) == {Verdict.ACCEPT}


def test_tokens_whose_version_is_gone_are_an_open_question_not_an_acceptance_in_silence():
    report, (evidence,) = audit(build_group(), scorer=ScriptedScorer(lambda t, o: float("nan")))
    assert not report.groups[0].complete
    assert report.gaps[0].num_tokens == 0
    assert not any(t.scored.any() for t in evidence.trajectories)
    assert all("nothing_scored" in {f.code for f in t.findings} for t in evidence.trajectories)


def test_ids_outside_the_vocabulary_are_rejected_whatever_on_fail_says():
    report, _ = audit(build_group(vocab_size=999), on_fail="observe")
    assert set(report.groups[0].verdicts) == {Verdict.REJECT}
    attribution = report.gaps[0].attribution
    assert "id_outside_vocabulary" in report.groups[0].reasons
    assert attribution is not None


def test_a_gap_within_the_ceiling_but_far_above_the_replicas_own_is_attributed_and_trained_on():
    report, _ = audit(build_group(), scorer=ScriptedScorer(lambda t, o: 8e-6), about=(facts(baseline=1e-7),))
    assert set(report.groups[0].verdicts) == {Verdict.ACCEPT}
    assert "gap_above_baseline" in {finding.code for finding in report.gaps[0].findings}
    assert report.gaps[0].attribution is not None


def test_a_prompt_that_was_encoded_otherwise_is_rejected_and_blamed_on_the_tokenizer():
    group = build_group(prompt_tokens=4)
    reader = PromptReader(
        read=lambda prompt: np.concatenate([group.trajectories[0].token_ids[:4], np.array([7], dtype=np.int32)]),
        special_ids=frozenset(),
    )
    groups = replace(build_stored([group]), prompts=(build_dispatch().prompt,))
    auditor = scripted_auditor(ConsistencyConfig(), prompts=reader)
    report, _ = auditor.audit(groups, AuditContext(committed=frozenset((BASE,)), replicas=(facts(),)), "verdict")
    assert set(report.groups[0].verdicts) == {Verdict.REJECT}
    assert any(reason.startswith("drift_") for reason in report.groups[0].reasons)
    attribution = report.gaps[0].attribution
    assert attribution is not None and attribution.first is GapCause.TOKENIZER


def test_a_first_audit_of_a_bf16_trainer_measures_it_against_its_own_float32():
    scorer = ScriptedScorer(lambda t, o: 0.003 if o.dtype == "float32" else 0.0)
    auditor = scripted_auditor(ConsistencyConfig(), scorer, trainer_dtype="bfloat16")
    for baseline, expected in ((None, pytest.approx(0.003, rel=1e-3)), (0.001, None)):
        context = AuditContext(committed=frozenset((BASE,)), replicas=(facts(baseline=baseline),))
        report, _ = auditor.audit(build_stored([build_group()]), context, "verdict")
        assert report.gaps[0].trainer_rounding == expected


@pytest.mark.parametrize(("trainer_dtype", "accepted"), [("bfloat16", True), ("float32", False)])
def test_a_bf16_trainer_against_a_float32_engine_is_held_to_the_limits_of_bf16(trainer_dtype: str, accepted: bool):
    scorer = ScriptedScorer(lambda t, o: 0.01)
    auditor = scripted_auditor(ConsistencyConfig(), scorer, trainer_dtype=trainer_dtype)
    context = AuditContext(committed=frozenset((BASE,)), replicas=(facts(baseline=0.009),))
    report, _ = auditor.audit(build_stored([build_group()]), context, "verdict")
    assert (set(report.groups[0].verdicts) == {Verdict.ACCEPT}) is accepted
    assert (report.gaps[0].attribution is None) is accepted


def test_an_audit_does_not_lift_what_the_gradient_search_quarantined():
    group = build_group()
    culprit = build_culprit(trajectory_id=group.trajectories[1].trajectory_id, position=5)
    (out,) = quarantined([AuditedGroup(group=group)], build_search(acted=Acted.QUARANTINED, culprits=(culprit,)))
    auditor = scripted_auditor(ConsistencyConfig())
    report, (annotation,) = auditor.audit(
        build_stored([group], [out.verdict]), AuditContext(committed=frozenset((BASE,)), replicas=(facts(),)), "verdict"
    )
    assert report.groups[0].verdicts == (Verdict.ACCEPT, Verdict.QUARANTINE)
    found = decode_evidence(annotation.payload).trajectories[1]
    assert found.reasons == ("gradient_spike",) and found.scored.any()
