"""A pool of reward workers behind one `Judge`: a deadline for each call, and a new worker for one that hangs or dies.

It owns who is idle and what goes into one call: quick rewards go several groups at a time, slow ones alone. A call that
fails as a whole (the worker hangs or dies) is repeated group by group, so that only the group that did it fails. It
must not know what a worker is made of.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rollout.errors import ConcordError, ProcessLostError, RewardError, boundary
from rollout.rewards.errors import RewardFailure, RewardTimeout, RewardWorkerDied
from rollout.tasks import Tasks, settle
from rollout.types.prompts import Prompt
from rollout.types.trajectory import Reward, Trajectory
from rollout.types.wire import wired

CALL_S = 0.02
"""Groups go together while their rewards are expected to take no longer than this."""
MAX_GROUPS_A_CALL = 32


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardJob:
    """One group to judge."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    completions: Sequence[str]


Judgement = Sequence[Reward] | RewardFailure
"""Rewards of one group in order, or the reason why there are none."""


class RewardPort(Protocol):
    """One reward worker."""

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[Sequence[Judgement], float]:
        """A judgement a job, in order, and the seconds they took together. Raises `ProcessLostError` when the worker is
        gone."""
        ...

    async def ready(self) -> None:
        """Answers when the worker is idle. Raises `ProcessLostError` when it is gone."""
        ...

    async def replace(self) -> None:
        """End the worker if it lives, and answer when a new one is ready."""
        ...


@dataclass(slots=True, kw_only=True)
class _Waiting:
    job: RewardJob
    answer: asyncio.Future[Sequence[Reward]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    alone: bool = False
    """Whether it must be a call of its own: one that it was part of failed as a whole."""


class RewardPool:
    """Implements `rollout.episodes.episode.Judge`."""

    def __init__(self, workers: Sequence[RewardPort], deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._queue: deque[_Waiting] = deque()
        self._bell = asyncio.Event()
        self._runners = Tasks()
        self._serving = False
        self._lost: ConcordError | None = None
        """Why a worker is gone for good."""
        self._group_s = CALL_S
        """Seconds that a group's rewards take, a running mean; at first every group goes alone."""
        self.replaced = 0

    async def __call__(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
    ) -> Sequence[Reward]:
        """Judge one group; waiting for an idle worker is not part of the deadline.

        Raises:
            RewardFailure: the reward raised, was invalid, passed its deadline, or its worker died.
            ConcordError: a worker is gone for good.
        """
        self.check()
        if not self._serving:
            self._serving = True
            for worker in self._workers:
                self._runners.start(self._serve(worker), self._lose, "a reward worker cannot be replaced")
        waiting = _Waiting(job=RewardJob(prompt=prompt, trajectories=trajectories, completions=completions))
        self._queue.append(waiting)
        self._bell.set()
        return await waiting.answer

    def check(self) -> None:
        """Whether groups can still be judged.

        Raises:
            ConcordError: why a worker cannot be replaced.
        """
        if self._lost is not None:
            raise self._lost

    def _lose(self, error: ConcordError) -> None:
        self._lost = error
        while self._queue:
            settle(self._queue.popleft().answer, error)

    async def _serve(self, worker: RewardPort) -> None:
        await self._begin(worker)
        while True:
            batch = self._next_batch()
            if not batch:
                self._bell.clear()
                await self._bell.wait()
                continue
            try:
                await self._judge(worker, batch)
            except (TimeoutError, ProcessLostError) as cause:
                self.replaced += 1
                self._give_up(batch, cause)
                await worker.replace()
            except ConcordError as error:
                for waiting in batch:
                    settle(waiting.answer, error)

    async def _begin(self, worker: RewardPort) -> None:
        """A worker that still judges for a client before us, and hangs, is replaced before it can fail a group of
        ours."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await worker.ready()
        except (TimeoutError, ProcessLostError):
            self.replaced += 1
            await worker.replace()

    def _next_batch(self) -> list[_Waiting]:
        share = -(-len(self._queue) // len(self._workers))
        size = max(1, min(share, int(CALL_S / self._group_s), MAX_GROUPS_A_CALL))
        batch: list[_Waiting] = []
        while self._queue and len(batch) < size and not (batch and self._queue[0].alone):
            waiting = self._queue.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
            if waiting.alone:
                break
        return batch

    async def _judge(self, worker: RewardPort, batch: list[_Waiting]) -> None:
        async with asyncio.timeout(self._deadline_s):
            with boundary(RewardError, f"a reward worker, asked for {len(batch)} judgements"):
                judgements, seconds = await worker.score([waiting.job for waiting in batch])
                answers = list(zip(batch, judgements, strict=True))
        self._group_s += 0.2 * (max(seconds / len(batch), 1e-5) - self._group_s)
        for waiting, judgement in answers:
            settle(waiting.answer, judgement)

    def _give_up(self, batch: list[_Waiting], cause: TimeoutError | ProcessLostError) -> None:
        if len(batch) > 1:
            self._queue.extendleft(replace(waiting, alone=True) for waiting in reversed(batch))
            return
        name = batch[0].job.prompt.prompt_id
        if isinstance(cause, ProcessLostError):
            settle(batch[0].answer, RewardWorkerDied(f"the reward worker died while it judged prompt {name}: {cause}"))
            return
        took = f"the reward of prompt {name} took longer than reward_workers.deadline_s = {self._deadline_s:g}"
        settle(batch[0].answer, RewardTimeout(f"{took}; its worker is replaced"))
