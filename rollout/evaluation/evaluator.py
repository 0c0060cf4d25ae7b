"""Scores one policy on held-out prompts through an engine that others use too. Its groups enter no store and no pool;
it judges by the run's own reward.

It loads no weights and keeps none: the engine says which policy sampled each token.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from rollout.config import EnvironmentConfig, EvaluationConfig, RewardConfig, SamplingConfig
from rollout.environments.registry import build_envs
from rollout.episodes.episode import run_group
from rollout.episodes.failure import EpisodeFailure
from rollout.episodes.turns import EpisodeSettings
from rollout.errors import ConcordError
from rollout.evaluation.fingerprint import configuration_parts, fingerprint
from rollout.evaluation.prompts import held_out_prompts
from rollout.rewards.judging import judge_group
from rollout.rewards.registry import build_reward, needs_answer, needs_text
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.generation import SamplingParams
from rollout.types.prompts import Prompt
from rollout.types.protocols import Engine, Env, RewardFunction
from rollout.types.trajectory import EngineTag, Reward, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One evaluation."""

    score: float | None
    """Mean reward over prompts; None where no prompt was finished."""
    stderr: float | None
    """Standard error of `score` over prompts; None with fewer than two."""
    prompts: int
    """Prompts that were finished."""
    failed: int
    """Prompts without a score; the others' mean is then over a selection."""
    failure: str
    """The first reason; empty without any."""
    length_mean: float
    """Sampled tokens a sample."""
    tokens: int
    """Sampled tokens of the finished prompts."""
    policies: tuple[PolicyVersion, ...]
    """All that sampled a token, oldest first; more than one makes the score a mixture."""
    parts: tuple[tuple[str, str], ...]
    """The configuration (`rollout.evaluation.fingerprint`)."""
    fingerprint: str
    seconds: float


class Evaluates(Protocol):
    """What scores policies; a planted fault is another implementation."""

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        """From now on, evaluations on `slot` go to `engine`."""
        ...

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        """Score what replica `slot` serves.

        Args:
            policy: what it is expected to serve.
            label: part of the requests' ids, never used before.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluator:
    """Implements `Evaluates`."""

    prompts: Sequence[Prompt]
    environment: EnvironmentConfig
    reward: RewardConfig
    function: RewardFunction
    """What `reward` builds."""
    tokenizer: Tokenizer
    settings: EpisodeSettings
    samples: int
    """Samples of each prompt."""
    _engines: dict[int, tuple[Engine, EngineTag]] = field(init=False, default_factory=dict[int, Any])

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        self._engines[slot] = (engine, tag)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        if slot not in self._engines:
            raise ConcordError(f"the evaluation knows no engine replica {slot}; known: {sorted(self._engines)}")
        engine, tag = self._engines[slot]
        begun = time.perf_counter()
        envs = [build_envs(self.environment, prompt, self.tokenizer, self.samples) for prompt in self.prompts]
        dispatches = [
            Dispatch(
                dispatch_id=f"evaluation-{label}-{index}",
                prompt=prompt,
                group_size=self.samples,
                attempt=1,
                policy=policy,
                replica=slot,
                created_at_s=time.time(),
            )
            for index, prompt in enumerate(self.prompts)
        ]
        answers = await asyncio.gather(
            *(self._group(dispatch, engine, each, tag) for dispatch, each in zip(dispatches, envs, strict=True))
        )
        parts = configuration_parts(
            prompts=self.prompts,
            prompt_ids=[each[0].prompt_ids() for each in envs],
            tokenizer=self.tokenizer,
            environment=self.environment,
            reward=self.reward,
            sampling=self.settings.sampling,
            samples=self.samples,
            tag=tag,
        )
        return _report(answers, parts, time.perf_counter() - begun)

    async def _group(
        self, dispatch: Dispatch, engine: Engine, envs: Sequence[Env], tag: EngineTag
    ) -> TrajectoryGroup | EpisodeFailure:
        async def judge(
            prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
        ) -> Sequence[Reward]:
            """Judge in this process: the pool of reward workers belongs to training."""
            return judge_group(self.function, prompt, completions, trajectories)

        run = partial(run_group, score=judge, tokenizer=self.tokenizer, settings=self.settings)
        try:
            return await run(dispatch, engine=engine, envs=envs, tag=tag)
        except EpisodeFailure as failure:
            return failure


def _report(
    answers: Sequence[TrajectoryGroup | EpisodeFailure], parts: tuple[tuple[str, str], ...], seconds: float
) -> EvaluationReport:
    groups = [answer for answer in answers if isinstance(answer, TrajectoryGroup)]
    failures = [answer for answer in answers if isinstance(answer, EpisodeFailure)]
    scores = np.array([np.mean([reward.total for reward in group.rewards]) for group in groups], dtype=np.float64)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    return EvaluationReport(
        score=float(scores.mean()) if scores.size else None,
        stderr=float(scores.std(ddof=1) / np.sqrt(scores.size)) if scores.size > 1 else None,
        prompts=len(groups),
        failed=len(failures),
        failure=f"{failures[0].reason}: {failures[0].detail}" if failures else "",
        length_mean=tokens / len(trajectories) if trajectories else 0.0,
        tokens=tokens,
        policies=tuple(sorted({span.policy for trajectory in trajectories for span in trajectory.version_spans})),
        parts=parts,
        fingerprint=fingerprint(parts),
        seconds=seconds,
    )


def build_evaluator(
    *,
    config: EvaluationConfig,
    environment: EnvironmentConfig,
    reward: RewardConfig,
    sampling: SamplingConfig,
    seed: int,
    max_context: int,
    tokenizer: Tokenizer,
) -> Evaluator:
    """The evaluator of a run.

    Raises:
        UserError: the held-out prompts or the reward cannot be loaded.
    """
    params = SamplingParams(
        max_new_tokens=config.max_new_tokens or sampling.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )
    function = build_reward(reward)
    return Evaluator(
        prompts=held_out_prompts(environment, config, seed, needs_answer(reward)),
        environment=environment,
        reward=reward,
        function=function,
        tokenizer=tokenizer,
        settings=EpisodeSettings(sampling=params, max_context=max_context, decode=needs_text(function)),
        samples=config.samples,
    )
