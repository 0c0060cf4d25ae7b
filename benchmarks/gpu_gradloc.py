"""GradLoc on a GPU: a step of a randomly initialised Qwen3 of 4 billion parameters in bfloat16, the search of a spike
in it, and chunked log-probs.

One GPU of 140 GB, a few minutes. `--small` takes a tiny model, and the CPU where there is no GPU.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.gradloc_planted import SHAPE, on_policy, places, plant, spiking_loss
from harness.runs import parser, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.config.gradloc import GivenTau
from trainer.config.trainer import OptimizerConfig, TrainerConfig
from trainer.gradloc import BackwardRecord, GradLoc, GradLocConfig, StepData, micro_batch
from trainer.gradloc.gradloc import TermPlace
from trainer.loss.policy_loss import loss_tokens
from trainer.model.blocks import named_blocks
from trainer.model.logprobs import chunked_logprobs
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, join_ranks, leave_ranks, shard_model
from trainer.optim.optimizer import PolicyOptimizer
from trainer.types.step import MicroBatch, OldLogprobSource

LARGE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
SPIKE = 1e5
"""Factor of the planted term."""


class Timed:
    """Seconds and most memory of calls, the device's own work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.found: dict[str, dict[str, Any]] = {}

    def __call__(
        self, name: str, work: Callable[[], object], times: int = 3, before: Callable[[], object] = lambda: None
    ) -> None:
        """Call `work` so often and once beforehand; `before` goes before each call and is not timed."""
        before()
        work()
        seconds, gpu = list[float](), self._device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            before()
            self._wait()
            begun = time.perf_counter()
            work()
            self._wait()
            seconds.append(time.perf_counter() - begun)
        self.found[name] = {
            "median_s": statistics.median(seconds),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        }

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Step:
    """A model, and a step of four micro-batches with old log-probs of its own."""

    def __init__(self, ranks: Ranks, shape: dict[str, Any], rows: int, width: int) -> None:
        self.ranks, self.loss = ranks, spiking_loss()
        torch.manual_seed(0)
        with torch.device(ranks.device):
            model = PolicyModel(Qwen3ForCausalLM(Qwen3Config.from_dict(shape)).eval(), 1024)
        model.checkpoint_activations()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = shard_model(model, ranks, torch.bfloat16)
        self.records = {
            "search": BackwardRecord(self.model, ranks),
            "search, no pulls": BackwardRecord(self.model, ranks, term_pulls=False),
        }
        self.optimizer = PolicyOptimizer(named_blocks(self.model), OptimizerConfig(), ranks, lambda _: 1e-7)
        rng, mask = np.random.default_rng(0), np.tile(np.arange(width) >= width // 4, (rows, 1))
        drawn = [
            micro_batch(rng.integers(shape["vocab_size"], size=(rows, width)), mask, 1 / (4 * mask.sum()))
            for _ in range(4)
        ]
        self.rows = on_policy(self.model, ranks, drawn)
        self.square = float(1 / (4 * mask.sum()))

    def gradient(self, rows: tuple[MicroBatch, ...], *records: BackwardRecord) -> float:
        """Forward, backward and the norm."""
        self.optimizer.zero()
        for number, micro in enumerate(rows):
            tokens = loss_tokens(micro, self.ranks.device)
            loss, _ = self.loss(self.model, tokens, 1.0, OldLogprobSource.ROLLOUT)
            with ExitStack() as stack:
                for record in records:
                    stack.enter_context(record.recording(number))
                loss.backward()
        return self.optimizer.measure().total

    def step(self) -> None:
        """The same and the update."""
        self.gradient(self.rows)
        self.optimizer.apply(1, self.optimizer.measure())


def measured(ranks: Ranks, shape: dict[str, Any], rows: int, width: int) -> dict[str, Any]:
    """Everything, in one process."""
    at, timed = Step(ranks, shape, rows, width), Timed(ranks.device)
    usual = at.gradient(at.rows)
    timed("gradient", lambda: at.gradient(at.rows))
    timed("gradient, with norms of parts and pulls of terms", lambda: at.gradient(at.rows, at.records["search"]))
    timed("whole step", at.step)
    place = places(at.rows)[len(places(at.rows)) // 3]
    planted = plant(at.rows, place, SPIKE)
    config = GradLocConfig(threshold=GivenTau(tau=3 * usual / at.square**0.5))
    gradloc = GradLoc(config, at.model, at.loss, ranks, dtype=torch.bfloat16)
    norm, data = at.gradient(planted, *at.records.values()), StepData(micro_batches=planted)
    suspect = TermPlace(micro_batch=place[0], row=place[1], position=place[2])
    reports: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = {name: {"record": record} for name, record in at.records.items()}
    variants |= {
        "search, no record": {},
        "right suspect": {"record": at.records["search, no pulls"], "suspects": [suspect]},
    }
    for name, settings in variants.items():

        def search(name: str = name, settings: dict[str, Any] = settings) -> None:
            reports[name] = gradloc.observe(norm, data, **settings)

        timed(name, search, times=1, before=lambda: at.gradient(planted, *at.records.values()))
    found: dict[str, Any] = {}
    for name, found_there in reports.items():
        exact = [(hit.micro_batch, hit.row, hit.position) for hit in found_there.hits] == [place]
        found[name] = {
            "outcome": str(found_there.outcome),
            "exact": exact,
            "passes": found_there.passes,
            "explained": found_there.explained,
        }
    dormant = GradLoc(GradLocConfig(), at.model, at.loss, ranks, dtype=torch.bfloat16)
    timed("watching a step without a trigger", lambda: dormant.observe(usual, StepData(micro_batches=at.rows)))
    at.optimizer.zero()
    logprobs(ranks, shape, rows * width, timed)
    return {
        "parameters": at.num_parameters,
        "tokens_a_micro_batch": rows * width,
        "spike_over_usual_norm": norm / usual,
        "searches": found,
        **timed.found,
    }


def logprobs(ranks: Ranks, shape: dict[str, Any], tokens: int, timed: Timed) -> None:
    """Forward and backward of the head: in chunks, and with all logits at once."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    hidden = torch.randn(
        tokens, shape["hidden_size"], device=ranks.device, dtype=torch.bfloat16, generator=generator, requires_grad=True
    )
    weight = (
        torch.randn(
            shape["vocab_size"], shape["hidden_size"], device=ranks.device, dtype=torch.bfloat16, generator=generator
        )
        .mul_(0.02)
        .requires_grad_()
    )
    targets = torch.randint(shape["vocab_size"], (tokens,), device=ranks.device, generator=generator)

    def chunked() -> None:
        chunked_logprobs(hidden, weight, targets, 1.0, 1024)[0].sum().backward()

    def whole() -> None:
        torch.log_softmax(torch.nn.functional.linear(hidden, weight).float(), dim=-1).gather(
            1, targets[:, None]
        ).sum().backward()

    timed("log-probs in chunks of 1024", chunked)
    timed("log-probs, all logits at once", whole)


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--small", action="store_true", help="a tiny model, in seconds")
    chosen = arguments.parse_args()
    gpu = torch.cuda.is_available()
    if not (gpu or chosen.small):
        raise SystemExit("this process sees no GPU; run it where there is one, or with --small")
    config = TrainerConfig(num_gpus=1.0 if gpu else 0.0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = join_ranks(config, 0, f"file://{Path(folder) / 'rendezvous'}")
        shape, rows, width = (SHAPE, 2, 40) if chosen.small else (LARGE, 4, 2048)
        found = measured(ranks, shape, rows, width)
        leave_ranks()
    report({"gpu": torch.cuda.get_device_name() if gpu else None, **found}, chosen)


if __name__ == "__main__":
    main()
