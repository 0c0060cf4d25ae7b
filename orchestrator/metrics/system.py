"""Signals of layer 4 about the loop itself: work, queues, time, processes. A part of the catalogue in
`orchestrator.metrics.catalogue`."""

from orchestrator.metrics.causes import Cause, Learning
from orchestrator.metrics.consistency import REPLICA, by_replica
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.types import (
    OTHER,
    CatalogueSection,
    Extent,
    Label,
    age,
    by,
    column,
    counter,
    gauge,
    histogram,
    single,
    step_column,
    total_column,
)
from rollout.types.dispatch import Counts, FailReason, RejectReason

QUEUES = ("running", "ready", "again", "audit", "publication")
PHASES = ("wait", "train", "publish", "checkpoint")
TRAINER_PHASES = ("decode", "pack", "forward_backward", "optimizer", OTHER)
ROLES = ("replica", "worker", "auditor")
NO_CAUSE = "none"
"""In the place of a cause: the doctor has no primary finding."""
PRIMARY_CAUSES = (NO_CAUSE, *Cause)
STORE_CALLS = ("dispatch", "acknowledge", "reject", "commit_version", "record_event")
"""Calls of `rollout.types.protocols.Store` that the loop itself makes."""
FACTS = (
    *("model", "engine", "replicas", "trainer", "ranks", "algorithm", "environment", "reward", "consistency"),
    *("batch_groups", "group_size", "max_staleness", "steps"),
)
"""Labels of `concord_run_info`, which `orchestrator.metrics.catalogue.facts_of` fills."""
SHORT_EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_EDGES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


def _trained(counts: Counts) -> int:
    return counts.trained + sum(groups for _, groups in counts.trained_held)


