"""Small sharded models, seeded steps and spikes planted into them: what a gradient search must find. It measures no
time."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.algorithms.grpo import Grpo
from trainer.config.consistency import CorrectionConfig, NoCorrection
from trainer.config.trainer import GrpoConfig
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.gradloc.probe.probe import StepData, TokenLoss
from trainer.gradloc.probe.random_states import RandomState
from trainer.loss.policy_loss import PolicyLoss, loss_tokens
from trainer.model.blocks import block_norms, gradients_of, named_blocks
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, reshard, shard_model
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import MicroBatch

VOCABULARY = 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def small_model(
    ranks: Ranks, *, moe: bool = False, dtype: torch.dtype = torch.float32, **changes: object
) -> PolicyModel:
    torch.manual_seed(0)
    if moe:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
        network: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(SHAPE | experts | changes))
    else:
        network = Qwen3ForCausalLM(Qwen3Config.from_dict(SHAPE | changes))
    return shard_model(PolicyModel(network.eval(), chunk_tokens=64), ranks, dtype)


class Spiking(Grpo):
    """GRPO whose terms are scaled where a spike was planted: a rollout log-prob above 0 is the factor, and the ratio
    stays normal."""

    def __init__(self) -> None:
        # Dropout moves ratios, and a clipped term has no gradient.
        super().__init__(GrpoConfig(clip_low=1e6, clip_high=1e6))

    def loss(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        factor = tokens.rollout_logprobs
        return super().loss(logprobs, tokens) * torch.where(factor <= 0, torch.ones_like(factor), factor)


def spiking_loss(correction: CorrectionConfig | None = None) -> PolicyLoss:
    return PolicyLoss(GrpoConfig(), Spiking(), None, correction or NoCorrection())


def random_step(
    seed: int, *, micro_batches: int = 2, rows: int = 3, width: int = 20, denominator: int = 1
) -> tuple[MicroBatch, ...]:
    """Rows of different lengths with weights 1/N, N over `denominator` ranks of this size."""
    rng = np.random.default_rng(seed)
    built: list[MicroBatch] = []
    for number in range(micro_batches):
        lengths = rng.integers(width // 2, width + 1, rows)
        mask = np.arange(width)[None] < lengths[:, None]
        mask[:, :3] = False
        logprobs = np.where(mask, -rng.uniform(2, 4, mask.shape), 0).astype(np.float32)
        built.append(
            MicroBatch(
                token_ids=np.where(
                    np.arange(width)[None] < lengths[:, None], rng.integers(3, VOCABULARY, mask.shape), 0
                ).astype(np.int64),
                loss_mask=mask,
                old_logprobs=logprobs,
                rollout_logprobs=logprobs.copy(),
                advantages=np.repeat(rng.choice([-1.0, 1.0], (rows, 1)), width, axis=1).astype(np.float32),
                token_weights=np.ones(rows, dtype=np.float32),
                trajectory_ids=tuple(f"t-{seed}-{number}-{row}" for row in range(rows)),
                lengths=tuple(int(length) for length in lengths),
                routing=(None,) * rows,
            )
        )
    total = denominator * sum(int(micro.loss_mask.sum()) for micro in built)
    return tuple(replace(micro, token_weights=np.full(rows, 1 / total, dtype=np.float32)) for micro in built)


def on_policy(model: PolicyModel, ranks: Ranks, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    """The same with the model's own log-probs as the old ones: every ratio is 1 and every term has a gradient."""
    result: list[MicroBatch] = []
    for micro in micro_batches:
        tokens = loss_tokens(micro, ranks.device)
        with torch.no_grad():
            logprobs = model(tokens.token_ids, tokens.positions, tokens.targets, 1.0)[0]
        old = micro.old_logprobs.copy()
        old[micro.loss_mask] = logprobs.cpu().numpy()
        result.append(replace(micro, old_logprobs=old))
    reshard(model)
    return tuple(result)


def plant(micro_batches: Sequence[MicroBatch], place: tuple[int, int, int], factor: float) -> tuple[MicroBatch, ...]:
    """Scale the term at (micro-batch, row, position)."""
    micro_batch, row, position = place
    marked = micro_batches[micro_batch].rollout_logprobs.copy()
    marked[row, position] = factor
    return tuple(
        replace(micro, rollout_logprobs=marked) if m == micro_batch else micro for m, micro in enumerate(micro_batches)
    )


def places(micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int, int]]:
    return [
        (m, int(row), int(column))
        for m, micro in enumerate(micro_batches)
        for row, column in zip(*np.nonzero(micro.loss_mask), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Ran:
    """What a forward and backward pass left."""

    data: StepData
    norm: float
    weight_square: float


def run_step(
    model: PolicyModel,
    loss: TokenLoss,
    ranks: Ranks,
    micro_batches: Sequence[MicroBatch],
    record: BackwardRecord | None = None,
) -> Ran:
    """Forward and backward of a whole step; `.grad` holds the sum, and `record` what backward told."""
    model.zero_grad(set_to_none=True)
    data = StepData(micro_batches=micro_batches)
    states: list[RandomState] = []
    for number, micro in enumerate(micro_batches):
        states.append(RandomState.take(ranks.device))
        with nullcontext() if record is None else record.recording(number):
            loss(model, loss_tokens(micro, ranks.device), data.temperature, data.source)[0].backward()
    of_blocks = block_norms(gradients_of(named_blocks(model)), ranks.device)
    square = sum(
        float(np.square(micro.token_weights)[:, None].repeat(micro.loss_mask.shape[1], 1)[micro.loss_mask].sum())
        for micro in micro_batches
    )
    return Ran(replace(data, random_states=states), float(np.sqrt(np.square(of_blocks).sum())), square)


def tau_of(ran: Ran, multiple: float = 3.0) -> float:
    return multiple * ran.norm / ran.weight_square**0.5
