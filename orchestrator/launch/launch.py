"""From a config to a finished run: model, cluster, fleet, recovery, loop, summary. The only module that brings all
rooms together."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.ports import Fleet
from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress, within
from orchestrator.exporters.prometheus_targets import Targets
from orchestrator.launch.console import Reporter
from orchestrator.launch.plan import resource_plan, totals
from orchestrator.launch.stop_signals import Stopped, StopSignals, handlers_restored, ignore_signals
from orchestrator.loop.auditing import Baselines
from orchestrator.loop.checkpoints import RunCheckpoints, export_model
from orchestrator.loop.loop import Loop, Opening
from orchestrator.loop.training import StepDone
from orchestrator.metrics.blocks import block_values
from orchestrator.replicas.registration import Expectation
from orchestrator.replicas.replicas import Replicas
from orchestrator.run_dir.events import EventLog
from orchestrator.run_dir.histogram_writer import HistogramRecorder
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.metrics_writer import BlockRecorder, MetricsRecorder
from orchestrator.run_dir.search_records import SearchRecords
from orchestrator.signals.live import LiveSignals
from orchestrator.signals.memory import PeakMemory
from orchestrator.signals.observer import NO_SINKS, Observing, Sinks
from orchestrator.signals.rows import Signals, write_summary
from rollout.environments.registry import build_source
from rollout.errors import UserError, boundary
from rollout.evaluation.overlap import NGRAM, PromptCheck, check_prompts
from rollout.evaluation.prompts import held_out_prompts
from rollout.faults.sources import plant_source
from rollout.rewards.registry import needs_answer
from rollout.tokenization.agreement import TokenizerIdentity, identify
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.dispatch import LedgerEntry, RejectReason
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import PromptSource, Recovery
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import latest_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run needs besides its config: checked before anything starts."""

    model_dir: Path
    max_context: int
    source: PromptSource
    tokenizer: TokenizerIdentity
    """The trainer's, which every replica must share."""
    prompts: PromptCheck | None = None
    """Duplicates and overlap of the run's prompts; None: not checked."""


def check_inputs(config: RunConfig, model_dir: Path) -> Inputs:
    """Read model facts, tokenizer and prompts.

    Raises:
        UserError: the model directory, the prompts, or their fit is wrong.
    """
    from trainer.model.model_dir import check_model_dir

    facts = check_model_dir(model_dir)
    wanted = config.engine.max_model_len
    if wanted is not None and facts.max_context is not None and wanted > facts.max_context:
        raise UserError(
            f"got engine.max_model_len = {wanted}, but the model in {model_dir} has a context of {facts.max_context}; "
            f"set {facts.max_context} or less"
        )
    source = training_source(config)
    max_context = wanted or facts.max_context
    if max_context is None:
        raise UserError(
            f"the config of the model in {model_dir} does not say how long its context is; set engine.max_model_len"
        )
    prompts = checked_prompts(config, source)
    return Inputs(
        model_dir=model_dir,
        max_context=max_context,
        source=source,
        tokenizer=identify(load_tokenizer(model_dir)),
        prompts=prompts,
    )


def training_source(config: RunConfig) -> PromptSource:
    """Where training prompts come from, planted faults included.

    Raises:
        UserError: the prompts are missing or malformed, or a planted fault cannot act on them.
    """
    environment, seed = config.environment, config.run.seed
    source = build_source(environment, seed, needs_answer(config.reward))
    held_out = held_out_prompts(environment, config.evaluation, seed, needs_answer(config.reward))
    return plant_source(
        source,
        config.faults,
        held_out,
        digits=environment.digits if environment.type == "arithmetic" else None,
        seed=seed,
    )


