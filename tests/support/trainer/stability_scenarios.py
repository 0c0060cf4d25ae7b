"""What trainer ranks do in tests of clips and optimizers, importable by the processes that run them. Results are files
below `folder`."""

import json
from pathlib import Path
from typing import Any

import torch
from support.trainer import trainer_scenarios as scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.config.trainer import OptimizerConfig, TrainerConfig
from trainer.model.blocks import block_norms
from trainer.model.ranks import join_ranks, leave_ranks
from trainer.step.policy_trainer import PolicyTrainer
from trainer.types.step import StepReport

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # So tight that every step clips some blocks and leaves others.
    "layerclip": ("dense", {"clip": {"type": "layerclip", "alpha": 1.01, "warmup_steps": 1}}),
    "adagc": ("moe", {"max_grad_norm": 0.02, "clip": {"type": "adagc", "lam": 1.01, "warmup_steps": 1}}),
    "muon": ("dense", {"type": "muon", "muon_momentum": 0.9, "clip": {"type": "zclip", "warmup_steps": 2}}),
    "muon_experts": ("moe", {"type": "muon", "muon_scale": "original"}),
}
"""Name -> (model directory below the folder, keys of the optimizer's config)."""
STEPS = (1, 2, 3)
SAVED = 2
"""The step after which a checkpoint is written."""


def build(folder: Path, name: str, rank: int, world: int, rendezvous: str) -> PolicyTrainer:
    model, optimizer = CASES[name]
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.01, **optimizer}
    )
    return scenarios.build(
        folder, rendezvous, rank, world, model, {"optimizer": config, "micro_batch_tokens": scenarios.SMALL}
    )


def write_reports(path: Path, reports: list[StepReport]) -> None:
    path.write_text(
        json.dumps(
            [
                {"norms": report.block_norms, "scales": report.block_scales, "norm": report.grad_norm}
                for report in reports
            ]
        )
    )


def run_case(rank: int, world: int, folder: Path, name: str) -> None:
    """`STEPS`; reports `NAME-wWORLD.json`, checkpoint `NAME-wWORLD-saved`, weights `NAME-wWORLD`."""
    trainer = build(folder, name, rank, world, name)
    reports: list[StepReport] = []
    for number in STEPS:
        reports.append(scenarios.step(trainer, number))
        if number == SAVED:
            state = CheckpointState(policy=PolicyVersion(1, number), seed=5, weights_digest="")
            trainer.save_checkpoint(folder / f"{name}-w{world}-saved", state)
    trainer.publish(PolicyVersion(1, STEPS[-1]), folder / f"{name}-w{world}")
    trainer.close()
    if rank == 0:
        write_reports(folder / f"{name}-w{world}.json", reports)


def resume_case(rank: int, world: int, folder: Path, name: str, written_by: int) -> None:
    """The last step from a checkpoint of `written_by` ranks; reports `NAME-wWORLD-resumed.json`, weights
    `NAME-wWORLD-resumed`."""
    trainer = build(folder, name, rank, world, f"{name}-resumed")
    trainer.load_checkpoint(folder / f"{name}-w{written_by}-saved")
    report = scenarios.step(trainer, STEPS[-1])
    trainer.publish(PolicyVersion(1, STEPS[-1]), folder / f"{name}-w{world}-resumed")
    trainer.close()
    if rank == 0:
        write_reports(folder / f"{name}-w{world}-resumed.json", [report])


def norms_over_meshes(rank: int, world: int, folder: Path) -> None:
    """Norms of one block's tensors, laid out over several meshes; `norms-RANK.json`."""
    join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous-norms'}")
    whole = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    sharded, replicated = init_device_mesh("cpu", (1, world)), init_device_mesh("cpu", (world, 1))
    flat = init_device_mesh("cpu", (world,))
    layouts = {
        "sharded": [distribute_tensor(whole, flat, [Shard(0)])],
        "hybrid": [distribute_tensor(whole, sharded, [Replicate(), Shard(0)])],
        "replicated": [distribute_tensor(whole, replicated, [Replicate(), Shard(0)])],
        "plain": [whole],
        "mixed": [
            distribute_tensor(whole, flat, [Shard(0)]),
            whole,
            distribute_tensor(whole, replicated, [Replicate(), Shard(0)]),
        ],
    }
    norms = block_norms(list(layouts.values()), torch.device("cpu"))
    (folder / f"norms-{rank}.json").write_text(json.dumps(dict(zip(layouts, norms, strict=True))))
    leave_ranks()


def all_together(rank: int, world: int, folder: Path) -> None:
    """Everything that several ranks do in one start of their processes; one rank has run `run_case` before."""
    norms_over_meshes(rank, world, folder)
    for name in CASES:
        run_case(rank, world, folder, name)
        resume_case(rank, world, folder, name, written_by=1)
