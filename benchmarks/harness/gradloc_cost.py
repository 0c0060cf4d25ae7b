"""What a gradient search costs, and what is paid in every step to be ready for one or to watch blocks. Every function
runs on all ranks alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.gradloc_planted import on_policy, places, plant, random_step, run_step, small_model, spiking_loss
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.gradloc import GivenTau
from trainer.config.trainer import OptimizerConfig, TrainerConfig
from trainer.gradloc import GradLoc, GradLocConfig, StepData
from trainer.gradloc.gradloc import TermPlace
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.loss.policy_loss import PolicyLoss, loss_tokens
from trainer.model.blocks import named_blocks
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, local_tensor, shard_model
from trainer.optim.optimizer import PolicyOptimizer
from trainer.optim.step_watch import StepWatch
from trainer.types.step import MicroBatch

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
"""That of the quickstart's model: the smaller the model, the larger the share of what is not its own work."""
SPIKE = 1e4
"""Factor of the planted term."""


def search_cost(ranks: Ranks, tries: int, micro_batches: int = 4, rows: int = 8, width: int = 512) -> dict[str, Any]:
    """Searches over their own steps, wall clock and CPU seconds of all ranks: M micro-batches of 8 sequences of 512, a
    spike at a random place."""
    torch.set_num_threads(1)
    model, loss = small_model(ranks, **SHAPE), spiking_loss()
    record, no_pulls = BackwardRecord(model, ranks), BackwardRecord(model, ranks, term_pulls=False)
    step = on_policy(
        model,
        ranks,
        random_step(ranks.rank, micro_batches=micro_batches, rows=rows, width=width, denominator=ranks.world),
    )
    ran = run_step(model, loss, ranks, step, record)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    gradloc = GradLoc(GradLocConfig(threshold=GivenTau(tau=3 * ran.norm / square**0.5)), model, loss, ranks)
    rng, found = np.random.default_rng(0), dict[str, list[tuple[float, float, int]]]()
    steps: list[tuple[float, float]] = []
    for _ in range(tries):
        rank, every = int(rng.integers(ranks.world)), places(step)
        place = every[int(rng.random() * len(every))]
        mine = rank == ranks.rank
        planted = plant(step, place, SPIKE) if mine else step
        run_step(model, loss, ranks, planted, no_pulls)
        spent = _Spent(ranks)
        ran = run_step(model, loss, ranks, planted, record)
        steps.append(spent.so_far())
        suspects = [TermPlace(micro_batch=place[0], row=place[1], position=place[2])] if mine else []
        variants: dict[str, dict[str, Any]] = {
            "search": {"record": record},
            "search, no pulls": {"record": no_pulls},
            "search, no record": {},
            "right suspect": {"suspects": suspects},
        }
        for name, settings in variants.items():
            spent = _Spent(ranks)
            report = gradloc.observe(ran.norm, ran.data, **settings)
            wall_s, cpu_s = spent.so_far()
            if report is None or report.outcome != "located":
                raise RuntimeError(f"the planted spike was not located: {report}")
            found.setdefault(name, []).append((wall_s / steps[-1][0], cpu_s / steps[-1][1], report.passes))
    answer: dict[str, Any] = {
        "step_wall_s": statistics.median(wall for wall, _ in steps),
        "step_cpu_s": statistics.median(cpu for _, cpu in steps),
    }
    for name, each in found.items():
        wall, cpu, passes = zip(*each, strict=True)
        shares = {
            "wall": statistics.median(wall),
            "wall_most": max(wall),
            "cpu": statistics.median(cpu),
            "cpu_most": max(cpu),
        }
        answer[f"{name} / step"] = {**shares, "passes": max(passes)}
    return answer


class _Spent:
    """Wall clock and CPU seconds of all ranks, from here on."""

    def __init__(self, ranks: Ranks) -> None:
        ranks.sum(torch.zeros(1))  # all ranks start together
        self._ranks, self._begun = ranks, (time.perf_counter(), time.process_time())

    def so_far(self) -> tuple[float, float]:
        """Until all ranks are here."""
        cpu_s = self._ranks.sum(torch.tensor([time.process_time() - self._begun[1]], dtype=torch.float64))
        return time.perf_counter() - self._begun[0], float(cpu_s.item())