def checked_prompts(config: RunConfig, source: PromptSource) -> PromptCheck:
    """Look for duplicates among the training prompts, and for held-out prompts among them.

    Raises:
        UserError: more of the held-out prompts are also trained on than `evaluation.max_overlap` allows.
    """
    evaluation = config.evaluation
    held_out = held_out_prompts(config.environment, evaluation, config.run.seed, needs_answer(config.reward))
    check = check_prompts(source.draw(PromptCursor(), source.size)[0], held_out)
    if check.overlap > evaluation.max_overlap:
        raise UserError(
            f"{check.overlapping} of {check.evaluation_prompts} held-out prompts are also training prompts "
            f"({check.exact} exactly, {check.by_ngrams} by a run of {NGRAM} words), for example {check.example!r}; "
            f"expected a share of at most evaluation.max_overlap = {evaluation.max_overlap:g}: take them out of the "
            "training prompts, or raise evaluation.max_overlap"
        )
    return check


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
                await within(
                    fleet.ready(), config.deadlines.trainer_start_s, "store, reward workers and trainer to start"
                )
                return await drive(config, run, inputs, fleet, reporter, stop.attach, sinks)
            finally:
                ignore_signals()
                await fleet.close()

    if config.faults.plant:
        reporter.say(f"faults are planted in this run: {', '.join(fault.type for fault in config.faults.plant)}")
    reporter.say(f"run {run.path}: starting Ray")
    with handlers_restored(), cluster(config.cluster, cpus, gpus):
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

    `on_loop` is told, once there is a loop, how to ask it to end after its step.
    """
    run.summary.unlink(missing_ok=True)
    saved = latest_checkpoint(run.checkpoints)
    policy = (
        await within(fleet.trainer.load(saved), config.deadlines.trainer_start_s, f"the trainer to load {saved}")
        if saved
        else None
    )
    recovery = await within(fleet.store.recover(policy), config.deadlines.store_s, "the store to recover")
    start = PolicyVersion(recovery.trainer_epoch, policy.version if policy else 0)
    run.weights.mkdir(exist_ok=True)
    manifest = await within(
        fleet.trainer.publish(start), config.deadlines.checkpoint_s, f"the trainer to publish {start.key}"
    )
    expected = Expectation(
        tokenizer=inputs.tokenizer, engine=config.engine, sampling=config.sampling, weights=config.weights
    )
    replicas = Replicas(fleet, config.deadlines, expected)
    reporter.say(
        f"epoch {recovery.trainer_epoch}, version {start.version}: starting {config.engine.replicas} x "
        f"{config.engine.type}"
    )
    await replicas.start_all(manifest)
    await fleet.store.commit_version(LedgerEntry(policy=start, digest=manifest.digest))
    checkpoints = RunCheckpoints(
        run=run,
        trainer=fleet.trainer,
        store=fleet.store,
        keep_last=config.trainer.checkpoint.keep_last,
        max_staleness=config.staleness.max_staleness,
    )
    loop = Loop(
        config=config,
        fleet=fleet,
        replicas=replicas,
        source=inputs.source,
        opening=Opening(recovery=recovery, manifest=manifest),
        checkpoints=checkpoints,
        progress=Progress(asyncio.get_running_loop().time),
        baselines=None if config.consistency.mode == "off" else Baselines(run.path / "baseline.json"),
    )
    await _end_unconfirmed(loop, recovery)
    if inputs.prompts is not None:
        await loop.book.store.record_event("prompts_checked", asdict(inputs.prompts))
    if loop.evaluation is not None and saved is not None:
        loop.evaluation.goes_on(_fingerprints(run))
    checkpoints.in_use = loop.policies_in_use
    loop.training.searches = SearchRecords(run.gradloc, lambda: load_tokenizer(inputs.model_dir), loop.book.side_files)
    on_loop(loop.request_stop)
    return await _observe(config, run, fleet, loop, checkpoints, reporter, Signals(loop, recovery.totals), sinks)


def _fingerprints(run: RunDir) -> list[str]:
    """Configurations of the scores that the run has so far, in order."""
    log = EventLog(run.events)
    log.read()
    return [event.text("fingerprint") for event in log.all(Lineage(log.resumed)) if event.kind == "evaluation"]


async def _end_unconfirmed(loop: Loop, recovery: Recovery) -> None:
    """Groups with tokens of a version that was published when the run ended, and that no replica's canary has
    confirmed, are not trained on."""
    confirmed = {entry.policy for entry in recovery.ledger}
    unconfirmed = [header for header in recovery.ready if not header.policies <= confirmed]
    await loop.book.reject(
        unconfirmed, RejectReason.ORPHANED_VERSION, "tokens of a version that the ledger never committed"
    )


async def _observe(
    config: RunConfig,
    run: RunDir,
    fleet: Fleet,
    loop: Loop,
    checkpoints: RunCheckpoints,
    reporter: Reporter,
    signals: Signals,
    sinks: Sinks,
) -> dict[str, object]:
    recorder, blocks, memory = (
        MetricsRecorder(run.metrics),
        BlockRecorder(run.block_metrics),
        PeakMemory(fleet.processes),
    )
    histograms = HistogramRecorder(run.histograms, loop.accounts.distributions, loop.training.policy)
    observing = (
        _observing(run, loop, reporter, sinks, LiveSignals(config, loop, signals, memory))
        if sinks.exporter or sinks.trackers
        else None
    )

    side_files = loop.book.side_files

    def flush() -> None:
        """What a checkpoint holds is on disk, and no histogram reaches over one: a resume takes back whole parts."""
        for name, parts in (("metrics", recorder), ("block_metrics", blocks), ("histograms", histograms)):
            with side_files.spared(name):
                parts.flush()

    async def on_step(done: StepDone) -> None:
        row = signals.row(done)
        with side_files.spared("metrics"):
            recorder.add(row)
        of_blocks = block_values(done.report)
        with side_files.spared("block_metrics"):
            blocks.add(done.report.policy, of_blocks)
        loop.doctor.step(row, loop.book.counts, of_blocks)
        with side_files.spared("histograms"):
            histograms.add(done.report.policy)
        if done.checkpointed:
            flush()
        reporter.step(row, config.run.steps)
        if observing is not None:
            await observing.step(done, row)
        with side_files.spared("weights that nothing refers to any more"):
            checkpoints.prune(done.report.policy)
        await side_files.tell()

    loop.training.on_step = on_step
    if loop.evaluation is not None and observing is not None:
        loop.evaluation.on_score = observing.score
    beside = [asyncio.create_task(memory.run(), name="memory")]
    if observing is not None:
        beside.append(asyncio.create_task(observing.run(), name="observing"))
    try:
        await loop.run()
    finally:
        for task in beside:
            task.cancel()
        flush()
        for trouble in side_files.untold():
            reporter.say(trouble)
    await loop.doctor.look()
    loop.book.counts = await fleet.store.counts()
    if observing is not None:
        await observing.show()
    summary = signals.summary(memory, sinks.url)
    with boundary(
        UserError,
        f"the training is done and checkpointed, but {run.path} cannot be completed (free space, then: concord resume "
        f"{run.path})",
    ):
        write_summary(run, summary)
        if loop.training.policy.version >= config.run.steps:
            export_model(Path(loop.training.manifest.location), run.export)
    return summary


def _observing(run: RunDir, loop: Loop, reporter: Reporter, sinks: Sinks, live: LiveSignals) -> Observing:
    async def tell(trouble: str) -> None:
        reporter.say(f"metrics are served no longer and trackers get nothing new, the training goes on: {trouble}")
        await loop.book.store.record_event("exporter_failed", {"reason": trouble})

    targets = None
    if sinks.exporter is not None:
        reporter.say(f"metrics at {sinks.url}")
        targets = Targets(run.prometheus_targets, run.path.name, sinks.exporter.target)
    return Observing(sinks, live, targets, loop.book.side_files, tell)
