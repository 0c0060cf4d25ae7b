"""What is planted into little runs, and what the doctor must say first; and healthy runs of unusual settings, of which
it must say nothing worse than info. It starts no run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from little.runs import Fault, Little, Rewards, Samples, Setting
from little.trace import Seen, Trace
from orchestrator.metrics.causes import LAYER, Cause
from orchestrator.run_dir.record import RunEvent

LATE = 28
"""Step at which a fault acts that needs a time before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LittleCase:
    """One row of the table."""

    causes: tuple[Cause, ...]
    """Names that are right for the primary finding; several where rows alone cannot tell them apart. None: healthy."""
    fault: Fault = field(default_factory=Fault)
    seen: Seen | None = None
    """What the loop reports otherwise, planted into the trace of a run without a fault."""
    setting: Setting = field(default_factory=Setting)

    @property
    def layers(self) -> frozenset[int]:
        """Right layers of the primary finding."""
        return frozenset(LAYER[cause] for cause in self.causes)


def trained(**trainer: object) -> Setting:
    """A run with these keys of the trainer."""
    return Setting(trainer=trainer)


def rate(value: float, **optimizer: object) -> Setting:
    """A run with this learning rate."""
    return trained(optimizer={"learning_rate": value, **optimizer})


def flipped(share: float, since: int = 0) -> Callable[[Little, Samples, Rewards], Rewards]:
    """From a step on, a share of the rewards is turned round."""

    def reward(run: Little, samples: Samples, rewards: Rewards) -> Rewards:
        turned = (run.random.random(rewards.shape) < share) & (run.step >= since)
        return np.where(turned, 1.0 - rewards, rewards)

    return reward


def paid(judge: Callable[[list[int]], float]) -> Callable[[Little, Samples, Rewards], Rewards]:
    """The reward of an answer's tokens, right or wrong."""
    return lambda run, samples, rewards: np.array([[judge(one) for one in group] for group in samples.answers])


def constant(value: float) -> Callable[[Little, Samples, Rewards], Rewards]:
    """One reward for all."""
    return lambda run, samples, rewards: np.full(rewards.shape, value)


def wrong_answers(share: float) -> Callable[[Little, Samples, Rewards], Rewards]:
    """The reference answers of a share of the prompts are wrong: what is right there counts as wrong, always."""
    return lambda run, samples, rewards: rewards * (samples.pairs * 7919 % 1000 / 1000.0 >= share)[:, None]


def by_prompt(run: Little, samples: Samples, rewards: Rewards) -> Rewards:
    """Half of the prompts are always solved, the others never."""
    return np.broadcast_to((samples.pairs % 2 == 0)[:, None], rewards.shape).astype(np.float64)


def shuffled(run: Little, rewards: Rewards) -> Rewards:
    """Rewards of a group among its samples in another order."""
    return run.random.permuted(rewards, axis=1)


def across(run: Little, rewards: Rewards) -> Rewards:
    """All rewards of the batch in another order."""
    return run.random.permuted(rewards.reshape(-1)).reshape(rewards.shape)


def before(run: Little, rewards: Rewards) -> Rewards:
    """The rewards of the group before."""
    return np.roll(rewards, 1, axis=0)


def shifted(run: Little, rewards: Rewards) -> Rewards:
    """The reward of the sample before."""
    return np.roll(rewards, 1, axis=1)


def turned(share: float) -> Callable[[Little, Rewards], Rewards]:
    """Advantages of a share of the trajectories with the other sign."""
    return lambda run, rewards: np.where(run.random.random(rewards.shape) < share, 1.0 - rewards, rewards)


def judged(given: Callable[[Little, Rewards], Rewards]) -> Callable[[Little, Samples, Rewards], Rewards]:
    """The same, of the reward itself, so that headers show it."""
    return lambda run, samples, rewards: given(run, rewards)


def scaled(factor: float, block: str = "", since: int = 1, until: int = 10**6) -> Callable[[int, str, Tensor], None]:
    """Gradients of one block, or of all, times a factor, in steps of a range."""

    def change(step: int, name: str, gradient: Tensor) -> None:
        if since <= step <= until and (not block or name == block):
            gradient.mul_(factor)

    return change


