"""What if the engine continued other ids than the sample holds: a later turn whose prefix went through text. Pure
numpy: it scores nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.supports import TokenSupports
from rollout.types.trajectory import Trajectory, VersionSpan

ThroughText = Callable[[NDArray[np.int32]], NDArray[np.int32]]
"""[P] ids to text, without special tokens, and back to ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherPrefix:
    """One later turn behind other ids."""

    source: int
    """Place of its trajectory among those asked about."""
    start: int
    """Where the turn's sampled tokens begin in that trajectory."""
    trajectory: Trajectory
    """The other prefix and the turn's sampled tokens."""


def sampled_runs(sampled: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], sampled, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def later_turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(start, end) of the sampled tokens of each turn but the first: turns are parted by given tokens."""
    return sampled_runs(trajectory.sampled)[1:]


def is_later(trajectory: Trajectory) -> NDArray[np.bool_]:
    """[T] sampled in a turn behind the first."""
    later = np.zeros(trajectory.sampled.size, dtype=np.bool_)
    for start, end in later_turns(trajectory):
        later[start:end] = True
    return later


def num_given(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one: the prompt."""
    return int(trajectory.sampled.argmax())


def behind_other_prompt(trajectory: Trajectory, prompt: NDArray[np.int32]) -> Trajectory:
    """The same from the first sampled token on, behind `prompt` [P]; without routing, which was that of the other
    prompt."""
    first = num_given(trajectory)
    shift = prompt.size - first
    given = np.zeros(prompt.size, dtype=np.float32)
    return replace(
        trajectory,
        token_ids=np.concatenate([prompt, trajectory.token_ids[first:]]),
        sampled=np.concatenate([given > 0, trajectory.sampled[first:]]),
        rollout_logprobs=np.concatenate([given, trajectory.rollout_logprobs[first:]]),
        version_spans=tuple(VersionSpan(s.policy, s.start + shift, s.end + shift) for s in trajectory.version_spans),
        routing=None,
        supports=_moved(trajectory.supports, prompt.size, first, trajectory.token_ids.size),
    )


def other_prefixes(trajectories: Sequence[Trajectory], through_text: ThroughText) -> list[OtherPrefix]:
    """Every later turn whose prefix comes back from text as other ids."""
    found: list[OtherPrefix] = []
    for source, trajectory in enumerate(trajectories):
        for start, end in later_turns(trajectory):
            prefix = through_text(trajectory.token_ids[:start])
            if prefix.size and not np.array_equal(prefix, trajectory.token_ids[:start]):
                found.append(
                    OtherPrefix(source=source, start=start, trajectory=_behind(trajectory, prefix, start, end))
                )
    return found


def placed_back(
    rows: Sequence[NDArray[np.float32]], others: Sequence[OtherPrefix], scores: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    """`rows` [T] a trajectory, with the scores of the turns behind other ids in their places."""
    placed = [row.copy() for row in rows]
    for other, score in zip(others, scores, strict=True):
        size = other.trajectory.num_sampled
        placed[other.source][other.start : other.start + size] = score[-size:]
    return placed


def _behind(trajectory: Trajectory, prefix: NDArray[np.int32], start: int, end: int) -> Trajectory:
    shift = prefix.size - start
    spans = tuple(
        VersionSpan(span.policy, max(span.start, start) + shift, min(span.end, end) + shift)
        for span in trajectory.version_spans
        if span.start < end and span.end > start
    )
    given = np.zeros(prefix.size, dtype=np.float32)
    return replace(
        trajectory,
        token_ids=np.concatenate([prefix, trajectory.token_ids[start:end]]),
        sampled=np.arange(prefix.size + end - start) >= prefix.size,
        rollout_logprobs=np.concatenate([given, trajectory.rollout_logprobs[start:end]]),
        version_spans=spans,
        turns=1,
        routing=None,
        supports=_moved(trajectory.supports, prefix.size, start, end),
    )


def _moved(supports: TokenSupports | None, num_given: int, start: int, end: int) -> TokenSupports | None:
    """Those of the tokens [start, end), behind so many given ones."""
    if supports is None:
        return None
    kept = supports.cut(start, end)
    counts = np.concatenate([np.zeros(num_given, dtype=np.uint8), kept.counts])
    return TokenSupports(counts=counts, ids=kept.ids)
