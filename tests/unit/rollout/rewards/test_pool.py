"""The reward pool: deadlines, dead workers, and groups that go together."""

import asyncio
from collections.abc import Sequence

import pytest
from support.builders import build_prompt

from rollout.errors import ProcessLostError
from rollout.rewards.errors import RewardRaised, RewardTimeout, RewardWorkerDied
from rollout.rewards.pool import Judgement, RewardJob, RewardPool
from rollout.types.trajectory import Reward

RIGHT = (Reward(total=1.0),)


class Worker:
    """Hangs on prompts named `hang`, dies on `die`, raises on `raise`; says that a group takes `group_s`."""

    def __init__(self, group_s: float = 0.0) -> None:
        self.calls: list[list[str]] = []
        self.replaced = 0
        self._group_s = group_s

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[Sequence[Judgement], float]:
        names = [job.prompt.prompt_id for job in jobs]
        self.calls.append(names)
        if "hang" in names:
            await asyncio.Event().wait()
        if "die" in names:
            raise ProcessLostError("gone")
        await asyncio.sleep(0)
        return [RewardRaised("it raised") if name == "raise" else RIGHT for name in names], self._group_s * len(jobs)

    async def replace(self) -> None:
        self.replaced += 1


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
