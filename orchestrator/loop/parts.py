"""What a loop is made of, each part built with all that it needs. Whoever reports a run reads them here."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.ports import Fleet
from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress, Quiet
from orchestrator.dispatch.accounts import Accounts
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.book import Book
from orchestrator.dispatch.collection import Collection
from orchestrator.dispatch.failures import FailureLimits, FailureWatch
from orchestrator.dispatch.staleness import Gate, Window
from orchestrator.loop.audit_queue import AuditQueue
from orchestrator.loop.audit_trends import SamplerWatch
from orchestrator.loop.auditing import Consistency
from orchestrator.loop.checkpoints import RunCheckpoints
from orchestrator.loop.evaluation import Evaluation
from orchestrator.loop.gap_watch import Baselines, GapWatch
from orchestrator.loop.live_doctor import LiveDoctor
from orchestrator.loop.measured_store import MeasuredStore
from orchestrator.loop.step_audits import StepAudits
from orchestrator.loop.step_log import StepLog
from orchestrator.loop.supervision import Supervision
from orchestrator.loop.training import Training
from orchestrator.observers import Observers
from orchestrator.replicas.replicas import Replicas
from orchestrator.run_dir.history import history_of
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.search_records import SearchRecords
from orchestrator.weight_sync.committed import CommittedWeights
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from orchestrator.weight_sync.publication import PublicationRules, Publisher
from orchestrator.weight_sync.transfer import build_transfer
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.generation import PauseMode
from rollout.types.protocols import PromptSource, Recovery
from rollout.types.weights import PolicyVersion, WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where the loop starts: the recovered store, and the trainer's weights, which the engines already serve."""

    recovery: Recovery
    manifest: WeightManifest
    fingerprints: tuple[str, ...] = ()
    """Configurations of the evaluations that the run has so far, in order."""
    unverified: frozenset[tuple[int, PolicyVersion]] = frozenset()
    """(slot, policy) of replicas that had not shown, when the run ended, that they have a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The parts of one loop."""

    observers: Observers
    accounts: Accounts
    book: Book
    failures: FailureWatch
    replicas: Replicas
    weights: CommittedWeights
    lifecycle: ReplicaLifecycle
    supervision: Supervision
    publisher: Publisher
    admission: Admission
    collection: Collection
    checkpoints: RunCheckpoints
    training: Training
    searches: SearchRecords
    doctor: LiveDoctor
    consistency: Consistency | None
    evaluation: Evaluation | None
    no_step: Quiet
    """Says and records that there was no step for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a loop runs, and on what."""

    config: RunConfig
    run: RunDir
    model_dir: Path
    fleet: Fleet
    replicas: Replicas
    source: PromptSource
    progress: Progress
    say: Callable[[str], None]
    """Speaks to whoever started the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """What nearly every part needs."""

    observers: Observers
    accounts: Accounts
    store: MeasuredStore
    book: Book
    weights: CommittedWeights
    lifecycle: ReplicaLifecycle


def build_parts(site: Site, opening: Opening) -> LoopParts:
    """Wire one loop. Nothing runs yet."""
    core = _core(site, opening)
    consistency = _consistency(site, opening, core) if site.config.consistency.mode != "off" else None
    evaluation = _evaluation(site, opening, core) if site.config.evaluation.every_steps else None
    publisher = _publisher(site, core, evaluation)
    failures = _failures(site, core)
    admission = _admission(site, core, failures)
    checkpoints = _checkpoints(site, core, publisher)
    searches = SearchRecords(site.run.gradloc, partial(load_tokenizer, site.model_dir), core.book.side_files)
    parts = LoopParts(
        observers=core.observers,
        accounts=core.accounts,
        book=core.book,
        failures=failures,
        replicas=site.replicas,
        weights=core.weights,
        lifecycle=core.lifecycle,
        supervision=Supervision(core.lifecycle, core.book, site.config.deadlines.health_interval_s),
        publisher=publisher,
        admission=admission,
        collection=_collection(site, core, admission),
        checkpoints=checkpoints,
        training=Training(
            trainer=site.fleet.trainer,
            book=core.book,
            gate=_gate(site.config, audited_only=consistency is not None and consistency.gates),
            publisher=publisher,
            checkpoints=checkpoints,
            deadlines=site.config.deadlines,
            log=StepLog(core.book, searches, core.observers),
            consistency=consistency,
        ),
        searches=searches,
        doctor=LiveDoctor(core.store.record_event, lambda: failures.history),
        consistency=consistency,
        evaluation=evaluation,
        no_step=partial(_no_step, site.say, core.store),
    )
    for observer in (parts.accounts, failures, parts.supervision, parts.doctor, evaluation, parts.book):
        if observer is not None:
            core.observers.add(observer)
    return parts


async def _no_step(say: Callable[[str], None], store: MeasuredStore, silence_s: float, waits: str) -> None:
    say(f"no step for {silence_s:.0f} s: {waits}")
    await store.record_event("no_step", {"silence_s": silence_s, "waits": waits})


def _core(site: Site, opening: Opening) -> _Core:
    config, observers, accounts = site.config, Observers(), Accounts(site.config.sampling.max_new_tokens)
    weights = CommittedWeights(opening.manifest)
    store = MeasuredStore(
        site.fleet.store,
        deadline_s=config.deadlines.store_s,
        observe=accounts.store_answered,
        on_event=observers.event_recorded,
    )
    book = Book(
        store=store,
        replicas=site.replicas,
        recovery=opening.recovery,
        accounts=accounts,
        progress=site.progress,
        observers=observers,
    )
    lifecycle = ReplicaLifecycle(
        replicas=site.replicas,
        weights=weights,
        store=store,
        mode=PauseMode.DRAIN if config.run.deterministic else PauseMode(config.engine.kv_across_versions),
        deadlines=config.deadlines,
        observers=observers,
    )
    return _Core(observers=observers, accounts=accounts, store=store, book=book, weights=weights, lifecycle=lifecycle)


def _publisher(site: Site, core: _Core, evaluation: Evaluation | None) -> Publisher:
    config = site.config
    gates: list[Callable[[], Awaitable[None]]] = []
    if evaluation is not None:
        gates.append(evaluation.version_0_is_scored)
    if config.run.deterministic:
        gates.append(core.book.until_idle)
    return Publisher(
        replicas=site.replicas,
        lifecycle=core.lifecycle,
        weights=core.weights,
        store=core.store,
        rules=PublicationRules(
            every_version=config.run.deterministic, quorum=config.weights.quorum, straggler_s=config.weights.straggler_s
        ),
        observers=core.observers,
        transfer=build_transfer(config, site.fleet.trainer),
        gates=gates,
    )


def _failures(site: Site, core: _Core) -> FailureWatch:
    config = site.config
    limits = FailureLimits(
        in_a_row=config.max_failures_in_a_row,
        share=config.episodes.max_failure_share,
        window_s=config.episodes.failure_window_s,
    )
    return FailureWatch(
        limits=limits,
        say=site.say,
        record_event=core.store.record_event,
        progress=site.progress,
        version=core.weights.policy.version,
        before=history_of(core.book.counts),
    )


def _admission(site: Site, core: _Core, failures: FailureWatch) -> Admission:
    return Admission(
        book=core.book,
        window=_window(site.config),
        source=site.source,
        weights=core.weights,
        replicas=site.replicas,
        failures=failures,
        group_size=site.config.run.group_size,
        submit_deadline_s=site.config.deadlines.store_s,
    )


def _collection(site: Site, core: _Core, admission: Admission) -> Collection:
    return Collection(
        fleet=site.fleet,
        replicas=site.replicas,
        book=core.book,
        admission=admission,
        deadlines=site.config.deadlines,
        max_attempts=site.config.episodes.max_attempts,
        check_engines=core.lifecycle.check,
    )


def _checkpoints(site: Site, core: _Core, publisher: Publisher) -> RunCheckpoints:
    return RunCheckpoints(
        run=site.run,
        trainer=site.fleet.trainer,
        store=core.store,
        keep_last=site.config.trainer.checkpoint.keep_last,
        max_staleness=site.config.staleness.max_staleness,
        in_use=partial(_policies_in_use, core.book, publisher),
    )


def _consistency(site: Site, opening: Opening, core: _Core) -> Consistency:
    config, baselines = site.config, Baselines(site.run.path / "baseline.json")
    ledger = [*(entry.policy for entry in opening.recovery.ledger), opening.manifest.policy]
    sampler = SamplerWatch(config.consistency.sampler_evidence_nats)
    gaps = GapWatch(core.book, baselines, core.lifecycle, sampler)
    queue = AuditQueue(config.consistency, config.run.seed, core.book.pool, ledger, baselines.has)
    core.observers.add(gaps)
    core.observers.add(queue)
    return Consistency(
        config=config.consistency,
        deadlines=config.deadlines,
        fleet=site.fleet,
        book=core.book,
        replicas=site.replicas,
        queue=queue,
        gaps=gaps,
        steps=StepAudits(core.store, config.consistency.step_audit_trajectories, config.run.seed),
    )


def _evaluation(site: Site, opening: Opening, core: _Core) -> Evaluation:
    return Evaluation(
        config=site.config.evaluation,
        fleet=site.fleet,
        replicas=site.replicas,
        book=core.book,
        weights=core.weights,
        observers=core.observers,
        fingerprints=opening.fingerprints,
    )


def _policies_in_use(book: Book, publisher: Publisher) -> set[PolicyVersion]:
    """Policies that live groups, replicas or waiting publications refer to."""
    ready = {policy for header in book.pool.ready.values() for policy in header.policies}
    return ready | {dispatch.policy for dispatch in book.pool.running.values()} | publisher.in_use()


def _window(config: RunConfig) -> Window:
    return Window(
        max_staleness=config.staleness.max_staleness,
        batch_groups=config.run.batch_groups,
        max_concurrent=config.max_concurrent_groups,
    )


def _gate(config: RunConfig, *, audited_only: bool) -> Gate:
    staleness = config.staleness
    return Gate(
        max_staleness=staleness.max_staleness,
        batch_groups=config.run.batch_groups,
        policy=staleness.policy,
        order=staleness.order,
        dispatch_window=staleness.dispatch_window,
        audited_only=audited_only,
    )