def noise(step: int, name: str, gradient: Tensor) -> None:
    """A gradient of the same norm in a direction of its own."""
    norm = gradient.norm()
    gradient.normal_()
    gradient.mul_(norm / gradient.norm().clamp_min(1e-12))


def drawn(**sampling: object) -> Callable[[Little, dict[str, object]], dict[str, object]]:
    """The engine samples otherwise than it was asked."""
    return lambda run, asked: asked | sampling


def measured(**columns: float) -> Callable[[Trace, dict[str, float]], None]:
    """What the loop measures from step 10 on."""

    def row(run: Trace, row: dict[str, float]) -> None:
        if run.step >= 10:
            row |= columns

    return row


def ended(kind: str, per_step: float) -> Callable[[Trace, dict[str, float]], None]:
    """So many dispatches a step end as `failed:REASON` or `rejected:REASON` from step 10 on."""

    def row(run: Trace, row: dict[str, float]) -> None:
        if run.step >= 10:
            run.tally[kind] = run.tally.get(kind, 0.0) + per_step

    return row


def happened(kind: str, at: int, **fields: object) -> Callable[[Trace, dict[str, float]], None]:
    """One event."""

    def row(run: Trace, row: dict[str, float]) -> None:
        if run.step == at:
            run.events.append(RunEvent(kind=kind, step=at, fields=fields))

    return row


def few(count: int) -> Callable[[Little, NDArray[np.int64]], NDArray[np.int64]]:
    """The same few prompts again and again."""
    return lambda run, pairs: run.train_pairs[(np.arange(pairs.size) + run.step * pairs.size) % count]


def slowly(run: Trace, row: dict[str, float]) -> None:
    """The loop's store takes most of the step."""
    row |= {"store_seconds": 3.0 * run.step, "step_train_seconds": 0.1, "step_publish_seconds": 0.8}


def rewarded_slowly(run: Trace, row: dict[str, float]) -> None:
    """The reward takes most of a group's time, and the trainer waits for it."""
    row |= {"step_wait_seconds": 0.8, "step_train_seconds": 0.1, "reward_seconds": 5.0, "generation_seconds": 0.5}


NOT_LEARNED = (Cause.NOTHING_LEARNED, Cause.REWARD_FALLS)
"""What rows can say where the gradient does not point at the reward."""
CHECKED = {"train_prompts": 4000, "duplicates": 0, "evaluation_prompts": 64, "overlapping": 0, "exact": 0}

