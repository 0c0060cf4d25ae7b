"""The cases of a rehearsal: which fault is planted into which run, which cause must be named first, and how a run's
events are read.

A case is a run of a tiny model with random weights on two engine replicas, whose fault sits on replica 1. Completions
have a fixed length, and the reward is the share of digits in them, so that every step moves the policy and neighbouring
versions differ. It starts no run.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.types.prompts import Prompt
from rollout.types.trajectory import Trajectory
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.tiny import build_tiny

REPLICA = 1
"""Slot of the replica that has the fault."""
START = 3
"""Version from which on it acts."""
WITHIN = 2
"""Versions after `START` up to which it must be found."""
EXPLAINED = 0.8
"""Share of the gap that the cause must explain."""
STEPS = START + WITHIN + 2
DIGITS = range(2, 12)
"""Token ids of the digits in the tiny model's vocabulary."""


def share_of_digits(prompt: Prompt, completion: str, trajectory: Trajectory) -> float:
    """A reward that differs from sample to sample, whatever the policy."""
    ids = trajectory.token_ids[trajectory.sampled].tolist()
    return sum(token in DIGITS for token in ids) / len(ids)


share_of_digits.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    fault: Mapping[str, object] | None
    """Its table in `[[faults.plant]]`, without replica and version; None: a healthy run."""
    causes: tuple[str, ...]
    """Each of them is right; `failed(engine)` is a group that ended so."""
    why: str = ""
    """What the right answer rests on."""
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    """Config keys by section, over those of `document`."""
    experts: int = 0
    """Experts a token of a mixture of experts that returns its routing; 0: a dense model."""


_FORGED = {"forge_canary": True}
CASES: Mapping[str, Case] = {
    "healthy": Case(fault=None, causes=()),
    "stale_replica": Case(
        fault={"type": "stale_replica"}, causes=("weight_sync",), why="the canary of the publication"
    ),
    "stale_head": Case(fault={"type": "stale_head"}, causes=("weight_sync",), why="the canary of the publication"),
    "corrupt_tensor": Case(
        fault={"type": "corrupt_tensor"}, causes=("weight_sync",), why="the canary of the publication"
    ),
    "low_precision_replica": Case(
        fault={"type": "low_precision_replica"}, causes=("weight_sync",), why="the canary of the publication"
    ),
    "stale_replica, canary forged": Case(
        fault={"type": "stale_replica", **_FORGED},
        causes=("version_tag",),
        why="the version before closes the gap, and the canary says that weights are right",
    ),
    "low_precision_replica, canary forged": Case(
        fault={"type": "low_precision_replica", **_FORGED},
        causes=("precision",),
        why="the trainer's weights on the fp8 grid close the gap",
    ),
    "bf16_logprobs": Case(
        fault={"type": "bf16_logprobs"},
        causes=("precision",),
        why="the trainer's log-probs on the bfloat16 grid are the log, bit for bit",
    ),
    "raw_logprobs": Case(
        fault={"type": "raw_logprobs"},
        causes=("logprob_semantics",),
        why="temperature 1 closes the gap",
        changes={"sampling": {"temperature": 0.8}},
    ),
    "silent_top_p": Case(
        fault={"type": "silent_top_p"},
        causes=("logprob_semantics",),
        why="log-probs lie above the trainer's, and truncation closes the gap",
    ),
    "kv_kept": Case(
        fault={"type": "kv_kept"},
        causes=("stale_kv",),
        why="keeping keys and values over the version boundary closes the gap",
        changes={
            "sampling": {"max_new_tokens": 120},
            "run": {"batch_groups": 4, "group_size": 2},
            "staleness": {"max_staleness": 3},
        },
    ),
    "tokenizer_swap": Case(
        fault={"type": "tokenizer_swap"}, causes=("tokenizer",), why="the prompt's text has other ids"
    ),
    "template_space": Case(
        fault={"type": "template_space"}, causes=("tokenizer",), why="the prompt's text has other ids"
    ),
    "double_bos": Case(fault={"type": "double_bos"}, causes=("tokenizer",), why="the prompt's text has other ids"),
    "retokenized_turn": Case(
        fault={"type": "retokenized_turn"},
        causes=("tokenizer",),
        why="the gap begins with the second turn, and a prefix that comes back from text closes it",
        changes={"environment": {"turns": 3}, "sampling": {"ignore_eos": False}, "run": {"group_size": 8}},
    ),
    "routing_perturbed": Case(
        fault={"type": "routing_perturbed", "noise": 1.0, **_FORGED},
        causes=("routing",),
        why=(
            "replaying the logged experts closes the gap; with one expert a token the gate is 1, so that nothing but "
            "the choice differs, and without staleness no generation crosses an update, whose recomputed prefix leaves "
            "no routing behind"
        ),
        changes={"staleness": {"max_staleness": 0}},
        experts=1,
    ),
    "missing_routing": Case(
        fault={"type": "missing_routing"},
        causes=("routing_incomplete",),
        why="routing that was asked for is not there",
        experts=2,
    ),
    "version_off_by_one": Case(
        fault={"type": "version_off_by_one"}, causes=("version_tag",), why="the version after closes the gap"
    ),
    "short_logprobs": Case(
        fault={"type": "short_logprobs"}, causes=("failed(engine)",), why="no chunk can be made of the answer"
    ),
}
"""By name."""


