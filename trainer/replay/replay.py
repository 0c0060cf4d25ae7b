"""Runs the fixed batch of a saved step again, in several ways, and says where the cause of its trouble lies. One rank,
no Ray.

saved step + published weights -> (configured, again, deterministic, float32) -> verdict, first block, tokens
"""

import math
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from trainer.algorithms.registry import build_algorithm
from trainer.batching.batcher import GroupRules, build_batch
from trainer.batching.packing import pack
from trainer.checkpointing.saved_steps import SavedStep
from trainer.config.gradloc import CalibratedTau, GivenTau, GradLocConfig
from trainer.config.trainer import TrainerConfig
from trainer.gradloc import GradLoc
from trainer.gradloc.gradloc import StepSigns
from trainer.gradloc.probe.probe import StepData, TokenLoss, draws_random_numbers
from trainer.gradloc.probe.random_states import RandomState
from trainer.loss.loss_settings import LossSettings
from trainer.loss.policy_loss import PolicyLoss, loss_tokens
from trainer.model.blocks import block_norms, gradients_of, named_blocks
from trainer.model.loading import DTYPES, load_policy
from trainer.model.ranks import Ranks, join_ranks, leave_ranks
from trainer.optim.clipping import global_norm
from trainer.planted.loss import PlantedLoss, PlantedStep
from trainer.replay.places import NonFinitePlaces
from trainer.replay.report import ReplayCulprit, ReplayReport, ReplayRun, shows_again, verdict_of
from trainer.step.batch_replay import BatchReplay
from trainer.types.evidence import audited_groups
from trainer.types.gradloc import Outcome
from trainer.types.step import MicroBatch, StepBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySource:
    """What a step is replayed from."""

    saved: SavedStep
    weights_dir: Path
    """The published weights that it started from."""
    reference_dir: Path
    """The model that the run began with; read where the loss has a KL to it."""
    config: TrainerConfig
    settings: LossSettings


def replay(source: ReplaySource) -> ReplayReport:
    """Run the batch as it was configured, twice; with deterministic kernels; and in float32, where that is something
    else.

    Raises:
        UserError: this process already runs a trainer rank, or the model cannot be loaded.
    """
    cuda = source.config.num_gpus > 0 and torch.cuda.is_available()
    config = source.config.model_copy(
        update={"ranks": 1, "num_gpus": source.config.num_gpus if cuda else 0.0, "dtype": source.saved.dtype}
    )
    with TemporaryDirectory() as folder:
        ranks = join_ranks(config, 0, f"file://{folder}/rendezvous")
        try:
            model = _ReplayModel(source, config, ranks)
            runs = [model.run("configured"), model.run("again"), model.run("deterministic", deterministic=True)]
            searchable = not runs[0].finite or (shows_again(runs[0], source.saved) and not math.isnan(source.saved.tau))
            search, culprits = model.search(runs[-1]) if searchable else ("", ())
            if config.dtype != "float32":
                del model
                runs.append(_ReplayModel(source, config.model_copy(update={"dtype": "float32"}), ranks).run("float32"))
        finally:
            leave_ranks()
    return ReplayReport(
        verdict=verdict_of({run.name: run for run in runs}, source.saved),
        reproduces=shows_again(runs[0], source.saved),
        device=str(ranks.device),
        runs=tuple(runs),
        search=search,
        culprits=culprits,
    )


