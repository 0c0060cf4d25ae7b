"""What the doctor can find: every cause once, in causal order, with its layer, what to do and what not to do. It reads no series."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """In causal order: where several hold, the one further up is looked at first."""

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
    """The trained prompts are solved by nearly every sample, those of the evaluation are not: nothing is left to learn from."""
    HARD_PROMPTS = "hard_prompts"
    """Nearly no sample of a trained prompt is right: nothing can be learned."""
    WRONG_DIFFICULTY = "wrong_difficulty"
    """The mean pass rate lies outside 30 to 70 %: `warn` where most groups are lost or solved from the start and the reward does not rise, else `info`."""
    FLAT_REWARD = "flat_reward"
    """Samples of most groups get the same reward, neither all right nor all wrong: the reward does not tell answers apart."""
    GROUPS_ALIKE = "groups_alike"
    """Most groups have no difference in reward, some of them solved and many of them not: little is learned from a batch."""
    REWARD_DETACHED = "reward_detached"
    """The training reward rises and the evaluation does not."""
    SOLVED = "solved"
    """Entropy falls because most groups are solved: what learning looks like near its end."""
    POLICY_COLLAPSE = "policy_collapse"
    """KL rises and entropy falls together (`info` while the reward rises with it), or the reward is lost in a leap of KL: the policy moves too far a step."""
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


FIRST_OF_LAYER: tuple[tuple[Cause, int], ...] = (
    (Cause.EVALUATION_CHANGED, 1),
    (Cause.POLICY_COLLAPSE, 2),
    (Cause.NON_FINITE, 3),
    (Cause.TOKENIZER, 4),
)
"""Layers of diagnosis are stretches of the causal order: 1 data and reward, 2 policy, 3 numerical updates, 4 training system."""
RANK: Mapping[Cause, int] = {cause: place for place, cause in enumerate(Cause)}
LAYER: Mapping[Cause, int] = {cause: max(layer for first, layer in FIRST_OF_LAYER if RANK[first] <= RANK[cause]) for cause in Cause}
DISAGREEMENT: frozenset[Cause] = frozenset(
    cause for cause in Cause if RANK[Cause.TOKENIZER] <= RANK[cause] <= RANK[Cause.GAP_DRIFT]
)
"""Causes under which engine and trainer do not compute the same: KL, entropy and ratios then say nothing of the policy."""
LAYER_3_TOOLS: tuple[str, ...] = ("gradient clip", "LayerClip", "ZClip", "AdaGC", "QK-Clip", "GradLoc", "learning rate")
"""What acts on numerical updates. None of it mends data or reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a cause, and what not."""

    do: tuple[str, ...]
    """In order; the first is the first thing to do."""
    do_not: tuple[str, ...]


_NOT_NUMERICS = "Do not reach for a gradient clip, QK-Clip, GradLoc or another learning rate: updates are not what is wrong."
_NOT_POLICY = "Do not read KL, entropy or ratios until engine and trainer agree, and do not tune the policy by them."

ADVICE: Mapping[Cause, Advice] = {
    Cause.EVALUATION_CHANGED: Advice(
        do=(
            "Compare the parts of the two fingerprints (events `evaluation`) and put back what changed, or start a new line from here.",
            "Score the version before the change again under the new configuration before you compare.",
        ),
        do_not=("Do not draw scores of both configurations as one line.", _NOT_NUMERICS),
    ),
    Cause.TRAIN_EVAL_OVERLAP: Advice(
        do=("Take the named prompts out of the training file, or hold other prompts out, and start again.",),
        do_not=("Do not report this evaluation as generalisation.", _NOT_NUMERICS),
    ),
    Cause.DUPLICATE_PROMPTS: Advice(
        do=("Remove repeated rows from the prompt file; if the weighting is meant, say so in the file's name.",),
        do_not=("Do not count passes by prompts while some come twice.", _NOT_NUMERICS),
    ),
    Cause.ENVIRONMENT_FAILURES: Advice(
        do=("Read `detail` of the `failed` events and mend the environment or the prompt; `concord explain RUN DISPATCH` shows one.",),
        do_not=("Do not raise episodes.max_attempts to drown the failures: what is left over is a selection.", _NOT_NUMERICS),
    ),
    Cause.REWARD_FAILURES: Advice(
        do=("Call the reward function on the prompts named in the `failed` events, and mend it; raise reward_workers.deadline_s if it is only slow.",),
        do_not=("Do not let the failing prompts drop out: training then selects by what the reward can judge.", _NOT_NUMERICS),
    ),
    Cause.REWARD_INVERTED: Advice(
        do=(
            "Read ten trajectories with high reward and ten with low (`concord explain`) and judge them by hand: look for a flipped sign or comparison.",
            "Compare with the reward of the first steps, and go back to the last checkpoint before the evaluation fell.",
        ),
        do_not=(_NOT_NUMERICS, "Do not train on in the hope that the evaluation follows."),
    ),
    Cause.LENGTH_REWARD: Advice(
        do=(
            "Take what pays for length out of the reward: normalise by length, or cap it; then go back to the checkpoint before length grew.",
            "Watch `length_mean` and the evaluation together, not the reward alone.",
        ),
        do_not=(_NOT_NUMERICS, "Do not raise sampling.max_new_tokens to give the growth more room."),
    ),
    Cause.LENGTH_GROWTH: Advice(
        do=("Evaluate (evaluation.every_steps): only held-out scores say whether longer answers are better ones.",),
        do_not=(_NOT_NUMERICS, "Do not take a reward that rises with the length for progress."),
    ),
    Cause.EASY_PROMPTS: Advice(
        do=("Choose prompts that the present policy solves in 30 to 70 % of its samples, or mix harder ones in.",),
        do_not=(_NOT_NUMERICS, "Do not take the high training reward for progress."),
    ),
    Cause.HARD_PROMPTS: Advice(
        do=("Check that the reward can be won at all (one known right answer through it), then start with easier prompts or a better start model.",),
        do_not=(_NOT_NUMERICS, "Do not raise the number of steps: without a right answer there is no gradient."),
    ),
    Cause.WRONG_DIFFICULTY: Advice(
        do=("Choose prompts that the present policy solves in 30 to 70 % of its samples: look at `group_pass_rate`.",),
        do_not=(_NOT_NUMERICS, "Do not raise the number of steps: groups without a difference have no gradient."),
    ),
    Cause.FLAT_REWARD: Advice(
        do=("Judge two different answers to one prompt by hand with the reward function: does it see the difference, or is it rounded or capped away?",),
        do_not=(_NOT_NUMERICS, "Do not raise the number of steps: groups without a difference have no gradient."),
    ),
    Cause.GROUPS_ALIKE: Advice(
        do=("Look at `group_pass_rate`: leave out prompts that are always solved and those that never are, or draw larger groups.",),
        do_not=(_NOT_NUMERICS, "Do not take the mean reward for the difficulty: half solved and half lost has the mean of a good batch."),
    ),
    Cause.REWARD_DETACHED: Advice(
        do=(
            "Read trajectories with high reward (`concord explain`): what does the policy do that the reward pays for and the evaluation does not?",
            "Mend the reward, then go back to the last checkpoint at which both rose.",
        ),
        do_not=(_NOT_NUMERICS, "Do not choose a checkpoint by training reward."),
    ),
    Cause.SOLVED: Advice(
        do=("Nothing, if the evaluation agrees; for more, bring harder prompts.",),
        do_not=("Do not add an entropy bonus to a policy that is simply right.",),
    ),
    Cause.POLICY_COLLAPSE: Advice(
        do=(
            "Look at clip_fraction_* and learning_rate: lower trainer.optimizer.learning_rate, or set trainer.algorithm.kl_coef.",
            "Go on from the last checkpoint before the entropy fell.",
        ),
        do_not=("Do not hide it with an entropy bonus alone.", "Do not conclude anything from KL while a finding of layer 4 marks it untrusted."),
    ),
    Cause.NON_FINITE: Advice(
        do=(
            "Run the saved batch of the skipped step again (`concord replay RUN STEP`): does it come from the batch, the number format or the state?",
            "Then go on from the last checkpoint before it.",
        ),
        do_not=("Do not change the learning rate before you know which token or block came first.",),
    ),
    Cause.GRADIENT_SPIKE: Advice(
        do=("Find the token behind it (GradLoc), and look at the trajectory; a clip by block keeps such a step from doing harm.",),
        do_not=("Do not lower the learning rate for one token.",),
    ),
    Cause.ATTENTION_LOGITS: Advice(
        do=("Turn trainer.optimizer.qk_clip on, or use a model with query and key norms.",),
        do_not=("Do not answer with a tighter global clip: it shrinks every block for the sake of one head.",),
    ),
    Cause.BLOCK_IMBALANCE: Advice(
        do=("Look at the block's rows in block_metrics (activations, attention logits, update ratio); a clip by block bounds it.",),
        do_not=("Do not tighten the global clip, which shrinks the healthy blocks as well.",),
    ),
    Cause.GRADIENT_COLLAPSE: Advice(
        do=("Check correction_zero_fraction, masks and clip fractions: something takes the terms out of the loss.",),
        do_not=("Do not raise the learning rate to make up for it.",),
    ),
    Cause.TOKENIZER: Advice(
        do=("Give engine and trainer the same tokenizer files and chat template; `concord explain` shows the ids of one trajectory.",),
        do_not=(_NOT_POLICY, "Do not repair other tokens with importance weights."),
    ),
    Cause.LOGPROB_SEMANTICS: Advice(
        do=("Compare the engine's sampling (temperature, top-p, top-k, logprobs mode) with the run's [sampling].",),
        do_not=(_NOT_POLICY,),
    ),
    Cause.WEIGHT_SYNC: Advice(
        do=("Look at the replica's update: digest, canary gap, engine version; it is restarted by itself, and its groups were rejected.",),
        do_not=(_NOT_POLICY, "Do not raise the canary's tolerance."),
    ),
    Cause.VERSION_TAG: Advice(
        do=("Look at how the engine labels its spans: the version before or after closes the gap.",),
        do_not=(_NOT_POLICY, "Do not trust staleness while labels are wrong."),
    ),
    Cause.ROUTING: Advice(
        do=("Replay the engine's experts (engine.return_routing, trainer.replay_routing).",),
        do_not=(_NOT_POLICY,),
    ),
    Cause.PRECISION: Advice(
        do=("Compare declared dtypes of weights, KV and head; use the same on both sides, or a correction by name.",),
        do_not=(_NOT_POLICY,),
    ),
    Cause.STALE_KV: Advice(
        do=('Set engine.kv_across_versions = "recompute", and check that the engine obeys.',),
        do_not=(_NOT_POLICY,),
    ),
    Cause.LOW_PROBABILITY_TAIL: Advice(
        do=("Bound the ratios (consistency.correction), and look at the tokens with `concord explain`.",),
        do_not=(_NOT_POLICY,),
    ),
    Cause.UNKNOWN_GAP: Advice(
        do=("Take the replica's audited trajectories apart with `concord explain`; compare kernels and versions of the engine with a healthy replica.",),
        do_not=(_NOT_POLICY, "Do not widen the limits until it is quiet."),
    ),
    Cause.GAP_DRIFT: Advice(
        do=("Compare engine and trainer formats as for `precision`: weights that grow leave the grid of a narrow format.",),
        do_not=(_NOT_POLICY,),
    ),
    Cause.ROUTING_INCOMPLETE: Advice(
        do=("Check that the replica returns routing for whole sequences, prefix-cache hits included.",),
        do_not=("Do not fill missing routing with the trainer's own choice and call it a replay.",),
    ),
    Cause.ENGINE_FAILURES: Advice(
        do=("Read `detail` of the `failed` events: which replica, which request, what it answered.",),
        do_not=("Do not raise episodes.max_attempts before you know why requests fail.",),
    ),
    Cause.REPLICA_FAILURES: Advice(
        do=("Read `reason` of the `replica_failed` events, and the replica's stacks and log.",),
        do_not=("Do not lower the number of replicas to hide one that dies.",),
    ),
    Cause.REWARD_WORKER: Advice(
        do=("Look for what ends the process (memory, a signal, sys.exit in the reward's code): run the reward on the named prompt by hand.",),
        do_not=("Do not raise reward_workers.deadline_s: the worker is dead, not slow.",),
    ),
    Cause.WORKER_LOST: Advice(
        do=("Read `detail` of the `worker_lost` and `auditor_lost` events; look at memory of the machine.",),
        do_not=("Do not add workers before the reason is known.",),
    ),
    Cause.SLOW_REPLICA: Advice(
        do=("Compare the replica's machine, cores and load with the others'; restart it elsewhere.",),
        do_not=("Do not raise max_staleness to make room for one slow replica.",),
    ),
    Cause.STALE_WORK: Advice(
        do=("Let rollout run less far ahead, or speed it up: fewer concurrent groups, shorter answers, more replicas.",),
        do_not=("Do not raise max_staleness before you have looked at which replica or prompt is slow.",),
    ),
}
