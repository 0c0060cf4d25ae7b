"""One rank of the trainer, put together: its place among the ranks, its model, loss, optimizer and step, with planted
faults as wrappers round the parts that they act on."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

import torch

from rollout.types.weights import Transport
from trainer.algorithms.registry import build_algorithm
from trainer.config.consistency import NoCorrection
from trainer.config.trainer import TrainerConfig, WeightsConfig
from trainer.loss.loss_settings import LossSettings
from trainer.loss.policy_loss import PolicyLoss
from trainer.model.blocks import named_blocks
from trainer.model.loading import DTYPES, load_policy
from trainer.model.model_dir import check_model_dir
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, join_ranks, leave_ranks
from trainer.optim.optimizer import PolicyOptimizer
from trainer.optim.step_watch import StepWatch
from trainer.planted.due import DueFaults
from trainer.planted.learning_rate import planted_rate
from trainer.planted.loss import PlantedLoss
from trainer.planted.mistakes import MistakenLoss
from trainer.planted.pull_meter import PullMeter
from trainer.step.batch_replay import BatchReplay
from trainer.step.build import TrainerOrder
from trainer.step.gradient_step import GradientSeam, GradientStep
from trainer.step.noted_loss import NotedLoss
from trainer.step.planted_step import MistakenGradientStep, PlantedGradientStep
from trainer.step.policy_trainer import PolicyTrainer, TrainerParts
from trainer.weights.canary import canary_token_ids
from trainer.weights.weight_writer import WeightWriter

if TYPE_CHECKING:
    from trainer.weights.weight_sender import WeightSender


def policy_trainer(**order: Unpack[TrainerOrder]) -> PolicyTrainer:
    """Join the other ranks and load the model of `model_dir` as version 0.

    Raises:
        UserError: the model directory or the placement cannot work.
    """
    model_dir, config, weights, seed = order["model_dir"], order["config"], order["weights"], order["seed"]
    facts, settings, dtype = check_model_dir(model_dir), order.get("settings", LossSettings()), DTYPES[config.dtype]
    ranks = join_ranks(config, order["rank"], order["init_method"])
    with ExitStack() as undo:
        undo.callback(leave_ranks)  # a rank that cannot start must not keep the others' group
        torch.manual_seed(seed * config.ranks + ranks.rank)  # pyright: ignore[reportUnknownMemberType]
        model, layout = load_policy(model_dir, config, ranks)
        reference = load_policy(model_dir, config, ranks, frozen=True)[0] if config.algorithm.kl_coef > 0 else None
        rate = planted_rate(settings.faults, config.optimizer, order["total_steps"])
        optimizer = PolicyOptimizer(named_blocks(model), config.optimizer, ranks, rate)
        gradient, noted = _gradient_step(config, settings, model, reference, optimizer, ranks)
        writer = WeightWriter(model, layout, model_dir, dtype=dtype, shard_bytes=weights.shard_bytes, ranks=ranks)
        parts = TrainerParts(
            ranks=ranks,
            model=model,
            algorithm=build_algorithm(config.algorithm),
            optimizer=optimizer,
            gradient=gradient,
            writer=writer,
            sender=_sender(weights, ranks, writer),
            canary_ids=canary_token_ids(facts.vocab_size, facts.tokenizer_size, facts.max_context),
            noted=noted,
        )
        undo.pop_all()
    return PolicyTrainer(config, seed, parts)


def _gradient_step(
    config: TrainerConfig,
    settings: LossSettings,
    model: PolicyModel,
    reference: PolicyModel | None,
    optimizer: PolicyOptimizer,
    ranks: Ranks,
) -> tuple[GradientSeam, NotedLoss]:
    replay = BatchReplay(model) if config.replay_routing else None
    algorithm = build_algorithm(config.algorithm)
    real = PolicyLoss(config.algorithm, algorithm, reference, settings.correction)
    noted = NotedLoss(real)
    mistaken = MistakenLoss(noted, model, settings.faults.in_trainer) if settings.faults.in_trainer else None
    planted = PlantedLoss(mistaken or noted, model) if settings.faults.in_gradients else None
    step: GradientSeam = GradientStep(
        model,
        planted or mistaken or noted,
        optimizer,
        ranks,
        watch=StepWatch(config, model, named_blocks(model), ranks),
        replay=replay,
        gradloc=config.gradloc,
        dtype=DTYPES[config.dtype],
    )
    if mistaken is not None:
        step = MistakenGradientStep(step, mistaken)
    if planted is None:
        return step, noted
    meter = PullMeter(model, ranks, None if replay is None else replay.using)
    uncorrected = PolicyLoss(config.algorithm, algorithm, reference, NoCorrection())
    due = DueFaults(
        settings.faults, planted, model, meter, real=real, uncorrected=uncorrected, corrects=settings.corrects
    )
    return PlantedGradientStep(step, due), noted


def _sender(weights: WeightsConfig, ranks: Ranks, writer: WeightWriter) -> "WeightSender | None":
    """Loads what sends from GPU to GPU only when the config asks for it."""
    if weights.transport == Transport.DISK:
        return None
    from trainer.weights.weight_sender import WeightSender

    return WeightSender(Transport(weights.transport), ranks.rank, ranks.device, writer.whole_tensors)
