"""What comes back: version-tagged trajectories and their rewarded groups. Checked once, at construction; never written
into."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.types.prompts import Prompt
from rollout.types.supports import TokenSupports
from rollout.types.weights import PolicyVersion
from rollout.types.wire import wired

_ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""Relative: a few additions of a few parts."""


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """`max_new_tokens` or the context was used up."""
    ABORT = "abort"
    """The request was aborted."""


class LogprobSemantics(StrEnum):
    """Which distribution an engine's log-probs belong to."""

    RAW = "raw"
    """Softmax of the logits, temperature 1."""
    TEMPERATURE = "temperature"
    """After temperature, before truncation."""
    PROCESSED = "processed"
    """After temperature and truncation: what was sampled from."""


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTag:
    """Who sampled, and under which declared numerics."""

    engine: str
    engine_version: str
    replica: int
    weights_dtype: str
    kv_dtype: str
    quantization: str
    logprob_semantics: LogprobSemantics
    kv_across_versions: str
    temperature: float
    top_p: float
    top_k: int
    tokenizer_fingerprint: str
    chat_template_digest: str
    weights_digest: str
    """Digest of the weights at the time of the tag."""
    lists_supports: bool = False
    """Whether it says which tokens a truncated draw kept (`rollout.types.supports`)."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens were out of reach when a token was drawn."""
        return self.top_p < 1.0 or self.top_k > 0


@wired
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Positions [start, end) of the whole trajectory were sampled under `policy`."""

    policy: PolicyVersion
    start: int
    end: int


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Experts chosen per input token: row p belongs to input p, which predicts p + 1. Missing rows are missing, never
    padded."""

    experts: NDArray[np.uint8] | NDArray[np.uint16]
    """[T - 1, blocks, top_k]; rows where `covered` is False hold nothing."""
    covered: NDArray[np.bool_]
    """[T - 1]"""

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.covered.shape != self.experts.shape[:1]:
            raise ValueError(
                f"routing has experts {self.experts.shape} and coverage {self.covered.shape}; expected [T-1, blocks, "
                "top_k] and [T-1]"
            )


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds on the wall clock of the machine that ran the episode."""

    started_at_s: float
    """Unix time."""
    generation_s: float


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode of one policy on one prompt."""

    trajectory_id: str
    dispatch_id: str
    prompt_id: str
    environment: str
    token_ids: NDArray[np.int32]
    """[T]"""
    sampled: NDArray[np.bool_]
    """[T], True where the policy chose the token."""
    rollout_logprobs: NDArray[np.float32]
    """[T] nats, 0 where not sampled."""
    version_spans: tuple[VersionSpan, ...]
    """In order, covering exactly the sampled positions."""
    turns: int
    tag: EngineTag
    finish_reason: FinishReason
    timings: Timings
    routing: RoutingTrace | None = None
    supports: TokenSupports | None = None
    """[T] what the sampler kept of each draw; None where it kept everything, or did not say."""

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise ValueError(f"trajectory {self.trajectory_id}: {fault}")

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy chose."""
        return int(np.count_nonzero(self.sampled))

    def token_versions(self) -> NDArray[np.int64]:
        """[T] version of the weights that sampled each token, -1 where the token was given."""
        versions = np.full(self.token_ids.size, -1, dtype=np.int64)
        for span in self.version_spans:
            versions[span.start : span.end] = span.policy.version
        return versions


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The judgement of one trajectory; `parts` add information, `total` is what is trained on."""

    total: float
    parts: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not np.isfinite(self.total):
            raise ValueError(f"reward is {self.total}; expected a finite number")