class System(CatalogueSection, layer=4):
    """The loop itself: work, queues, time, processes."""

    step = step_column("steps", lambda step: step.report.policy.version)
    """Optimizer step that this row describes; equals the version it produced."""
    trainer_epoch = step_column("epochs", lambda step: step.report.policy.trainer_epoch)
    """Trainer epoch of the step."""
    wall_seconds = column("seconds", lambda now: now.wall_s)
    """Wall clock since the start of the training loop."""
    dispatched = column("groups", lambda now: now.counts.total)
    """Dispatches recorded since the run began."""
    trained = column("groups", lambda now: _trained(now.counts))
    """Dispatches trained on since the run began."""
    rejected = column("groups", lambda now: sum(n for _, n in now.counts.rejected))
    """Dispatches rejected since the run began."""
    failed = column("groups", lambda now: sum(n for _, n in now.counts.failed))
    """Dispatches failed since the run began."""
    in_flight = column("groups", lambda now: now.counts.in_flight - sum(n for _, n in now.counts.trained_held))
    """Dispatches that have not ended."""
    running = column("groups", lambda now: now.queues["running"])
    """Dispatches in generation or reward."""
    ready = column("groups", lambda now: now.queues["ready"])
    """Finished groups that wait for the trainer."""
    admission_capacity = column("groups", lambda now: now.admission_capacity)
    """Groups that may start now."""
    trainer_version = column("version", lambda now: now.trainer_version)
    """Version of the trainer."""
    committed_version = column("version", lambda now: now.committed_version)
    """Version that the healthy engines have confirmed."""
    weight_updates = total_column("updates", lambda now: now.weight_updates)
    """Committed publications since the loop began."""
    weights_superseded = total_column("updates", lambda now: now.weights_superseded)
    """Publications that a newer one replaced before an engine saw them."""
    update_pause_seconds = column("seconds", lambda now: now.longest_pause_s)
    """Longest pause of a replica in the last weight update."""
    tokens_per_second = step_column("tokens/s", lambda step: step.report.num_tokens / step.seconds)
    """Trained tokens over the seconds of the step."""
    engine_busy = column("ratio", lambda now: now.engine_busy)
    """Share of the wall clock in which a replica generated, evaluations included, mean over replicas, since the loop
    began."""
    evaluation_busy = column("ratio", lambda now: now.share_of_replicas(now.evaluation_s))
    """Share of the wall clock in which a replica answered an evaluation, beside training or alone; as engine_busy."""
    evaluation_tokens = total_column("tokens", lambda now: now.evaluation_tokens)
    """Tokens that replicas have sampled for finished prompts of evaluations, since the loop began."""
    trainer_busy = column("ratio", lambda now: now.share(now.trainer_busy_s))
    """Share of the wall clock in which the trainer worked, since the loop began."""
    step_seconds = step_column("seconds", lambda step: step.seconds)
    """Wall clock from the end of the step before to the end of this one."""
    step_wait_seconds = step_column("seconds", lambda step: step.phases.wait_s)
    """Seconds of the step spent waiting for a batch."""
    step_train_seconds = step_column("seconds", lambda step: step.phases.train_s)
    """Seconds of the step spent on lease, decode, forward, backward and optimizer."""
    step_publish_seconds = step_column("seconds", lambda step: step.phases.publish_s)
    """Seconds of the step spent on the commit record and the publication to disk."""
    step_checkpoint_seconds = step_column("seconds", lambda step: step.phases.checkpoint_s)
    """Seconds of the step spent on a checkpoint."""
    generation_seconds = step_column("seconds", lambda step: step.facts.generation_s)
    """Mean generation time of the trained groups."""
    replica_slowness = column("ratio", lambda now: now.speeds["replica_slowness"], optional=True)
    """Generation time of the slowest replica's newest groups over the median of the others'; -1 with one replica, or
    before each has 8 groups."""
    slowest_replica = column("slot", lambda now: now.speeds["slowest_replica"], optional=True)
    """Slot of the slowest replica; -1 where there is none."""
    reward_seconds = step_column("seconds", lambda step: step.facts.reward_s)
    """Mean time of the trained groups in a reward worker."""
    store_seconds = total_column("seconds", lambda now: now.store_s)
    """Seconds since the loop began that its calls of the store took, those at the same time added up."""
    replica_restarts = total_column("restarts", lambda now: now.restarts["replica"])
    """Engine replicas restarted since the loop began."""
    observing_cpu_seconds = total_column("seconds", lambda now: now.observing_cpu_s)
    """CPU seconds of the driver that reducing signals for Prometheus and trackers took since the loop began."""
    worker_restarts = total_column("restarts", lambda now: now.restarts["worker"])
    """Episode workers replaced since the loop began."""
    side_file_failures = total_column("failures", lambda now: now.side_file_failures)
    """Times since the loop began that the disk refused a file that no accounting rests on; event side_file_failed."""
    diagnosis = gauge(
        "rank",
        lambda now: now.diagnosis.get("concord_diagnosis", {}),
        Label(name="diagnosis_layer", values=tuple(map(str, LAYERS))),
    )
    """The doctor's worst finding in each layer of diagnosis: 0 nothing, 1 info, 2 warn, 3 critical. Absent once the
    rules themselves have failed."""
    diagnosis_primary = gauge(
        "bool",
        lambda now: now.diagnosis.get("concord_diagnosis_primary", {}),
        Label(name="cause", values=PRIMARY_CAUSES),
    )
    """1 for the cause of the doctor's primary finding, which is none where nothing is worse than info; 0 for every
    other cause."""
    learning_state = gauge(
        "bool",
        lambda now: now.diagnosis.get("concord_learning_state", {}),
        Label(name="state", values=tuple(map(str, Learning))),
    )
    """1 for what the doctor's findings come to: solved (most groups are, little is left to learn), not_learning (the
    reward does not rise although it could, is lost, or nothing is trained), open (it learns, or nobody can say yet)."""
    dispatched_groups = counter("groups", lambda now: single(now.counts.total - now.opening.total))
    """Dispatches recorded."""
    trained_groups = counter("groups", lambda now: single(_trained(now.counts) - _trained(now.opening)))
    """Dispatches trained on."""
    rejected_groups = counter(
        "groups", lambda now: by(RejectReason, now.rejected), Label(name="reason", values=tuple(RejectReason))
    )
    """Dispatches rejected, by reason."""
    failed_groups = counter(
        "groups", lambda now: by(FailReason, now.failed), Label(name="reason", values=tuple(FailReason))
    )
    """Dispatches that failed, by reason."""
    retried_groups = counter("groups", lambda now: single(now.retried))
    """Dispatches that are another attempt at a prompt."""
    trained_tokens = counter("tokens", lambda now: single(now.trained_tokens))
    """Terms in the losses of the applied steps."""
    generated_tokens = counter("tokens", lambda now: by_replica(now, lambda one: one.sampled_tokens), REPLICA)
    """Tokens that the replica has sampled, those of evaluations included, this incarnation and those before."""
    queue_depth = gauge("groups", lambda now: by(QUEUES, now.queues), Label(name="queue", values=QUEUES))
    """Groups that are generated or judged (running), wait for the trainer (ready), come again (again), wait for an
    audit (audit); versions that wait for the engines (publication)."""
    batch_wait_seconds = gauge("seconds", lambda now: single(now.batch_wait_s))
    """How long the trainer has been waiting for a batch now; 0 while it works."""
    last_step_age_seconds = age(lambda now: now.last_step_age_s)
    """Time since the last step ended, by the driver's own monotonic clock; before the first, since the loop's begin."""
    last_step_timestamp_seconds = gauge("seconds", lambda now: single(now.last_step_s))
    """Unix time at which the last step ended, by the driver's clock; before the first, at which the loop began."""
    start_timestamp_seconds = gauge("seconds", lambda now: single(now.started_s))
    """Unix time at which the loop of this process began, by the driver's clock: a start, or a resume."""
    run_info = gauge(
        "info",
        lambda now: {now.facts: 1.0} if now.facts else {},
        *(Label(name=one, extent=Extent.FACTS) for one in FACTS),
    )
    """Always 1: what the config says, in its labels."""
    batch_groups = gauge("groups", lambda now: single(now.batch_groups))
    """Groups that a step needs."""
    max_staleness = gauge("steps", lambda now: single(now.max_staleness))
    """eta: a token older than this is not trained on."""
    step_duration_seconds = histogram("seconds", STEP_EDGES_S)
    """Wall clock from the end of a step to the end of the next."""
    step_phase_seconds = counter("seconds", lambda now: by(PHASES, now.phases), Label(name="phase", values=PHASES))
    """Wall clock of the steps by phase."""
    trainer_phase_seconds = counter(
        "seconds", lambda now: by(TRAINER_PHASES, now.trainer_phases), Label(name="phase", values=TRAINER_PHASES)
    )
    """Wall clock of the phase `train` inside the trainer."""
    weight_update_pause_seconds = histogram("seconds", SHORT_EDGES_S)
    """Pause of a replica in a weight update."""
    store_latency_seconds = histogram("seconds", SHORT_EDGES_S, Label(name="call", values=STORE_CALLS))
    """Time from the driver's call of the store to its answer."""
    replica_version = gauge(
        "version", lambda now: by_replica(now, lambda one: one.applied and one.applied.version), REPLICA
    )
    """Policy version that the replica last answered for."""
    replica_up = gauge(
        "bool", lambda now: by_replica(now, lambda one: one.port is not None and one.applied is not None), REPLICA
    )
    """1 while the replica serves, 0 while it starts or is dead."""
    restarts = counter("restarts", lambda now: by(ROLES, now.restarts), Label(name="role", values=ROLES))
    """Actors replaced."""
    actor_memory_bytes = gauge(
        "bytes",
        lambda now: {(name,): size for name, size in now.memory.items()},
        Label(name="actor", extent=Extent.ACTORS),
    )
    """Resident memory of the actor and the processes that it started, sampled."""
