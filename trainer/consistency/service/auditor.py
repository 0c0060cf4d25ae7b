"""One batch of stored groups becomes evidence.

    decode -> structure and versions -> scores -> gap and attribution a replica -> verdict a trajectory

Owns that order. It runs inside a service actor and must never know actors, the loop or the store: groups come in
encoded, evidence goes out as annotations.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.config import EngineConfig, EnvironmentConfig, returns_routing
from rollout.environments.registry import build_envs
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.codec import decode
from rollout.types.prompts import Prompt
from rollout.types.trajectory import Annotation, StoredGroups, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.batching.quarantine import keep_quarantines
from trainer.config.consistency import ConsistencyConfig, GapLimits
from trainer.config.trainer import TrainerConfig
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.checks.gap import GapSummary, check_gap, default_limits, gap_floor, gap_summary
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.checks.structure import check_same_ids, check_trajectory
from trainer.consistency.checks.tokens import ThroughText
from trainer.consistency.checks.versions import check_versions
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.consistency.service.report import AuditContext, AuditReport, GroupVerdict, ReplicaFacts, ReplicaGap
from trainer.consistency.service.routing_evidence import check_routing, routing_facts
from trainer.consistency.service.verdicts import Decision, decide
from trainer.model.model_dir import ModelFacts, check_model_dir
from trainer.types.evidence import (
    Attribution,
    Check,
    CheckFinding,
    CheckSeverity,
    GroupEvidence,
    TrajectoryEvidence,
    decode_evidence,
    encode_evidence,
)
from trainer.types.histograms import LOG_RATIO_EDGES, bucket_counts

Scores = list[NDArray[np.float32]]


class ServiceScorer(Rescorer, Protocol):
    """A rescorer that says what it holds."""

    def score_with_routing(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[Scores, list[RoutingAgreement | None]]:
        """`score`, and the agreement of each trajectory's routing over its scored tokens; None where there is none to
        compare."""
        ...

    @property
    def held(self) -> dict[str, str]:
        """Key of each version in memory -> digest."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory of all held weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """One trajectory with its scores."""

    trajectory: Trajectory
    findings: tuple[CheckFinding, ...]
    scores: NDArray[np.float32]
    """[T] nats, NaN where it could not be scored."""
    routing: RoutingAgreement | None = None

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[T] sampled and scored."""
        return self.trajectory.sampled & np.isfinite(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """How this run turns prompts into ids, with a tokenizer of the service's own."""

    read: Callable[[Prompt], NDArray[np.int32]]
    special_ids: frozenset[int]
    through_text: ThroughText | None = None
    """[P] ids to text, without special tokens, and back."""

    def check(self, expected: NDArray[np.int32], trajectory: Trajectory) -> tuple[CheckFinding, ...]:
        """Whether the policy was shown the very ids that its prompt has."""
        given = trajectory.token_ids[: trajectory.version_spans[0].start]
        return check_same_ids(expected, given, self.special_ids, np.zeros(expected.size, dtype=np.bool_))


class _Counted:
    """A rescorer that counts the tokens it was asked for."""

    def __init__(self, scorer: ServiceScorer) -> None:
        self._scorer = scorer
        self.tokens = 0

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> Scores:
        self.tokens += sum(trajectory.token_ids.size for trajectory in trajectories)
        return self._scorer.score(trajectories, options)

    def score_with_routing(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[Scores, list[RoutingAgreement | None]]:
        self.tokens += sum(trajectory.token_ids.size for trajectory in trajectories)
        return self._scorer.score_with_routing(trajectories, options)


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
        begun = time.perf_counter()
        counted = _Counted(self._scorer)
        decoded = [decode(payload) for payload in groups.payloads]
        scored = self._score(decoded, groups.prompts, context, counted)
        facts = {each.replica: each for each in context.replicas}
        gaps = [self._gap(facts[replica], mine, counted) for replica, mine in _by_replica(scored).items()]
        attributions = {gap.replica: gap.attribution for gap in gaps}
        before = [decode_evidence(verdict) if verdict else None for verdict in groups.verdicts]
        evidence = [
            keep_quarantines(new, old)
            for new, old in zip(self._evidence(decoded, scored, attributions), before, strict=True)
        ]
        report = AuditReport(
            groups=tuple(_verdict(each) for each in evidence),
            gaps=tuple(gaps),
            scored_tokens=counted.tokens,
            seconds=time.perf_counter() - begun,
            held_versions=len(self._scorer.held),
            held_bytes=self._scorer.held_bytes,
        )
        return report, tuple(
            Annotation(dispatch_id=each.dispatch_id, kind=kind, payload=encode_evidence(each)) for each in evidence
        )

    def _score(
        self, groups: Sequence[TrajectoryGroup], prompts: Sequence[Prompt], context: AuditContext, scorer: _Counted
    ) -> list[_Scored]:
        reader, asked = self._run.prompts, dict[str, NDArray[np.int32]]()
        if reader is not None:
            asked = {group.dispatch_id: reader.read(prompt) for group, prompt in zip(groups, prompts, strict=True)}
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scores, routings = scorer.score_with_routing(trajectories, self._run.options)
        return [
            _Scored(
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
            )
            for trajectory, values, routing in zip(trajectories, scores, routings, strict=True)
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
        tag = trajectory.tag
        return self._config.limits or default_limits(
            tag.weights_dtype, tag.quantization, self._run.model.is_moe, self._run.deterministic
        )

    def _gap(self, facts: ReplicaFacts, scored: Sequence[_Scored], scorer: Rescorer) -> ReplicaGap:
        """One replica's gap over all its trajectories of the batch, and its attribution when it is out of bounds."""
        limits, summary = self._limits(scored[0].trajectory), _summary(scored)
        findings = [
            *(finding for each in scored for finding in each.findings),
            *check_gap(summary, limits, facts.baseline),
        ]
        attribution = None
        broken = any(
            f.severity is CheckSeverity.FAIL and f.check in (Check.STRUCTURE, Check.TOKENIZER) for f in findings
        )
        if summary.num_tokens and (
            broken
            or summary.mean_abs > gap_floor(limits, facts.baseline)
            or any(f.code == "gap_tail" for f in findings)
        ):
            attribution = self._attribute(facts, scored, scorer, limits)
        d = np.concatenate([(each.scores - each.trajectory.rollout_logprobs)[each.mask] for each in scored])
        return ReplicaGap(
            replica=facts.replica,
            newest=max(span.policy for each in scored for span in each.trajectory.version_spans),
            engine=scored[0].trajectory.tag.engine,
            num_tokens=summary.num_tokens,
            mean_abs=summary.mean_abs,
            mean_abs_limit=limits.mean_abs_fail,
            max_abs=float(np.abs(d).max()) if d.size else 0.0,
            k3=summary.k3,
            ess=summary.ess,
            outside_factor_two=summary.f2,
            findings=tuple({finding.code: finding for finding in reversed(findings)}.values()),
            attribution=attribution,
            abs_quantiles=_quantiles(np.abs(d)),
            log_ratios=bucket_counts(d, LOG_RATIO_EDGES),
            trainer_rounding=self._rounding(scored, scorer) if facts.baseline is None else None,
            routing=routing_facts([each.routing for each in scored], self._tokens_without_trace(scored)),
        )

    def _tokens_without_trace(self, scored: Sequence[_Scored]) -> int:
        return sum(
            each.trajectory.num_sampled for each in scored if self._routing_expected and each.trajectory.routing is None
        )

    def _rounding(self, scored: Sequence[_Scored], scorer: Rescorer) -> float:
        """Mean |difference| of the trainer's own log-probs from those in float32: the trainer's half of the rounding in
        every gap."""
        if self._run.trainer_dtype == "float32":
            return 0.0
        exact = scorer.score([each.trajectory for each in scored], replace(self._run.options, dtype="float32"))
        differences = np.concatenate(
            [(values - each.scores)[each.mask] for values, each in zip(exact, scored, strict=True)]
        )
        return float(np.abs(differences).mean()) if differences.size else 0.0

    def _attribute(
        self, facts: ReplicaFacts, scored: Sequence[_Scored], scorer: Rescorer, limits: GapLimits
    ) -> Attribution | None:
        """Of the trajectories that fail by themselves, or of all where only the sum does: a fault that touches a few
        must not drown in the rest."""
        worst = [
            each
            for each in scored
            if any(
                f.severity is CheckSeverity.FAIL for f in (*each.findings, *check_gap(_summary([each]), limits, None))
            )
        ]
        asked = worst or list(scored)
        known = AttributionFacts(
            structure=tuple(finding for each in asked for finding in each.findings),
            canary_gap=facts.canary_gap,
            canary_tolerance=facts.canary_tolerance,
            baseline=facts.baseline,
            options=self._run.options,
            through_text=None if self._run.prompts is None else self._run.prompts.through_text,
        )
        behaviour = [np.where(np.isfinite(each.scores), each.scores, np.float32(np.nan)) for each in asked]
        return attribute(
            [each.trajectory for each in asked],
            known,
            scorer,
            limits,
            max_tokens=self._config.batch_tokens,
            behaviour=behaviour,
        )

    def _evidence(
        self, groups: Sequence[TrajectoryGroup], scored: Sequence[_Scored], attributions: dict[int, Attribution | None]
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

    def _judge(self, scored: _Scored, attribution: Attribution | None) -> TrajectoryEvidence:
        trajectory, limits = scored.trajectory, self._limits(scored.trajectory)
        gap_findings = check_gap(_summary([scored]), limits, None)
        decision: Decision = decide(
            scored.findings, gap_findings, self._config.on_fail, _token_gaps(scored), token_bound=limits.mean_abs_fail
        )
        blamed = any(finding.severity is CheckSeverity.FAIL for finding in decision.findings)
        return TrajectoryEvidence(
            trajectory_id=trajectory.trajectory_id,
            scored=scored.mask,
            behaviour_logprobs=np.where(scored.mask, scored.scores, np.float32(0)),
            verdict=decision.verdict,
            masked=decision.masked,
            findings=tuple(_without_long_positions(finding) for finding in decision.findings),
            attribution=attribution if blamed else None,
            suspects=decision.suspects,
        )


def build_auditor(
    *,
    model_dir: Path,
    weights_dir: Path,
    config: ConsistencyConfig,
    trainer: TrainerConfig,
    environment: EnvironmentConfig,
    engine: EngineConfig,
    max_staleness: int,
    deterministic: bool,
) -> Auditor:
    """The service of a run: the trainer's model and numerics, version 0 loaded.

    Raises:
        UserError: the model directory cannot be loaded, or there is no GPU where the config asks for one.
    """
    import torch

    from trainer.consistency.scoring.scorer import Scorer

    torch.set_num_threads(config.threads)
    facts = check_model_dir(model_dir)
    scorer = Scorer(
        model_dir=model_dir,
        weights_dir=weights_dir,
        dtype=trainer.dtype,
        chunk_tokens=trainer.logprob_chunk_tokens,
        batch_tokens=config.batch_tokens,
        max_versions=config.max_versions or max_staleness + 2,
        device=torch.device("cuda" if config.num_gpus else "cpu"),
    )
    tokenizer = load_tokenizer(model_dir)
    prompts = PromptReader(
        read=lambda prompt: build_envs(environment, prompt, tokenizer, 1)[0].prompt_ids(),
        special_ids=tokenizer.special_ids,
        through_text=lambda ids: tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True)),
    )
    run = AuditedRun(
        model=facts,
        bos_id=tokenizer.bos_id,
        deterministic=deterministic,
        trainer_dtype=trainer.dtype,
        prompts=prompts,
        returns_routing=returns_routing(engine),
        options=ScoreOptions(replay_routing=trainer.replay_routing),
    )
    return Auditor(scorer, config, run)


def _by_replica(scored: Sequence[_Scored]) -> dict[int, list[_Scored]]:
    found: dict[int, list[_Scored]] = {}
    for each in scored:
        found.setdefault(each.trajectory.tag.replica, []).append(each)
    return found


def _summary(scored: Sequence[_Scored]) -> GapSummary:
    """Over sampled tokens that were scored; one that the recomputed distribution excludes (-inf) counts."""
    masks = [each.trajectory.sampled & ~np.isnan(each.scores) for each in scored]
    return gap_summary([each.scores for each in scored], [each.trajectory.rollout_logprobs for each in scored], masks)


def _quantiles(gaps: NDArray[np.float32]) -> tuple[float, float, float]:
    p50, p90, p99 = np.quantile(gaps, (0.5, 0.9, 0.99)).tolist() if gaps.size else (0.0, 0.0, 0.0)
    return p50, p90, p99


def _token_gaps(scored: _Scored) -> NDArray[np.float32]:
    """[T] |d| in nats, 0 where not sampled, NaN where sampled and not scored. Nothing predicts the first token, so
    nothing is missing there."""
    gaps = np.abs(
        np.where(scored.trajectory.sampled, scored.scores - scored.trajectory.rollout_logprobs, np.float32(0))
    )
    gaps[0] = 0.0
    return gaps


def _without_long_positions(finding: CheckFinding) -> CheckFinding:
    """Evidence names the first positions only: a finding about a whole trajectory need not list it."""
    return (
        replace(finding, positions=finding.positions[:_MAX_POSITIONS])
        if len(finding.positions) > _MAX_POSITIONS
        else finding
    )


_MAX_POSITIONS = 16
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
