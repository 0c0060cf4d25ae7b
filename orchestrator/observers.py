"""What happens in a loop that several of its parts, and those who report it, want to hear.

Every part gets the one list `Observers` in its constructor and says there what happened. Whoever wants to hear of it is
added before the loop starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.errors import ConcordError
from rollout.types.dispatch import Ending
from rollout.types.protocols import EventFields
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import ApplyReport, PolicyVersion
from trainer.types.step import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step trained on, reduced from headers and report."""

    reward_mean: float
    reward_std: float
    length_mean: float
    length_cap_fraction: float
    length_cut_fraction: float
    zero_variance: float
    reward_length_correlation: float
    all_correct: float
    all_wrong: float
    staleness_mean: float
    staleness_max: int
    mixed_fraction: float
    generation_s: float
    reward_s: float
    num_sampled: int
    num_trajectories: int
    tokens_by_age: tuple[tuple[int, int], ...] = ()
    """(staleness, trained tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhases:
    """Wall-clock seconds of one step, phase by phase."""

    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """An applied step."""

    report: StepReport
    facts: StepFacts
    phases: StepPhases = field(default_factory=StepPhases)
    checkpointed: bool = False
    """A checkpoint holds it: no resume takes it back, unless from an older one."""


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """An incarnation of a replica that was given up."""

    slot: int
    incarnation: int
    reason: str
    policy: PolicyVersion | None = None
    """The policy that it was to take over, where it failed at that."""
    canary_gap_nats: float = 0.0
    """Gap of its newest answer to a canary."""
    tolerance_nats: float = 0.0


class Observer:
    """Hears what happens; overrides what it wants to hear. What it raises goes to whoever says that it happened."""

    def event_recorded(self, kind: str, fields: EventFields) -> None:
        """A run event goes into the log."""

    def dispatches_begun(self, count: int) -> None:
        """So many dispatches were recorded, and are handed to episode workers."""

    def episodes_over(self, returned: int, failed: Sequence[Ending]) -> None:
        """Episodes ended: so many with a group, and these without."""

    def groups_ready(self, headers: Sequence[GroupHeader]) -> None:
        """Groups became ready."""

    async def replica_failed(self, failure: ReplicaFailure) -> None:
        """An incarnation was given up; its process is gone."""

    def replica_serves(self, slot: int) -> None:
        """A replica serves the committed policy, having not done so before."""

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        """The ledger has a new policy; `reports` are of the replicas that serve it."""

    async def step_done(self, done: StepDone) -> None:
        """A step was applied."""

    async def score_taken(self) -> None:
        """An evaluation has ended with a score."""


class Observers(Observer):
    """The list: each hears in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[Observer] = []
        self._complete = False

    def add(self, observer: Observer) -> None:
        """One more.

        Raises:
            ConcordError: the loop has started, so it would have missed something.
        """
        if self._complete:
            raise ConcordError(f"{type(observer).__name__} was added after the loop had started; add it before")
        self._all.append(observer)

    def complete(self) -> None:
        """The loop starts: nobody comes any more."""
        self._complete = True

    def event_recorded(self, kind: str, fields: EventFields) -> None:
        for observer in self._all:
            observer.event_recorded(kind, fields)

    def dispatches_begun(self, count: int) -> None:
        for observer in self._all:
            observer.dispatches_begun(count)

    def episodes_over(self, returned: int, failed: Sequence[Ending]) -> None:
        for observer in self._all:
            observer.episodes_over(returned, failed)

    def groups_ready(self, headers: Sequence[GroupHeader]) -> None:
        for observer in self._all:
            observer.groups_ready(headers)

    async def replica_failed(self, failure: ReplicaFailure) -> None:
        for observer in self._all:
            await observer.replica_failed(failure)

    def replica_serves(self, slot: int) -> None:
        for observer in self._all:
            observer.replica_serves(slot)

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        for observer in self._all:
            observer.version_committed(policy, reports)

    async def step_done(self, done: StepDone) -> None:
        for observer in self._all:
            await observer.step_done(done)

    async def score_taken(self) -> None:
        for observer in self._all:
            await observer.score_taken()
