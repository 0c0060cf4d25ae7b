"""What to do about each cause, and what not to do. Advice for one layer never offers a tool of another."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.metrics.causes import Cause

DO_NOT = "Do not "
"""How every text of what not to do begins."""
LAYER_3_TOOLS: tuple[str, ...] = ("gradient clip", "LayerClip", "ZClip", "AdaGC", "QK-Clip", "GradLoc", "learning rate")
"""What acts on numerical updates. None of it mends data or reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a cause, and what not."""

    do: tuple[str, ...]
    """What to do, in this order."""
    do_not: tuple[str, ...]


_NOT_NUMERICS = (
    "Do not reach for a gradient clip, QK-Clip, GradLoc or another learning rate: updates are not what is wrong."
)


_NOT_POLICY = "Do not read KL, entropy or ratios until engine and trainer agree, and do not tune the policy by them."


def _advice(*texts: str) -> Advice:
    """What to do, in order, and what not: that begins with `DO_NOT`."""
    return Advice(
        do=tuple(text for text in texts if not text.startswith(DO_NOT)),
        do_not=tuple(text for text in texts if text.startswith(DO_NOT)),
    )


ADVICE: Mapping[Cause, Advice] = {
    Cause.EVALUATION_CHANGED: _advice(
        "Compare the parts of the two fingerprints (events `evaluation`) and put back what changed, or start a new "
        "line from here.",
        "Score the version before the change again under the new configuration before you compare.",
        "Do not draw scores of both configurations as one line.",
        _NOT_NUMERICS,
    ),
    Cause.TRAIN_EVAL_OVERLAP: _advice(
        "Take the named prompts out of the training file, or hold other prompts out, and start again.",
        "Do not report this evaluation as generalisation.",
        _NOT_NUMERICS,
    ),
    Cause.DUPLICATE_PROMPTS: _advice(
        "Remove repeated rows from the prompt file; if the weighting is meant, say so in the file's name.",
        "Do not count passes by prompts while some come twice.",
        _NOT_NUMERICS,
    ),
    Cause.ENVIRONMENT_FAILURES: _advice(
        "Read `detail` of the `failed` events and mend the environment or the prompt; `concord explain RUN DISPATCH` "
        "shows one.",
        "Do not raise episodes.max_attempts to drown the failures: what is left over is a selection.",
        _NOT_NUMERICS,
    ),
    Cause.REWARD_FAILURES: _advice(
        "Call the reward function on the prompts named in the `failed` events, and mend it; raise "
        "reward_workers.deadline_s if it is only slow.",
        "Do not let the failing prompts drop out: training then selects by what the reward can judge.",
        _NOT_NUMERICS,
    ),
    Cause.REWARD_INVERTED: _advice(
        "Read ten trajectories with high reward and ten with low (`concord explain`) and judge them by hand: look "
        "for a flipped sign or comparison.",
        "Compare with the reward of the first steps, and go back to the last checkpoint before the evaluation fell.",
        _NOT_NUMERICS,
        "Do not train on in the hope that the evaluation follows.",
    ),
    Cause.LENGTH_REWARD: _advice(
        "Take what pays for length out of the reward: normalise by length, or cap it; then go back to the checkpoint "
        "before length grew.",
        "Watch `length_mean` and the evaluation together, not the reward alone.",
        _NOT_NUMERICS,
        "Do not raise sampling.max_new_tokens to give the growth more room.",
    ),
    Cause.LENGTH_GROWTH: _advice(
        "Evaluate (evaluation.every_steps): only held-out scores say whether longer answers are better ones.",
        _NOT_NUMERICS,
        "Do not take a reward that rises with the length for progress.",
    ),
    Cause.EASY_PROMPTS: _advice(
        "Choose prompts that the present policy solves in 30 to 70 % of its samples, or mix harder ones in.",
        _NOT_NUMERICS,
        "Do not take the high training reward for progress.",
    ),
    Cause.HARD_PROMPTS: _advice(
        "Check that the reward can be won at all (one known right answer through it), then start with easier prompts "
        "or a better start model.",
        _NOT_NUMERICS,
        "Do not raise the number of steps: without a right answer there is no gradient.",
    ),
    Cause.WRONG_DIFFICULTY: _advice(
        "Choose prompts that the present policy solves in 30 to 70 % of its samples: look at `group_pass_rate`.",
        _NOT_NUMERICS,
        "Do not raise the number of steps: groups without a difference have no gradient.",
    ),
    Cause.FLAT_REWARD: _advice(
        "Judge two different answers to one prompt by hand with the reward function: does it see the difference, or "
        "is it rounded or capped away?",
        _NOT_NUMERICS,
        "Do not raise the number of steps: groups without a difference have no gradient.",
    ),
    Cause.GROUPS_ALIKE: _advice(
        "Look at `group_pass_rate`: leave out prompts that are always solved and those that never are, or draw "
        "larger groups.",
        _NOT_NUMERICS,
        "Do not take the mean reward for the difficulty: half solved and half lost has the mean of a good batch.",
    ),
    Cause.REWARD_DETACHED: _advice(
        "Read trajectories with high reward (`concord explain`): what does the policy do that the reward pays for "
        "and the evaluation does not?",
        "Mend the reward, then go back to the last checkpoint at which both rose.",
        _NOT_NUMERICS,
        "Do not choose a checkpoint by training reward.",
    ),
    Cause.REWARD_OFF_EVALUATION: _advice(
        "Judge ten trained trajectories by hand (`concord explain`): reference answers of the training file, a judge "
        "that errs, another sampling or another difficulty all look like this in the rows.",
        "Score the training prompts as an evaluation, once: what is left of the difference is the judge's.",
        _NOT_NUMERICS,
        "Do not read the height of the training reward until the two agree.",
    ),
    Cause.FEW_PROMPTS: _advice(
        "Bring more prompts, or check that the prompt file is read whole: the loop comes round to the same ones.",
        _NOT_NUMERICS,
        "Do not take the training reward for progress: few prompts are learned by heart.",
    ),
    Cause.SOLVED: _advice(
        "Nothing, if the evaluation agrees; for more, bring harder prompts.",
        "Do not add an entropy bonus to a policy that is simply right.",
    ),
    Cause.POLICY_COLLAPSE: _advice(
        "Look at clip_fraction_* and learning_rate: lower trainer.optimizer.learning_rate, or set "
        "trainer.algorithm.kl_coef.",
        "Go on from the last checkpoint before the entropy fell.",
        "Do not hide it with an entropy bonus alone.",
        "Do not conclude anything from KL while a finding of layer 4 marks it untrusted.",
    ),
    Cause.REWARD_FALLS: _advice(
        "Hold the trained advantages against the rewards (the step audit of the consistency service, or one saved "
        "batch by hand): a flipped sign, advantages of other samples and a loss of control look alike in the rows.",
        "Compare the steps before and after the fall began: learning_rate, clip fractions, entropy, and what was "
        "deployed then; go on from the last checkpoint before it.",
        "Do not train on in the hope that it comes back.",
        "Do not choose easier prompts or larger groups: they were learned from before.",
    ),
    Cause.ENTROPY_RISES: _advice(
        "Look at trainer.algorithm.entropy_coef, the learning rate and weight decay; then at whether advantages belong "
        "to their samples (the step audit of the consistency service).",
        "Do not lower the sampling temperature to hide it: the log-probs then belong to another distribution.",
    ),
    Cause.NOTHING_LEARNED: _advice(
        "Check that advantages belong to their samples and have the reward's sign (the step audit of the consistency "
        "service): shuffled or delayed rewards, a gradient of noise and a pull that outweighs the reward "
        "(trainer.algorithm.kl_coef, entropy_coef) look alike in the rows.",
        "Run a few steps on ten easy prompts with a reward that you computed by hand: it must rise.",
        "Do not raise the learning rate before you know that the gradient points at the reward.",
    ),
    Cause.NON_FINITE: _advice(
        "Run the saved batch of the skipped step again (`concord replay RUN STEP`): does it come from the batch, the "
        "number format or the state?",
        "Then go on from the last checkpoint before it.",
        "Do not change the learning rate before you know which token or block came first.",
    ),
    Cause.GRADIENT_SPIKE: _advice(
        "Find the token behind it (GradLoc), and look at the trajectory; a clip by block keeps such a step from "
        "doing harm.",
        "Do not lower the learning rate for one token.",
    ),
    Cause.ATTENTION_LOGITS: _advice(
        "Turn trainer.optimizer.qk_clip on, or use a model with query and key norms.",
        "Do not answer with a tighter global clip: it shrinks every block for the sake of one head.",
    ),
    Cause.BLOCK_IMBALANCE: _advice(
        "Look at the block's rows in block_metrics (activations, attention logits, update ratio); a clip by block "
        "bounds it.",
        "Do not tighten the global clip, which shrinks the healthy blocks as well.",
    ),
    Cause.GRADIENT_COLLAPSE: _advice(
        "Check correction_zero_fraction, masks and clip fractions: something takes the terms out of the loss.",
        "Do not raise the learning rate to make up for it.",
    ),
    Cause.FROZEN_BLOCK: _advice(
        "Check that the block's parameters take a gradient and reach the optimizer (requires_grad, detached inputs, a "
        "mask that leaves it out).",
        "Do not raise the learning rate: the other blocks would pay for it.",
    ),
    Cause.POLICY_STILL: _advice(
        "Look at learning_rate (schedule included), trainer.optimizer.max_grad_norm and epsilon, and a kl_coef that "
        "holds the policy; then whether the updated weights reach the engines (trainer_version and committed_version).",
        "Do not change reward or prompts: what they teach does not arrive.",
    ),
    Cause.TRAINER_DISAGREES: _advice(
        "Read `codes` and `detail` of the `trainer_disagrees` events. `trainer_logprobs`: dropout that is on, an "
        "attention mask or positions that differ, other kernels or formats. `loss_positions`: a shifted loss mask. "
        "`advantages`: a sign, a shift, or groups mixed up between reward and loss.",
        "Compare one trajectory by hand: `concord explain` has its tokens and the service's log-probs.",
        "Do not tune rewards, clips or the learning rate until trainer and service agree: the gradient is of other "
        "tokens than were sampled.",
    ),
    Cause.UPDATE_DIFFERS: _advice(
        "Read `codes` and `detail` of the `update_differs` events. `against_rewards`: a sign between loss and "
        "optimizer. `unmoved`: a frozen or detached block, or weights that are not published. `update_too_large`, "
        "`update_too_small`: the optimizer does not step with trainer.optimizer.learning_rate.",
        "Do not read the reward curve as a verdict on the algorithm before the steps do what the config says.",
    ),
    Cause.TOKENIZER: _advice(
        "Give engine and trainer the same tokenizer files and chat template; `concord explain` shows the ids of one "
        "trajectory.",
        _NOT_POLICY,
        "Do not repair other tokens with importance weights.",
    ),
    Cause.LOGPROB_SEMANTICS: _advice(
        "Compare the engine's sampling (temperature, top-p, top-k, logprobs mode) with the run's [sampling].",
        _NOT_POLICY,
    ),
    Cause.WEIGHT_SYNC: _advice(
        "Look at the replica's update: digest, canary gap, engine version; it is restarted by itself, and its groups "
        "were rejected.",
        _NOT_POLICY,
        "Do not raise the canary's tolerance.",
    ),
    Cause.VERSION_TAG: _advice(
        "Look at how the engine labels its spans: the version before or after closes the gap.",
        _NOT_POLICY,
        "Do not trust staleness while labels are wrong.",
    ),
    Cause.ROUTING: _advice("Replay the engine's experts (engine.return_routing, trainer.replay_routing).", _NOT_POLICY),
    Cause.PRECISION: _advice(
        "Compare declared dtypes of weights, KV and head; use the same on both sides, or a correction by name.",
        _NOT_POLICY,
    ),
    Cause.STALE_KV: _advice(
        'Set engine.kv_across_versions = "recompute", and check that the engine obeys.', _NOT_POLICY
    ),
    Cause.SAMPLER: _advice(
        "Compare how the named replica samples (temperature, top-p, top-k, min-p, penalties, a logits processor) with "
        "the run's [sampling]: the event `sampler_differs` says by how much, as a temperature.",
        "Where log-probs agree all the same, the engine reports those of the declared distribution and draws from "
        "another: set its defaults (generation_config) aside, and ask for log-probs of what it drew from.",
        _NOT_POLICY,
    ),
    Cause.REPEATED_SAMPLES: _advice(
        "Look for a seed that does not change from sample to sample: in the request, in the engine's arguments, in a "
        "cache of answers between the two.",
        "Do not enlarge groups against it: copies of one sample carry no difference.",
    ),
    Cause.LOW_PROBABILITY_TAIL: _advice(
        "Bound the ratios (consistency.correction), and look at the tokens with `concord explain`.", _NOT_POLICY
    ),
    Cause.UNKNOWN_GAP: _advice(
        "Take the replica's audited trajectories apart with `concord explain`; compare kernels and versions of the "
        "engine with a healthy replica.",
        _NOT_POLICY,
        "Do not widen the limits until it is quiet.",
    ),
    Cause.GAP_DRIFT: _advice(
        "Compare engine and trainer formats as for `precision`: weights that grow leave the grid of a narrow format.",
        _NOT_POLICY,
    ),
    Cause.ROUTING_INCOMPLETE: _advice(
        "Check that the replica returns routing for whole sequences, prefix-cache hits included.",
        "Do not fill missing routing with the trainer's own choice and call it a replay.",
    ),
    Cause.ENGINE_FAILURES: _advice(
        "Read `detail` of the `failed` events: which replica, which request, what it answered.",
        "Do not raise episodes.max_attempts before you know why requests fail.",
    ),
    Cause.REPLICA_FAILURES: _advice(
        "Read `reason` of the `replica_failed` events, and the replica's stacks and log.",
        "Do not lower the number of replicas to hide one that dies.",
    ),
    Cause.REWARD_WORKER: _advice(
        "Look for what ends the process (memory, a signal, sys.exit in the reward's code): run the reward on the "
        "named prompt by hand.",
        "Do not raise reward_workers.deadline_s: the worker is dead, not slow.",
    ),
    Cause.WORKER_LOST: _advice(
        "Read `detail` of the `worker_lost` and `auditor_lost` events; look at memory of the machine.",
        "Do not add workers before the reason is known.",
    ),
    Cause.SLOW_REPLICA: _advice(
        "Compare the replica's machine, cores and load with the others'; restart it elsewhere.",
        "Do not raise max_staleness to make room for one slow replica.",
    ),
    Cause.STALE_WORK: _advice(
        "Let rollout run less far ahead, or speed it up: fewer concurrent groups, shorter answers, more replicas.",
        "Do not raise max_staleness before you have looked at which replica or prompt is slow.",
    ),
    Cause.ANSWERS_CUT: _advice(
        "Compare sampling.max_new_tokens with the engine's own limits (max_model_len less the prompt, a default of the "
        "server) and with what one trajectory shows (`concord explain`).",
        "Do not raise sampling.max_new_tokens: the answers do not reach it.",
    ),
    Cause.SLOW_STORE: _advice(
        "Look at `concord_store_latency_seconds` by call and at the disk below the run directory; put it on a local "
        "disk.",
        "Do not raise deadlines.store_s: slow calls hold up every group.",
    ),
    Cause.SLOW_REWARD: _advice(
        "Give the reward more workers (reward_workers.workers), or make it faster: `reward_seconds` is its part of a "
        "group's time.",
        "Do not add engine replicas: they do not wait for themselves.",
    ),
    Cause.TRAINER_WAITS: _advice(
        "For more steps an hour, add engine replicas or shorten answers; the trainer has time to spare.",
        "Do not give the trainer more ranks.",
    ),
    Cause.EPISODE_DEADLINE: _advice(
        "Look at how long groups take (engine load, answer lengths, a reward or an environment that hangs), and raise "
        "episodes.deadline_s where the work is simply slow.",
        "Do not read what is left over as a sample of the prompts: the slow ones are missing.",
    ),
    Cause.NO_STEP: _advice(
        "Read what each part of the run waits for, and look at that part: its stacks are in stacks/ (`kill -USR1 PID` "
        "asks for new ones).",
        "Do not raise deadlines.stall_s before you know what it waits for.",
    ),
    Cause.RUN_FAILED: _advice(
        "Mend what the reason names, and go on from the last checkpoint with `concord resume RUN`.",
        "Do not resume again and again without a change: it ends at the same place.",
    ),
    Cause.DRIVER_LOST: _advice(
        "Look for who ended it (the kernel's log for memory, the scheduler, a terminal that closed), and go on with "
        "`concord resume RUN`.",
        "Do not look for the reason in the training: the driver had no time to say one.",
    ),
}
