"""The configuration of an evaluation, part by part: two scores are comparable when all parts are equal. The weights
stand beside it, not in it."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from rollout.config import EnvironmentConfig, RewardConfig
from rollout.published.digests import canonical_json, json_digest
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.generation import SamplingParams
from rollout.types.prompts import Prompt
from rollout.types.trajectory import EngineTag


def configuration_parts(
    *,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[NDArray[np.int32]],
    tokenizer: Tokenizer,
    environment: EnvironmentConfig,
    reward: RewardConfig,
    sampling: SamplingParams,
    samples: int,
    tag: EngineTag,
) -> tuple[tuple[str, str], ...]:
    """(name, value or digest) of everything that a score depends on besides the weights.

    Args:
        prompt_ids: what the policy really sees, one a prompt: a template that changes without saying so shows here.
    """
    system = getattr(environment, "system_prompt", None)
    tasks = [[p.prompt_id, p.text, [[m.role, m.content] for m in p.messages], p.answer, p.metadata] for p in prompts]
    return (
        ("prompts", json_digest(tasks)),
        ("prompt_ids", json_digest([ids.tolist() for ids in prompt_ids])),
        ("chat_template", tokenizer.chat_template_digest()),
        ("system_prompt", "" if system is None else json_digest(system)),
        ("tokenizer", tokenizer.fingerprint()),
        ("environment", environment.type),
        ("reward", json_digest(reward.model_dump(mode="json"))),
        ("sampling", canonical_json({**asdict(sampling), "samples": samples}).decode()),
        ("engine", f"{tag.engine} {tag.engine_version}, weights {tag.weights_dtype}, KV {tag.kv_dtype}"),
    )


def fingerprint(parts: Sequence[tuple[str, str]]) -> str:
    """SHA-256 over all parts."""
    return json_digest(dict(parts))
