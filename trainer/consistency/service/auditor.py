"""One batch of stored groups becomes evidence.

    decode -> structure and versions -> scores -> gap and attribution a replica -> verdict a trajectory

Owns that order. It runs inside a service actor and must never know actors, the loop or the store: groups come in
encoded, evidence goes out as annotations.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.codec import decode
from rollout.types.prompts import Prompt
from rollout.types.trajectory import Annotation, StoredGroups, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.batching.quarantine import keep_quarantines
from trainer.config.consistency import ConsistencyConfig, GapLimits
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.attribution.scored import Scored, attribute_worst, gap_of, is_out_of_bounds
from trainer.consistency.checks.gap import check_gap, default_limits
from trainer.consistency.checks.structure import check_trajectory
from trainer.consistency.checks.versions import check_versions
from trainer.consistency.scoring.protocols import MomentRescorer, ScoreOptions
from trainer.consistency.service.prompts import PromptReader
from trainer.consistency.service.report import (
    AuditContext,
    AuditReport,
    GroupVerdict,
    ReplicaFacts,
    ReplicaGap,
    StepAudit,
    StepToAudit,
)
from trainer.consistency.service.routing_evidence import check_routing, routing_facts
from trainer.consistency.service.sampling_evidence import sampling_of
from trainer.consistency.service.step_audit import DeclaredTrainer, StepScorer, audit_step
from trainer.consistency.service.verdicts import decide
from trainer.model.model_dir import ModelFacts
from trainer.types.evidence import (
    Attribution,
    CheckFinding,
    GroupEvidence,
    TrajectoryEvidence,
    decode_evidence,
    encode_evidence,
)
from trainer.types.histograms import LOG_RATIO_EDGES, bucket_counts


class ServiceScorer(MomentRescorer, StepScorer, Protocol):
    """A rescorer that says what it holds and how much it has done."""

    @property
    def held(self) -> dict[str, str]:
        """Key of each version in memory -> digest."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory of all held weights."""
        ...

    @property
    def scored_tokens(self) -> int:
        """Tokens that it was asked for so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """What the service must know of the run that it audits."""

    model: ModelFacts
    bos_id: int | None = None
    deterministic: bool = False
    trainer_dtype: str = "float32"
    prompts: PromptReader | None = None
    """None: the ids of prompts are not compared with their text."""
    returns_routing: bool = False
    """Whether engines are asked to return the routing of a mixture of experts."""
    options: ScoreOptions = field(default_factory=ScoreOptions)
    """How the trainer computes, routing replay included."""
    trainer: DeclaredTrainer | None = None
    """What its steps are held against; None: they are not audited."""


class Auditor:
    """Scores and judges. One lives as long as its actor."""

    def __init__(self, scorer: ServiceScorer, config: ConsistencyConfig, run: AuditedRun) -> None:
        self._scorer, self._config, self._run = scorer, config, run
        self._routing_expected = run.returns_routing and run.model.is_moe

    def audit(
        self, groups: StoredGroups, context: AuditContext, kind: str
    ) -> tuple[AuditReport, tuple[Annotation, ...]]:
        """The report for the driver, and the evidence of every group as an annotation of `kind`.

        Raises:
            ConcordError: a group's bytes are damaged.
        """
        begun, tokens_before = time.perf_counter(), self._scorer.scored_tokens
        decoded = [decode(payload) for payload in groups.payloads]
        scored = self._score(decoded, groups.prompts, context)
        facts = {each.replica: each for each in context.replicas}
        gaps = [self._gap(facts[replica], mine) for replica, mine in _by_replica(scored).items()]
        attributions = {gap.replica: gap.attribution for gap in gaps}
        before = [decode_evidence(verdict) if verdict else None for verdict in groups.verdicts]
        evidence = [
            keep_quarantines(new, old)
            for new, old in zip(self._evidence(decoded, scored, attributions), before, strict=True)
        ]
        report = AuditReport(
            groups=tuple(_verdict(each) for each in evidence),
            gaps=tuple(gaps),
            scored_tokens=self._scorer.scored_tokens - tokens_before,
            seconds=time.perf_counter() - begun,
            held_versions=len(self._scorer.held),
            held_bytes=self._scorer.held_bytes,
        )
        return report, tuple(
            Annotation(dispatch_id=each.dispatch_id, kind=kind, payload=encode_evidence(each)) for each in evidence
        )

    def audit_step(self, groups: StoredGroups, step: StepToAudit) -> StepAudit | None:
        """What an applied step was seen to do to trajectories of `groups`; None where the weights before or after it
        are gone, or the trainer is not one to audit.

        Raises:
            ConcordError: a group's bytes are damaged.
        """
        declared = self._run.trainer
        return None if declared is None else audit_step(groups, step, self._scorer, declared, self._run.options)

    def _score(
        self, groups: Sequence[TrajectoryGroup], prompts: Sequence[Prompt], context: AuditContext
    ) -> list[Scored]:
        reader, asked = self._run.prompts, dict[str, NDArray[np.int32]]()
        if reader is not None:
            asked = {group.dispatch_id: reader.read(prompt) for group, prompt in zip(groups, prompts, strict=True)}
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scores, routings, moments = self._scorer.score_with_moments(trajectories, self._run.options)
        return [
            Scored(
                trajectory=trajectory,
                findings=(
                    *self._check(trajectory, asked.get(trajectory.dispatch_id), context.committed),
                    *(
                        check_routing(trajectory, routing, expected=self._routing_expected)
                        if self._run.model.is_moe
                        else ()
                    ),
                ),
                scores=values,
                routing=routing,
                moments=of_each,
            )
            for trajectory, values, routing, of_each in zip(trajectories, scores, routings, moments, strict=True)
        ]

    def _check(
        self, trajectory: Trajectory, prompt_ids: NDArray[np.int32] | None, committed: frozenset[PolicyVersion]
    ) -> tuple[CheckFinding, ...]:
        newest = max(committed, default=trajectory.version_spans[0].policy)
        return (
            *check_trajectory(trajectory, self._run.model.vocab_size, self._run.bos_id),
            *(
                ()
                if prompt_ids is None or self._run.prompts is None
                else self._run.prompts.check(prompt_ids, trajectory)
            ),
            *check_versions(trajectory, known=committed, committed=newest),
        )

    def _limits(self, trajectory: Trajectory) -> GapLimits:
        """Of the coarser of the two formats: a trainer in bf16 is no nearer to an engine in float32 than the other way
        round."""
        tag, trainer = trajectory.tag, self._run.trainer_dtype
        dtype = trainer if tag.weights_dtype == "float32" else tag.weights_dtype
        return self._config.limits or default_limits(
            dtype, tag.quantization, self._run.model.is_moe, self._run.deterministic
        )

    def _gap(self, facts: ReplicaFacts, scored: Sequence[Scored]) -> ReplicaGap:
        """One replica's gap over all its trajectories of the batch, and its attribution when it is out of bounds."""
        limits, gap = self._limits(scored[0].trajectory), gap_of(scored)
        findings = [*(finding for each in scored for finding in each.findings), *check_gap(gap, limits, facts.baseline)]
        attribution = None
        if is_out_of_bounds(gap, findings, limits, facts.baseline):
            attribution, _ = attribute_worst(
                scored, self._known(facts), self._scorer, limits, self._config.batch_tokens
            )
        d = np.concatenate([(each.scores - each.trajectory.rollout_logprobs)[each.mask] for each in scored])
        gaps = np.abs(d) if d.size else np.zeros(1)
        p50, p90, p99 = np.quantile(gaps, (0.5, 0.9, 0.99)).tolist()
        return ReplicaGap(
            replica=facts.replica,
            newest=max(span.policy for each in scored for span in each.trajectory.version_spans),
            engine=scored[0].trajectory.tag.engine,
            num_tokens=gap.num_tokens,
            mean_abs=gap.mean_abs,
            mean_abs_limit=limits.mean_abs_fail,
            max_abs=float(gaps.max()),
            k3=gap.k3,
            ess=gap.ess,
            outside_factor_two=gap.f2,
            findings=tuple({finding.code: finding for finding in reversed(findings)}.values()),
            attribution=attribution,
            abs_quantiles=(p50, p90, p99),
            log_ratios=bucket_counts(d, LOG_RATIO_EDGES),
            trainer_rounding=self._rounding(scored) if facts.baseline is None else None,
            routing=routing_facts([each.routing for each in scored], self._tokens_without_trace(scored)),
            sampling=sampling_of(scored),
        )

    def _known(self, facts: ReplicaFacts) -> AttributionFacts:
        return AttributionFacts(
            canary_gap=facts.canary_gap,
            canary_tolerance=facts.canary_tolerance,
            baseline=facts.baseline,
            options=self._run.options,
            through_text=None if self._run.prompts is None else self._run.prompts.through_text,
        )

    def _tokens_without_trace(self, scored: Sequence[Scored]) -> int:
        return sum(
            each.trajectory.num_sampled for each in scored if self._routing_expected and each.trajectory.routing is None
        )

    def _rounding(self, scored: Sequence[Scored]) -> float:
        """Mean |difference| of the trainer's own log-probs from those in float32: the trainer's half of the rounding in
        every gap."""
        if self._run.trainer_dtype == "float32":
            return 0.0
        exact = self._scorer.score([each.trajectory for each in scored], replace(self._run.options, dtype="float32"))
        differences = np.concatenate(
            [(values - each.scores)[each.mask] for values, each in zip(exact, scored, strict=True)]
        )
        return float(np.abs(differences).mean()) if differences.size else 0.0

    def _evidence(
        self, groups: Sequence[TrajectoryGroup], scored: Sequence[Scored], attributions: dict[int, Attribution | None]
    ) -> list[GroupEvidence]:
        remaining = iter(scored)
        evidence: list[GroupEvidence] = []
        for group in groups:
            mine = [next(remaining) for _ in group.trajectories]
            replica = group.trajectories[0].tag.replica
            evidence.append(
                GroupEvidence(
                    dispatch_id=group.dispatch_id,
                    replica=replica,
                    policies=tuple(sorted({span.policy for each in mine for span in each.trajectory.version_spans})),
                    trajectories=tuple(self._judge(each, attributions.get(replica)) for each in mine),
                )
            )
        return evidence

    def _judge(self, scored: Scored, attribution: Attribution | None) -> TrajectoryEvidence:
        trajectory, limits = scored.trajectory, self._limits(scored.trajectory)
        gaps, bound = _token_gaps(scored), limits.mean_abs_fail
        decision = decide(scored.findings, scored.check_gap(limits), self._config.on_fail, gaps, token_bound=bound)
        blamed = any(finding.failed for finding in decision.findings)
        return TrajectoryEvidence(
            trajectory_id=trajectory.trajectory_id,
            scored=scored.mask,
            behaviour_logprobs=np.where(scored.mask, scored.scores, np.float32(0)),
            verdict=decision.verdict,
            masked=decision.masked,
            findings=tuple(
                replace(finding, positions=finding.positions[:_MAX_POSITIONS]) for finding in decision.findings
            ),
            attribution=attribution if blamed else None,
            suspects=decision.suspects,
        )


