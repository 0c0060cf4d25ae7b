"""What can go wrong in a made-up run, by the cause that the doctor should name first."""

import math
from collections.abc import Callable

import numpy as np
from support.loop.doctor_runs import MadeUpRun, rescore

from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.history import How


def length_pays(run: MadeUpRun) -> None:
    run.set("length_mean", lambda t: 4 + 3 * t)
    run.set("reward_mean", lambda t: 0.5 + 0.4 * t)
    run.set("reward_length_correlation", lambda t: 0.4 + 0.55 * t)
    rescore(run, lambda t: 0.5 - 0.3 * t)


def reward_flips(run: MadeUpRun) -> None:
    run.set("reward_mean", lambda t: 0.55 + 0.4 * t)
    rescore(run, lambda t: 0.6 - 0.55 * t)


def reward_is_flat(run: MadeUpRun) -> None:
    run.set("zero_variance_groups", lambda t: 0.95, since=60)
    run.set("all_correct_groups", lambda t: 0.1)


def prompts_are_easy(run: MadeUpRun) -> None:
    run.set("distinct_prompts", lambda t: 0.1)
    run.set("all_correct_groups", lambda t: 0.97)
    run.set("zero_variance_groups", lambda t: 0.97)
    run.set("reward_mean", lambda t: 0.99)
    run.set("policy_entropy", lambda t: 0.05)
    rescore(run, lambda t: 0.5)


def prompts_are_hard(run: MadeUpRun) -> None:
    run.set("all_wrong_groups", lambda t: 0.98)
    run.set("zero_variance_groups", lambda t: 0.98)
    run.set("all_correct_groups", lambda t: 0.0)
    run.set("reward_mean", lambda t: 0.01)
    rescore(run, lambda t: 0.01)


def reward_is_detached(run: MadeUpRun) -> None:
    run.set("reward_mean", lambda t: 0.3 + 0.5 * t)
    for name in ("all_correct_groups", "zero_variance_groups"):
        run.set(name, lambda t: 0.2 * t)
    rescore(run, lambda t: 0.45)


def evaluation_changes(run: MadeUpRun) -> None:
    run.events = [
        type(e)(
            kind=e.kind,
            step=e.step,
            fields={**e.fields, **({"fingerprint": "other", "part_chat_template": "b"} if e.step > 60 else {})},
        )
        for e in run.events
    ]


def groups_of(wrong: float, right: float, reward: float) -> Callable[[MadeUpRun], None]:
    """From the start to the end these shares of groups are lost and solved, and the rest differ; nothing is
    evaluated."""

    def change(run: MadeUpRun) -> None:
        random = np.random.default_rng(len(run.rows))
        run.set("all_wrong_groups", lambda t: wrong)
        run.set("all_correct_groups", lambda t: right)
        run.set("zero_variance_groups", lambda t: wrong + right)
        run.set("reward_mean", lambda t: reward + random.normal(0, 0.005))
        run.set("policy_entropy", lambda t: 0.5)
        run.events.clear()

    return change


def prompts_checked(**fields: object) -> Callable[[MadeUpRun], None]:
    known = {
        "train_prompts": 100,
        "duplicates": 0,
        "evaluation_prompts": 64,
        "exact": 0,
        "by_ngrams": 0,
        "overlapping": 0,
        "example": "",
    }
    return lambda run: run.event("prompts_checked", 0, **{**known, **fields})


def policy_collapses(run: MadeUpRun) -> None:
    """The worked example: KL .193 -> .495, entropy .500 -> .199."""
    run.set("reference_kl", lambda t: 0.193 + 0.302 * t)
    run.set("policy_entropy", lambda t: 0.5 - 0.301 * t)
    run.set("reward_mean", lambda t: 0.5)
    run.set("all_correct_groups", lambda t: 0.1)
    rescore(run, lambda t: 0.5)


def reward_grows_better(run: MadeUpRun, evaluated: bool) -> None:
    """The reward rises, and the evaluation with it where there is one."""
    run.set("reward_mean", lambda t: 0.3 + 0.5 * t)
    rescore(run, lambda t: 0.3 + 0.5 * t)
    if not evaluated:
        run.events.clear()


def gradient_spikes(run: MadeUpRun) -> None:
    run.rows[-5]["grad_norm"] = 900.0


