"""One dispatch becomes one rewarded group.

    dispatch -> turns (engine and environments) -> trajectories -> judge -> group

It owns the order of these steps and the reason of every failure. It must never know where engine and judge run, which
policy is current, or what becomes of the group. Deadlines are the caller's: it cancels, and what runs on the engine is
aborted.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from rollout.episodes.failure import failing_as
from rollout.episodes.turns import Episode, EpisodeSettings
from rollout.errors import EngineError, RewardError
from rollout.rewards.errors import RewardInvalid
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.dispatch import Dispatch, FailReason
from rollout.types.prompts import Prompt
from rollout.types.protocols import Engine, Env
from rollout.types.trajectory import EngineTag, Reward, Trajectory, TrajectoryGroup


class Judge(Protocol):
    """Scores a group, wherever the reward runs; its deadline is its own."""

    async def __call__(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
    ) -> Sequence[Reward]:
        """One reward a trajectory, in order. Raises a `RewardFailure` with the reason."""
        ...


async def run_group(
    dispatch: Dispatch,
    *,
    engine: Engine,
    envs: Sequence[Env],
    score: Judge,
    tag: EngineTag,
    tokenizer: Tokenizer,
    settings: EpisodeSettings,
) -> TrajectoryGroup:
    """Run all samples of a dispatch and have them judged.

    Args:
        dispatch: its id names requests (`ID:0`, later turns `ID:TURN:SAMPLE`) and trajectories (`ID-SAMPLE`).
        envs: one single-use environment a sample; all show the same prompt.
        tokenizer: decodes completions (the sampled tokens of all turns, special tokens left out).

    Raises:
        EpisodeFailure: with the reason for which the dispatch ends without a group.
    """
    episode = Episode(dispatch, engine, envs, tag, tokenizer.eos_ids, settings)
    await episode.run()
    returned = f"dispatch {dispatch.dispatch_id}: what replica {tag.replica} returned is no trajectory"
    with failing_as(FailReason.ENGINE, EngineError, returned):
        trajectories = episode.trajectories()
        completions = [tokenizer.decode(t.token_ids[t.sampled]) if settings.decode else "" for t in trajectories]
    rewards, reward_s = await _judged(dispatch, score, trajectories, completions)
    return TrajectoryGroup(
        dispatch_id=dispatch.dispatch_id,
        prompt_id=dispatch.prompt.prompt_id,
        pass_index=dispatch.prompt.pass_index,
        environment=envs[0].name,
        trajectories=tuple(trajectories),
        rewards=rewards,
        reward_s=reward_s,
    )


async def _judged(
    dispatch: Dispatch, score: Judge, trajectories: Sequence[Trajectory], completions: Sequence[str]
) -> tuple[tuple[Reward, ...], float]:
    """The rewards, and the seconds that they took."""
    started_s = time.perf_counter()
    with failing_as(FailReason.REWARD_RAISED, RewardError, f"rewards of dispatch {dispatch.dispatch_id}"):
        rewards = tuple(await score(dispatch.prompt, trajectories, completions))
        if len(rewards) != len(trajectories):
            raise RewardInvalid(f"got {len(rewards)} rewards for {len(trajectories)} trajectories; expected one each")
    return rewards, time.perf_counter() - started_s