def _by_replica(scored: Sequence[Scored]) -> dict[int, list[Scored]]:
    found: dict[int, list[Scored]] = {}
    for each in scored:
        found.setdefault(each.trajectory.tag.replica, []).append(each)
    return found


def _token_gaps(scored: Scored) -> NDArray[np.float32]:
    """[T] |d| in nats, 0 where not sampled, NaN where sampled and not scored. Nothing predicts the first token, so
    nothing is missing there."""
    gaps = np.abs(
        np.where(scored.trajectory.sampled, scored.scores - scored.trajectory.rollout_logprobs, np.float32(0))
    )
    gaps[0] = 0.0
    return gaps


_MAX_POSITIONS = 16
"""Evidence names the first positions only: a finding about a whole trajectory need not list it."""
_UNSCORED = ("nothing_scored", "tokens_not_scored")
"""Codes of tokens that have no score."""


def _verdict(evidence: GroupEvidence) -> GroupVerdict:
    trajectories = evidence.trajectories
    open_questions = any(f.code in _UNSCORED for t in trajectories for f in t.findings)
    return GroupVerdict(
        dispatch_id=evidence.dispatch_id,
        replica=evidence.replica,
        verdicts=tuple(trajectory.verdict for trajectory in trajectories),
        reasons=tuple(dict.fromkeys(reason for trajectory in trajectories for reason in trajectory.reasons)),
        complete=not open_questions,
    )
