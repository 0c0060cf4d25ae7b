"""Real model directories, seeded batches and real ranks for tests of the trainer."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.builders import build_dispatch, build_group, build_stored

from rollout.types.supports import listed_supports
from rollout.types.trajectory import StoredGroups, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion

VOCABULARY = 24


def write_bare_model(
    directory: Path, vocab_size: int = VOCABULARY, tokenizer_size: int = VOCABULARY, **config: object
) -> Path:
    """A directory with a config, a tokenizer and one weight file: enough for everything that reads no model code."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    vocabulary = {chr(97 + i): i for i in range(tokenizer_size)}
    (directory / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}, "added_tokens": []})
    )
    save_file(
        {"model.embed_tokens.weight": np.arange(vocab_size * 2, dtype=np.float32).reshape(vocab_size, 2)},
        directory / "model.safetensors",
    )
    return directory


def write_model(directory: Path, seed: int = 0, moe: bool = False, **changes: object) -> Path:
    """A small random Qwen3, dense or MoE, saved by transformers, with logits that are not all alike."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if moe:
        experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(shape | experts | changes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config.from_dict(shape | changes))
    write_bare_model(directory)  # its config and weights are replaced, its tokenizer stays
    model.save_pretrained(directory)
    return directory


def stored(
    seed: int = 0,
    lengths: Sequence[int] = (3, 11, 6),
    group_size: int = 3,
    old_logprob: float | None = None,
    *,
    truncated: bool = False,
) -> StoredGroups:
    """One encoded group a length, all with an odd number of samples; `old_logprob` replaces every rollout log-prob.
    With `truncated` they are drawn under top-p, and every second one lists what each draw kept."""
    rng = np.random.default_rng(seed)
    groups: list[TrajectoryGroup] = []
    for number, length in enumerate(lengths):
        policies = ((PolicyVersion(1, 0), length // 2), (PolicyVersion(1, 1), length - length // 2))
        rewards = [float(r) for r in rng.permutation(np.arange(group_size)) / group_size]
        group = build_group(
            build_dispatch(number),
            rewards,
            prompt_tokens=2 + number,
            spans=policies,
            seed=seed + number,
            vocab_size=VOCABULARY,
        )
        if old_logprob is not None:
            for trajectory in group.trajectories:
                trajectory.rollout_logprobs[trajectory.sampled] = old_logprob
        if truncated:
            group = replace(group, trajectories=tuple(map(_truncated, group.trajectories, range(group_size))))
        groups.append(group)
    return build_stored(groups)


def _truncated(trajectory: Trajectory, index: int) -> Trajectory:
    tag, tokens = replace(trajectory.tag, top_p=0.8), trajectory.token_ids.tolist()
    kept = [
        [token, (token + 5) % VOCABULARY] if here else []
        for token, here in zip(tokens, trajectory.sampled, strict=True)
    ]
    return replace(trajectory, tag=tag, supports=listed_supports(kept) if index % 2 else None)


def _work_and_leave(work: Callable[[int, int, Path], None], rank: int, world: int, folder: Path) -> None:
    """Leaves without the interpreter's own end: threads of torch that are still there then now and then abort a process
    whose work is done."""
    work(rank, world, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(world: int, work: Callable[[int, int, Path], None], folder: Path, deadline_s: float = 100.0) -> None:
    """Run `work(rank, world, folder)` in `world` processes and wait for all.

    `work` must be importable by its module's name, so it lives beside the tests, not in one.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_work_and_leave, args=(work, rank, world, folder), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(deadline_s)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {world} ranks did not finish in {deadline_s} s"
    assert [process.exitcode for process in processes] == [0] * world