KINDS: Mapping[str, LittleCase] = {
    # data and reward
    "reward flipped": LittleCase(causes=(Cause.REWARD_INVERTED,), fault=Fault(reward=flipped(1.0))),
    "reward flipped for 80 %": LittleCase(causes=(Cause.REWARD_INVERTED,), fault=Fault(reward=flipped(0.8))),
    "reward flipped from step 15": LittleCase(
        causes=(Cause.REWARD_INVERTED, Cause.REWARD_FALLS), fault=Fault(reward=flipped(1.0, 15))
    ),
    "reward flipped for 40 %": LittleCase(
        causes=(Cause.REWARD_OFF_EVALUATION, Cause.NOTHING_LEARNED), fault=Fault(reward=flipped(0.4))
    ),
    "reward is a coin": LittleCase(causes=(*NOT_LEARNED, Cause.REWARD_DETACHED), fault=Fault(reward=flipped(0.5))),
    "rewards shuffled in a group": LittleCase(causes=NOT_LEARNED, fault=Fault(reward=judged(shuffled))),
    "rewards shuffled in a batch": LittleCase(causes=NOT_LEARNED, fault=Fault(reward=judged(across))),
    "rewards of the group before": LittleCase(causes=NOT_LEARNED, fault=Fault(reward=judged(before))),
    "rewards of the sample before": LittleCase(causes=NOT_LEARNED, fault=Fault(reward=judged(shifted))),
    "one reward for all": LittleCase(causes=(Cause.FLAT_REWARD,), fault=Fault(reward=constant(0.5))),
    "never a reward": LittleCase(
        causes=(Cause.HARD_PROMPTS, Cause.REWARD_OFF_EVALUATION), fault=Fault(reward=constant(0.0))
    ),
    "always a reward": LittleCase(causes=(Cause.EASY_PROMPTS,), fault=Fault(reward=constant(1.0))),
    "five prompts": LittleCase(causes=(Cause.FEW_PROMPTS,), fault=Fault(prompts=few(5))),
    "twenty prompts": LittleCase(causes=(Cause.FEW_PROMPTS,), fault=Fault(prompts=few(20))),
    "wrong reference answers, 30 %": LittleCase(
        causes=(Cause.REWARD_OFF_EVALUATION,), fault=Fault(reward=wrong_answers(0.3))
    ),
    "wrong reference answers, 60 %": LittleCase(
        causes=(Cause.REWARD_OFF_EVALUATION,), fault=Fault(reward=wrong_answers(0.6))
    ),
    "prompts solved or lost": LittleCase(causes=(Cause.GROUPS_ALIKE,), fault=Fault(reward=by_prompt)),
    "reward pays for length": LittleCase(
        causes=(Cause.LENGTH_REWARD,), fault=Fault(reward=paid(lambda tokens: len(tokens) / 12))
    ),
    "reward pays for a digit": LittleCase(
        causes=(Cause.REWARD_INVERTED, Cause.REWARD_DETACHED), fault=Fault(reward=paid(lambda t: float(t[0] == 9)))
    ),
    "reward pays for brevity": LittleCase(
        causes=(Cause.REWARD_INVERTED, Cause.REWARD_DETACHED), fault=Fault(reward=paid(lambda t: float(len(t) <= 2)))
    ),
    "evaluation changed": LittleCase(
        causes=(Cause.EVALUATION_CHANGED,),
        seen=Seen(evaluated=lambda version, score: (score, "a" if version < 16 else "b")),
    ),
    "evaluation trained on": LittleCase(
        causes=(Cause.TRAIN_EVAL_OVERLAP,),
        seen=Seen(row=happened("prompts_checked", 1, **CHECKED | {"overlapping": 9})),
    ),
    "prompts repeated": LittleCase(
        causes=(Cause.DUPLICATE_PROMPTS,),
        seen=Seen(row=happened("prompts_checked", 1, **CHECKED | {"duplicates": 900})),
    ),
    "reward raises": LittleCase(causes=(Cause.REWARD_FAILURES,), seen=Seen(row=ended("failed:reward_raised", 4))),
    "environment raises": LittleCase(
        causes=(Cause.ENVIRONMENT_FAILURES,), seen=Seen(row=ended("failed:environment", 4))
    ),
    # policy change
    "learning rate 1e-2": LittleCase(causes=(Cause.POLICY_COLLAPSE,), setting=rate(1e-2)),
    "learning rate 3e-2": LittleCase(causes=(Cause.POLICY_COLLAPSE,), setting=rate(3e-2)),
    "learning rate 1e-1": LittleCase(causes=(Cause.POLICY_COLLAPSE,), setting=rate(1e-1)),
    "learning rate warms up to 1e-1": LittleCase(
        causes=(Cause.POLICY_COLLAPSE,), setting=rate(1e-1, schedule={"warmup_steps": 40})
    ),
    "beta2 0": LittleCase(causes=(Cause.POLICY_COLLAPSE,), setting=rate(1e-2, beta2=0.0)),
    "beta1 and beta2 0": LittleCase(causes=(Cause.POLICY_COLLAPSE,), setting=rate(1e-2, beta1=0.0, beta2=0.0)),
    "weight decay 30": LittleCase(
        causes=(Cause.POLICY_COLLAPSE, Cause.REWARD_FALLS, Cause.ENTROPY_RISES), setting=rate(1e-3, weight_decay=30.0)
    ),
    "entropy bonus 1": LittleCase(
        causes=(Cause.ENTROPY_RISES, Cause.REWARD_FALLS),
        setting=trained(algorithm={"type": "grpo", "entropy_coef": 1.0}),
    ),
    "entropy bonus .3": LittleCase(
        causes=(Cause.ENTROPY_RISES, Cause.REWARD_FALLS, Cause.NOTHING_LEARNED),
        setting=trained(algorithm={"type": "grpo", "entropy_coef": 0.3}),
    ),
    "advantages flipped": LittleCase(causes=(Cause.REWARD_FALLS,), fault=Fault(given=turned(1.0))),
    "advantages flipped for 80 %": LittleCase(causes=(Cause.REWARD_FALLS,), fault=Fault(given=turned(0.8))),
    "advantages flipped for half": LittleCase(causes=NOT_LEARNED, fault=Fault(given=turned(0.5))),
    "advantages of the sample before": LittleCase(causes=NOT_LEARNED, fault=Fault(given=shifted)),
    "advantages of the group before": LittleCase(causes=NOT_LEARNED, fault=Fault(given=before)),
    "advantages shuffled": LittleCase(causes=NOT_LEARNED, fault=Fault(given=across)),
    "kl_coef 50": LittleCase(
        causes=(Cause.NOTHING_LEARNED, Cause.POLICY_STILL), setting=trained(algorithm={"type": "grpo", "kl_coef": 50.0})
    ),
    "gradient with the other sign": LittleCase(causes=(Cause.REWARD_FALLS,), fault=Fault(gradients=scaled(-1.0))),
    # numerical updates
    "learning rate 1e-12": LittleCase(causes=(Cause.POLICY_STILL,), setting=rate(1e-12)),
    "learning rate 1e-8": LittleCase(causes=(Cause.POLICY_STILL,), setting=rate(1e-8)),
    "max_grad_norm 1e-9": LittleCase(causes=(Cause.POLICY_STILL,), setting=rate(1e-3, max_grad_norm=1e-9)),
    "epsilon 1e4": LittleCase(causes=(Cause.POLICY_STILL,), setting=rate(1e-3, epsilon=1e4)),
    "gradient of noise": LittleCase(causes=NOT_LEARNED, fault=Fault(gradients=noise)),
    "embedding frozen": LittleCase(
        causes=(Cause.FROZEN_BLOCK,), fault=Fault(gradients=scaled(0.0, "embeddings_and_head"))
    ),
    "first block frozen": LittleCase(
        causes=(Cause.FROZEN_BLOCK,), fault=Fault(gradients=scaled(0.0, "model.layers.0"))
    ),
    "block frozen from step 15": LittleCase(
        causes=(Cause.FROZEN_BLOCK,), fault=Fault(gradients=scaled(0.0, "model.layers.1", 15))
    ),
    "gradient lost from step 25": LittleCase(
        causes=(Cause.GRADIENT_COLLAPSE,), fault=Fault(gradients=scaled(0.0, since=25))
    ),
    "gradient a thousandth from step 25": LittleCase(
        causes=(Cause.GRADIENT_COLLAPSE,), fault=Fault(gradients=scaled(1e-3, since=25))
    ),
    "gradient spike": LittleCase(
        causes=(Cause.GRADIENT_SPIKE,), fault=Fault(gradients=scaled(1e3, since=LATE, until=LATE))
    ),
    "two gradient spikes": LittleCase(
        causes=(Cause.GRADIENT_SPIKE,), fault=Fault(gradients=scaled(1e3, since=LATE, until=LATE + 1))
    ),
    "spike of a block": LittleCase(
        causes=(Cause.BLOCK_IMBALANCE,), fault=Fault(gradients=scaled(1e3, "model.layers.1", LATE, LATE))
    ),
    "one step not a number": LittleCase(
        causes=(Cause.NON_FINITE,), fault=Fault(gradients=scaled(float("nan"), since=LATE, until=LATE))
    ),
    "not a number from step 25": LittleCase(
        causes=(Cause.NON_FINITE,), fault=Fault(gradients=scaled(float("nan"), since=25))
    ),
    "a block is infinite": LittleCase(
        causes=(Cause.NON_FINITE,), fault=Fault(gradients=scaled(float("inf"), "model.layers.2", LATE, LATE + 2))
    ),
    # training system
    "one seed for all samples": LittleCase(causes=(Cause.REPEATED_SAMPLES,), fault=Fault(engine=drawn(shared=True))),
    "answers cut at two tokens": LittleCase(causes=(Cause.ANSWERS_CUT,), fault=Fault(engine=drawn(max_new_tokens=2))),
    "answers cut at three tokens": LittleCase(causes=(Cause.ANSWERS_CUT,), fault=Fault(engine=drawn(max_new_tokens=3))),
    "sampled at .4, declared 1": LittleCase(causes=(Cause.UNKNOWN_GAP,), fault=Fault(engine=drawn(temperature=0.4))),
    "sampled at 2, declared 1": LittleCase(causes=(Cause.UNKNOWN_GAP,), fault=Fault(engine=drawn(temperature=2.0))),
    "reward slow": LittleCase(causes=(Cause.SLOW_REWARD,), seen=Seen(row=rewarded_slowly)),
    "store slow": LittleCase(causes=(Cause.SLOW_STORE,), seen=Seen(row=slowly)),
    "replica slow": LittleCase(
        causes=(Cause.SLOW_REPLICA,), seen=Seen(row=measured(replica_slowness=3.0, slowest_replica=1.0))
    ),
    "work too old": LittleCase(causes=(Cause.STALE_WORK,), seen=Seen(row=ended("rejected:stale", 4))),
    "requests fail": LittleCase(causes=(Cause.ENGINE_FAILURES,), seen=Seen(row=ended("failed:engine", 2))),
    "reward workers die": LittleCase(
        causes=(Cause.REWARD_WORKER,), seen=Seen(row=ended("failed:reward_worker_died", 1))
    ),
    "replica lost": LittleCase(
        causes=(Cause.REPLICA_FAILURES,), seen=Seen(row=happened("replica_failed", 20, replica=0, reason="dead"))
    ),
    "worker lost": LittleCase(
        causes=(Cause.WORKER_LOST,), seen=Seen(row=happened("worker_lost", 20, worker=0, detail="killed"))
    ),
}
"""Planted kinds by name."""


