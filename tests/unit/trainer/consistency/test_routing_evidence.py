"""What routing says in the service's report: whole evidence is silent, holes are open questions, and the worst replica
is shown."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.builders import BASE, build_dispatch, build_group, build_stored, build_trajectory
from support.consistency.audit_fakes import ScriptedScorer, scripted_auditor
from support.loop.moments import moment

from orchestrator.metrics.consistency import Agreement
from orchestrator.metrics.types import UNMEASURED
from rollout.types.trajectory import TrajectoryGroup
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.checks.routing import RoutingAgreement, routing_agreement
from trainer.consistency.service.report import AuditContext, AuditReport, ReplicaFacts, ReplicaGap
from trainer.consistency.service.routing_evidence import check_routing, routing_facts
from trainer.types.evidence import CheckSeverity, decode_evidence
from trainer.types.step import Verdict


def agreement(rows: int = 8, missing: int = 0, flipped: int = 0) -> RoutingAgreement:
    """Two blocks of two of eight experts; the first `missing` rows are not covered, the last `flipped` differ in block
    1."""
    ours = np.tile(np.array([[0, 1], [2, 3]], dtype=np.uint8), (rows, 1, 1))
    theirs = ours.copy()
    theirs[rows - flipped :, 1, 0] = 7
    predicting = np.ones(rows, dtype=np.bool_)
    gap = np.full((rows, 2), 2.0)
    return routing_agreement(
        theirs, ours, covered=np.arange(rows) >= missing, predicting=predicting, num_experts=8, gate_gap=gap
    )


def audit(
    *groups: TrajectoryGroup,
    scorer: ScriptedScorer | None = None,
    moe: bool = True,
    expected: bool = True,
    replicas: int = 1,
) -> tuple[AuditReport, list[set[str]]]:
    """The report, and the codes of each trajectory's findings."""
    auditor = scripted_auditor(ConsistencyConfig(), scorer, moe=moe, routing_expected=expected)
    facts = tuple(
        ReplicaFacts(replica=replica, canary_gap=0.0, canary_tolerance=1.0, baseline=None)
        for replica in range(replicas)
    )
    report, annotations = auditor.audit(
        build_stored(groups), AuditContext(committed=frozenset([BASE]), replicas=facts), "verdict"
    )
    return report, [{f.code for f in t.findings} for a in annotations for t in decode_evidence(a.payload).trajectories]


def agreeing(whole: RoutingAgreement) -> ScriptedScorer:
    scorer = ScriptedScorer()
    scorer.agree = lambda trajectory: whole if trajectory.routing is not None else None
    return scorer


def test_whole_routing_is_silent_and_its_numbers_are_told():
    report, codes = audit(build_group(routing=(2, 2)), scorer=agreeing(agreement(flipped=2)))
    facts = report.gaps[0].routing
    assert codes == [set(), set()] and not report.gaps[0].findings
    assert facts is not None
    assert (facts.num_rows, facts.coverage, facts.mismatch, facts.token_any_mismatch) == (16, 1.0, 0.125, 0.25)
    assert (facts.block_mismatch.tolist(), int(facts.hollow_cells.sum())) == ([0.0, 0.25], 0)
    assert facts.gate_gap_mismatch == pytest.approx(0.125 * math.tanh(1.0))
    assert facts.jaccard == pytest.approx(1 - 0.125 * (1 - 1 / 3))


def test_routing_that_the_engine_should_return_and_does_not_is_an_open_question():
    report, codes = audit(build_group())
    assert codes == [{"routing_missing"}] * 2
    assert report.groups[0].verdicts == (Verdict.ACCEPT, Verdict.ACCEPT) and report.groups[0].complete
    facts = report.gaps[0].routing
    assert facts is not None and (facts.coverage, facts.num_rows) == (0.0, 0) and math.isnan(facts.mismatch)
    assert report.gaps[0].attribution is None, "evidence that is missing explains no gap"


@pytest.mark.parametrize(("moe", "expected"), [(True, False), (False, True), (False, False)])
def test_without_an_engine_that_is_asked_or_experts_to_ask_for_nothing_is_missing(moe: bool, expected: bool):
    report, codes = audit(build_group(), moe=moe, expected=expected)
    assert codes == [set(), set()]
    assert report.gaps[0].routing is None


def test_holes_in_the_routing_are_an_open_question_and_say_how_many():
    item = build_trajectory(routing=(2, 2))
    (finding,) = check_routing(item, agreement(missing=3), expected=True)
    assert (finding.code, finding.severity) == ("routing_incomplete", CheckSeverity.INCOMPLETE)
    assert "5 of the 8 inputs" in finding.detail
    assert not check_routing(item, None, expected=True), "nothing of it was scored: that is reported elsewhere"


def test_a_trajectory_without_its_trace_lowers_the_coverage_of_its_replica():
    facts = routing_facts([agreement(), None], missing=8)
    assert facts is not None and (facts.coverage, facts.mismatch) == (0.5, 0.0)
    assert routing_facts([None], missing=0) is None


def test_only_the_replica_that_loses_routing_is_told():
    whole, lost = build_group(build_dispatch(0), routing=(2, 2)), build_group(build_dispatch(1))
    lost = replace(lost, trajectories=tuple(replace(t, tag=replace(t.tag, replica=1)) for t in lost.trajectories))
    report, _ = audit(whole, lost, scorer=agreeing(agreement()), replicas=2)
    assert {gap.replica: gap.routing.coverage for gap in report.gaps if gap.routing is not None} == {0: 1.0, 1: 0.0}
    assert {gap.replica: [f.code for f in gap.findings] for gap in report.gaps} == {0: [], 1: ["routing_missing"]}


def gap_of(replica: int, *agreements: RoutingAgreement | None, missing: int = 0) -> ReplicaGap:
    return ReplicaGap(
        replica=replica,
        newest=BASE,
        engine="torch",
        num_tokens=8,
        mean_abs=0.0,
        mean_abs_limit=0.05,
        max_abs=0.0,
        k3=0.0,
        ess=1.0,
        outside_factor_two=0.0,
        findings=(),
        attribution=None,
        routing=routing_facts(agreements, missing),
    )


def routing_columns(newest: dict[int, ReplicaGap]) -> dict[str, float]:
    now = moment(newest_gaps=newest)
    found = {metric.column: metric.now(now)[()] for metric in Agreement.metrics if metric.in_rows and metric.now}
    return {name: value for name, value in found.items() if "_routing_" in name}


def test_columns_show_the_worst_replica_and_nothing_before_there_is_something():
    assert set(routing_columns({}).values()) == {UNMEASURED}
    gaps = {0: gap_of(0, agreement(flipped=4)), 1: gap_of(1, agreement(flipped=2, missing=4)), 2: gap_of(2, None)}
    assert routing_columns(gaps) == {
        "consistency_routing_mismatch": 0.25,
        "consistency_routing_any_mismatch": 0.5,
        "consistency_routing_coverage": 0.5,
    }
    gaps = {0: gap_of(0, None, missing=8)}
    assert routing_columns(gaps) == {
        "consistency_routing_mismatch": UNMEASURED,
        "consistency_routing_any_mismatch": UNMEASURED,
        "consistency_routing_coverage": 0.0,
    }
