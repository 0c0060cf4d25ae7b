"""Builders of valid values for tests: tags, prompts, dispatches, trajectories, groups. Seeded; every argument has a
default."""

from collections.abc import Sequence

import numpy as np

from rollout.types.codec import encode
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Prompt
from rollout.types.trajectory import (
    EngineTag,
    FinishReason,
    LogprobSemantics,
    Reward,
    RoutingTrace,
    StoredGroups,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import GroupEvidence, TrajectoryEvidence
from trainer.types.step import Verdict

BASE = PolicyVersion(1, 0)
"""Version 0 of the first trainer epoch."""


def build_tag(replica: int = 0, weights_digest: str = "a" * 64) -> EngineTag:
    """The tag of a scripted engine."""
    return EngineTag(
        engine="scripted",
        engine_version="1",
        replica=replica,
        weights_dtype="float32",
        kv_dtype="float32",
        quantization="none",
        logprob_semantics=LogprobSemantics.PROCESSED,
        kv_across_versions="recompute",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        tokenizer_fingerprint="b" * 64,
        chat_template_digest="",
        weights_digest=weights_digest,
    )


def build_prompt(prompt_id: str = "p-0", pass_index: int = 0, text: str = "12+34=", answer: str = "64") -> Prompt:
    """A raw prompt."""
    return Prompt(prompt_id=prompt_id, pass_index=pass_index, text=text, answer=answer)


def build_dispatch(
    number: int = 0, prompt: Prompt | None = None, attempt: int = 1, policy: PolicyVersion = BASE, group_size: int = 2
) -> Dispatch:
    """Dispatch `d-NUMBER` of prompt `p-NUMBER` unless a prompt is given."""
    return Dispatch(
        dispatch_id=f"d-{number}",
        prompt=prompt or build_prompt(f"p-{number}"),
        group_size=group_size,
        attempt=attempt,
        policy=policy,
        replica=0,
        created_at_s=1000.0 + number,
    )


def build_trajectory(
    dispatch_id: str = "d-0",
    index: int = 0,
    prompt_id: str = "p-0",
    prompt_tokens: int = 4,
    spans: Sequence[tuple[PolicyVersion, int]] = ((BASE, 8),),
    seed: int = 0,
    vocab_size: int = 32,
    routing: tuple[int, int] | None = None,
) -> Trajectory:
    """Trajectory `DISPATCH_ID/INDEX`: `prompt_tokens` given tokens, then one run of sampled tokens a (policy, length)
    of `spans`.

    Args:
        routing: (blocks, top_k) of a uint8 routing trace whose first row is missing; None has no trace.
    """
    rng = np.random.default_rng([seed, index])
    num_sampled = sum(length for _, length in spans)
    total = prompt_tokens + num_sampled
    sampled = np.arange(total) >= prompt_tokens
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[prompt_tokens:] = -rng.exponential(size=num_sampled)
    ends = np.cumsum([prompt_tokens, *(length for _, length in spans)]).tolist()
    return Trajectory(
        trajectory_id=f"{dispatch_id}/{index}",
        dispatch_id=dispatch_id,
        prompt_id=prompt_id,
        environment="arithmetic",
        token_ids=rng.integers(vocab_size, size=total, dtype=np.int32),
        sampled=sampled,
        rollout_logprobs=logprobs,
        version_spans=tuple(
            VersionSpan(policy, start, end) for (policy, _), start, end in zip(spans, ends[:-1], ends[1:], strict=True)
        ),
        turns=1,
        tag=build_tag(),
        finish_reason=FinishReason.STOP,
        timings=Timings(started_at_s=1000.0, generation_s=0.5),
        routing=None if routing is None else build_routing(total - 1, *routing, seed=seed),
    )


def build_routing(rows: int, blocks: int = 2, top_k: int = 2, seed: int = 0) -> RoutingTrace:
    """[rows, blocks, top_k] uint8 experts; the first row is missing."""
    covered = np.ones(rows, dtype=np.bool_)
    covered[:1] = False
    experts = np.random.default_rng(seed).integers(8, size=(rows, blocks, top_k), dtype=np.uint8)
    return RoutingTrace(experts=experts, covered=covered)


def build_group(
    dispatch: Dispatch | None = None,
    rewards: Sequence[float] = (1.0, 0.0),
    prompt_tokens: int = 4,
    spans: Sequence[tuple[PolicyVersion, int]] = ((BASE, 8),),
    seed: int = 0,
    vocab_size: int = 32,
    routing: tuple[int, int] | None = None,
) -> TrajectoryGroup:
    """The finished group of `dispatch` (default `d-0`), one trajectory a reward."""
    dispatch = dispatch or build_dispatch()
    trajectories = tuple(
        build_trajectory(
            dispatch.dispatch_id, index, dispatch.prompt.prompt_id, prompt_tokens, spans, seed, vocab_size, routing
        )
        for index in range(len(rewards))
    )
    return TrajectoryGroup(
        dispatch_id=dispatch.dispatch_id,
        prompt_id=dispatch.prompt.prompt_id,
        pass_index=dispatch.prompt.pass_index,
        environment="arithmetic",
        trajectories=trajectories,
        rewards=tuple(Reward(total=reward) for reward in rewards),
    )


def build_stored(groups: Sequence[TrajectoryGroup], verdicts: Sequence[bytes] = ()) -> StoredGroups:
    """Groups as the store hands them out, with no verdicts unless given."""
    return StoredGroups(
        dispatch_ids=tuple(group.dispatch_id for group in groups),
        payloads=tuple(encode(group).payload for group in groups),
        verdicts=tuple(verdicts) or (b"",) * len(groups),
    )


def build_evidence(
    group: TrajectoryGroup, verdicts: Sequence[Verdict] = (), shift: float = 0.0, scored: bool = True
) -> GroupEvidence:
    """Evidence of `group` whose recomputed log-probs are the rollout's plus `shift`; verdict `mask` names the first
    sampled token of a trajectory."""
    return GroupEvidence(
        dispatch_id=group.dispatch_id,
        replica=group.trajectories[0].tag.replica,
        policies=(BASE,),
        trajectories=tuple(
            TrajectoryEvidence(
                trajectory_id=trajectory.trajectory_id,
                scored=trajectory.sampled & scored,
                behaviour_logprobs=np.where(
                    trajectory.sampled, trajectory.rollout_logprobs + np.float32(shift), np.float32(0)
                ),
                verdict=verdict,
                masked=np.arange(trajectory.sampled.size)
                == (int(np.argmax(trajectory.sampled)) if verdict is Verdict.MASK else -1),
            )
            for trajectory, verdict in zip(
                group.trajectories, verdicts or (Verdict.ACCEPT,) * len(group.trajectories), strict=True
            )
        ),
    )
