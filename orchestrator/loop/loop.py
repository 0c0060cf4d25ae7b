"""The asynchronous loop: one, for every eta.

    prompts -> admission -> [episode workers: engine, reward, store] -> collection -> gate -> training
    -> publication -> engines

* admission consumes capacity and prompts (re-admitted ones first); produces durable dispatches; waits for capacity;
  unblocked by a ledger commit, by a dispatch that ends, by a replica that begins to serve.
* collection (one per episode worker) consumes what came back; produces ready headers or endings; waits for its worker.
* training consumes a batch that the gate lets through; produces a step, its commit record and published weights; waits
  for ready groups; unblocked by collection and by ledger commits.
* publication consumes the newest weights; produces a committed version; waits for engines, not for stragglers.
* the replicas' lifecycle gives up what fails, starts it anew and brings up to date whoever is behind; supervision asks
  how they are.
* consistency (one per service actor) consumes ready headers; produces evidence, and in mode `gate` the verdicts that
  let groups through; waits for the service; unblocked by collection and by ledger commits.
* evaluation consumes ledger commits; produces scores of held-out prompts through a replica that serves; the engines'
  first update waits for that of version 0.
* the doctor reads rows and events every few steps and says what is wrong.
* the failure watch hears of every episode that ended; it says which groups fail and why, makes admission pause while
  all of them do, and ends a run in which too many do.

None waits for another beyond those edges; eta = 0 is the same loop with a window of one batch. This module owns their
tasks, and those of companions that look at the run; an error of any of them ends it with the reason.
"""

import asyncio
from collections.abc import Coroutine, Mapping

from actors.ports import Fleet
from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress, watch_for_stall
from orchestrator.loop.parts import LoopParts
from rollout.errors import ConcordError, boundary, first_error


class Loop:
    """All tasks of one run, on one event loop."""

    def __init__(self, config: RunConfig, fleet: Fleet, parts: LoopParts, progress: Progress) -> None:
        self._config, self._fleet, self._parts, self._progress = config, fleet, parts, progress
        self._stop = asyncio.Event()

    def request_stop(self) -> None:
        """Finish the running step, checkpoint, and end."""
        self._stop.set()
        self._parts.book.ring()

    async def run(self, companions: Mapping[str, Coroutine[None, None, None]] | None = None) -> None:
        """Train until `run.steps` or a stop.

        Args:
            companions: run for as long as the loop does, by the name that an error of theirs is reported under.

        Raises:
            ConcordError: what ended the run early.
        """
        self._parts.observers.complete()
        self._progress.begin()
        try:
            async with asyncio.TaskGroup() as group:
                work = {**self._work(), **(companions or {})}
                tasks = [group.create_task(_owned(task, name), name=name) for name, task in work.items()]
                dump = self._fleet.dump_stacks
                watch = watch_for_stall(self._progress, self._config.deadlines.stall_s, dump, self._parts.no_step)
                stall_watch = group.create_task(_owned(watch, "stall watch"), name="stall watch")
                try:
                    await self._train(stall_watch)
                finally:
                    for task in (*tasks, stall_watch):
                        task.cancel()
        except* ConcordError as errors:
            raise first_error(errors) from errors

    def _work(self) -> dict[str, Coroutine[None, None, None]]:
        """What runs beside training, by name. The lifecycle comes first: others hand tasks to it."""
        parts, config = self._parts, self._config
        work: dict[str, Coroutine[None, None, None]] = {"lifecycle": parts.lifecycle.run()}
        work |= {"admission": parts.admission.run()}
        work |= {"publication": parts.publisher.run(), "supervision": parts.supervision.run()}
        work |= {"doctor": parts.doctor.run(), "failure watch": parts.failures.run()}
        work |= {f"collection {index}": parts.collection.run(index) for index in range(config.episodes.workers)}
        if (consistency := parts.consistency) is not None:
            work |= {f"consistency {index}": consistency.run(index) for index in range(config.consistency.workers)}
            work |= {"consistency waiver": consistency.waive()} if consistency.waives else {}
        if parts.evaluation is not None:
            work["evaluation"] = parts.evaluation.run()
        return work

    async def _train(self, stall_watch: asyncio.Task[None]) -> None:
        training, evaluation = self._parts.training, self._parts.evaluation
        await training.run(self._config.run.steps, self._config.trainer.checkpoint.every_steps, self._stop)
        stall_watch.cancel()  # no step is to come
        if evaluation is not None and not self._stop.is_set():
            await evaluation.last(training.policy, self._stop)


async def _owned(work: Coroutine[None, None, None], name: str) -> None:
    """What escapes a part of the loop ends the run under the part's name."""
    with boundary(ConcordError, name):
        await work
