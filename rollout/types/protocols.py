"""The seams of the rollout room. A planted fault or a fake is another implementation of one of these, never an `if`
inside."""

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollout.types.dispatch import Counts, Dispatch, Ending, LedgerEntry, Readmission, Readmitted, StepCommit, Totals
from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.trajectory import Annotation, EncodedGroup, EngineTag, GroupHeader, Reward, StoredGroups, Trajectory
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

EventFields: TypeAlias = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What a replica is doing, for routing and for the busy share."""

    running: int
    """Samples being generated or queued."""
    busy_s: float
    """Seconds since start in which at least one sample was running."""
    generated_tokens: int


class Engine(Protocol):
    """One rollout engine replica. All methods may be called while requests run."""

    async def start(self, manifest: WeightManifest) -> EngineTag:
        """Load the published weights of `manifest` and get ready to serve under its policy label."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample; chunks of one sample come in order, samples in any order.

        Raises:
            EngineError: the engine failed, or `request.request_id` is already running.
        """
        ...

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue one sample (num_samples = 1) after `produced`; yields the new tokens only."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its samples end with finish reason `abort`. Unknown ids are ignored: it may just have
        finished."""
        ...

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probs of given tokens, raw on every engine (temperature 1, no truncation): [T] -> [T - 1] nats."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling at a token boundary (or, for `drain`, when running requests have finished)."""
        ...

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Take over the weights and the version label; only while paused. Answers with the digest of the bytes
        received.

        Raises:
            EngineError: the weights do not fit or cannot be read.
        """
        ...

    async def resume(self) -> None:
        """Go on sampling; running requests continue, under the rules of the pause's mode."""
        ...

    async def tag(self) -> EngineTag:
        """Who it is, and under which numerics it samples."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine can still serve. Must answer within seconds, also when its core process has died."""
        ...

    async def load(self) -> EngineLoad:
        """What it is doing."""
        ...

    async def stop(self) -> None:
        """End the engine and every process that it started."""
        ...


class PromptSource(Protocol):
    """A seeded, resumable, endless order of prompts."""

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
        """The next `count` prompts from `cursor`, and the cursor behind them. A pure function of its arguments."""
        ...

    @property
    def size(self) -> int:
        """Prompts in one pass."""
        ...


class Env(Protocol):
    """Single use: one instance runs one episode's conversation. Single-turn environments answer None from `reply`."""

    @property
    def name(self) -> str:
        """Recorded as the environment of its trajectories."""
        ...

    def prompt_ids(self) -> NDArray[np.int32]:
        """[P] tokens that the policy sees first."""
        ...

    async def reply(self, sampled_ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """What the environment says after a turn: tokens to append, or None when the episode is over."""
        ...


class RewardFunction(Protocol):
    """Judges one trajectory. Synchronous: it runs in a reward worker under a deadline."""

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        """The reward of one trajectory; `completion` is its sampled text without special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What the store found when a new trainer epoch opened it."""

    trainer_epoch: int
    """The new epoch; every older one is fenced from now on."""
    cursor: PromptCursor
    next_dispatch: int
    """First free dispatch number."""
    ready: tuple[GroupHeader, ...]
    """Ready and audited groups, in dispatch order."""
    readmissions: tuple[Readmission, ...]
    """In order; they go before new prompts."""
    ledger: tuple[LedgerEntry, ...]
    """All committed versions of the current lineage, in order."""
    counts: Counts
    totals: Totals


class Send(Protocol):
    """Brings one call to where the store is and its answer back. A fake store, a measured one and one in another
    process differ in this alone."""

    def __call__(self, name: str, /, *args: object) -> Awaitable[Any]:
        """The answer of the store's method `name`."""
        ...


class Store:
    """The authority on what was dispatched, finished and trained, as callers hold it; `rollout.store.sqlite` answers.
    Every change is durable before the call returns, one transaction with its event."""

    def __init__(self, send: Send) -> None:
        self.send = send

    async def recover(self, checkpoint: PolicyVersion | None) -> Recovery:
        """Open a new epoch at `checkpoint` and settle what older epochs left; None is version 0: a new run, or one that
        ended before its first checkpoint.

        A prompt that was lost or rejected here comes again under its old attempt number: that did not count.

        Raises:
            StoreError: the checkpoint is not in the lineage of this store.
        """
        return await self.send("recover", checkpoint)

    async def dispatch(self, trainer_epoch: int, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> Counts:
        """Record attempts and the prompt cursor behind them; re-admitted prompts leave their queue.

        Raises:
            FencedError: `trainer_epoch` is not the current one (as for every method that takes it).
        """
        return await self.send("dispatch", trainer_epoch, dispatches, cursor)

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        """dispatched -> ready; answers with the ids that it took. A group whose dispatch has ended (or was put before)
        is refused with an event."""
        return await self.send("put", groups)

    async def annotate(self, annotations: Sequence[Annotation]) -> None:
        """Keep a later room's typed bytes with groups; kind `verdict` also moves a ready group to audited."""
        await self.send("annotate", annotations)

    async def fetch(self, dispatch_ids: Sequence[str]) -> StoredGroups:
        """A look at encoded groups with their prompts, in whatever state; those that have ended meanwhile are left
        out."""
        return await self.send("fetch", dispatch_ids)

    async def lease(self, trainer_epoch: int, dispatch_ids: Sequence[str]) -> StoredGroups:
        """ready or audited -> leased; the encoded groups (`rollout.types.codec`) in the order asked, with their newest
        verdict annotations.

        Raises:
            StoreError: one of them is in another state; then none is leased.
        """
        return await self.send("lease", trainer_epoch, dispatch_ids)

    async def acknowledge(self, commit: StepCommit) -> Counts:
        """Write the commit record of a step; its groups become leased (trained). Leased groups that it does not name
        stay leased. The same record twice is accepted once.

        Raises:
            StoreError: another record of this step is stored, the step is not newer than the newest, or a group is not
                leased.
        """
        return await self.send("acknowledge", commit)

    async def settle(self, checkpoint: PolicyVersion) -> Counts:
        """A checkpoint holds steps up to this version: their groups are terminal. The one that this epoch resumed from
        is accepted again.

        Raises:
            FencedError: the checkpoint is of an older epoch and not in the lineage.
        """
        return await self.send("settle", checkpoint)

    async def reject(self, trainer_epoch: int, endings: Sequence[Ending]) -> Readmitted:
        """End dispatches that were not trained, from any state that is not terminal. One that has already ended is left
        out, with an event.

        A re-admitted prompt's attempt goes up by one after a failure of its own; rejections do not count.
        """
        return await self.send("reject", trainer_epoch, endings)

    async def commit_version(self, entry: LedgerEntry) -> Counts:
        """Add a policy version to the ledger.

        Raises:
            StoreError: the version is not newer than the ledger's newest of this epoch.
        """
        return await self.send("commit_version", entry)

    async def record_event(self, kind: str, fields: EventFields) -> None:
        """Add a run event (replica restarted, weights applied, ...) to the numbered log.

        Raises:
            StoreError: a field has a name that every event has of its own.
        """
        await self.send("record_event", kind, fields)

    async def counts(self) -> Counts:
        """Where all dispatches are."""
        return await self.send("counts")

    async def close(self) -> None:
        """Close all files."""
        await self.send("close")
