"""Whatever happens to an episode, its dispatch comes back; what breaks the worker itself is raised by `collect`."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.builders import build_dispatch, build_tag
from support.episode_fakes import TOKENIZER, RecordingJudge, ToldEngine, stopping

from rollout.config import ArithmeticConfig
from rollout.environments.registry import build_envs
from rollout.episodes.episode import EpisodeSettings, Judge
from rollout.episodes.worker import EpisodeWorker, WorkerSettings
from rollout.errors import ConcordError, DeadlineError
from rollout.types.dispatch import Ending, FailReason
from rollout.types.generation import SamplingParams
from rollout.types.prompts import Prompt
from rollout.types.protocols import Store
from rollout.types.trajectory import EncodedGroup, GroupHeader, Reward, Trajectory

T = TypeVar("T")
SETTINGS = WorkerSettings(
    episode=EpisodeSettings(sampling=SamplingParams(max_new_tokens=8), max_context=64),
    deadline_s=20.0,
    store_deadline_s=20.0,
    max_attempts=2,
)


def within_20_s(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(20):
            return await work

    return asyncio.run(main())


class OnlyPuts(Store):
    """A store of which a worker uses `put` alone."""

    def __init__(self) -> None:
        super().__init__(self._unasked)

    async def _unasked(self, name: str, *args: object) -> Any:
        raise AssertionError(f"nobody asks for {name}")


class TakesAll(OnlyPuts):
    """Says of every group that it is durable."""

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        return tuple(group.header.dispatch_id for group in groups)


class Breaks(OnlyPuts):
    """Fails a put as foreign code does."""

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        raise OSError("no space left on device")


class Hangs(OnlyPuts):
    """A put that never ends."""

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        await asyncio.Event().wait()
        raise AssertionError


@dataclass
class OddJudge:
    """Judges prompt `p-0` wrongly, in the way of `how`, and every other one as it should."""

    how: str
    others: RecordingJudge = field(default_factory=RecordingJudge)

    async def __call__(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
    ) -> Sequence[Reward]:
        if prompt.prompt_id != "p-0":
            return await self.others(prompt, trajectories, completions)
        if self.how == "cancelled":
            cancelled: asyncio.Future[Sequence[Reward]] = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            return await cancelled
        no_rewards: Any = ["high"] * len(trajectories)
        return no_rewards


def worker_of(
    tmp_path: Path, store: type[OnlyPuts] = TakesAll, score: Judge | None = None, settings: WorkerSettings = SETTINGS
) -> EpisodeWorker:
    """A worker with engine 0, whose samples are `3 4`."""
    worker = EpisodeWorker(
        store=store(),
        score=score or RecordingJudge(),
        tokenizer=TOKENIZER,
        make_envs=lambda prompt, count: build_envs(ArithmeticConfig(), prompt, TOKENIZER, count),
        settings=settings,
    )
    worker.connect(0, ToldEngine(stopping(3, 4)), build_tag())
    return worker


@pytest.mark.parametrize("how", ["no reward", "cancelled"])
def test_an_error_that_nobody_foresaw_ends_its_dispatch_and_no_other(tmp_path: Path, how: str) -> None:
    async def main() -> dict[str, GroupHeader | Ending]:
        worker = worker_of(tmp_path, score=OddJudge(how))
        worker.submit([build_dispatch(0), build_dispatch(1)])
        outcomes: dict[str, GroupHeader | Ending] = {}
        while len(outcomes) < 2:
            outcomes |= {outcome.dispatch_id: outcome for outcome in await worker.collect()}
        return outcomes

    outcomes = within_20_s(main())
    ending = outcomes["d-0"]
    assert isinstance(ending, Ending)
    assert ending.reason is FailReason.WORKER and ending.readmit
    assert ("cancelled" if how == "cancelled" else "AttributeError") in ending.detail
    assert isinstance(outcomes["d-1"], GroupHeader)


def test_a_store_that_fails_as_nobody_foresaw_breaks_the_worker_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        worker = worker_of(tmp_path, Breaks)
        worker.submit([build_dispatch(0)])
        while True:
            await worker.collect()

    with pytest.raises(ConcordError, match="no space left on device"):
        within_20_s(main())


def test_a_store_that_does_not_answer_a_put_breaks_the_worker_with_the_key_of_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        worker = worker_of(tmp_path, Hangs, settings=replace(SETTINGS, store_deadline_s=0.01))
        worker.submit([build_dispatch(0)])
        while True:
            await worker.collect()

    with pytest.raises(DeadlineError, match=r"take finished groups.*deadlines\.store_s"):
        within_20_s(main())


def test_closing_a_worker_leaves_no_task(tmp_path: Path) -> None:
    async def main() -> None:
        worker = worker_of(tmp_path, Hangs)
        worker.submit([build_dispatch(0)])
        for _ in range(20):
            await asyncio.sleep(0)
        worker.submit([build_dispatch(1)])
        await worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    within_20_s(main())
