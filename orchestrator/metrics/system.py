"""Signals of layer 4 about the loop itself: work, queues, time, processes. A part of the catalogue in
`orchestrator.metrics.catalogue`."""

from orchestrator.metrics.causes import Cause
from orchestrator.metrics.consistency import REPLICA
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.types import OTHER, Extent, Label, Metric, column, counter, gauge, histogram, optional_column
from rollout.types.dispatch import FailReason, RejectReason

QUEUES = ("running", "ready", "again", "audit", "publication")
PHASES = ("wait", "train", "publish", "checkpoint")
TRAINER_PHASES = ("decode", "pack", "forward_backward", "optimizer", OTHER)
NO_CAUSE = "none"
"""In the place of a cause: the doctor has no primary finding."""
PRIMARY_CAUSES = (NO_CAUSE, *Cause)
STORE_CALLS = ("dispatch", "acknowledge", "reject", "commit_version", "record_event")
"""Calls of `rollout.types.protocols.Store` that the loop itself makes."""
SHORT_EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_EDGES_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

SYSTEM: tuple[Metric, ...] = (
    column("step", "steps", 4, "Optimizer step that this row describes; equals the version it produced."),
    column("trainer_epoch", "epochs", 4, "Trainer epoch of the step."),
    column("wall_seconds", "seconds", 4, "Since the start of the training loop."),
    column("dispatched", "groups", 4, "Dispatches recorded since the run began."),
    column("trained", "groups", 4, "Dispatches trained on since the run began."),
    column("rejected", "groups", 4, "Dispatches rejected since the run began."),
    column("failed", "groups", 4, "Dispatches failed since the run began."),
    column("in_flight", "groups", 4, "Dispatches that have not ended."),
    column("running", "groups", 4, "Dispatches in generation or reward."),
    column("ready", "groups", 4, "Finished groups that wait for the trainer."),
    column("admission_capacity", "groups", 4, "Groups that may start now."),
    column("trainer_version", "version", 4, "Version of the trainer."),
    column("committed_version", "version", 4, "Version that the healthy engines have confirmed."),
    column("weight_updates", "updates", 4, "Committed publications since the loop began."),
    column("weights_superseded", "updates", 4, "Publications that a newer one replaced before an engine saw them."),
    column("update_pause_seconds", "seconds", 4, "Longest pause of a replica in the last weight update."),
    column("tokens_per_second", "tokens/s", 4, "Trained tokens over the seconds of the step."),
    column(
        "engine_busy",
        "ratio",
        4,
        "Share of the wall clock in which a replica generated, evaluations included, mean over replicas, since the loop"
        " began.",
    ),
    column(
        "evaluation_busy",
        "ratio",
        4,
        "Share of the wall clock in which a replica answered an evaluation, beside training or alone; as engine_busy.",
    ),
    column(
        "evaluation_tokens",
        "tokens",
        4,
        "Tokens that replicas have sampled for finished prompts of evaluations, since the loop began.",
    ),
    column("trainer_busy", "ratio", 4, "Share of the wall clock in which the trainer worked, since the loop began."),
    column("step_seconds", "seconds", 4, "Wall clock from the end of the step before to the end of this one."),
    column("step_wait_seconds", "seconds", 4, "Of it, waiting for a batch."),
    column("step_train_seconds", "seconds", 4, "Of it, lease, decode, forward, backward and optimizer."),
    column("step_publish_seconds", "seconds", 4, "Of it, commit record and publication to disk."),
    column("step_checkpoint_seconds", "seconds", 4, "Of it, checkpoint."),
    column("generation_seconds", "seconds", 4, "Mean generation time of the trained groups."),
    optional_column(
        "replica_slowness",
        "ratio",
        4,
        "Generation time of the slowest replica's newest groups over the median of the others'; -1 with one replica, or"
        " before each has 8 groups.",
    ),
    optional_column("slowest_replica", "slot", 4, "Its slot; -1 where there is none."),
    column("reward_seconds", "seconds", 4, "Mean time of the trained groups in a reward worker."),
    column("replica_restarts", "restarts", 4, "Engine replicas restarted since the loop began."),
    column(
        "observing_cpu_seconds",
        "seconds",
        4,
        "CPU seconds of the driver that reducing signals for Prometheus and trackers took since the loop began.",
    ),
    column("worker_restarts", "restarts", 4, "Episode workers replaced since the loop began."),
    column(
        "side_file_failures",
        "failures",
        4,
        "Times since the loop began that the disk refused a file that no accounting rests on; event side_file_failed.",
    ),
    gauge(
        "diagnosis",
        "rank",
        4,
        "The doctor's worst finding in each layer of diagnosis: 0 nothing, 1 info, 2 warn, 3 critical. Absent once the "
        "rules themselves have failed.",
        Label(name="diagnosis_layer", values=tuple(map(str, LAYERS))),
    ),
    gauge(
        "diagnosis_primary",
        "bool",
        4,
        f"1 for the cause of the doctor's primary finding, which is {NO_CAUSE} where nothing is worse than info; 0 for "
        "every other cause.",
        Label(name="cause", values=PRIMARY_CAUSES),
    ),
    counter("dispatched_groups", "groups", 4, "Dispatches recorded."),
    counter("trained_groups", "groups", 4, "Dispatches trained on."),
    counter(
        "rejected_groups",
        "groups",
        4,
        "Dispatches rejected, by reason.",
        Label(name="reason", values=tuple(RejectReason)),
    ),
    counter(
        "failed_groups",
        "groups",
        4,
        "Dispatches that failed, by reason.",
        Label(name="reason", values=tuple(FailReason)),
    ),
    counter("retried_groups", "groups", 4, "Dispatches that are another attempt at a prompt."),
    counter("trained_tokens", "tokens", 4, "Terms in the losses of the applied steps."),
    counter(
        "generated_tokens",
        "tokens",
        4,
        "Tokens that the replica has sampled, those of evaluations included, this incarnation and those before.",
        REPLICA,
    ),
    gauge(
        "queue_depth",
        "groups",
        4,
        "Groups that are generated or judged (running), wait for the trainer (ready), come again (again), wait for an "
        "audit (audit); versions that wait for the engines (publication).",
        Label(name="queue", values=QUEUES),
    ),
    gauge(
        "batch_wait_seconds",
        "seconds",
        4,
        "For how long the trainer has been waiting for a batch now; 0 while it works.",
    ),
    gauge(
        "last_step_timestamp_seconds",
        "seconds",
        4,
        "Unix time at which the last step ended; before the first, at which the loop began.",
    ),
    gauge("max_staleness", "steps", 4, "eta: a token older than this is not trained on."),
    histogram(
        "step_duration_seconds", "seconds", 4, "Wall clock from the end of a step to the end of the next.", STEP_EDGES_S
    ),
    counter(
        "step_phase_seconds", "seconds", 4, "Wall clock of the steps by phase.", Label(name="phase", values=PHASES)
    ),
    counter(
        "trainer_phase_seconds",
        "seconds",
        4,
        "Wall clock of the phase `train` inside the trainer.",
        Label(name="phase", values=TRAINER_PHASES),
    ),
    histogram("weight_update_pause_seconds", "seconds", 4, "Pause of a replica in a weight update.", SHORT_EDGES_S),
    histogram(
        "store_latency_seconds",
        "seconds",
        4,
        "From the driver's call of the store to its answer.",
        SHORT_EDGES_S,
        Label(name="call", values=STORE_CALLS),
    ),
    gauge("replica_version", "version", 4, "Policy version that the replica last answered for.", REPLICA),
    gauge("replica_up", "bool", 4, "1 while the replica serves, 0 while it starts or is dead.", REPLICA),
    counter("restarts", "restarts", 4, "Actors replaced.", Label(name="role", values=("replica", "worker", "auditor"))),
    gauge(
        "actor_memory_bytes",
        "bytes",
        4,
        "Resident memory of the actor and the processes that it started, sampled.",
        Label(name="actor", extent=Extent.ACTORS),
    ),
)