def memory(ranks: Ranks) -> dict[str, Any]:
    """Peak resident memory of a search above that of its step, over the bytes of this rank's part of the gradient. The
    gradient outweighs all activations."""
    model, loss = small_model(ranks, vocab_size=65536, hidden_size=128, tie_word_embeddings=False), spiking_loss()
    step = on_policy(model, ranks, random_step(ranks.rank, rows=2, width=12, denominator=ranks.world))
    record = BackwardRecord(model, ranks)
    ran = run_step(model, loss, ranks, step, record)
    square = float(ranks.sum(torch.tensor([ran.weight_square], dtype=torch.float64)).item())
    gradloc = GradLoc(GradLocConfig(threshold=GivenTau(tau=3 * ran.norm / square**0.5)), model, loss, ranks)
    planted = plant(step, places(step)[3], SPIKE) if ranks.rank == 0 else step
    run_step(model, loss, ranks, planted, record)
    with _PeakResident() as of_step:
        ran = run_step(model, loss, ranks, planted, record)
    gradient = sum(local_tensor(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    found: dict[str, Any] = {"gradient_mib": gradient / 2**20}
    for name, known in (("search", record), ("search, no record", None)):
        with _PeakResident() as of_search:
            report = gradloc.observe(ran.norm, ran.data, record=known)
        if report is None or report.outcome != "located":
            raise RuntimeError(f"the planted spike was not located: {report}")
        found[f"{name}: peak above step, in gradients"] = (of_search.bytes - of_step.bytes) / gradient
    return found


class _PeakResident:
    """Most memory of this process that was resident at once inside `with`."""

    bytes = 0

    def __enter__(self) -> "_PeakResident":
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        self.bytes = int(line.split()[1]) * 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """One model with everything that can watch it."""

    ranks: Ranks
    model: PolicyModel
    loss: PolicyLoss
    optimizer: PolicyOptimizer
    rows: Sequence[MicroBatch]

    def step(self, watch: StepWatch, gradloc: GradLoc | None = None, record: BackwardRecord | None = None) -> None:
        """As the trainer does it."""
        for number, micro in enumerate(self.rows):
            with ExitStack() as stack:
                if record is not None:
                    stack.enter_context(record.recording(number))
                with watch.forward(micro):
                    loss, _ = self.loss(
                        self.model, loss_tokens(micro, self.ranks.device), 1.0, StepData(micro_batches=()).source
                    )
                loss.backward()
        measured = self.optimizer.measure()
        if gradloc is not None:
            gradloc.observe(measured.total, StepData(micro_batches=self.rows), record=record)
        with watch.updating():
            applied = self.optimizer.apply(1, measured)
            watch.clip_heads(applied=applied.applied)
        watch.take()


def watched(ranks: Ranks, kind: str) -> Watched:
    """A model of a kind, and a step of two micro-batches of 8 sequences of 256."""
    if kind == "llama":
        torch.manual_seed(0)
        network = LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": 24, **SHAPE}))
        model = shard_model(PolicyModel(network.eval(), chunk_tokens=1024), ranks, torch.float32)
    else:
        model = small_model(ranks, moe=kind == "moe", **SHAPE)
    rows = on_policy(model, ranks, random_step(0, rows=8, width=256))
    optimizer = PolicyOptimizer(named_blocks(model), OptimizerConfig(), ranks, lambda _: 1e-6)
    return Watched(ranks=ranks, model=model, loss=spiking_loss(), optimizer=optimizer, rows=rows)


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradloc": ("dense", {}),
    "part_norms": ("dense", {}),
    "term_pulls": ("dense", {}),
    "update_ratio": ("dense", {"probes": {"update_ratio": True}}),
    "activations": ("dense", {"probes": {"activations": True}}),
    "router_load": ("moe", {"probes": {"router_load": True}}),
    "qk_clip": ("llama", {"optimizer": {"qk_clip": {"enabled": True}}}),
}
"""Name -> (kind of model, trainer config); "gradloc" is all that a step without a trigger pays for a search by
default."""


def dormant(ranks: Ranks, pairs: int, features: Sequence[str] = ()) -> dict[str, Any]:
    """CPU seconds of a step with a feature over one without, less 1; of some features or of all."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, (kind, config) in FEATURES.items():
        if features and name not in features:
            continue
        at = watched(ranks, kind)
        plain = StepWatch(TrainerConfig(), at.model, named_blocks(at.model), ranks)
        watch = StepWatch(TrainerConfig.model_validate(config), at.model, named_blocks(at.model), ranks)
        gradloc = GradLoc(GradLocConfig(), at.model, at.loss, ranks) if name == "gradloc" else None
        records = {one: name in (one, "gradloc") for one in ("part_norms", "term_pulls")}
        record = BackwardRecord(at.model, ranks, **records) if any(records.values()) else None
        found[name] = growth(
            lambda at=at, plain=plain: at.step(plain),
            lambda at=at, w=watch, g=gradloc, r=record: at.step(w, g, r),
            pairs,
        )
    return found


def growth(without: Callable[[], None], having: Callable[[], None], pairs: int) -> dict[str, float]:
    """CPU seconds of `having` over `without`, less 1, in interleaved pairs."""
    for warm in (without, having):
        warm()
    shares, seconds = list[float](), list[float]()
    for pair in range(pairs):
        spent = {work: _cpu_s(work) for work in ((without, having) if pair % 2 == 0 else (having, without))}
        shares.append(spent[having] / spent[without] - 1.0)
        seconds.append(spent[without])
    error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
    return {
        "median": statistics.median(shares),
        "mean": statistics.fmean(shares),
        "standard_error": error,
        "step_cpu_s": statistics.median(seconds),
    }


def _cpu_s(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