def ramp(run: Little, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums that grow with the steps: a curriculum."""
    largest = 20 + 80 * run.step // run.setting.steps
    return run.random.integers(0, largest, pairs.size) * 100 + run.random.integers(0, largest, pairs.size)


HEALTHY: Mapping[str, LittleCase] = {
    "bf16 trainer": LittleCase(causes=(), setting=Setting(steps=100, trainer={"dtype": "bfloat16"})),
    "long warm-up to a large rate": LittleCase(
        causes=(),
        setting=Setting(steps=100, trainer={"optimizer": {"learning_rate": 2e-3, "schedule": {"warmup_steps": 50}}}),
    ),
    "eta 8": LittleCase(causes=(), setting=Setting(steps=100, lag=8, trainer={"optimizer": {"learning_rate": 3e-4}})),
    "group size 2": LittleCase(causes=(), setting=Setting(steps=100, batch_groups=32, group_size=2)),
    "two groups a batch": LittleCase(
        causes=(), setting=Setting(steps=100, batch_groups=2, trainer={"optimizer": {"learning_rate": 3e-4}})
    ),
    "long answers": LittleCase(causes=(), setting=Setting(steps=100, max_new_tokens=48)),
    "curriculum": LittleCase(causes=(), fault=Fault(prompts=ramp), setting=Setting(steps=100)),
    "mixture of experts": LittleCase(causes=(), setting=Setting(steps=100, moe=True)),
    "reference KL and Muon": LittleCase(
        causes=(),
        setting=Setting(
            steps=100,
            trainer={
                "algorithm": {"type": "grpo", "kl_coef": 0.01},
                "optimizer": {"type": "muon", "learning_rate": 1e-3},
            },
        ),
    ),
    "no evaluation, RLOO, cosine": LittleCase(
        causes=(),
        setting=Setting(
            steps=100,
            evaluation_every=0,
            trainer={
                "algorithm": {"type": "rloo"},
                "optimizer": {"learning_rate": 1e-3, "schedule": {"type": "cosine", "final_fraction": 0.0}},
            },
        ),
    ),
}
"""Healthy runs of unusual settings by name: 1,000 steps in all."""
