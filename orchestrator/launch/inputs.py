"""What a run needs besides its config, checked before anything starts: model facts, tokenizer, prompts."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import RunConfig
from rollout.environments.registry import build_source
from rollout.errors import UserError
from rollout.evaluation.overlap import NGRAM, PromptCheck, check_prompts
from rollout.evaluation.prompts import held_out_prompts
from rollout.faults.sources import plant_source
from rollout.rewards.registry import needs_answer
from rollout.tokenization.agreement import TokenizerIdentity, identify
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import PromptSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run needs besides its config: checked before anything starts."""

    model_dir: Path
    max_context: int
    source: PromptSource
    tokenizer: TokenizerIdentity
    """The trainer's, which every replica must share."""
    prompts: PromptCheck | None = None
    """Duplicates and overlap of the run's prompts; None: not checked."""


def check_inputs(config: RunConfig, model_dir: Path) -> Inputs:
    """Read model facts, tokenizer and prompts.

    Raises:
        UserError: the model directory, the prompts, or their fit is wrong.
    """
    from trainer.model.model_dir import check_model_dir

    facts = check_model_dir(model_dir)
    wanted = config.engine.max_model_len
    if wanted is not None and facts.max_context is not None and wanted > facts.max_context:
        raise UserError(
            f"got engine.max_model_len = {wanted}, but the model in {model_dir} has a context of {facts.max_context}; "
            f"set {facts.max_context} or less"
        )
    source = training_source(config)
    max_context = wanted or facts.max_context
    if max_context is None:
        raise UserError(
            f"the config of the model in {model_dir} does not say how long its context is; set engine.max_model_len"
        )
    prompts = checked_prompts(config, source)
    return Inputs(
        model_dir=model_dir,
        max_context=max_context,
        source=source,
        tokenizer=identify(load_tokenizer(model_dir)),
        prompts=prompts,
    )


def training_source(config: RunConfig) -> PromptSource:
    """Where training prompts come from, planted faults included.

    Raises:
        UserError: the prompts are missing or malformed, or a planted fault cannot act on them.
    """
    environment, seed = config.environment, config.run.seed
    source = build_source(environment, seed, needs_answer(config.reward))
    held_out = held_out_prompts(environment, config.evaluation, seed, needs_answer(config.reward))
    digits = environment.digits if environment.type == "arithmetic" else None
    return plant_source(source, config.faults, held_out, digits=digits, seed=seed)


def checked_prompts(config: RunConfig, source: PromptSource) -> PromptCheck:
    """Look for duplicates among the training prompts, and for held-out prompts among them.

    Raises:
        UserError: more of the held-out prompts are also trained on than `evaluation.max_overlap` allows.
    """
    evaluation = config.evaluation
    held_out = held_out_prompts(config.environment, evaluation, config.run.seed, needs_answer(config.reward))
    check = check_prompts(source.draw(PromptCursor(), source.size)[0], held_out)
    if check.overlap > evaluation.max_overlap:
        raise UserError(
            f"{check.overlapping} of {check.evaluation_prompts} held-out prompts are also training prompts "
            f"({check.exact} exactly, {check.by_ngrams} by a run of {NGRAM} words), for example {check.example!r}; "
            f"expected a share of at most evaluation.max_overlap = {evaluation.max_overlap:g}: take them out of the "
            "training prompts, or raise evaluation.max_overlap"
        )
    return check