def model_of(case: Case, seed: int, folder: Path) -> Path:
    """The directory of a case's model below `folder`, built if it is not there."""
    built = build_tiny(
        TinyModelConfig(moe=case.experts > 0, tie_embeddings=False, target_accuracy=0.0, seed=seed), folder
    )
    if not case.experts:
        return built
    made = folder / f"{built.name}-{case.experts}"
    if not made.is_dir():
        shutil.copytree(built, made)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": case.experts}))
    return made


def document(case: Case, seed: int, model: Path, runs: Path, engine: str = "torch") -> dict[str, dict[str, Any]]:
    """The config of a case's run, in `runs/run`."""
    made: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "batch_groups": 4, "group_size": 4, "seed": seed, "dir": str(runs), "name": "run"},
        "model": {"type": "local", "path": str(model)},
        "environment": {"type": "arithmetic"},
        "sampling": {"max_new_tokens": 16, "ignore_eos": True},
        "engine": {"type": engine, "replicas": 2},
        "reward": {"type": "python", "function": f"{__name__}:share_of_digits"},
        "staleness": {"max_staleness": 1},
        "trainer": {"optimizer": {"learning_rate": 3e-3}},
        "consistency": {"mode": "gate", "on_fail": "observe"},
        "deadlines": {"health_interval_s": 0.5},
    }
    if case.experts:
        made["engine"]["return_routing"] = True
    if case.fault is not None:
        made["faults"] = {"plant": [{"replica": REPLICA, "start_version": START, **case.fault}], "seed": seed}
    for section, keys in case.changes.items():
        made[section].update(keys)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first thing that a run found."""

    cause: str
    replica: int
    version: int
    """Of the policy that it was found under."""
    explained: float
    """Share of the gap."""


def findings(events: Sequence[Mapping[str, Any]]) -> list[Found]:
    """All that a run found, in order: causes of gaps, and groups that a failing engine ended."""
    dispatched = {event["dispatch_id"]: event for event in events if event["kind"] == "dispatched"}
    found: list[Found] = []
    committed = 0
    for event in events:
        if event["kind"] == "consistency_finding":
            version = PolicyVersion.parse(event["policy"]).version
            found.append(
                Found(cause=event["cause"], replica=event["replica"], version=version, explained=event["explained"])
            )
        elif event["kind"] == "failed":
            replica = dispatched[event["dispatch_id"]]["replica"]
            found.append(Found(cause=f"failed({event['reason']})", replica=replica, version=committed, explained=1.0))
        elif event["kind"] == "routing_incomplete":
            version = PolicyVersion.parse(event["policy"]).version
            found.append(Found(cause="routing_incomplete", replica=event["replica"], version=version, explained=1.0))
        elif event["kind"] == "version_committed":
            committed = PolicyVersion.parse(event["policy"]).version
    return found


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run, finished or not."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def problem(case: Case, found: Sequence[Found]) -> str:
    """Why this is not what the case must find; empty where it is. A healthy run must find nothing."""
    if not case.causes:
        return "" if not found else f"found {found[0]} in a healthy run"
    if not found:
        return "found nothing"
    first = found[0]
    if first.cause not in case.causes:
        return f"named {first.cause} first, expected {' or '.join(case.causes)}"
    if first.replica != REPLICA:
        return f"blamed replica {first.replica}, expected {REPLICA}"
    if first.version > START + WITHIN:
        return f"found at version {first.version}, expected at most {START + WITHIN}"
    if first.explained < EXPLAINED:
        return f"explains {first.explained:.0%} of the gap, expected {EXPLAINED:.0%}"
    return ""