class _ReplayModel:
    """The model of the saved version in one dtype, and the batch in front of it."""

    def __init__(self, source: ReplaySource, config: TrainerConfig, ranks: Ranks) -> None:
        saved, settings = source.saved, source.settings
        self._ranks, self._dtype, self._saved = ranks, config.dtype, saved
        self._model = load_policy(source.weights_dir, config, ranks)[0]
        self._blocks = named_blocks(self._model)
        reference = (
            load_policy(source.reference_dir, config, ranks, frozen=True)[0] if config.algorithm.kl_coef > 0 else None
        )
        algorithm = build_algorithm(config.algorithm)
        self._batch = build_batch(
            audited_groups(saved.groups),
            algorithm,
            saved.request.oldest_version,
            config.algorithm.aggregation,
            saved.request.old_logprobs,
            GroupRules.of(config.algorithm),
        )
        step: StepBatches = pack(self._batch.samples, saved.ranks, config.micro_batch_tokens)
        self._loss: TokenLoss = PolicyLoss(config.algorithm, algorithm, reference, settings.correction)
        if saved.planted:
            # What was planted then, not what would be drawn now: another dtype or device may measure otherwise.
            planted = PlantedLoss(self._loss, self._model)
            step = planted.plant(PlantedStep(batch=self._batch, micro_batches=step), saved.planted).micro_batches
            self._loss = planted
        self._micro_batches: tuple[MicroBatch, ...] = tuple(micro for rank in step for micro in rank)
        self._routing = BatchReplay(self._model) if config.replay_routing else None
        self._places = NonFinitePlaces(self._model)
        self._draws = draws_random_numbers(self._model)

    def run(self, name: str, *, deterministic: bool = False) -> ReplayRun:
        """Forward and backward of every micro-batch from the saved random state."""
        self._model.zero_grad(set_to_none=True)
        self._places.begin()
        RandomState(cpu=torch.as_tensor(self._saved.random_state), device=None).put_back(self._ranks.device)
        total = 0.0
        self._random_states: list[RandomState] = []
        with _deterministic() if deterministic else nullcontext():
            for number, micro in enumerate(self._micro_batches):
                self._places.micro_batch(number)
                if self._draws:
                    self._random_states.append(RandomState.take(self._ranks.device))
                with nullcontext() if self._routing is None else self._routing.using(micro):
                    loss = self._loss(
                        self._model,
                        loss_tokens(micro, self._ranks.device),
                        self._batch.temperature,
                        self._batch.old_logprob_source,
                    )[0]
                    self._places.see_loss(loss)
                    loss.backward()  # pyright: ignore[reportUnknownMemberType]
                total += float(loss.detach())
        self._places.see_gradients(self._blocks)
        norms = block_norms(gradients_of(self._blocks), self._ranks.device)
        return ReplayRun(
            name=name,
            dtype=self._dtype,
            deterministic=deterministic,
            loss=total,
            grad_norm=global_norm(norms),
            block_norms=tuple((block.name, norm) for block, norm in zip(self._blocks, norms, strict=True)),
            forward=self._places.first_forward,
            backward=self._places.first_backward,
        )

    def search(self, last: ReplayRun) -> tuple[str, tuple[ReplayCulprit, ...]]:
        """How the search for tokens came out, on the gradient that the last run left: those whose terms alone are not
        finite, or that located its norm."""
        tau = self._saved.tau
        threshold = CalibratedTau() if math.isnan(tau) else GivenTau(tau=tau)
        config = GradLocConfig(threshold=threshold, budget_passes=max(64, 4 * len(self._micro_batches)))
        gradloc = GradLoc(config, self._model, self._loss, self._ranks, dtype=DTYPES[self._dtype])
        data = StepData(
            micro_batches=self._micro_batches,
            temperature=self._batch.temperature,
            source=self._batch.old_logprob_source,
            random_states=self._random_states,
            context=None if self._routing is None else self._routing.using,
        )
        # A saved step was searched for a reason that the replay need not have again, such as a clip's scale or
        # suspects: ask as a clip does.
        report = gradloc.observe(last.grad_norm if last.finite else math.nan, data, signs=StepSigns(smallest_scale=0.0))
        if report is None:
            raise RuntimeError("a step that was to be searched started no search")
        named = report.hits if not last.finite or report.outcome is Outcome.LOCATED else ()
        culprits = [
            ReplayCulprit(
                trajectory_id=hit.trajectory_id,
                position=hit.position,
                token_id=int(self._micro_batches[hit.micro_batch].token_ids[hit.row, hit.position]),
                norm=hit.norm,
                blocks=tuple(name for name, norm in hit.block_norms if not math.isfinite(norm)),
            )
            for hit in named
        ]
        return str(report.outcome), tuple(culprits)


@contextmanager
def _deterministic() -> Generator[None]:
    """Kernels that give the same bits every time, where torch has them; it warns where it has none."""
    before = torch.are_deterministic_algorithms_enabled()
    cast(Any, torch).use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cast(Any, torch).use_deterministic_algorithms(before)
