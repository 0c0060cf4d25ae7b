"""Invariants 1 and 3 of the store, held after every operation of random histories with crashes, against a model that
keeps its own books."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import BASE, build_dispatch, build_group

from rollout.errors import StoreError
from rollout.store.sqlite.reader import open_reader
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import encode
from rollout.types.dispatch import Dispatch, Ending, FailReason, LedgerEntry, RejectReason, StepCommit
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery
from rollout.types.trajectory import Annotation, EncodedGroup
from rollout.types.weights import PolicyVersion

T = TypeVar("T")
SEGMENT_BYTES = 2000


@dataclass
class Entry:
    """What the model knows of one dispatch."""

    dispatch: Dispatch
    state: str = "dispatched"
    step: int | None = None
    policies: tuple[PolicyVersion, ...] = ()
    judged: bool = False

    @property
    def held(self) -> bool:
        return self.state == "leased" and self.step is not None

    @property
    def ended(self) -> bool:
        return self.state not in ("dispatched", "ready", "audited", "leased")


@dataclass
class Model:
    """The store's books as a reader of the blueprint would keep them."""

    epoch: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    alive: set[PolicyVersion] = field(default_factory=lambda: {BASE})
    """Policies that a token may carry."""
    commits: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Steps of the lineage."""
    settled: int = 0
    ledger: dict[int, PolicyVersion] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    """Ended dispatch -> attempt of its prompt."""
    cursor: int = 0
    ended: dict[str, str] = field(default_factory=dict)
    """First ending of each dispatch: it never changes."""

    def names(self, *states: str, held: bool = False) -> list[str]:
        return [name for name, e in self.entries.items() if e.state in states and e.held == held]

    def end(self, name: str, state: str, attempt: int | None) -> None:
        self.entries[name].state = state
        if attempt is not None:
            self.queue[name] = attempt

    def recover(self, version: int) -> None:
        self.epoch += 1
        for name, e in self.entries.items():
            if e.held and (e.step or 0) <= version:
                e.state = "trained"
            elif e.state == "leased":
                e.state, e.step = "audited" if e.judged else "ready", None
            elif e.state == "trained" and any(name in ids for step, ids in self.commits.items() if step > version):
                self.queue[name] = e.dispatch.attempt
        self.commits = {step: ids for step, ids in self.commits.items() if step <= version}
        self.ledger = {v: p for v, p in self.ledger.items() if v <= version}
        self.alive = {p for p in self.alive if p.version <= version}
        for name, e in self.entries.items():
            if e.state == "dispatched":
                self.end(name, "failed:lost", e.dispatch.attempt)
            elif e.state in ("ready", "audited") and not set(e.policies) <= self.alive:
                self.end(name, "rejected:orphaned_version", e.dispatch.attempt)


class History:
    """Drives store and model side by side. A crash drops the open store as it is and opens its files anew."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.run_dir = run_dir
        self.random = Random(seed)
        self.model = Model()
        self.checkpoints: list[PolicyVersion] = []
        self.store = SqliteStore(run_dir, segment_bytes=SEGMENT_BYTES)
        self.checked(self.store.recover(None), 0)

    def some(self, names: Sequence[T], most: int) -> list[T]:
        """Up to `most` of `names`, none twice."""
        return self.random.sample(names, min(len(names), self.random.randint(1, most)))

    @property
    def version(self) -> int:
        """The newest trained version of the lineage."""
        return max(self.model.commits, default=self.checkpoints[-1].version if self.checkpoints else 0)

    def checked(self, recovery: Recovery, version: int) -> None:
        self.model.recover(version)
        model = self.model
        assert recovery.trainer_epoch == model.epoch
        assert recovery.cursor == PromptCursor(index=model.cursor)
        assert recovery.next_dispatch == len(model.entries)
        assert [h.dispatch_id for h in recovery.ready] == model.names("ready", "audited")
        order = list(model.entries)
        expected = [
            (model.entries[name].dispatch.prompt, model.queue[name]) for name in sorted(model.queue, key=order.index)
        ]
        assert [(r.prompt, r.attempt) for r in recovery.readmissions] == expected
        assert {e.policy.version: e.policy for e in recovery.ledger} == model.ledger
        assert recovery.totals.steps == len(model.commits)

    def dispatch(self) -> list[str]:
        model, new = self.model, list[Dispatch]()
        for _ in range(self.random.randint(1, 5)):
            number = len(model.entries)
            if model.queue:
                origin = min(model.queue, key=list(model.entries).index)
                dispatch = build_dispatch(
                    number, prompt=model.entries[origin].dispatch.prompt, attempt=model.queue.pop(origin)
                )
            else:
                dispatch = build_dispatch(number)
                model.cursor += 1
            model.entries[dispatch.dispatch_id] = Entry(dispatch)
            new.append(dispatch)
        self.store.dispatch(model.epoch, new, PromptCursor(index=model.cursor))
        return [d.dispatch_id for d in new]

    def dispatch_and_put(self) -> None:
        self.put(self.dispatch())

    def put_anything(self) -> None:
        names = self.some(list(self.model.entries), 4)
        self.put([*names, *names[:1]])

    def put(self, names: list[str]) -> None:
        """Put groups of these dispatches, whatever state they are in, with tokens of the newest policies."""
        expected, groups = list[str](), list[EncodedGroup]()
        for name in names:
            policies = tuple(self.some(sorted(self.model.alive, key=lambda p: p.version)[-3:], 2))
            entry = self.model.entries[name]
            groups.append(encode(build_group(entry.dispatch, spans=[(p, 2) for p in policies])))
            if entry.state == "dispatched":
                entry.state, entry.policies = "ready", policies
                expected.append(name)
        assert self.store.put(groups) == tuple(expected)

    def judge(self) -> None:
        for name in self.some(self.model.names("ready", "leased"), 2):
            self.store.annotate([Annotation(dispatch_id=name, kind="verdict", payload=b"accept")])
            entry = self.model.entries[name]
            entry.judged = True
            entry.state = "audited" if entry.state == "ready" else entry.state

    def lease(self) -> None:
        names = self.some(self.model.names("ready", "audited"), 3)
        assert self.store.lease(self.model.epoch, names).dispatch_ids == tuple(names)
        for name in names:
            self.model.entries[name].state = "leased"

    def lease_anything(self) -> None:
        names = self.some(list(self.model.entries), 3)
        if set(names) <= set(self.model.names("ready", "audited")):
            return
        with pytest.raises(StoreError, match="cannot be leased"):
            self.store.lease(self.model.epoch, names)

    def train(self) -> None:
        names = tuple(self.some(self.model.names("ready", "audited", "leased"), 2))
        if not names:
            return
        self.store.lease(self.model.epoch, [name for name in names if self.model.entries[name].state != "leased"])
        policy = PolicyVersion(self.model.epoch, self.version + 1)
        commit = StepCommit(
            policy=policy,
            dispatch_ids=names,
            trajectories_trained=2 * len(names),
            trajectories_masked=0,
            trajectories_dropped=0,
        )
        for _ in range(self.random.randint(1, 2)):
            self.store.acknowledge(commit)
        self.model.commits[policy.version] = names
        self.model.alive.add(policy)
        for name in names:
            self.model.entries[name].state, self.model.entries[name].step = "leased", policy.version
        if self.random.random() < 0.8:
            self.store.commit_version(LedgerEntry(policy=policy, digest=policy.key))
            self.model.ledger[policy.version] = policy

    def checkpoint(self) -> None:
        """A checkpoint is on disk; a crash may come before the store is notified."""
        policy = next(p for p in self.model.alive if p.version == self.version)
        self.checkpoints = [c for c in self.checkpoints if c.version < self.version] + [policy]
        if self.random.random() < 0.5:
            self.store.settle(policy)
            for entry in self.model.entries.values():
                if entry.held:
                    entry.state = "trained"

    def reject(self) -> None:
        names = self.some(list(self.model.entries), 2)
        reason = self.random.choice(
            [RejectReason.STALE, RejectReason.CANARY, FailReason.ENGINE, FailReason.REWARD_TIMEOUT]
        )
        readmit = self.random.random() < 0.7
        expected = list[str]()
        for name in [*names, *names[:1]]:
            entry = self.model.entries[name]
            if not entry.ended and not entry.held:
                failed = isinstance(reason, FailReason)
                self.model.end(
                    name,
                    f"{'failed' if failed else 'rejected'}:{reason}",
                    entry.dispatch.attempt + failed if readmit else None,
                )
                expected += [entry.dispatch.prompt.prompt_id] if readmit else []
        endings = [Ending(dispatch_id=name, reason=reason, detail="", readmit=readmit) for name in [*names, *names[:1]]]
        answer = self.store.reject(self.model.epoch, endings)
        assert [r.prompt.prompt_id for r in answer.readmissions] == expected

    def crash(self) -> None:
        """Resume from the newest checkpoint, or now and then from the one before, which then is the newest."""
        if len(self.checkpoints) > 1 and self.random.random() < 0.3:
            self.checkpoints.pop()
        checkpoint = self.checkpoints[-1] if self.checkpoints else None
        self.store = SqliteStore(self.run_dir, segment_bytes=SEGMENT_BYTES)
        self.checked(self.store.recover(checkpoint), checkpoint.version if checkpoint else 0)

    def check(self) -> None:
        """Everything that must hold at any moment."""
        self.invariant_1()
        self.invariant_3()
        numbers = [json.loads(line)["number"] for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        assert numbers == list(range(1, len(numbers) + 1))

    def invariant_1(self) -> None:
        """Every dispatch is counted in one place, and an ended one never moves."""
        counts, entries = self.store.counts(), self.model.entries
        with closing(open_reader(self.run_dir)) as reader:
            assert counts == reader.counts()
        at = Counter(entry.state for entry in entries.values() if not entry.held)
        assert counts.total == len(entries)
        found = (counts.dispatched, counts.ready, counts.audited, counts.leased, counts.trained)
        assert found == tuple(at[state] for state in ("dispatched", "ready", "audited", "leased", "trained"))
        assert dict(counts.trained_held) == Counter(entry.step for entry in entries.values() if entry.held)
        assert {f"rejected:{r}": n for r, n in counts.rejected} | {f"failed:{r}": n for r, n in counts.failed} == {
            s: n for s, n in at.items() if ":" in s
        }
        assert counts.total == counts.in_flight + counts.trained + sum(n for _, n in counts.rejected) + sum(
            n for _, n in counts.failed
        )
        for name, entry in entries.items():
            if entry.ended:
                assert self.model.ended.setdefault(name, entry.state) == entry.state

    def invariant_3(self) -> None:
        """The lineage trains no group twice, and its versions go up."""
        reader = open_reader(self.run_dir)
        commits, ledger = reader.commits(), reader.ledger()
        reader.close()
        assert {c.policy.version: c.dispatch_ids for c in commits} == self.model.commits
        trained = [name for commit in commits for name in commit.dispatch_ids]
        assert len(trained) == len(set(trained))
        versions = [entry.policy.version for entry in ledger]
        assert versions == sorted(set(versions))


STEPS: dict[Callable[[History], object], int] = {
    History.dispatch: 2,
    History.dispatch_and_put: 6,
    History.put_anything: 1,
    History.judge: 1,
    History.lease: 1,
    History.lease_anything: 1,
    History.train: 9,
    History.checkpoint: 3,
    History.reject: 2,
    History.crash: 3,
}
"""Operations and how often they come."""


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(
        st.sampled_from([step for step, weight in STEPS.items() for _ in range(weight)]), min_size=20, max_size=60
    ),
)
def test_invariants_1_and_3_hold_through_any_history_with_crashes(
    seed: int, steps: list[Callable[[History], object]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        history = History(Path(directory), seed)
        history.dispatch_and_put()
        for step in steps:
            step(history)
            history.check()
        history.store.close()
