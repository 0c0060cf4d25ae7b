"""The cases of the doctor's rehearsal: what is planted into which run, and which cause must come first. It starts no
run.

They go into runs of the tiny model that learns sums, with an evaluation every five steps. Disagreements between engine
and trainer are the cases of `rehearsal_cases`, whose runs have a consistency service; `doctor.py` takes both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.metrics.causes import LAYER, Cause
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.tiny import build_tiny

STEPS = 60
START = 8
"""Version from which on a fault acts that needs a time before it."""

LATE = 35
"""Version of a single step that goes wrong: what is ordinary must be known by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    cause: Cause | None
    """What must be the primary finding; None: nothing worse than info."""
    fault: Mapping[str, object] | None = None
    """Its table in `[[faults.plant]]`; None: a healthy run."""
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    """Config keys by section, over those of `document`."""
    warm: bool = True
    """A model that knows some sums already; else one with random weights, whose answers have any length."""

    @property
    def layer(self) -> int:
        """Expected layer of diagnosis; 0 for none."""
        return 0 if self.cause is None else LAYER[self.cause]


CASES: Mapping[str, Case] = {
    "healthy": Case(cause=None),
    "length_reward": Case(
        cause=Cause.LENGTH_REWARD,
        fault={"type": "length_reward"},
        changes={"sampling": {"max_new_tokens": 32}},
        warm=False,
    ),
    "reward_flip": Case(cause=Cause.REWARD_INVERTED, fault={"type": "reward_flip"}),
    "eval_template_changed": Case(
        cause=Cause.EVALUATION_CHANGED, fault={"type": "eval_template_changed", "start_version": 20}
    ),
    "train_eval_overlap": Case(
        cause=Cause.TRAIN_EVAL_OVERLAP,
        fault={"type": "train_eval_overlap"},
        changes={"evaluation": {"max_overlap": 1.0}},
    ),
    "easy_prompts": Case(cause=Cause.EASY_PROMPTS, fault={"type": "easy_prompts"}),
    "high_lr": Case(cause=Cause.POLICY_COLLAPSE, fault={"type": "high_lr", "start_version": START}),
    "dead_reward_worker": Case(cause=Cause.REWARD_WORKER, fault={"type": "dead_reward_worker"}),
    "grad_spike": Case(cause=Cause.GRADIENT_SPIKE, fault={"type": "grad_spike", "start_version": LATE}),
    "two_spikes": Case(
        cause=Cause.GRADIENT_SPIKE,
        fault={"type": "two_spikes", "start_version": LATE},
        changes={"trainer": {"micro_batch_tokens": 256}},
    ),
    "ratio_spike": Case(cause=Cause.GRADIENT_SPIKE, fault={"type": "ratio_spike", "start_version": LATE}),
    "diffuse_spike": Case(cause=Cause.GRADIENT_SPIKE, fault={"type": "diffuse_spike", "start_version": LATE}),
    "nan_token": Case(cause=Cause.NON_FINITE, fault={"type": "nan_token", "start_version": LATE}),
    "block_explosion": Case(cause=Cause.BLOCK_IMBALANCE, fault={"type": "block_explosion", "start_version": LATE}),
    "slow_replica": Case(
        cause=Cause.SLOW_REPLICA, fault={"type": "slow_replica", "replica": 1}, changes={"engine": {"replicas": 2}}
    ),
}
"""By name."""


def document(case: Case, seed: int, models: Path, runs: Path) -> dict[str, dict[str, Any]]:
    """The config of a case's run, in `runs/run`."""
    made: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "batch_groups": 8, "group_size": 8, "seed": seed, "dir": str(runs), "name": "run"},
        "model": {
            "type": "local",
            "path": str(build_tiny(TinyModelConfig(target_accuracy=0.4 if case.warm else 0.0), models)),
        },
        "environment": {"type": "arithmetic"},
        "sampling": {"max_new_tokens": 12},
        "engine": {"type": "torch", "replicas": 1},
        "staleness": {"max_staleness": 1},
        "trainer": {"optimizer": {"learning_rate": 1e-3}},
        "consistency": {"mode": "off"},
        "evaluation": {"every_steps": 5, "prompts": 64, "top_k": 0},
        "deadlines": {"health_interval_s": 0.5},
    }
    if case.fault is not None:
        made["faults"] = {"plant": [dict(case.fault)], "seed": seed}
    for section, keys in case.changes.items():
        made[section].update(keys)
    return made
