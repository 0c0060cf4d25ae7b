"""Small sharded models, seeded steps and planted spikes, for tests of the gradient search; and what a second rank runs."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout.trajectory import Reward
from trainer.algorithms.grpo import Grpo
from trainer.config import GrpoConfig, TrainerConfig
from trainer.consistency.config import CorrectionConfig, NoCorrection
from trainer.policy_loss import PolicyLoss, loss_tokens
from trainer.policy_model import PolicyModel
from trainer.protocols import LossInputs
from trainer.ranks import Ranks, join_ranks, leave_ranks, shard_model
from trainer.stability import GradLoc, GradLocReport
from trainer.stability.blocks import block_norms, gradients_of, named_blocks
from trainer.stability.config import GivenTau, GradLocConfig
from trainer.stability.gradient_probe import StepData
from trainer.stability.random_states import RandomState
from trainer.stability.search import Outcome
from trainer.types import MicroBatch

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


def small_model(ranks: Ranks, *, moe: bool = False, dtype: torch.dtype = torch.float32, **changes: object) -> PolicyModel:
    torch.manual_seed(0)
    if moe:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
        network: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(SHAPE | experts | changes))
    else:
        network = Qwen3ForCausalLM(Qwen3Config.from_dict(SHAPE | changes))
    return shard_model(PolicyModel(network.eval(), chunk_tokens=64), ranks, dtype)


class Spiking:
    """GRPO whose terms are scaled where a spike was planted: a rollout log-prob above 0 is the factor, and the ratio stays normal."""

    def __init__(self) -> None:
        self._inner = Grpo(GrpoConfig(clip_low=1e6, clip_high=1e6))  # dropout moves ratios, and a clipped term has no gradient

    def advantages(self, rewards: Sequence[Reward]) -> NDArray[np.float32]:
        return self._inner.advantages(rewards)

    def loss(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        factor: Tensor = inputs.rollout_logprobs  # pyright: ignore[reportAttributeAccessIssue]
        return self._inner.loss(logprobs, inputs) * torch.where(factor <= 0, torch.ones_like(factor), factor)


def spiking_loss(correction: CorrectionConfig | None = None) -> PolicyLoss:
    return PolicyLoss(GrpoConfig(), Spiking(), None, correction or NoCorrection())


def random_step(seed: int, *, micro_batches: int = 2, rows: int = 3, width: int = 20, denominator: int = 1) -> tuple[MicroBatch, ...]:
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
                token_ids=np.where(np.arange(width)[None] < lengths[:, None], rng.integers(3, VOCABULARY, mask.shape), 0).astype(np.int64),
                loss_mask=mask,
                old_logprobs=logprobs,
                rollout_logprobs=logprobs.copy(),
                advantages=rng.choice([-1.0, 1.0], rows).astype(np.float32),
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
        old[micro.loss_mask] = logprobs.numpy()
        result.append(replace(micro, old_logprobs=old))
    for unit in model.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()  # pyright: ignore[reportCallIssue]
    return tuple(result)


def plant(micro_batches: Sequence[MicroBatch], place: tuple[int, int, int], factor: float) -> tuple[MicroBatch, ...]:
    """Scale the term at (micro-batch, row, position)."""
    micro_batch, row, position = place
    marked = micro_batches[micro_batch].rollout_logprobs.copy()
    marked[row, position] = factor
    return tuple(replace(micro, rollout_logprobs=marked) if m == micro_batch else micro for m, micro in enumerate(micro_batches))


def places(micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int, int]]:
    return [(m, int(row), int(column)) for m, micro in enumerate(micro_batches) for row, column in zip(*np.nonzero(micro.loss_mask), strict=True)]


@dataclass(frozen=True, eq=False)
class Ran:
    """What a forward and backward pass left."""

    data: StepData
    norm: float
    weight_square: float


def run_step(model: PolicyModel, loss: PolicyLoss, ranks: Ranks, micro_batches: Sequence[MicroBatch]) -> Ran:
    """Forward and backward of a whole step; `.grad` holds the sum."""
    model.zero_grad(set_to_none=True)
    data = StepData(micro_batches=micro_batches)
    states: list[RandomState] = []
    for micro in micro_batches:
        states.append(RandomState.take(ranks.device))
        loss(model, loss_tokens(micro, ranks.device), data.temperature, data.source)[0].backward()
    norms = block_norms(gradients_of(named_blocks(model)), ranks.device)
    square = sum(float(np.square(micro.token_weights)[:, None].repeat(micro.loss_mask.shape[1], 1)[micro.loss_mask].sum()) for micro in micro_batches)
    return Ran(replace(data, random_states=states), float(np.sqrt(np.square(norms).sum())), square)


def located(report: GradLocReport | None) -> list[tuple[int, int, int]]:
    assert report is not None and report.outcome is Outcome.LOCATED, report
    return [(hit.micro_batch, hit.row, hit.position) for hit in report.hits]


def tau_of(ran: Ran, multiple: float = 3.0) -> float:
    return multiple * ran.norm / ran.weight_square**0.5


def watching(model: PolicyModel, ranks: Ranks, tau: float, loss: Any = None, dtype: torch.dtype = torch.float32, **config: Any) -> GradLoc:
    return GradLoc(GradLocConfig(threshold=GivenTau(tau=tau), **config), model, loss or spiking_loss(), ranks, dtype=dtype)


@contextmanager
def one_rank(folder: Path) -> Generator[Ranks]:
    yield join_ranks(TrainerConfig(), 0, f"file://{folder / 'rendezvous'}")
    leave_ranks()


def two_ranks_find_what_was_planted(rank: int, world: int, folder: Path) -> None:
    """One spike on each rank, in different micro-batches: both are in both ranks' report."""
    ranks = join_ranks(TrainerConfig(ranks=world), rank, f"file://{folder / 'rendezvous'}")
    model, loss = small_model(ranks), spiking_loss()
    healthy = on_policy(model, ranks, random_step(rank, denominator=world))
    ran = run_step(model, loss, ranks, healthy)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    tau = 3 * ran.norm / square**0.5
    gradloc = GradLoc(GradLocConfig(threshold=GivenTau(tau=tau), budget_passes=200), model, loss, ranks)
    rng = np.random.default_rng(7)
    for _ in range(1):
        chosen = tuple(int(rng.integers(len(places(random_step(r))))) for r in range(world))
        mine = next(p for p in places(healthy)[chosen[rank] :] + places(healthy) if p[0] == rank)
        ran = run_step(model, loss, ranks, plant(healthy, mine, 3e4))
        report = gradloc.observe(ran.norm, ran.data)
        assert report is not None and report.outcome == "located", report
        assert len(report.hits) == world
        found = {hit.rank: (hit.micro_batch, hit.row, hit.position) for hit in report.hits}
        assert found[rank] == mine, (found, mine)
        assert all(hit.trajectory_id.startswith(f"t-{hit.rank}-") for hit in report.hits)
        assert ranks.sum(torch.tensor([float(report.passes)])).item() == world * report.passes
    leave_ranks()
