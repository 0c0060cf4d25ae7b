"""A loop in which nothing has happened, as the accessors of metrics see it."""

from typing import Any

from orchestrator.loop.auditing import AuditSums
from orchestrator.loop.evaluation import NO_SCORE
from orchestrator.metrics.state import Moment
from orchestrator.metrics.types import UNMEASURED
from orchestrator.run_dir.search_records import SearchRecords
from rollout.types.dispatch import Counts

NUMBERS = (
    *("admission_capacity", "trainer_version", "committed_version", "weight_updates", "weights_superseded", "retried"),
    *(
        "longest_pause_s",
        "trained_tokens",
        "store_s",
        "trainer_busy_s",
        "observing_cpu_s",
        "steps",
        "skipped",
        "batch_wait_s",
    ),
    *("last_step_s", "last_step_age_s", "started_s", "side_file_failures", "evaluation_tokens", "evaluation_s"),
)


def moment(**values: Any) -> Moment:
    """All zeros and nothing measured, but for `values`."""
    nothing: dict[str, Any] = {
        "wall_s": 1.0,
        "counts": Counts(),
        "opening": Counts(),
        "queues": {"running": 0, "ready": 0},
        "replica_busy_s": {0: 0.0},
        "speeds": {"replica_slowness": UNMEASURED, "slowest_replica": UNMEASURED},
        "searches": SearchRecords(),
        "restarts": {"replica": 0, "worker": 0, "auditor": 0},
        "evaluation": NO_SCORE,
        "audits": AuditSums(),
        "audits_skipped": 0,
        "findings": {},
        "newest_gaps": {},
        "audits_run": False,
        "replicas": (),
        **{name: {} for name in ("phases", "trainer_phases", "scores", "baselines", "multiples", "diagnosis")},
    }
    return Moment(**dict.fromkeys(NUMBERS, 0), **(nothing | values))
