"""Runs many episodes at once: dispatches in, durable groups or endings out.

It owns the episodes' deadlines and the batching of puts: groups that finish while a put is under way go together in the
next. It must not know admission, staleness or training, nor where engines, rewards and store live.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rollout.episodes.episode import EpisodeSettings, Judge, run_group
from rollout.episodes.failure import EpisodeFailure, failing_as
from rollout.errors import ConcordError, EnvironmentFailure
from rollout.tasks import Tasks, within
from rollout.tokenization.tokenizer import Tokenizer
from rollout.transport.mailbox import COLLECT_WAIT_S
from rollout.types.codec import encode
from rollout.types.dispatch import Dispatch, Ending, FailReason
from rollout.types.prompts import Prompt
from rollout.types.protocols import Engine, Env, Store
from rollout.types.trajectory import EncodedGroup, EngineTag, GroupHeader

Outcome: TypeAlias = GroupHeader | Ending
"""How a dispatch came back: durable in the store, or with the reason why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What an episode worker is given once, when it is built."""

    episode: EpisodeSettings
    deadline_s: float
    """Deadline for one group."""
    store_deadline_s: float
    """`deadlines.store_s`, for one put."""
    max_attempts: int
    """A prompt whose dispatch fails comes again up to this many attempts."""


class EpisodeWorker:
    """One worker, on one event loop."""

    def __init__(
        self,
        *,
        store: Store,
        score: Judge,
        tokenizer: Tokenizer,
        make_envs: Callable[[Prompt, int], Sequence[Env]],
        settings: WorkerSettings,
    ) -> None:
        self._store = store
        self._score = score
        self._tokenizer = tokenizer
        self._make_envs = make_envs
        self._settings = settings
        self._engines: dict[int, tuple[Engine, EngineTag]] = {}
        self._tasks = Tasks()
        self._unput: list[EncodedGroup] = []
        self._putting = False
        self._outcomes: list[Outcome] = []
        self._bell = asyncio.Event()
        self._broken: ConcordError | None = None

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        self._engines[slot] = (engine, tag)

    def submit(self, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            self._tasks.start(self._run(dispatch), partial(self._lost, dispatch), dispatch.dispatch_id)

    async def collect(self) -> tuple[Outcome, ...]:
        """All that has come back since the last call; waits for the first, at most COLLECT_WAIT_S. Raises why finished
        groups could not be put into the store: this worker can then keep nothing."""
        if not self._outcomes and self._broken is None:
            try:
                async with asyncio.timeout(COLLECT_WAIT_S):
                    await self._bell.wait()
            except TimeoutError:
                return ()
        self._bell.clear()
        if self._broken is not None:
            raise self._broken
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    async def close(self) -> None:
        """Cancel the episodes that run, and abort their requests at the engines."""
        await self._tasks.close()

    async def _run(self, dispatch: Dispatch) -> None:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                group = await self._episode(dispatch)
        except TimeoutError:
            took = f"the episode took longer than episodes.deadline_s = {self._settings.deadline_s:g}"
            self._come_back(self._ending(dispatch, FailReason.DEADLINE, took))
        except EpisodeFailure as failure:
            self._come_back(self._ending(dispatch, failure.reason, failure.detail))
        else:
            self._unput.append(group)
            if not self._putting:
                self._putting = True
                self._tasks.start(self._put_all(), self._break, "putting groups into the store")

    async def _episode(self, dispatch: Dispatch) -> EncodedGroup:
        if dispatch.replica not in self._engines:
            known = f"this worker knows no engine replica {dispatch.replica}; known: {sorted(self._engines)}"
            raise EpisodeFailure(FailReason.ENGINE, known)
        engine, tag = self._engines[dispatch.replica]
        name = f"the environment of prompt {dispatch.prompt.prompt_id}"
        with failing_as(FailReason.ENVIRONMENT, EnvironmentFailure, name):
            envs = self._make_envs(dispatch.prompt, dispatch.group_size)
        group = await run_group(
            dispatch,
            engine=engine,
            envs=envs,
            score=self._score,
            tag=tag,
            tokenizer=self._tokenizer,
            settings=self._settings.episode,
        )
        return encode(group)

    async def _put_all(self) -> None:
        try:
            while self._unput:
                batch, self._unput = self._unput, []
                putting, limit_s = self._store.put(batch), self._settings.store_deadline_s
                taken = set(await within(putting, limit_s, "deadlines.store_s", "the store to take finished groups"))
                for group in batch:
                    if group.header.dispatch_id in taken:
                        self._come_back(group.header)
        finally:
            self._putting = False

    def _lost(self, dispatch: Dispatch, error: ConcordError) -> None:
        """An episode ended in a way that has no reason of its own."""
        self._come_back(self._ending(dispatch, FailReason.WORKER, str(error)))

    def _break(self, error: ConcordError) -> None:
        """Groups could not be put: what this worker finishes is lost."""
        self._broken = error
        self._bell.set()

    def _ending(self, dispatch: Dispatch, reason: FailReason, detail: str) -> Ending:
        again = dispatch.attempt < self._settings.max_attempts and reason is not FailReason.PROMPT_TOO_LONG
        return Ending(dispatch_id=dispatch.dispatch_id, reason=reason, detail=detail, readmit=again)

    def _come_back(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._bell.set()