def block_spikes(run: MadeUpRun) -> None:
    for block in ("layers.0", "layers.1", "head"):
        run.blocks["block_grad_norm", block] = {int(row["step"]): 0.3 for row in run.rows}
    run.blocks["block_grad_norm", "layers.1"][len(run.rows) - 3] = 300.0
    run.rows[-3]["grad_norm"] = 300.0


def gap_by(cause: str) -> Callable[[MadeUpRun], None]:
    return lambda run: run.event(
        "consistency_finding",
        20,
        cause=cause,
        replica=1,
        policy="e1-v20",
        gap_nats=0.4,
        explained=0.9,
        codes="gap_mean",
        detail="x",
    )


def noisily(value: Callable[[float], float], error: float, seed: int = 0) -> Callable[[float], float]:
    """With the noise of a batch."""
    random = np.random.default_rng(seed)
    return lambda t: value(t) + random.normal(0, error)


def steady(run: MadeUpRun, reward: Callable[[float], float] = lambda t: 0.5) -> None:
    """Groups differ, entropy stays, and the reward does what is said; the evaluation does the same."""
    run.set("reward_mean", noisily(reward, 0.03))
    run.set("reward_std", lambda t: 0.5)
    run.set("policy_entropy", noisily(lambda t: 0.6, 0.02))
    for name, value in (("all_correct_groups", 0.05), ("all_wrong_groups", 0.05), ("zero_variance_groups", 0.1)):
        run.set(name, lambda t, value=value: value)
    rescore(run, reward)


def reward_is_lost(run: MadeUpRun) -> None:
    """.53 -> .009, and the evaluation with it; KL never leaps."""
    steady(run, lambda t: 0.53 - 0.521 * min(1.0, 1.5 * t))


def entropy_grows(run: MadeUpRun) -> None:
    steady(run)
    run.set("policy_entropy", noisily(lambda t: 0.6 + 0.9 * t, 0.02))


def nothing_is_learned(run: MadeUpRun) -> None:
    steady(run)
    run.set("approx_kl", lambda t: 0.005)
    run.set("abs_logprob_difference_mean", lambda t: 0.03)
    run.set("token_staleness_mean", lambda t: 1.0)


def policy_stands_still(run: MadeUpRun) -> None:
    nothing_is_learned(run)
    run.set("approx_kl", lambda t: 0.0)
    run.set("abs_logprob_difference_mean", lambda t: 1e-7)


def judged_otherwise(run: MadeUpRun) -> None:
    """A third of the reference answers are wrong."""
    steady(run, lambda t: 0.3 + 0.2 * t)
    rescore(run, lambda t: 0.45 + 0.3 * t)
    sampled = {"part_environment": "arithmetic", "part_sampling": '{"temperature":1.0,"top_k":0,"top_p":1.0}'}
    run.events = [type(e)(kind=e.kind, step=e.step, fields={**e.fields, **sampled}) for e in run.events]


def block_is_frozen(run: MadeUpRun) -> None:
    for block, norm in (("embeddings", 0.0), ("layers.0", 0.3), ("layers.1", 0.2)):
        run.blocks["block_grad_norm", block] = {int(row["step"]): norm for row in run.rows}


def time_goes(**columns: float) -> Callable[[MadeUpRun], None]:
    """Where the seconds of each step of one second go."""

    def change(run: MadeUpRun) -> None:
        for name, value in {"step_seconds": 1.0, "generation_seconds": 1.0, **columns}.items():
            run.set(name, lambda t, value=value: value)

    return change


def store_is_slow(run: MadeUpRun) -> None:
    time_goes(step_wait_seconds=0.3, step_publish_seconds=0.5)(run)
    for row in run.rows:
        row["store_seconds"] = 3.0 * row["step"]


