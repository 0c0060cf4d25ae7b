"""What to audit: ready groups that wait for the consistency service, and in which order they go to it.

In mode `gate` all of them; in mode `audit` a share by a hash of the dispatch, and a few of every replica whose own gap
is not known yet. It never asks the service and never reads an answer.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from orchestrator.dispatch.staleness import Pool
from orchestrator.observers import Observer
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import ApplyReport, PolicyVersion
from trainer.config.consistency import ConsistencyConfig

MAX_GROUPS = 16
"""Groups of one call."""
MAX_WAITING = 64
"""Groups that mode `audit` keeps waiting; the oldest beyond it are let go, and counted."""
BASELINE_GROUPS = 4
"""Groups of a replica without a baseline that mode `audit` keeps waiting besides its share: a sample to start from, not
all that comes meanwhile."""


class AuditQueue(Observer):
    """Groups that wait for an audit."""

    def __init__(
        self,
        config: ConsistencyConfig,
        seed: int,
        pool: Pool,
        ledger: Iterable[PolicyVersion],
        has_baseline: Callable[[int], bool],
    ) -> None:
        self._config, self._seed, self._pool, self._has_baseline = config, seed, pool, has_baseline
        self._gates = config.mode == "gate"
        self._ledger = set(ledger)
        self._waiting: OrderedDict[str, GroupHeader] = OrderedDict()
        self._since: dict[str, float] = {}
        self._bell = asyncio.Event()
        self.skipped = 0
        """Groups chosen for an audit that were let go because the service was behind."""
        self.groups_ready(tuple(pool.ready.values()))

    def __len__(self) -> int:
        return len(self._waiting)

    def groups_ready(self, headers: Sequence[GroupHeader]) -> None:
        """Choose those to audit."""
        for header in headers:
            if self._gates or self.is_in_the_share(header.dispatch_id) or self._wants_baseline(header.replica):
                self._waiting[header.dispatch_id] = header
                self._since.setdefault(header.dispatch_id, time.monotonic())
        while not self._gates and len(self._waiting) > MAX_WAITING:
            self.done(self._waiting.popitem(last=False)[0])
            self.skipped += 1
        self._bell.set()

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        """Groups that waited for this version can be audited."""
        self._ledger.add(policy)
        self._bell.set()

    def ring(self) -> None:
        """Whoever waits for a group shall look for other work."""
        self._bell.set()

    async def take(self) -> list[GroupHeader]:
        """The oldest groups whose policies the ledger holds, of one incarnation a replica; in `gate` only those that
        may still be trained on. Waits for the first, and may come back with none."""
        newest = max(self._ledger)
        for dispatch_id in [i for i in self._waiting if self._gates and i not in self._pool.ready]:
            self.done(dispatch_id)
        chosen: list[GroupHeader] = []
        incarnations: dict[int, int] = {}
        for header in self._waiting.values():
            alike = incarnations.setdefault(header.replica, header.incarnation) == header.incarnation
            if header.newest <= newest and alike and len(chosen) < MAX_GROUPS:
                chosen.append(header)
        for header in chosen:
            del self._waiting[header.dispatch_id]
        if not chosen:
            self._bell.clear()
            await self._bell.wait()
        return chosen

    def put_back(self, headers: Iterable[GroupHeader]) -> None:
        """They were taken and not audited: they come first."""
        self._waiting = OrderedDict({**{header.dispatch_id: header for header in headers}, **self._waiting})
        self._bell.set()

    def done(self, dispatch_id: str) -> None:
        """A group waits no longer."""
        self._waiting.pop(dispatch_id, None)
        self._since.pop(dispatch_id, None)

    def committed_of(self, headers: Iterable[GroupHeader]) -> frozenset[PolicyVersion]:
        """The policies of these groups that the ledger holds."""
        return frozenset(policy for header in headers for policy in header.policies if policy in self._ledger)

    def late(self) -> set[str]:
        """Ready groups that have waited for longer than `consistency.behind_s`."""
        now = time.monotonic()
        return {i for i, since in self._since.items() if now - since > self._config.behind_s and i in self._pool.ready}

    def _wants_baseline(self, replica: int) -> bool:
        waiting = sum(header.replica == replica for header in self._waiting.values())
        return not self._has_baseline(replica) and waiting < BASELINE_GROUPS

    def is_in_the_share(self, dispatch_id: str) -> bool:
        """The same for the same dispatch, whatever happened before."""
        digest = hashlib.blake2b(f"{self._seed}/{dispatch_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < self._config.audit_fraction
