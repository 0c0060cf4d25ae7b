"""From a config to a finished run: model, cluster, fleet, recovery, loop, summary. The only module that brings all
rooms together."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from actors.ports import Fleet
from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress
from orchestrator.exporters.prometheus_targets import Targets
from orchestrator.launch.console import Reporter
from orchestrator.launch.endings import classify, record_end
from orchestrator.launch.inputs import Inputs
from orchestrator.launch.plan import resource_plan, totals
from orchestrator.launch.recorder import StepRecorder
from orchestrator.launch.stop_signals import Stopped, StopSignals, handlers_restored, ignore_signals
from orchestrator.loop.checkpoints import export_model
from orchestrator.loop.loop import Loop
from orchestrator.loop.parts import LoopParts, Opening, Site, build_parts
from orchestrator.replicas.registration import Expectation
from orchestrator.replicas.replicas import Replicas
from orchestrator.run_dir.ending import EndRecorded, first_line, write_summary
from orchestrator.run_dir.events import EventLog
from orchestrator.run_dir.history import How, RunEnd
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.record import RunEvent
from orchestrator.signals.live import LiveSignals
from orchestrator.signals.memory import PeakMemory
from orchestrator.signals.observer import NO_SINKS, Observing, Sinks
from orchestrator.signals.rows import Signals
from rollout.errors import ConcordError, UserError, boundary
from rollout.tasks import within
from rollout.types.dispatch import LedgerEntry, RejectReason
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import latest_checkpoint


def execute(config: RunConfig, run: RunDir, inputs: Inputs, reporter: Reporter, sinks: Sinks) -> dict[str, object]:
    """Run on Ray to the end and answer with the summary.

    Raises:
        ConcordError: what ended the run early.
    """
    from actors.cluster import cluster
    from actors.ray_fleet import RayFleet
    from actors.spec import FleetSpec

    spec = FleetSpec(
        run_dir=run.path,
        model_dir=inputs.model_dir,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        total_steps=config.run.steps,
        store_deadline_s=config.deadlines.store_s,
        max_context=inputs.max_context,
        environment=config.environment,
        sampling=config.sampling,
        engine=config.engine,
        reward=config.reward,
        reward_workers=config.reward_workers,
        episodes=config.episodes,
        store=config.store,
        trainer=config.trainer,
        weights=config.weights,
        cluster=config.cluster,
        metrics_host=config.exporter.host,
        consistency=config.consistency,
        max_staleness=config.staleness.max_staleness,
        evaluation=config.evaluation,
        faults=config.faults,
    )
    cpus, gpus = totals(resource_plan(config))
    stop = StopSignals(config.deadlines.shutdown_s, reporter.say)

    async def main() -> dict[str, object]:
        with stop.installed():
            fleet = RayFleet(spec)
            try:
                what, key = "store, reward workers and trainer to start", "deadlines.trainer_start_s"
                await within(fleet.ready(), config.deadlines.trainer_start_s, key, what)
                return await drive(config, run, inputs, fleet, reporter, stop.attach, sinks)
            finally:
                stop.run_has_ended()
                ignore_signals()
                await fleet.close()

    if config.faults.plant:
        reporter.say(f"faults are planted in this run: {', '.join(fault.type for fault in config.faults.plant)}")
    reporter.say(f"run {run.path}: starting Ray")
    with EndRecorded(run, classify), handlers_restored(), cluster(config.cluster, cpus, gpus):
        try:
            return asyncio.run(main())
        except asyncio.CancelledError as cause:
            raise Stopped("stopped at once by a signal, without a checkpoint of the newest step") from cause
        finally:
            ignore_signals()


async def drive(
    config: RunConfig,
    run: RunDir,
    inputs: Inputs,
    fleet: Fleet,
    reporter: Reporter,
    on_loop: Callable[[Callable[[], None]], None] = lambda request_stop: None,
    sinks: Sinks = NO_SINKS,
) -> dict[str, object]:
    """Drive a ready fleet from the last checkpoint (or from nothing) to the end, and write the summary.

    `on_loop` hears, once there is a loop, how to ask it to end after its step.
    """
    with EndRecorded(run, classify) as ending:
        return await _drive(config, run, inputs, fleet, reporter, on_loop, sinks, ending)


async def _drive(
    config: RunConfig,
    run: RunDir,
    inputs: Inputs,
    fleet: Fleet,
    reporter: Reporter,
    on_loop: Callable[[Callable[[], None]], None],
    sinks: Sinks,
    ending: EndRecorded,
) -> dict[str, object]:
    progress = Progress(asyncio.get_running_loop().time)
    opening = await _opened(config, run, fleet)
    engine, start = config.engine, opening.manifest.policy
    expected = Expectation(tokenizer=inputs.tokenizer, engine=engine, sampling=config.sampling, weights=config.weights)
    replicas = Replicas(fleet, config.deadlines, expected)
    said = f"epoch {start.trainer_epoch}, version {start.version}"
    reporter.say(f"{said}: starting {engine.replicas} x {engine.type}")
    await replicas.start_all(opening.manifest)
    site = Site(
        config=config,
        run=run,
        model_dir=inputs.model_dir,
        fleet=fleet,
        replicas=replicas,
        source=inputs.source,
        progress=progress,
        say=reporter.say,
    )
    parts = build_parts(site, opening)
    await parts.book.store.commit_version(LedgerEntry(policy=start, digest=opening.manifest.digest))
    await _end_unconfirmed(parts, opening)
    if inputs.prompts is not None:
        await parts.book.store.record_event("prompts_checked", asdict(inputs.prompts))
    loop = Loop(config, fleet, parts, progress)
    on_loop(loop.request_stop)
    signals, memory = Signals(parts, opening.recovery.totals), PeakMemory(fleet.processes)
    ending.begins(partial(signals.summary, memory, sinks.url))
    return await _run(site, loop, parts, signals, memory, reporter, sinks)


async def _opened(config: RunConfig, run: RunDir, fleet: Fleet) -> Opening:
    """The trainer at the last checkpoint, the store at the same, and the weights published."""
    deadlines, saved = config.deadlines, latest_checkpoint(run.checkpoints)
    policy: PolicyVersion | None = None
    if saved is not None:
        loading, key = fleet.trainer.load(saved), "deadlines.trainer_start_s"
        policy = await within(loading, deadlines.trainer_start_s, key, f"the trainer to load {saved}")
    recovering = fleet.store.recover(policy)
    recovery = await within(recovering, deadlines.store_s, "deadlines.store_s", "the store to recover")
    start = PolicyVersion(recovery.trainer_epoch, policy.version if policy else 0)
    run.weights.mkdir(exist_ok=True)
    publishing, key = fleet.trainer.publish(start), "deadlines.checkpoint_s"
    manifest = await within(publishing, deadlines.checkpoint_s, key, f"the trainer to publish {start.key}")
    log = EventLog(run.events)
    log.read()
    events = log.all(Lineage(log.resumed)) if saved else []
    return Opening(
        recovery=recovery,
        manifest=manifest,
        fingerprints=tuple(event.text("fingerprint") for event in events if event.kind == "evaluation"),
        unverified=unverified_at_the_end(events),
    )


def unverified_at_the_end(events: Iterable[RunEvent]) -> frozenset[tuple[int, PolicyVersion]]:
    """(slot, policy) that the events of a run leave open: the replica was to take the policy over, and never showed
    that it had."""
    found: set[tuple[int, PolicyVersion]] = set()
    for event in events:
        if event.kind not in ("replica_straggles", "replica_failed", "replica_caught_up") or not event.text("policy"):
            continue
        slot, policy = int(event.number("replica")), PolicyVersion.parse(event.text("policy"))
        if event.kind == "replica_caught_up":
            found = {(other, older) for other, older in found if other != slot or older > policy}
        else:
            found.add((slot, policy))
    return frozenset(found)


async def _end_unconfirmed(parts: LoopParts, opening: Opening) -> None:
    """Groups with tokens of a version that was published when the run ended, and that no replica's canary has
    confirmed, are not trained on; nor are those of a replica that had not shown yet, or failed to show, that it has a
    version which others confirmed."""
    recovery = opening.recovery
    confirmed = {entry.policy for entry in recovery.ledger}
    unconfirmed = [header for header in recovery.ready if not header.policies <= confirmed]
    said = "tokens of a version that the ledger never committed"
    await parts.book.reject(unconfirmed, RejectReason.ORPHANED_VERSION, said)
    doubtful = [
        header
        for header in recovery.ready
        if header not in unconfirmed and not opening.unverified.isdisjoint((header.replica, p) for p in header.policies)
    ]
    await parts.book.reject(doubtful, RejectReason.CANARY, "sampled by a replica that was not verified for its version")


async def _run(
    site: Site, loop: Loop, parts: LoopParts, signals: Signals, memory: PeakMemory, reporter: Reporter, sinks: Sinks
) -> dict[str, object]:
    """Run the loop to its end with everybody who looks at it, and complete the run directory."""
    config, run = site.config, site.run
    observing = None
    companions = {"memory": memory.run()}
    if sinks.exporter or sinks.trackers:
        observing = _observing(run, parts, reporter, sinks, LiveSignals(config, parts, signals, memory))
        companions["observing"] = observing.run()
    recorder = StepRecorder(run, parts, signals, reporter, config.run.steps, observing)
    parts.observers.add(recorder)
    try:
        await loop.run(companions)
    except ConcordError as error:
        end = RunEnd(how=classify(error), reason=first_line(error))
        await record_end(parts.book, end, parts.training.policy.version)
        await parts.doctor.look()
        if observing is not None:
            await observing.show()
        raise
    finally:
        recorder.flush()
        for trouble in parts.book.side_files.take_unreported():
            reporter.say(trouble)
    end = RunEnd(how=How.FINISHED if parts.training.policy.version >= config.run.steps else How.STOPPED)
    await parts.doctor.look()
    await record_end(parts.book, end, parts.training.policy.version)
    parts.book.recounts(await parts.book.store.counts())
    if observing is not None:
        await observing.show()
    summary = signals.summary(memory, sinks.url, end)
    cure = f"(free space, then: concord resume {run.path})"
    with boundary(UserError, f"the training is done and checkpointed, but {run.path} cannot be completed {cure}"):
        write_summary(run, summary)
        if parts.training.policy.version >= config.run.steps:
            export_model(Path(parts.training.manifest.location), run.export)
    return summary


def _observing(run: RunDir, parts: LoopParts, reporter: Reporter, sinks: Sinks, live: LiveSignals) -> Observing:
    async def report_trouble(trouble: str) -> None:
        reporter.say(f"metrics are served no longer and trackers get nothing new, the training goes on: {trouble}")
        await parts.book.store.record_event("exporter_failed", {"reason": trouble})

    targets = None
    if sinks.exporter is not None:
        reporter.say(f"metrics at {sinks.url}")
        targets = Targets(run.prometheus_targets, run.path.name, sinks.exporter.target)
    return Observing(sinks, live, targets, parts.book.side_files, report_trouble)
