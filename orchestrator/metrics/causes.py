"""What the doctor can find: every cause once, in causal order, with its layer of diagnosis."""

from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """Causes in causal order: where several hold, the one further up is looked at first."""

    EVALUATION_CHANGED = "evaluation_changed"
    """Two evaluations had different configurations: their scores cannot be compared."""
    TRAIN_EVAL_OVERLAP = "train_eval_overlap"
    """Prompts of the evaluation are also trained on."""
    DUPLICATE_PROMPTS = "duplicate_prompts"
    """Prompts come more than once in one pass."""
    ENVIRONMENT_FAILURES = "environment_failures"
    """Environments fail, or prompts do not fit the context."""
    REWARD_FAILURES = "reward_failures"
    """The reward function raises, times out, or returns no number."""
    REWARD_INVERTED = "reward_inverted"
    """The training reward rises while the evaluation falls, and no growth of length explains it."""
    LENGTH_REWARD = "length_reward"
    """The reward follows the length of the answer instead of its quality."""
    LENGTH_GROWTH = "length_growth"
    """Answers grow, and too few evaluations say whether for the better."""
    EASY_PROMPTS = "easy_prompts"
    """The trained prompts are solved by nearly every sample, those of the evaluation are not: nothing is left to learn
    from."""
    HARD_PROMPTS = "hard_prompts"
    """Nearly no sample of a trained prompt is right: nothing can be learned."""
    WRONG_DIFFICULTY = "wrong_difficulty"
    """The mean pass rate lies outside 30 to 70 %: `warn` where most groups are lost from the start and the reward
    does not rise, else `info`. Where most groups are solved, that is `solved`."""
    FLAT_REWARD = "flat_reward"
    """Samples of most groups get the same reward, neither all right nor all wrong: the reward does not
    distinguish answers."""
    GROUPS_ALIKE = "groups_alike"
    """Most groups have no difference in reward, some of them solved and many of them not: little is learned from a
    batch."""
    REWARD_DETACHED = "reward_detached"
    """The training reward rises and the evaluation does not, or the evaluation is lost while the training reward
    stands."""
    REWARD_OFF_EVALUATION = "reward_off_evaluation"
    """Training reward and evaluation judge the same policy differently, from the start: wrong reference answers, a
    noisy judge, or prompts of another difficulty."""
    FEW_PROMPTS = "few_prompts"
    """The same few prompts are trained on again and again."""
    SOLVED = "solved"
    """Most groups are solved by every sample, or entropy falls on the way there: what learning looks like near its end,
    or prompts in which little was left to learn."""
    POLICY_COLLAPSE = "policy_collapse"
    """KL rises and entropy falls together (`info` while the reward rises with it), or the reward is lost in a leap of
    KL: the policy moves too far a step."""
    REWARD_FALLS = "reward_falls"
    """The reward falls, and the evaluation with it where there is one: the policy is trained away from the reward."""
    ENTROPY_RISES = "entropy_rises"
    """Entropy rises while the reward does not: the policy loses what it knew."""
    NOTHING_LEARNED = "nothing_learned"
    """The policy moves, groups differ in reward, and neither reward nor evaluation rises."""
    NON_FINITE = "non_finite"
    """A loss, gradient or parameter is not finite."""
    BLOCK_IMBALANCE = "block_imbalance"
    """One block's gradient norm leaves its own history while the others keep theirs."""
    GRADIENT_SPIKE = "gradient_spike"
    """The gradient norm jumps far above its own history."""
    ATTENTION_LOGITS = "attention_logits"
    """Attention logits above 100."""
    GRADIENT_COLLAPSE = "gradient_collapse"
    """The gradient norm falls to nearly nothing although groups still differ in reward."""
    FROZEN_BLOCK = "frozen_block"
    """The gradient of some blocks is zero while the others have one."""
    POLICY_STILL = "policy_still"
    """Updates do not move the policy: tokens keep the log-probs that they were sampled with, and nothing is learned."""
    TRAINER_DISAGREES = "trainer_disagrees"
    """The trainer computes or uses something else than the service does for the same tokens under the same weights:
    log-probs, loss tokens, or advantages."""
    UPDATE_DIFFERS = "update_differs"
    """What a step changed is not what rewards and optimizer settings ask for: the wrong way, too far, or not at all."""
    TOKENIZER = "tokenizer"
    """Engine and trainer disagree about tokens."""
    LOGPROB_SEMANTICS = "logprob_semantics"
    """The engine's log-probs belong to another distribution than they say."""
    WEIGHT_SYNC = "weight_sync"
    """A replica computes with other weights than those published."""
    VERSION_TAG = "version_tag"
    """Tokens carry the version of other weights than those that sampled them."""
    ROUTING = "routing"
    """Engine and trainer choose other experts."""
    PRECISION = "precision"
    """Engine and trainer compute in other number formats."""
    STALE_KV = "stale_kv"
    """Keys and values that older weights wrote are read after an update."""
    SAMPLER = "sampler"
    """A replica draws tokens from another distribution than it declares."""
    REPEATED_SAMPLES = "repeated_samples"
    """A replica gives the same sample again, more often than chance does."""
    LOW_PROBABILITY_TAIL = "low_probability_tail"
    """A few unlikely tokens differ; the mean is fine."""
    UNKNOWN_GAP = "unknown_gap"
    """Engine and trainer differ, and no known cause explains it."""
    GAP_DRIFT = "gap_drift"
    """The gap between engine and trainer grows from version to version."""
    ROUTING_INCOMPLETE = "routing_incomplete"
    """Routing that was asked for does not arrive."""
    ENGINE_FAILURES = "engine_failures"
    """Requests fail in an engine."""
    REPLICA_FAILURES = "replica_failures"
    """Engine replicas are lost and restarted."""
    REWARD_WORKER = "reward_worker"
    """Reward workers die while they judge."""
    WORKER_LOST = "worker_lost"
    """Episode workers or consistency services are lost and replaced."""
    SLOW_REPLICA = "slow_replica"
    """One replica takes much longer for its groups than the others."""
    STALE_WORK = "stale_work"
    """Much of what engines produce is too old to be trained on."""
    ANSWERS_CUT = "answers_cut"
    """Answers end by length below sampling.max_new_tokens."""
    SLOW_STORE = "slow_store"
    """The loop's calls of the store take most of its time."""
    SLOW_REWARD = "slow_reward"
    """The trainer waits for groups, and judging takes most of a group's time."""
    TRAINER_WAITS = "trainer_waits"
    """The trainer waits for groups for most of the time: generation bounds the run."""
    EPISODE_DEADLINE = "episode_deadline"
    """Episodes take longer than they may."""
    NO_STEP = "no_step"
    """No step is made: none yet (`info`), none for long (`warn`), or the run has ended for it (`critical`)."""
    RUN_FAILED = "run_failed"
    """An error ended the run."""
    DRIVER_LOST = "driver_lost"
    """The driver is gone and did not say why: it was killed, or its machine is gone."""


