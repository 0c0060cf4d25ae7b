"""Which groups the next step trains on: the staleness window at its exit.

Consumes headers of ready groups and the record of running dispatches; produces a batch, or the groups to reject.
Guarantee (invariant 2): no token older than eta is trained on. It never reads a token and never talks to the store.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rollout.types.dispatch import Counts, Dispatch
from rollout.types.trajectory import GroupHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The gate's answer for step v + 1."""

    batch: tuple[GroupHeader, ...] = ()
    """Groups to train on; empty when the step has to wait."""
    stale: tuple[GroupHeader, ...] = ()
    """Groups that no later step may train on; to be rejected now."""
    waits_for: str = ""
    """What the step waits for, in words; empty when there is a batch."""


@dataclass(slots=True, kw_only=True)
class Pool:
    """Dispatches that run and groups that are ready, in dispatch order and in order of arrival."""

    running: dict[str, Dispatch] = field(default_factory=dict[str, Dispatch])
    ready: dict[str, GroupHeader] = field(default_factory=dict[str, GroupHeader])
    audited: set[str] = field(default_factory=set[str])
    """Ready groups whose every token the consistency service has scored."""
    waived: set[str] = field(default_factory=set[str])
    """Ready groups that may be trained on without."""

    def start(self, dispatches: Iterable[Dispatch]) -> None:
        self.running.update((d.dispatch_id, d) for d in dispatches)

    def finish(self, headers: Iterable[GroupHeader]) -> None:
        for header in headers:
            self.running.pop(header.dispatch_id, None)
            self.ready[header.dispatch_id] = header

    def let_through(self, scored: Iterable[str]) -> None:
        """The consistency service has scored these groups whole."""
        self.audited.update(dispatch_id for dispatch_id in scored if dispatch_id in self.ready)

    def waive(self, dispatch_ids: Iterable[str]) -> bool:
        """These groups may be trained on without a score; whether one of them might not before."""
        new = {dispatch_id for dispatch_id in dispatch_ids if dispatch_id in self.ready} - self.waived
        self.waived |= new
        return bool(new)

    def drop(self, dispatch_ids: Iterable[str]) -> None:
        for dispatch_id in dispatch_ids:
            self.running.pop(dispatch_id, None)
            self.ready.pop(dispatch_id, None)
            self.audited.discard(dispatch_id)
            self.waived.discard(dispatch_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The consumption rules of one run."""

    max_staleness: int
    batch_groups: int
    policy: Literal["drop", "mask", "wait"]
    order: Literal["ready", "dispatch"]
    dispatch_window: int = 1
    audited_only: bool = False
    """Take only groups that the consistency service has scored (or waived)."""

    def select(
        self, pool: Pool, trainer_version: int, committed_version: int, unverified: Container[str] = ()
    ) -> Selection:
        """The batch of step `trainer_version` + 1, whose tokens may be at most eta older than `trainer_version`.

        Groups with tokens newer than `committed_version` are held until the ledger commits, and those of `unverified`
        until their replica has shown that it holds the weights that it sampled them with.

        Raises:
            ValueError: a ready group holds tokens of a version that the trainer has not reached.
        """
        floor = trainer_version - self.max_staleness
        for header in pool.ready.values():
            if header.newest.version > trainer_version:
                got = f"group {header.dispatch_id} has tokens of version {header.newest.version}"
                raise ValueError(f"{got}, but the trainer is at {trainer_version}: versions went backwards")
        stale = tuple(h for h in pool.ready.values() if self._is_stale(h, floor))
        stale_ids = {h.dispatch_id for h in stale}
        fresh = [h for h in pool.ready.values() if h.dispatch_id not in stale_ids]
        committed = [header for header in fresh if header.newest.version <= committed_version]
        let_through = pool.audited | pool.waived if self.audited_only else pool.ready.keys()
        usable = [h for h in committed if h.dispatch_id not in unverified and h.dispatch_id in let_through]
        candidates = self._candidates(pool, usable, stale_ids)
        if len(candidates) < self.batch_groups:
            have = f"have {len(candidates)}; {len(pool.running)} running, {len(pool.ready)} ready"
            if self.audited_only:
                have += f", of them {len(pool.audited)} scored by the consistency service"
            return Selection(stale=stale, waits_for=f"{self.batch_groups} groups ready in {self.order} order ({have})")
        batch = tuple(candidates[: self.batch_groups])
        awaited = self._may_still_join(pool, fresh, usable, floor) if self.policy == "wait" else []
        if awaited:
            step, limit = trainer_version + 1, self.max_staleness
            what = f"groups {', '.join(awaited[:4])}, which step {step} would make older than {limit}"
            return Selection(stale=stale, waits_for=what)
        return Selection(batch=batch, stale=stale)

    def _is_stale(self, header: GroupHeader, floor: int) -> bool:
        if self.policy == "mask":
            return all(policy.version < floor for policy in header.policies)
        return header.oldest_version < floor

    def _candidates(self, pool: Pool, usable: list[GroupHeader], stale_ids: set[str]) -> list[GroupHeader]:
        if self.policy == "wait":
            return sorted(usable, key=lambda h: (h.oldest_version, h.dispatch_id))
        if self.order == "ready":
            return usable
        unfinished = sorted((pool.running.keys() | pool.ready.keys()) - stale_ids)
        window = set(unfinished[: self.dispatch_window * self.batch_groups])
        return sorted((h for h in usable if h.dispatch_id in window), key=lambda h: h.dispatch_id)

    def _may_still_join(self, pool: Pool, fresh: list[GroupHeader], usable: list[GroupHeader], floor: int) -> list[str]:
        """Groups for which policy `wait` delays step v + 1: it is the last that can take them, and they may still join
        its batch.

        The last that can take a group is the step whose floor is the group's oldest version. A running group is as old
        as the policy it was dispatched under; like a group that is held, it joins when it becomes usable. Once groups
        of that age fill the batch, no wait could help one more of them: the step is taken, and what is left over
        becomes stale. (A resume with a smaller batch or window finds more of them ready than one step takes.)
        """
        usable_ids = {h.dispatch_id for h in usable if h.oldest_version == floor}
        if len(usable_ids) >= self.batch_groups:
            return []
        held = [h.dispatch_id for h in fresh if h.oldest_version == floor and h.dispatch_id not in usable_ids]
        return held + [d.dispatch_id for d in pool.running.values() if d.policy.version == floor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The staleness window, in groups."""

    max_staleness: int
    batch_groups: int
    max_concurrent: int


def capacity(window: Window, counts: Counts, running: int, uncommitted: int) -> int:
    """Groups that may be dispatched now: min(max_concurrent - running, (eta + 1) x batch - unfinished), never below 0.

    Args:
        running: groups in generation or reward.
        uncommitted: trained groups whose step's version the ledger has not committed: no engine has those weights yet.
            A checkpoint may have made them terminal; they count all the same.

    Source: docs/builder/life_of_a_prompt.md; golden vector V14_areal (whose `accepted` is cumulative).
    """
    unfinished = counts.dispatched + counts.ready + counts.audited + counts.leased + uncommitted
    return max(0, min(window.max_concurrent - running, (window.max_staleness + 1) * window.batch_groups - unfinished))
