"""Dashboards of layer 4: whether engines and trainer agree, where work waits, and the machines below. The last rows ask
for metrics that are not Concord's: vLLM's, Ray's, and those of NVIDIA's DCGM exporter."""

from shape import RATE, Dashboard, Panel, Row, by, lines, rates, spread


def slowest(histogram: str) -> str:
    """The time that one in a hundred exceeds, of each replica."""
    return f"histogram_quantile(0.99, sum by (le, replica) (rate({histogram}_bucket[{RATE}])))"


SYSTEM = Dashboard(
    "concord-layer-4",
    "Concord: 4 training system",
    "Whether engine and trainer compute the same, and where work waits.",
    4,
    (
        Row(
            "Engine against trainer",
            (
                Panel(
                    "Gap by replica",
                    (
                        ('concord_replica_gap_nats{statistic=~"mean|p99"}', "{{replica}} {{statistic}}"),
                        ("concord_replica_gap_limit_nats", "{{replica}} limit"),
                    ),
                    alerts=("ConcordGapFail", "ConcordGapPrecision"),
                ),
                by(
                    "Over the replica's own baseline",
                    "concord_replica_baseline_multiple_ratio",
                    "replica",
                    unit="suffix:x",
                    alerts=("ConcordBaselineMultiple",),
                ),
                by("Attributed gap", "concord_replica_attributed_nats", "replica", "cause"),
                by("k3 of the gap", "concord_replica_gap_k3_nats", "replica"),
                by(
                    "Effective sample size",
                    "concord_replica_ess_ratio",
                    "replica",
                    alerts=("ConcordEngineEssLow", "ConcordEngineEssWarn"),
                ),
                by(
                    "F(2): ratio outside [1/2, 2]",
                    "concord_replica_tail_ratio",
                    "replica",
                    alerts=("ConcordTailHeavy",),
                ),
                spread("Importance ratio, distribution", "log_ratio_nats", '{part="total"}'),
                rates("Verdicts", "verdicts", "verdict"),
                rates("What failed in audited groups", "verdict_reasons", "reason"),
                rates("Findings by cause", "consistency_findings", "cause", alerts=("ConcordFinding",)),
                rates("Tokenizer drift", "tokenizer_drift", "kind", alerts=("ConcordTokenizerDrift",)),
                Panel(
                    "Consistency service",
                    (
                        (f"rate(concord_consistency_audited_groups_total[{RATE}])", "audited"),
                        (f"rate(concord_consistency_skipped_groups_total[{RATE}])", "skipped"),
                    ),
                    alerts=("ConcordAuditsSkipped",),
                ),
                rates("Steps that went on unaudited", "consistency_degraded_steps", alerts=("ConcordDegradedSteps",)),
                lines("Busy service", "consistency_busy"),
            ),
        ),
        Row(
            "Tokens as they are drawn",
            (
                by("Surprise minus entropy", "concord_replica_surprise_z_ratio", "replica", unit="suffix:sd"),
                by(
                    "Inverse temperature over the declared one",
                    "concord_replica_inverse_temperature_ratio",
                    "replica",
                    unit="suffix:x",
                ),
                lines("Evidence against the sampler", "consistency_sampler_evidence", "consistency_repeat_evidence"),
                lines("Trainer against service", "consistency_trainer_gap"),
                lines("Steps against their rewards", "consistency_step_drive", "consistency_update_rates"),
                lines("Evidence against the steps", "consistency_against_evidence"),
            ),
        ),
        Row(
            "Staleness and the correction",
            (
                spread("Staleness of trained tokens", "token_staleness_steps"),
                lines(
                    "Staleness against its limit",
                    "token_staleness_mean",
                    "token_staleness_max",
                    "max_staleness",
                    unit="count:steps",
                    alerts=("ConcordStalenessAtLimit",),
                ),
                lines(
                    "Tokens that the correction takes out",
                    "correction_zero_fraction",
                    "correction_ess",
                    alerts=("ConcordCorrectionDropsTokens",),
                ),
                lines("Mean weight of the correction", "correction_weight_mean", unit="suffix:x"),
            ),
        ),
        Row(
            "Where work waits",
            (
                by("Queues", "concord_queue_depth", "queue", alerts=("ConcordGateStalled",)),
                lines(
                    "Dispatches since the run began",
                    "dispatched",
                    "trained",
                    "rejected",
                    "failed",
                    "in_flight",
                    alerts=("ConcordRejectedShare", "ConcordFailedShare"),
                ),
                rates("Rejected dispatches", "rejected_groups", "reason"),
                rates("Failed dispatches", "failed_groups", "reason"),
                lines("The trainer waits for a batch", "batch_wait_seconds"),
                rates("Time inside the trainer", "trainer_phase_seconds", "phase"),
                by(
                    "Store latency, 99 %",
                    f"histogram_quantile(0.99, sum by (le, call) (rate(concord_store_latency_seconds_bucket[{RATE}])))",
                    "call",
                    unit="s",
                    alerts=("ConcordStoreSlow",),
                ),
                by("Files that the disk refused", "concord_side_file_failures_total", alerts=("ConcordSideFileFails",)),
            ),
        ),
        Row(
            "Routing",
            (
                by(
                    "Experts that differ",
                    "concord_replica_routing_mismatch_ratio",
                    "replica",
                    "block",
                    alerts=("ConcordRoutingMismatch",),
                ),
                by(
                    "Coverage of routing evidence",
                    "concord_replica_routing_coverage_ratio",
                    "replica",
                    alerts=("ConcordRoutingCoverage",),
                ),
                lines("Replayed routing", "routing_replayed", "routing_fallback"),
            ),
            needs="a mixture of experts",
        ),
    ),
    variables=("replica", "block"),
)
FLEET = Dashboard(
    "concord-fleet",
    "Concord: rollout fleet",
    "Each engine replica: alive, on which version, how fast, how long its updates pause it; then engines, Ray and GPUs "
    "by their own metrics.",
    4,
    (
        Row(
            "Replicas",
            (
                by("Up", "concord_replica_up", "replica", alerts=("ConcordReplicaDown", "ConcordNoReplicaUp")),
                Panel(
                    "Version by replica and of the trainer",
                    (("concord_replica_version", "replica {{replica}}"), ("concord_trainer_version", "trainer")),
                    alerts=("ConcordReplicaBehind",),
                ),
                rates("Sampled tokens a second", "generated_tokens", "replica"),
                lines("Busy", "engine_busy", "evaluation_busy", "trainer_busy", alerts=("ConcordEnginesIdle",)),
                lines("Seconds of a trained group", "generation_seconds", "reward_seconds"),
                lines("Work", "running", "ready", "admission_capacity"),
            ),
        ),
        Row(
            "Weight updates",
            (
                Panel(
                    "Canary gap and its tolerance",
                    (
                        ("concord_replica_canary_gap_nats", "gap {{replica}}"),
                        ("concord_replica_canary_tolerance_nats", "tolerance {{replica}}"),
                    ),
                ),
                by("Failed canaries", "concord_canary_failures_total", "replica", alerts=("ConcordCanaryGap",)),
                by(
                    "Other bytes than published",
                    "concord_digest_mismatches_total",
                    "replica",
                    alerts=("ConcordDigestMismatch",),
                ),
                by(
                    "Pause of a weight update, 99 %",
                    "concord:weight_update_pause_seconds:p99_15m",
                    unit="s",
                    help="Of a quarter of an hour.",
                    alerts=("ConcordUpdatePauseLong",),
                ),
                lines("Weight updates", "weight_updates", "weights_superseded"),
            ),
        ),
        Row(
            "Processes",
            (
                by("Replaced actors", "concord_restarts_total", "role", alerts=("ConcordRestarts",)),
                by("Memory by actor", "concord_actor_memory_bytes", "actor", alerts=("ConcordActorMemoryGrows",)),
                lines("Tokens sampled for evaluations", "evaluation_tokens"),
            ),
        ),
        Row(
            "Replicas against each other",
            (
                lines(
                    "Slowest replica over the others",
                    "replica_slowness",
                    unit="suffix:x",
                    alerts=("ConcordReplicaSlow",),
                ),
            ),
            needs="engine.replicas above 1",
        ),
        Row(
            "Engines: vLLM",
            (
                Panel(
                    "Requests in the engine",
                    (
                        ("vllm:num_requests_running", "{{replica}} running"),
                        ("vllm:num_requests_waiting", "{{replica}} waiting"),
                    ),
                    unit="count:requests",
                    help="Requests that a step of the engine works on, and those that wait for room.",
                ),
                by(
                    "Use of the KV cache",
                    "vllm:kv_cache_usage_perc",
                    "replica",
                    unit="percentunit",
                    help="Share of its blocks. Near 1 requests wait, or are thrown out and computed again.",
                ),
                by(
                    "Preemptions",
                    f"rate(vllm:num_preemptions_total[{RATE}])",
                    "replica",
                    unit="suffix:requests/s",
                    help="Requests that lost their blocks and start again.",
                ),
                Panel(
                    "Tokens",
                    (
                        (f"rate(vllm:generation_tokens_total[{RATE}])", "{{replica}} sampled"),
                        (f"rate(vllm:prompt_tokens_total[{RATE}])", "{{replica}} prompt"),
                    ),
                    unit="count:tokens/s",
                    help="Tokens that the engine read and sampled.",
                ),
                by(
                    "Prefix cache hits",
                    f"rate(vllm:prefix_cache_hits_total[{RATE}]) / rate(vllm:prefix_cache_queries_total[{RATE}])",
                    "replica",
                    unit="percentunit",
                    help="Share of the prompt tokens found in the cache; the samples of a group share their prompt.",
                ),
                by(
                    "Time between tokens, 99 %",
                    slowest("vllm:inter_token_latency_seconds"),
                    "replica",
                    unit="s",
                    help="Time from one sampled token of a request to its next.",
                ),
                by(
                    "Time to the first token, 99 %",
                    slowest("vllm:time_to_first_token_seconds"),
                    "replica",
                    unit="s",
                    help="Waiting in the engine's queue included.",
                ),
                by(
                    "Requests by how they ended",
                    f"sum by (finished_reason) (rate(vllm:request_success_total[{RATE}]))",
                    "finished_reason",
                    unit="suffix:requests/s",
                    help="`length`: at the limit; `stop`: with an end token.",
                ),
            ),
            needs='engine.type = "vllm" and engine.serve_metrics',
        ),
        Row(
            "Ray",
            (
                by(
                    "CPU of the nodes",
                    "ray_node_cpu_utilization",
                    "ip",
                    unit="percent",
                    help="All cores of a node together.",
                ),
                by(
                    "Memory of the nodes",
                    "ray_node_mem_used_host / ray_node_mem_total_host",
                    "ip",
                    unit="percentunit",
                    help="Near 1 Ray ends workers.",
                ),
                by(
                    "Object store",
                    "sum by (Location) (ray_object_store_memory)",
                    "Location",
                    unit="bytes",
                    help="Shared memory for arguments and answers; `SPILLED` is on disk.",
                ),
                by(
                    "Actors by state",
                    'sum by (State) (ray_actors{Source="gcs"})',
                    "State",
                    unit="count:actors",
                    help="Actors of every run on that cluster.",
                ),
            ),
            needs="a Ray cluster with its dashboard (cluster.address), scraped as docs/user/deploy.md says",
        ),
        Row(
            "GPUs",
            (
                by(
                    "GPU in use",
                    "DCGM_FI_DEV_GPU_UTIL",
                    "Hostname",
                    "gpu",
                    unit="percent",
                    help="Share of time with a kernel running.",
                ),
                by(
                    "Memory in use",
                    "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)",
                    "Hostname",
                    "gpu",
                    unit="percentunit",
                    help="Engines take theirs at once, by engine.gpu_memory_utilization.",
                ),
                by(
                    "Power",
                    "DCGM_FI_DEV_POWER_USAGE",
                    "Hostname",
                    "gpu",
                    unit="watt",
                    help="Far below its limit the GPU waits.",
                ),
                by(
                    "Temperature",
                    "DCGM_FI_DEV_GPU_TEMP",
                    "Hostname",
                    "gpu",
                    unit="celsius",
                    help="Above 85 most slow down.",
                ),
                by(
                    "XID errors",
                    "DCGM_FI_DEV_XID_ERRORS",
                    "Hostname",
                    "gpu",
                    unit="short",
                    help="The last error's number; 0: none.",
                ),
            ),
            needs="dcgm-exporter, scraped as docs/user/deploy.md says",
        ),
    ),
    variables=("replica",),
)