SCENARIOS: dict[Cause, Callable[[MadeUpRun], None]] = {
    Cause.EVALUATION_CHANGED: evaluation_changes,
    Cause.TRAIN_EVAL_OVERLAP: prompts_checked(overlapping=8, exact=8, example="12+34="),
    Cause.DUPLICATE_PROMPTS: prompts_checked(duplicates=30),
    Cause.ENVIRONMENT_FAILURES: lambda run: run.end("failed:environment", 4.0),
    Cause.REWARD_FAILURES: lambda run: run.end("failed:reward_raised", 4.0),
    Cause.REWARD_INVERTED: reward_flips,
    Cause.LENGTH_REWARD: length_pays,
    Cause.EASY_PROMPTS: prompts_are_easy,
    Cause.HARD_PROMPTS: prompts_are_hard,
    Cause.WRONG_DIFFICULTY: groups_of(wrong=0.85, right=0.0, reward=0.03),
    Cause.FLAT_REWARD: reward_is_flat,
    Cause.GROUPS_ALIKE: groups_of(wrong=0.475, right=0.475, reward=0.5),
    Cause.REWARD_DETACHED: reward_is_detached,
    Cause.REWARD_OFF_EVALUATION: judged_otherwise,
    Cause.FEW_PROMPTS: lambda run: run.set("distinct_prompts", lambda t: 0.1),
    Cause.POLICY_COLLAPSE: policy_collapses,
    Cause.REWARD_FALLS: reward_is_lost,
    Cause.ENTROPY_RISES: entropy_grows,
    Cause.NOTHING_LEARNED: nothing_is_learned,
    Cause.NON_FINITE: lambda run: run.set("loss", lambda t: math.inf, since=len(run.rows) - 2),
    Cause.GRADIENT_SPIKE: gradient_spikes,
    Cause.ATTENTION_LOGITS: lambda run: run.set("max_attention_logit", lambda t: 140.0, since=len(run.rows) - 3),
    Cause.BLOCK_IMBALANCE: block_spikes,
    Cause.GRADIENT_COLLAPSE: lambda run: (
        run.set("grad_norm", lambda t: 1e-5, since=60),
        run.set("zero_variance_groups", lambda t: 0.2),
    )[0],
    Cause.FROZEN_BLOCK: block_is_frozen,
    Cause.POLICY_STILL: policy_stands_still,
    **{
        Cause(name): gap_by(name)
        for name in ("tokenizer", "logprob_semantics", "weight_sync", "version_tag", "routing", "precision", "stale_kv")
    },
    Cause.TRAINER_DISAGREES: lambda run: run.event("trainer_disagrees", 50, step=50, codes="loss_positions"),
    Cause.UPDATE_DIFFERS: lambda run: run.event("update_differs", 50, step=50, codes="unmoved"),
    Cause.SAMPLER: lambda run: run.event("sampler_differs", 50, replica=0, detail="sharper than declared"),
    Cause.REPEATED_SAMPLES: lambda run: run.event("samples_repeat", 50, replica=0, detail="9 of 12 samples repeat"),
    Cause.LOW_PROBABILITY_TAIL: gap_by("low_probability_tail"),
    Cause.UNKNOWN_GAP: gap_by("unknown"),
    Cause.GAP_DRIFT: lambda run: run.event("consistency_drift", 50, replica=0, detail="doubled"),
    Cause.ROUTING_INCOMPLETE: lambda run: run.event("routing_incomplete", 50, replica=0, coverage=0.5),
    Cause.ENGINE_FAILURES: lambda run: run.end("failed:engine", 2.0),
    Cause.REPLICA_FAILURES: lambda run: run.event("replica_failed", 50, replica=0, reason="its engine core is dead"),
    Cause.REWARD_WORKER: lambda run: run.end("failed:reward_worker_died", 1.0),
    Cause.WORKER_LOST: lambda run: run.event("worker_lost", 50, worker=0, detail="killed"),
    Cause.SLOW_REPLICA: lambda run: run.set("replica_slowness", lambda t: 3.0, since=90),
    Cause.STALE_WORK: lambda run: run.end("rejected:stale", 8.0),
    Cause.ANSWERS_CUT: lambda run: run.set("length_cut_fraction", lambda t: 0.4, since=60),
    Cause.SLOW_STORE: store_is_slow,
    Cause.SLOW_REWARD: time_goes(step_wait_seconds=0.8, step_train_seconds=0.1, reward_seconds=5.0),
    Cause.EPISODE_DEADLINE: lambda run: run.end("failed:deadline", 4.0),
    Cause.NO_STEP: lambda run: run.event(
        "no_step", len(run.rows), silence_s=150.0, waits="training waits for 16 groups"
    ),
    Cause.RUN_FAILED: lambda run: run.ended(How.ERROR, "the trainer is gone"),
    Cause.DRIVER_LOST: lambda run: run.ended(How.LOST, "process 7 does not run any more"),
}
