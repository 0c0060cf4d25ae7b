"""The service of a run, put together: the trainer's model and numerics, a tokenizer of its own, and the auditor."""

from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from rollout.config import EngineConfig, EnvironmentConfig, returns_routing
from rollout.environments.registry import build_envs
from rollout.tokenization.tokenizer import load_tokenizer
from trainer.config.consistency import ConsistencyConfig
from trainer.config.trainer import TrainerConfig
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.service.auditor import AuditedRun, Auditor
from trainer.consistency.service.prompts import PromptReader
from trainer.consistency.service.step_audit import DeclaredTrainer
from trainer.model.model_dir import check_model_dir


class AuditorOrder(TypedDict):
    """What the service of a run is built from."""

    model_dir: Path
    weights_dir: Path
    config: ConsistencyConfig
    trainer: TrainerConfig
    environment: EnvironmentConfig
    engine: EngineConfig
    max_staleness: int
    deterministic: bool
    total_steps: int
    """Where the learning-rate schedule ends."""


def build_auditor(**order: Unpack[AuditorOrder]) -> Auditor:
    """The service of a run: the trainer's model and numerics, version 0 loaded.

    Raises:
        UserError: the model directory cannot be loaded, or there is no GPU where the config asks for one.
    """
    import torch

    from trainer.consistency.scoring.held_versions import HeldVersions
    from trainer.consistency.scoring.scorer import Scorer
    from trainer.optim.optimizer import learning_rate

    model_dir, config, trainer = order["model_dir"], order["config"], order["trainer"]
    torch.set_num_threads(config.threads)
    facts = check_model_dir(model_dir)
    versions = HeldVersions(
        model_dir,
        order["weights_dir"],
        dtype=trainer.dtype,
        chunk_tokens=trainer.logprob_chunk_tokens,
        max_versions=config.max_versions or order["max_staleness"] + 2,
        device=torch.device("cuda" if config.num_gpus else "cpu"),
    )
    tokenizer = load_tokenizer(model_dir)
    prompts = PromptReader(
        read=lambda prompt: build_envs(order["environment"], prompt, tokenizer, 1)[0].prompt_ids(),
        special_ids=tokenizer.special_ids,
        through_text=lambda ids: tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True)),
    )
    run = AuditedRun(
        model=facts,
        bos_id=tokenizer.bos_id,
        deterministic=order["deterministic"],
        trainer_dtype=trainer.dtype,
        prompts=prompts,
        returns_routing=returns_routing(order["engine"]),
        options=ScoreOptions(replay_routing=trainer.replay_routing),
        trainer=DeclaredTrainer(
            config=trainer, rate=partial(learning_rate, trainer.optimizer, order["total_steps"]), is_moe=facts.is_moe
        ),
    )
    return Auditor(Scorer(versions, config.batch_tokens), config, run)
