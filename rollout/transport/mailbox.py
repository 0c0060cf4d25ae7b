"""Many small jobs over few calls: what is asked in one turn of the event loop travels together, and so does what has
finished meanwhile.

`Outbox` is the asking side, `Inbox` the working side; between them stand two calls that somebody else makes: `submit`
and `collect`. They own order-free delivery, once each. They know neither jobs nor the transport.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from rollout.errors import ConcordError
from rollout.tasks import Tasks, settle

Job = TypeVar("Job")
Result = TypeVar("Result")

COLLECT_WAIT_S = 1.0
"""`collect` answers at least this often, so that the asking side notices a dead partner."""


class Inbox(Generic[Job, Result]):
    """Runs jobs at once and keeps what has finished, a client apart, until it is collected. Answers for a client that
    is gone stay."""

    def __init__(self, work: Callable[[Job], Awaitable[Result]]) -> None:
        self._work = work
        self._tasks = Tasks()
        self._finished: dict[str, list[tuple[int, Result | ConcordError]]] = {}
        self._bells: dict[str, asyncio.Event] = {}

    def submit(self, client: str, jobs: Sequence[tuple[int, Job]]) -> None:
        """Start numbered jobs of a client."""
        for number, job in jobs:
            answer = partial(self._answer, client, number)
            self._tasks.start(self._run(job, answer), answer, f"job {number} of client {client}")

    async def collect(self, client: str) -> list[tuple[int, Result | ConcordError]]:
        """What has finished since the last call, errors as values; waits for the first, at most COLLECT_WAIT_S."""
        bell = self._bells.setdefault(client, asyncio.Event())
        if not self._finished.get(client):
            try:
                async with asyncio.timeout(COLLECT_WAIT_S):
                    await bell.wait()
            except TimeoutError:
                return []
        bell.clear()
        return self._finished.pop(client, [])

    async def _run(self, job: Job, answer: Callable[[Result], None]) -> None:
        answer(await self._work(job))

    def _answer(self, client: str, number: int, answer: Result | ConcordError) -> None:
        self._finished.setdefault(client, []).append((number, answer))
        self._bells.setdefault(client, asyncio.Event()).set()


class Outbox(Generic[Job, Result]):
    """Asks one partner. At most one `submit` and one `collect` are under way."""

    def __init__(
        self,
        submit: Callable[[list[tuple[int, Job]]], Awaitable[None]],
        collect: Callable[[], Awaitable[Sequence[tuple[int, Result | ConcordError]]]],
    ) -> None:
        self._submit = submit
        self._collect = collect
        self._unsent: list[tuple[int, Job]] = []
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._next = 0
        self._tasks = Tasks()
        self._sending = False
        self._collecting = False

    async def ask(self, job: Job) -> Result:
        """The partner's answer.

        Raises:
            ConcordError: what the job raised, or why the partner cannot be reached.
        """
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._unsent.append((number, job))
        if not self._sending:
            self._sending = True
            self._tasks.start(self._send(), self._fail, "outbox submit")
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _send(self) -> None:
        try:
            while self._unsent:
                await asyncio.sleep(0)  # whoever asks in this turn of the event loop goes along
                jobs, self._unsent = self._unsent, []
                await self._submit(jobs)
                if not self._collecting:
                    self._collecting = True
                    self._tasks.start(self._take(), self._fail, "outbox collect")
        finally:
            self._sending = False

    async def _take(self) -> None:
        try:
            while self._waiting:
                for number, answer in await self._collect():
                    if number in self._waiting:
                        settle(self._waiting[number], answer)
                await asyncio.sleep(0)  # let the askers leave, so that nobody is waited for in vain
        finally:
            self._collecting = False

    def _fail(self, error: ConcordError) -> None:
        self._unsent = []
        for future in self._waiting.values():
            settle(future, error)
