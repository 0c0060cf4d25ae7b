"""What trainer ranks do in tests of probes and QK-Clip, importable by the processes that run them. Results are files
below `folder`."""

import json
from pathlib import Path
from typing import Any

import torch
from support.trainer import trainer_scenarios as scenarios
from support.trainer.trainer_room import VOCABULARY, write_model
from transformers import LlamaConfig, LlamaForCausalLM

from rollout.types.weights import PolicyVersion
from trainer.types.step import StepReport

PROBES = {"update_ratio": True, "activations": True, "router_load": True}
LIMIT = 11.0
"""Some heads of the Llama are above it and some below."""


def write_llama(directory: Path, key_heads: int) -> Path:
    """A small random Llama, which has no QK-norm, with logits that differ by head."""
    write_model(directory)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_report(path: Path, report: StepReport) -> None:
    path.write_text(
        json.dumps({"probes": report.probes, "logits": dict(report.attention_logits), "norm": report.grad_norm})
    )


def run_step(folder: Path, model: str, name: str, world: int, rank: int, config: dict[str, Any]) -> None:
    """One step on `model`; report `NAME.json` and weights `NAME`."""
    trainer = scenarios.build(folder, name, rank, world, model, config)
    report = scenarios.step(trainer, 1)
    trainer.publish(PolicyVersion(1, 1), folder / name)
    trainer.close()
    if rank == 0:
        write_report(folder / f"{name}.json", report)


def probed(rank: int, world: int, folder: Path) -> None:
    """A step of a mixture of experts with all probes; on two ranks every row is a micro-batch of its own."""
    run_step(
        folder,
        "moe",
        f"probed-w{world}",
        world,
        rank,
        {"probes": PROBES, "micro_batch_tokens": scenarios.SMALL if world == 1 else 1},
    )


def clipped(rank: int, world: int, folder: Path) -> None:
    """A step of each Llama with QK-Clip and one without."""
    for model in ("llama-4", "llama-2"):
        for name, limit in (("clipped", {"enabled": True, "threshold": LIMIT}), ("plain", {})):
            config = {"optimizer": {"learning_rate": 1e-2, "qk_clip": limit}, "micro_batch_tokens": scenarios.SMALL}
            run_step(folder, model, f"{model}-{name}-w{world}", world, rank, config)


def all_together(rank: int, world: int, folder: Path) -> None:
    """Everything that several ranks do in one start of their processes."""
    probed(rank, world, folder)
    clipped(rank, world, folder)
