"""What the log of a run says of a training step: applied, skipped, searched, planted. It decides nothing."""

from dataclasses import asdict

from orchestrator.dispatch.book import Book
from orchestrator.observers import Observers, StepDone
from orchestrator.run_dir.search_records import SearchRecords
from rollout.types.trajectory import Annotation
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import ANNOTATION_KIND
from trainer.types.step import StepReport


class StepLog:
    """Events of training steps, and the files of their gradient searches."""

    def __init__(self, book: Book, searches: SearchRecords, observers: Observers) -> None:
        self._book, self._observers = book, observers
        self.searches = searches

    async def taken(self, policy: PolicyVersion, report: StepReport) -> None:
        """The trainer has finished the step that was to produce `policy`, applied or not."""
        await self._tell_planted(report)
        await self._searched(policy, report)
        if report.not_saved:
            self._book.side_files.failed("saved_steps", report.not_saved)
        await self._book.side_files.report()

    async def applied(self, done: StepDone) -> None:
        """It was applied and published."""
        await self._observers.step_done(done)

    async def skipped(self, policy: PolicyVersion, report: StepReport) -> None:
        """It was not applied."""
        fields = {
            "step": policy.version,
            "reason": report.skipped,
            "saved": report.saved,
            "removed": ", ".join(report.saves_removed),
        }
        await self._book.store.record_event("step_skipped", {**fields})

    async def _searched(self, policy: PolicyVersion, report: StepReport) -> None:
        """The step's gradient was searched: keep what was found, and let no later lease train on what is
        quarantined."""
        if report.gradloc is None:
            return
        store = self._book.store
        found = self.searches.keep(policy, report.gradloc, report.saved)
        await store.record_event("gradloc", found | {"removed": ", ".join(report.saves_removed)})
        for group in report.quarantined:
            await store.annotate(
                [Annotation(dispatch_id=group.dispatch_id, kind=ANNOTATION_KIND, payload=group.verdict)]
            )
            for trajectory_id in group.trajectory_ids:
                fields = {"step": policy.version, "trajectory_id": trajectory_id}
                await store.record_event("gradloc_quarantined", {**fields})

    async def _tell_planted(self, report: StepReport) -> None:
        """What was planted into the step's gradient, so that what is found can be held against it."""
        for planted in report.planted:
            kind = "fault_missed" if planted.missed else "fault_planted"
            await self._book.store.record_event(kind, {"step": report.policy.version, **asdict(planted)})