def rewards_alike(totals: Iterable[float]) -> bool:
    """Whether no reward differs from another by more than rounding: .1 + .2 and .3 are alike, and one alone is."""
    values = np.array(list(totals), dtype=np.float64)
    return not values.size or float(np.ptp(values)) <= _ROUNDING * float(np.abs(values).max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup:
    """All trajectories of one dispatch with their rewards. Its id is the dispatch id."""

    dispatch_id: str
    prompt_id: str
    pass_index: int
    environment: str
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[Reward, ...]
    reward_s: float = 0.0
    """Seconds that the judgement of the group took."""

    def __post_init__(self) -> None:
        if not self.trajectories or len(self.trajectories) != len(self.rewards):
            raise ValueError(
                f"group {self.dispatch_id}: {len(self.trajectories)} trajectories and {len(self.rewards)} rewards; "
                "expected one reward each and at least one"
            )


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHeader:
    """What scheduling needs to know of a trajectory without its arrays."""

    trajectory_id: str
    num_tokens: int
    num_sampled: int
    tokens_by_policy: tuple[tuple[PolicyVersion, int], ...]
    """Sampled tokens per policy, in order of first appearance."""
    reward: float
    finish_reason: FinishReason


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What the driver sees of a finished group: ids and numbers, never tokens."""

    dispatch_id: str
    prompt_id: str
    pass_index: int
    replica: int
    trajectories: tuple[TrajectoryHeader, ...]
    generation_s: float
    reward_s: float
    num_bytes: int
    """Size of the encoded group."""
    incarnation: int = 0
    """Incarnation of the replica, as the driver counts them in this trainer epoch; 0: one of an earlier epoch."""

    @property
    def policies(self) -> frozenset[PolicyVersion]:
        return frozenset(policy for trajectory in self.trajectories for policy, _ in trajectory.tokens_by_policy)

    @property
    def oldest_version(self) -> int:
        return min(policy.version for policy in self.policies)

    @property
    def newest(self) -> PolicyVersion:
        return max(self.policies)


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedGroup:
    """A group in its binary form (`rollout.types.codec`) with its header; nothing between worker and trainer decodes
    it."""

    header: GroupHeader
    payload: NDArray[np.uint8]
    """[num_bytes]; an array, so that it crosses processes without a copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredGroups:
    """Encoded groups on their way to the trainer, or to the consistency service."""

    dispatch_ids: tuple[str, ...]
    payloads: tuple[NDArray[np.uint8], ...]
    verdicts: tuple[bytes, ...]
    """The newest `verdict` annotation of each, empty where there is none."""
    prompts: tuple[Prompt, ...] = ()
    """What each was asked; given to the consistency service only."""


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A later room's finding about a group, as typed bytes."""

    dispatch_id: str
    kind: str
    payload: bytes


def header_of(group: TrajectoryGroup, num_bytes: int) -> GroupHeader:
    """The header of a group whose encoding has `num_bytes` bytes."""
    first = group.trajectories[0]
    return GroupHeader(
        dispatch_id=group.dispatch_id,
        prompt_id=group.prompt_id,
        pass_index=group.pass_index,
        replica=first.tag.replica,
        trajectories=tuple(_trajectory_header(t, r) for t, r in zip(group.trajectories, group.rewards, strict=True)),
        generation_s=max(t.timings.generation_s for t in group.trajectories),
        reward_s=group.reward_s,
        num_bytes=num_bytes,
    )


def _trajectory_header(trajectory: Trajectory, reward: Reward) -> TrajectoryHeader:
    tokens: dict[PolicyVersion, int] = {}
    for span in trajectory.version_spans:
        tokens[span.policy] = tokens.get(span.policy, 0) + span.end - span.start
    return TrajectoryHeader(
        trajectory_id=trajectory.trajectory_id,
        num_tokens=trajectory.token_ids.size,
        num_sampled=sum(tokens.values()),
        tokens_by_policy=tuple(tokens.items()),
        reward=reward.total,
        finish_reason=trajectory.finish_reason,
    )


def _faults(trajectory: Trajectory) -> Iterator[str]:
    """What is wrong with a trajectory."""
    shape = trajectory.token_ids.shape
    wanted = (
        (trajectory.token_ids, np.int32, "token_ids"),
        (trajectory.sampled, np.bool_, "sampled"),
        (trajectory.rollout_logprobs, np.float32, "rollout_logprobs"),
    )
    for array, dtype, name in wanted:
        if array.dtype != dtype or array.shape != shape or array.ndim != 1:
            yield f"{name} is {array.dtype} {array.shape}; expected {np.dtype(dtype)} {shape}"
    if not np.isfinite(trajectory.rollout_logprobs).all():
        yield "rollout_logprobs hold NaN or infinity"
    if trajectory.rollout_logprobs[~trajectory.sampled].any():
        yield "a token that was not sampled has a log-prob; expected 0 there"
    if trajectory.routing is not None and trajectory.routing.covered.size != shape[0] - 1:
        yield f"routing has {trajectory.routing.covered.size} rows for {shape[0]} tokens; expected T - 1"
    if trajectory.supports is not None:
        yield from _support_faults(trajectory.supports, trajectory)
    position, covered = 0, 0
    for span in trajectory.version_spans:
        if not position <= span.start < span.end <= shape[0] or not trajectory.sampled[span.start : span.end].all():
            yield f"span {span} overlaps its neighbour or covers tokens that were not sampled"
        position, covered = span.end, covered + span.end - span.start
    if covered == 0 or covered != trajectory.num_sampled:
        yield f"spans cover {covered} of {trajectory.num_sampled} sampled tokens; expected all, and at least one"


def _support_faults(supports: TokenSupports, trajectory: Trajectory) -> Iterator[str]:
    if supports.counts.shape != trajectory.token_ids.shape:
        yield f"supports are of {supports.counts.size} tokens; expected {trajectory.token_ids.size}"
    elif supports.counts[~trajectory.sampled].any():
        yield "a token that was not sampled has a support; expected none there"
    elif (lacking := supports.without(trajectory.token_ids)).size:
        yield f"token {lacking[0]} is not among the tokens that its sampler kept; expected it there"
