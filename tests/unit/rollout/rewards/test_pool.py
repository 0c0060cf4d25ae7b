"""The reward pool: deadlines, dead workers, and groups that go together."""

import asyncio
from collections.abc import Sequence

import pytest
from support.builders import build_prompt

from rollout.errors import ConcordError, ProcessLostError, RewardError, UserError
from rollout.rewards.errors import RewardRaised, RewardTimeout, RewardWorkerDied
from rollout.rewards.pool import Judgement, RewardJob, RewardPool
from rollout.types.trajectory import Reward

RIGHT = (Reward(total=1.0),)


class Worker:
    """Hangs on prompts named `hang`, dies on `die`, raises on `raise`, forgets to answer on `forget`; says that a group
    takes `group_s`. With `busy` it hangs until it is replaced; with `last` it cannot be replaced."""

    def __init__(self, group_s: float = 0.0, *, busy: bool = False, last: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self.replaced = 0
        self._group_s, self._busy, self._last = group_s, busy, last

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[Sequence[Judgement], float]:
        names = [job.prompt.prompt_id for job in jobs]
        self.calls.append(names)
        if "forget" in names:
            return [], 0.0
        if "hang" in names or self._busy:
            await asyncio.Event().wait()
        if "die" in names:
            raise ProcessLostError("gone")
        await asyncio.sleep(0)
        return [RewardRaised("it raised") if name == "raise" else RIGHT for name in names], self._group_s * len(jobs)

    async def ready(self) -> None:
        if self._busy:
            await asyncio.Event().wait()

    async def replace(self) -> None:
        self.replaced += 1
        self._busy = False
        if self._last is not None:
            raise self._last


def judged(worker: Worker, names: Sequence[str], deadline_s: float = 0.2) -> list[object]:
    async def main() -> list[object]:
        pool = RewardPool([worker], deadline_s)
        async with asyncio.timeout(10.0):
            return list(
                await asyncio.gather(*(pool(build_prompt(name), (), ()) for name in names), return_exceptions=True)
            )

    return asyncio.run(main())


def test_quick_groups_go_together() -> None:
    worker = Worker()
    assert judged(worker, [str(n) for n in range(100)]) == [RIGHT] * 100
    assert len(worker.calls) < 50


def test_slow_groups_go_alone() -> None:
    worker = Worker(group_s=1.0)
    judged(worker, [str(n) for n in range(5)])
    assert all(len(call) == 1 for call in worker.calls)


@pytest.mark.parametrize(("name", "error"), [("hang", RewardTimeout), ("die", RewardWorkerDied)])
def test_only_the_group_that_breaks_its_worker_fails(name: str, error: type[Exception]) -> None:
    worker = Worker()
    names = [*(str(n) for n in range(40)), name, *(str(n) for n in range(40, 60))]
    answers = judged(worker, names)
    assert isinstance(answers[40], error)
    assert [a for i, a in enumerate(answers) if i != 40] == [RIGHT] * 60
    assert worker.replaced >= 1


def test_a_reward_that_raises_fails_its_group_and_keeps_its_worker() -> None:
    worker = Worker()
    answers = judged(worker, ["0", "raise", "1"])
    assert isinstance(answers[1], RewardRaised)
    assert worker.replaced == 0


def test_a_worker_that_hangs_in_a_call_from_before_is_replaced_and_no_group_pays_for_it() -> None:
    """As the reward workers of an episode worker that died in the middle of a call."""
    worker = Worker(busy=True)
    assert judged(worker, ["0", "1"], deadline_s=0.05) == [RIGHT] * 2
    assert worker.replaced == 1


def test_a_worker_that_answers_for_too_few_fails_its_groups_and_goes_on() -> None:
    worker = Worker(group_s=1.0)
    answers = judged(worker, ["0", "forget", "1"])
    assert isinstance(answers[1], RewardError)
    assert (answers[0], answers[2]) == (RIGHT, RIGHT)


@pytest.mark.parametrize("last", [UserError("cannot import it"), OSError("cannot import it")])
def test_a_worker_that_cannot_be_replaced_fails_what_waits_and_is_the_pools_end(last: Exception) -> None:
    async def main() -> None:
        pool = RewardPool([Worker(group_s=1.0, last=last)], 0.2)
        async with asyncio.timeout(10.0):
            names = ("0", "die", "1", "2")
            answers = await asyncio.gather(*(pool(build_prompt(n), (), ()) for n in names), return_exceptions=True)
            assert answers[0] == RIGHT
            assert isinstance(answers[1], RewardWorkerDied)
            assert all("cannot import it" in str(answer) for answer in answers[2:])
            with pytest.raises(ConcordError, match="cannot import it"):
                pool.check()
            with pytest.raises(ConcordError, match="cannot import it"):
                await pool(build_prompt("3"), (), ())

    asyncio.run(main())
