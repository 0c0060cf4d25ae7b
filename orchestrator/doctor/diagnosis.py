"""From a record to a diagnosis: all rules, in causal order, with what is untrusted and what could not be seen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.doctor.findings import Finding, Severity
from orchestrator.doctor.rules import (
    bounds,
    difficulty,
    engines,
    inputs,
    learning,
    numerical,
    policy,
    reward,
    runs,
    system,
)
from orchestrator.metrics.causes import DISAGREEMENT, FAILING, NOT_LEARNING, RANK, Cause, Learning
from orchestrator.run_dir.record import Record

Rule = Callable[[Record], Finding | None]

_GAP_CAUSES = (Cause.TOKENIZER, Cause.LOGPROB_SEMANTICS, Cause.WEIGHT_SYNC, Cause.VERSION_TAG, Cause.ROUTING)


def _first_of(*rules: Rule) -> Rule:
    """What the first of them finds that finds anything."""
    return lambda record: next((found for rule in rules if (found := rule(record)) is not None), None)


RULES: Mapping[Cause, Rule] = {
    Cause.EVALUATION_CHANGED: inputs.evaluation_changed,
    Cause.TRAIN_EVAL_OVERLAP: inputs.train_eval_overlap,
    Cause.DUPLICATE_PROMPTS: inputs.duplicate_prompts,
    Cause.ENVIRONMENT_FAILURES: inputs.environment_failures,
    Cause.REWARD_FAILURES: inputs.reward_failures,
    Cause.REWARD_INVERTED: reward.reward_inverted,
    Cause.LENGTH_REWARD: reward.length_reward,
    Cause.LENGTH_GROWTH: reward.length_growth,
    Cause.EASY_PROMPTS: difficulty.easy_prompts,
    Cause.HARD_PROMPTS: difficulty.hard_prompts,
    Cause.WRONG_DIFFICULTY: difficulty.wrong_difficulty,
    Cause.FLAT_REWARD: difficulty.flat_reward,
    Cause.GROUPS_ALIKE: difficulty.groups_alike,
    Cause.REWARD_DETACHED: reward.reward_detached,
    Cause.REWARD_OFF_EVALUATION: reward.reward_off_evaluation,
    Cause.FEW_PROMPTS: difficulty.few_prompts,
    Cause.SOLVED: difficulty.solved,
    Cause.POLICY_COLLAPSE: policy.policy_collapse,
    Cause.REWARD_FALLS: learning.reward_falls,
    Cause.ENTROPY_RISES: learning.entropy_rises,
    Cause.NOTHING_LEARNED: learning.nothing_learned,
    Cause.NON_FINITE: numerical.non_finite,
    Cause.BLOCK_IMBALANCE: numerical.block_imbalance,
    Cause.GRADIENT_SPIKE: numerical.gradient_spike,
    Cause.ATTENTION_LOGITS: numerical.attention_logits,
    Cause.GRADIENT_COLLAPSE: numerical.gradient_collapse,
    Cause.FROZEN_BLOCK: numerical.frozen_block,
    Cause.POLICY_STILL: learning.policy_still,
    Cause.TRAINER_DISAGREES: system.trainer_disagrees,
    Cause.UPDATE_DIFFERS: system.update_differs,
    **{cause: system.disagreement(cause, cause.value) for cause in _GAP_CAUSES},
    Cause.PRECISION: _first_of(system.disagreement(Cause.PRECISION, "precision"), engines.formats_apart),
    Cause.STALE_KV: system.disagreement(Cause.STALE_KV, Cause.STALE_KV.value),
    Cause.SAMPLER: system.sampler,
    Cause.REPEATED_SAMPLES: _first_of(system.repeated_samples, engines.repeated_samples),
    Cause.LOW_PROBABILITY_TAIL: system.disagreement(Cause.LOW_PROBABILITY_TAIL, Cause.LOW_PROBABILITY_TAIL.value),
    Cause.UNKNOWN_GAP: _first_of(system.disagreement(Cause.UNKNOWN_GAP, "unknown"), engines.same_weights_gap),
    Cause.GAP_DRIFT: system.gap_drift,
    Cause.ROUTING_INCOMPLETE: system.routing_incomplete,
    Cause.ENGINE_FAILURES: system.engine_failures,
    Cause.REPLICA_FAILURES: system.replica_failures,
    Cause.REWARD_WORKER: system.reward_worker,
    Cause.WORKER_LOST: system.worker_lost,
    Cause.SLOW_REPLICA: system.slow_replica,
    Cause.STALE_WORK: system.stale_work,
    Cause.ANSWERS_CUT: engines.answers_cut,
    Cause.SLOW_STORE: bounds.slow_store,
    Cause.SLOW_REWARD: bounds.slow_reward,
    Cause.TRAINER_WAITS: bounds.trainer_waits,
    Cause.EPISODE_DEADLINE: system.episode_deadline,
    Cause.NO_STEP: runs.no_step,
    Cause.RUN_FAILED: runs.run_failed,
    Cause.DRIVER_LOST: runs.driver_lost,
}
"""The rule of each cause, in causal order."""
RATIO_SERIES = (
    *("policy_entropy", "approx_kl", "reference_kl", "clip_fraction_low", "clip_fraction_high"),
    *(
        "abs_logprob_difference_mean",
        "abs_rollout_difference_mean",
        "correction_weight_mean",
        "correction_ess",
        "correction_zero_fraction",
    ),
)
"""What says nothing of the policy while engine and trainer disagree."""

OF_THE_RUN = frozenset((Cause.NO_STEP, Cause.RUN_FAILED, Cause.DRIVER_LOST))
"""What says how the run stands, and nothing of its numbers."""
CONSEQUENCES = frozenset(
    (
        *(Cause.HARD_PROMPTS, Cause.WRONG_DIFFICULTY, Cause.FLAT_REWARD, Cause.GROUPS_ALIKE),
        Cause.REWARD_OFF_EVALUATION,
        *(Cause.POLICY_COLLAPSE, Cause.REWARD_FALLS, Cause.ENTROPY_RISES, Cause.NOTHING_LEARNED),
    )
)
"""What may be the work of something further down that began no later."""
_EXPLAIN = DISAGREEMENT | {
    *(Cause.NON_FINITE, Cause.GRADIENT_SPIKE, Cause.BLOCK_IMBALANCE, Cause.FROZEN_BLOCK, Cause.POLICY_STILL),
    *(Cause.REPEATED_SAMPLES, Cause.ANSWERS_CUT, Cause.REWARD_OFF_EVALUATION),
}
"""What explains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the rules make of a record."""

    steps: int
    """Rows that were read."""
    last_step: int
    findings: tuple[Finding, ...]
    """The primary one first, in causal order; `info` behind all others."""
    untrusted: tuple[str, ...]
    """Series that a finding of layer 4 marks untrusted."""

    @property
    def primary(self) -> Finding | None:
        """What to look at first; None where nothing is worse than `info`."""
        return self.findings[0] if self.findings and self.findings[0].severity is not Severity.INFO else None

    @property
    def learning(self) -> Learning:
        """Whether the run learns, as far as the findings say."""
        for finding in self.findings:
            hopeless = finding.cause in FAILING and finding.severity is Severity.CRITICAL
            if hopeless or (finding.cause in NOT_LEARNING and finding.severity is not Severity.INFO):
                return Learning.NOT_LEARNING
        return Learning.SOLVED if any(f.cause is Cause.SOLVED for f in self.findings) else Learning.OPEN

    def worst_rank(self, layer: int) -> int:
        """`Severity.rank` of the worst finding of a layer; 0 without any."""
        return max((finding.severity.rank for finding in self.findings if finding.layer == layer), default=0)


def diagnose(record: Record) -> Diagnosis:
    """Apply every rule, and put what was found into the order in which to look at it (`_before`)."""
    found = [finding for rule in RULES.values() if (finding := rule(record)) is not None]
    marked = any(f.layer == 4 and f.severity is not Severity.INFO and f.cause not in OF_THE_RUN for f in found)
    return Diagnosis(
        steps=int(record.steps.size),
        last_step=record.last_step,
        findings=_ordered(found),
        untrusted=RATIO_SERIES if marked else (),
    )


def _ordered(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Causal order, in which a finding moves up before those that it goes before by its onset; `info` behind all."""
    placed: list[Finding] = []
    for finding in sorted(found, key=lambda one: (one.severity is Severity.INFO, RANK[one.cause])):
        at = next((place for place, other in enumerate(placed) if _before(finding, other)), len(placed))
        placed.insert(at, finding)
    return tuple(placed)


def _before(finding: Finding, other: Finding) -> bool:
    """Whether `finding`, which is further down in causal order, must be looked at before `other` all the same: it is
    worse and began earlier, so it is no consequence; or `other` is what it leads to, and did not begin before it."""
    if Severity.INFO in (finding.severity, other.severity):
        return False
    if finding.cause in DISAGREEMENT and (other.layer == 2 or (other.layer == 3 and finding.since < other.since)):
        return True
    if finding.severity.rank > other.severity.rank and finding.since < other.since:
        return True
    return other.cause in CONSEQUENCES and finding.cause in _EXPLAIN and finding.since <= other.since
