"""Running sums of a run, in bounded memory: lengths and rewards by stage, staleness, pauses, busy shares.

Three views of length and reward show what the order of consumption selects: `dispatched` (all groups up to the oldest
unfinished one: free of selection by speed), `finished` (whatever has come back), `trained`.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.dispatch.replica_speeds import ReplicaSpeeds
from orchestrator.metrics.distributions import Distributions
from orchestrator.observers import Observer, StepFacts
from rollout.types.dispatch import Dispatch
from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader, rewards_alike
from rollout.types.weights import ApplyReport, PolicyVersion
from trainer.types.step import StepReport, StepRequest


@dataclass(slots=True)
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        """Add a sum over `count` items."""
        self.total += value
        self.count += count

    @property
    def value(self) -> float:
        """The mean; 0 before the first item."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class Stage:
    """Length and reward of the trajectories that reached a stage."""

    length: Mean = field(default_factory=Mean)
    reward: Mean = field(default_factory=Mean)

    def add(self, header: GroupHeader) -> None:
        self.length.add(sum(t.num_sampled for t in header.trajectories), len(header.trajectories))
        self.reward.add(sum(t.reward for t in header.trajectories), len(header.trajectories))


class Accounts(Observer):
    """All running sums of one driver's life."""

    def __init__(self, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self.dispatched = Stage()
        self.finished = Stage()
        self.trained = Stage()
        self.staleness = Mean()
        self.staleness_max = 0
        self.mixed = 0
        self.rewards: deque[float] = deque(maxlen=10)
        self.reward_first: float | None = None
        self.reward_last = 0.0
        self.pauses: deque[float] = deque(maxlen=10_000)
        self.longest_pause_s = 0.0
        """Longest pause of a replica in the last weight update."""
        self.weight_updates = 0
        self.trained_tokens = 0
        self.trained_samples = 0
        self.trainer_busy_s = 0.0
        self.retried = 0
        self.observing_cpu_s = 0.0
        """What reducing signals for Prometheus has cost the driver."""
        self.store_s = 0.0
        """What the loop's calls of the store took, those at the same time added up."""
        self.distributions = Distributions()
        self.speeds = ReplicaSpeeds()
        self.prompts: deque[str] = deque(maxlen=64)
        """Ids of the prompts of the newest trained groups."""
        self._order: dict[str, GroupHeader | None] = {}

    def start(self, dispatches: Iterable[Dispatch]) -> None:
        for dispatch in dispatches:
            self.retried += dispatch.attempt > 1
            self._order[dispatch.dispatch_id] = None

    def finish(self, header: GroupHeader) -> None:
        self.finished.add(header)
        self.speeds.add(header.replica, header.generation_s)
        if header.dispatch_id in self._order:
            self._order[header.dispatch_id] = header
            self._advance()

    def end(self, dispatch_id: str) -> None:
        """A dispatch failed without a group."""
        if dispatch_id in self._order and self._order[dispatch_id] is None:
            del self._order[dispatch_id]
            self._advance()

    def _advance(self) -> None:
        while self._order:
            oldest = next(iter(self._order))
            header = self._order[oldest]
            if header is None:
                return
            self.dispatched.add(header)
            del self._order[oldest]

    def step(self, batch: Sequence[GroupHeader], report: StepReport, request: StepRequest) -> StepFacts:
        for header in batch:
            self.trained.add(header)
            self.prompts.append(header.prompt_id)
        facts = step_facts(batch, report, request, self._max_new_tokens)
        self.staleness.add(facts.staleness_mean * facts.num_sampled, facts.num_sampled)
        self.staleness_max = max(self.staleness_max, facts.staleness_max)
        self.mixed += sum(len(t.tokens_by_policy) > 1 for t in _trained(batch, report))
        self.rewards.append(facts.reward_mean)
        if self.reward_first is None:
            self.reward_first = facts.reward_mean
        self.reward_last = facts.reward_mean
        for header in batch:
            passed = sum(t.reward >= 1.0 for t in header.trajectories)
            self.distributions.observe("concord_group_pass_rate_ratio", passed / len(header.trajectories))
            self.distributions.observe_all(
                "concord_response_length_tokens", (t.num_sampled for t in header.trajectories)
            )
        for age, tokens in facts.tokens_by_age:
            self.distributions.observe("concord_token_staleness_steps", age, times=tokens)
        self.trained_tokens += report.num_tokens
        self.trained_samples += len(report.trained_ids)
        return facts

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        pauses_s = [report.pause_s for report in reports]
        self.weight_updates += 1
        self.longest_pause_s = max(pauses_s)
        self.pauses.extend(pauses_s)
        self.distributions.observe_all("concord_weight_update_pause_seconds", pauses_s)

    def trainer_worked(self, seconds: float) -> None:
        self.trainer_busy_s += seconds

    def observing_took(self, cpu_s: float) -> None:
        self.observing_cpu_s += cpu_s

    def store_answered(self, call: str, seconds: float) -> None:
        self.store_s += seconds
        self.distributions.observe("concord_store_latency_seconds", seconds, call)

    @property
    def reward_moving_10(self) -> float:
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


def _trained(batch: Sequence[GroupHeader], report: StepReport) -> list[TrajectoryHeader]:
    return [t for header in batch for t in header.trajectories if t.trajectory_id in report.trained_ids]


def step_facts(
    batch: Sequence[GroupHeader], report: StepReport, request: StepRequest, max_new_tokens: int
) -> StepFacts:
    """Reduce the headers of a trained batch, of which no answer had to end by length below `max_new_tokens`. Staleness
    counts trained trajectories; tokens that policy `mask` took out do not count."""
    trained, everyone = _trained(batch, report), [t for header in batch for t in header.trajectories]
    rewards = np.array([t.reward for t in everyone])
    groups = [[t.reward for t in header.trajectories] for header in batch]
    trainer_version, oldest = request.policy.version - 1, request.oldest_version
    tokens_by_age: Counter[int] = Counter()
    for trajectory in trained:
        for policy, count in trajectory.tokens_by_policy:
            if policy.version >= oldest:
                tokens_by_age[trainer_version - policy.version] += count
    tokens = tokens_by_age.total()
    return StepFacts(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        length_mean=sum(t.num_sampled for t in everyone) / len(everyone),
        length_cap_fraction=sum(t.finish_reason is FinishReason.LENGTH for t in everyone) / len(everyone),
        length_cut_fraction=sum(
            t.finish_reason is FinishReason.LENGTH and t.num_sampled < max_new_tokens for t in everyone
        )
        / len(everyone),
        zero_variance=sum(map(rewards_alike, groups)) / len(groups),
        reward_length_correlation=reward_length_correlation(batch),
        all_correct=sum(min(g) >= 1.0 for g in groups) / len(groups),
        all_wrong=sum(max(g) <= 0.0 for g in groups) / len(groups),
        staleness_mean=sum(age * count for age, count in tokens_by_age.items()) / tokens if tokens else 0.0,
        staleness_max=max(tokens_by_age, default=0),
        mixed_fraction=sum(len(t.tokens_by_policy) > 1 for t in trained) / len(trained) if trained else 0.0,
        generation_s=sum(header.generation_s for header in batch) / len(batch),
        reward_s=sum(header.reward_s for header in batch) / len(batch),
        num_sampled=tokens,
        num_trajectories=len(everyone),
        tokens_by_age=tuple(sorted(tokens_by_age.items())),
    )


def reward_length_correlation(batch: Sequence[GroupHeader]) -> float:
    """Pearson's, of reward and sampled tokens, both less their group's mean: neither the prompt nor its difficulty
    enters; 0 without a spread."""
    rewards = [np.array([t.reward for t in header.trajectories]) for header in batch]
    lengths = [np.array([float(t.num_sampled) for t in header.trajectories]) for header in batch]
    reward = np.concatenate([each - each.mean() for each in rewards])
    length = np.concatenate([each - each.mean() for each in lengths])
    spread = float(np.sqrt((reward @ reward) * (length @ length)))
    return float(reward @ length) / spread if spread > 0 else 0.0