class Learning(StrEnum):
    """What the doctor's findings come to, for whoever asks whether a run learns."""

    OPEN = "open"
    """It learns, or nobody can say yet."""
    SOLVED = "solved"
    """Most groups are solved: little is left to learn."""
    NOT_LEARNING = "not_learning"
    """The reward does not rise although it could, is lost, or nothing is trained at all."""


NOT_LEARNING: frozenset[Cause] = frozenset(
    (
        *(Cause.NOTHING_LEARNED, Cause.POLICY_STILL, Cause.REWARD_FALLS, Cause.POLICY_COLLAPSE, Cause.NO_STEP),
        *(Cause.HARD_PROMPTS, Cause.WRONG_DIFFICULTY, Cause.FLAT_REWARD, Cause.GROUPS_ALIKE, Cause.GRADIENT_COLLAPSE),
    )
)
"""Causes under which a run does not learn, where they are worse than `info`."""
FAILING: frozenset[Cause] = frozenset(
    (
        *(Cause.ENVIRONMENT_FAILURES, Cause.REWARD_FAILURES, Cause.ENGINE_FAILURES, Cause.REWARD_WORKER),
        *(Cause.WORKER_LOST, Cause.EPISODE_DEADLINE),
    )
)
"""Causes for which dispatches fail: where nearly all do (`critical`), nothing is trained."""


FIRST_OF_LAYER: tuple[tuple[Cause, int], ...] = (
    (Cause.EVALUATION_CHANGED, 1),
    (Cause.POLICY_COLLAPSE, 2),
    (Cause.NON_FINITE, 3),
    (Cause.TRAINER_DISAGREES, 4),
)
"""Layers of diagnosis are stretches of the causal order: 1 data and reward, 2 policy, 3 numerical updates, 4 training
system."""
RANK: Mapping[Cause, int] = {cause: place for place, cause in enumerate(Cause)}
LAYER: Mapping[Cause, int] = {
    cause: max(layer for first, layer in FIRST_OF_LAYER if RANK[first] <= RANK[cause]) for cause in Cause
}
DISAGREEMENT: frozenset[Cause] = frozenset(
    cause for cause in Cause if RANK[Cause.TOKENIZER] <= RANK[cause] <= RANK[Cause.GAP_DRIFT]
)
"""Causes under which engine and trainer do not compute the same: KL, entropy and ratios then say nothing of the
policy."""
