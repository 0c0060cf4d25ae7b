"""One slot of the fleet and its present incarnation: what it serves, and what of it is known. Only its own methods
change it."""

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

from actors.ports import EnginePort, Started
from rollout.types.protocols import EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion

IDLE = EngineLoad(running=0, busy_s=0.0, generated_tokens=0)


class Replica:
    """A slot. An incarnation (one more at every start) is starting, then serving, then gone."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.incarnation = 0
        self.port: EnginePort | None = None
        """None while it is dead, or before its process is there."""
        self.tag: EngineTag | None = None
        """None before this incarnation has started."""
        self.applied: PolicyVersion | None = None
        """The policy it last answered for; None before it serves, and while it is dead."""
        self.applying: PolicyVersion | None = None
        """A newer policy that it has been asked to take, until it is verified; it may sample under it already."""
        self.tolerance_nats = 0.0
        self._canary_gaps: dict[int, float] = {}
        self.assigned = 0
        """Groups handed out to it and not yet back."""
        self.metrics_address = ""
        """host:port of the engine's own metrics; empty where it has none, and while it is dead."""
        self.digest_mismatches = 0
        """Updates of which it received other bytes than were published, over all incarnations."""
        self.canary_failures = 0
        """Updates after which its canary was outside the tolerance, over all incarnations."""
        self.load = IDLE
        self._earlier = IDLE
        self._update = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"engine replica {self.slot}"

    @property
    def canary_gap_nats(self) -> float:
        """The newest `canary_gap_of` the slot; 0 before the first answer."""
        return next(reversed(self._canary_gaps.values()), 0.0)

    def canary_gap_of(self, incarnation: int) -> float:
        """How far an incarnation's newest answer to a canary was from the trainer's, mean of a token; infinity when it
        received other bytes than were published, or answered nonsense; 0 where it is of an earlier trainer epoch."""
        return self._canary_gaps.get(incarnation, 0.0)

    @property
    def busy_s(self) -> float:
        """Busy seconds over all incarnations."""
        return self._earlier.busy_s + self.load.busy_s

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens over all incarnations."""
        return self._earlier.generated_tokens + self.load.generated_tokens

    def is_live(self, incarnation: int) -> bool:
        """Whether this incarnation is the present one, and has a process."""
        return self.incarnation == incarnation and self.port is not None

    def serves(self, policy: PolicyVersion) -> bool:
        """Whether it has answered for `policy`, or a newer one."""
        return self.port is not None and self.applied is not None and self.applied >= policy

    def begins(self, port: EnginePort) -> None:
        """A process for a new incarnation is there."""
        self.incarnation += 1
        self.port, self.tag, self.applied = port, None, None

    def has_started(self, started: Started, gap_nats: float, canary_floor_nats: float) -> None:
        """The present incarnation is what the run expects; it gets work once it `is_ready`."""
        self.tag, self.metrics_address = started.tag, started.metrics_address
        self.answered(gap_nats)
        if self.tolerance_nats == 0.0:
            self.tolerance_nats = 3.0 * max(gap_nats, canary_floor_nats)

    def is_ready(self, policy: PolicyVersion) -> None:
        """Every episode worker can reach it: it serves `policy` from now on."""
        self.applied = policy

    @contextmanager
    def takes(self, policy: PolicyVersion) -> Generator[None]:
        """While the update to `policy` goes on; verified when nothing is raised."""
        incarnation, self.applying = self.incarnation, policy
        yield
        if self.incarnation == incarnation:
            self.applied, self.applying = policy, None

    @property
    def update_lock(self) -> asyncio.Lock:
        """Held during an update: an engine takes one at a time."""
        return self._update

    def received_other_bytes(self) -> None:
        """Its update had another digest than what was published."""
        self.digest_mismatches += 1
        self.answered(math.inf)

    def answered(self, gap_nats: float) -> None:
        """A canary, so far from the trainer's answer."""
        self._canary_gaps[self.incarnation] = gap_nats

    def is_verified(self, gap_nats: float) -> bool:
        """Whether its canary after an update, so far from the trainer's answer, is within its tolerance."""
        self.answered(gap_nats)
        within = gap_nats <= self.tolerance_nats
        self.canary_failures += not within
        return within

    def reports(self, load: EngineLoad) -> None:
        self.load = load

    def takes_group(self) -> None:
        self.assigned += 1

    def gives_back(self, incarnation: int) -> None:
        """A group that was handed out to `incarnation` is back."""
        if self.incarnation == incarnation and self.assigned:
            self.assigned -= 1

    def goes(self) -> EnginePort | None:
        """The present incarnation is gone for good; answers with its process, which the caller ends."""
        port, self.port, self.applied, self.applying = self.port, None, None, None
        self.assigned, self.metrics_address = 0, ""
        self._earlier = EngineLoad(running=0, busy_s=self.busy_s, generated_tokens=self.sampled_tokens)
        self.load = IDLE
        return port
