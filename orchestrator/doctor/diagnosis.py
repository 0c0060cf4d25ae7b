"""From a record to a diagnosis: all rules, in causal order, with what is untrusted and what could not be seen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.doctor.findings import Finding, Severity
from orchestrator.doctor.rules import difficulty, inputs, numerical, policy, reward, system
from orchestrator.metrics.causes import DISAGREEMENT, RANK, Cause
from orchestrator.run_dir.record import Record

Rule = Callable[[Record], Finding | None]

_GAP_CAUSES = (
    *(Cause.TOKENIZER, Cause.LOGPROB_SEMANTICS, Cause.WEIGHT_SYNC, Cause.VERSION_TAG),
    *(Cause.ROUTING, Cause.PRECISION, Cause.STALE_KV),
)
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
    Cause.SOLVED: reward.solved,
    Cause.POLICY_COLLAPSE: policy.policy_collapse,
    Cause.NON_FINITE: numerical.non_finite,
    Cause.BLOCK_IMBALANCE: numerical.block_imbalance,
    Cause.GRADIENT_SPIKE: numerical.gradient_spike,
    Cause.ATTENTION_LOGITS: numerical.attention_logits,
    Cause.GRADIENT_COLLAPSE: numerical.gradient_collapse,
    **{cause: system.disagreement(cause, cause.value) for cause in _GAP_CAUSES},
    Cause.SAMPLER: system.sampler,
    Cause.REPEATED_SAMPLES: system.repeated_samples,
    Cause.LOW_PROBABILITY_TAIL: system.disagreement(Cause.LOW_PROBABILITY_TAIL, Cause.LOW_PROBABILITY_TAIL.value),
    Cause.UNKNOWN_GAP: system.disagreement(Cause.UNKNOWN_GAP, "unknown"),
    Cause.GAP_DRIFT: system.gap_drift,
    Cause.ROUTING_INCOMPLETE: system.routing_incomplete,
    Cause.ENGINE_FAILURES: system.engine_failures,
    Cause.REPLICA_FAILURES: system.replica_failures,
    Cause.REWARD_WORKER: system.reward_worker,
    Cause.WORKER_LOST: system.worker_lost,
    Cause.SLOW_REPLICA: system.slow_replica,
    Cause.STALE_WORK: system.stale_work,
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

    def worst_rank(self, layer: int) -> int:
        """`Severity.rank` of the worst finding of a layer; 0 without any."""
        return max((finding.severity.rank for finding in self.findings if finding.layer == layer), default=0)


def diagnose(record: Record) -> Diagnosis:
    """Apply every rule. A finding of layer 2 that rests on readings which layer 4 marks untrusted stands behind that
    one."""
    found = [finding for rule in RULES.values() if (finding := rule(record)) is not None]
    doubtful = any(finding.cause in DISAGREEMENT and finding.severity is not Severity.INFO for finding in found)

    def place(finding: Finding) -> tuple[bool, bool, int]:
        behind = doubtful and finding.layer == 2
        return finding.severity is Severity.INFO, behind, RANK[finding.cause]

    marked = any(finding.layer == 4 and finding.severity is not Severity.INFO for finding in found)
    return Diagnosis(
        steps=int(record.steps.size),
        last_step=record.last_step,
        findings=tuple(sorted(found, key=place)),
        untrusted=RATIO_SERIES if marked else (),
    )
