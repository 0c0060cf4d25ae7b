"""Which replicas get work: what a replica says of itself at a start, held against what the run expects.

Owns the comparison of tokenizer, declared numerics, weights and canary, at every start of every incarnation. What
cannot be repaired by weights later (other tokens, other log-probs) is refused before the first token is sampled. It
must never know processes or slots: who starts and retires a replica is `replicas`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.ports import Started
from rollout.config import EngineSection, SamplingConfig
from rollout.errors import RegistrationError, TokenizerMismatchError, WeightSyncError
from rollout.tokenization.agreement import TokenizerIdentity, differences
from rollout.types.trajectory import EngineTag, LogprobSemantics
from rollout.types.weights import WeightManifest
from trainer.config.trainer import WeightsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What every replica of a run must be."""

    tokenizer: TokenizerIdentity
    """The trainer's: of the run's model directory, as this process reads it."""
    engine: EngineSection
    sampling: SamplingConfig
    weights: WeightsConfig


def check_registration(who: str, manifest: WeightManifest, expected: Expectation, started: Started) -> float:
    """Mean gap in nats a token between the replica's canary and the trainer's, once everything else agrees.

    Args:
        who: names the replica in messages.
        manifest: the weights that it was started on.

    Raises:
        TokenizerMismatchError: its tokenizer is another one; the message names the fields and probes.
        RegistrationError: it declares other numerics or log-probs than the config asks for; the message names the
            fields of its tag.
        WeightSyncError: digest or canary differ from what the trainer published.
    """
    _check_tokenizer(who, expected.tokenizer, started.tokenizer)
    _check_declared(who, expected, started.tag)
    return _check_weights(who, manifest, expected.weights.canary_ceiling_nats, started)


def canary_gap(manifest: WeightManifest, logprobs: NDArray[np.float32]) -> float:
    """Mean |log-prob difference| in nats between an engine's answer and the trainer's canary; infinity for a wrong
    length or a NaN."""
    if logprobs.shape != manifest.canary.logprobs.shape:
        return float("inf")
    gap = float(np.abs(logprobs.astype(np.float64) - manifest.canary.logprobs.astype(np.float64)).mean())
    return gap if np.isfinite(gap) else float("inf")


def semantics_fit(semantics: LogprobSemantics, sampling: SamplingConfig) -> bool:
    """Whether log-probs of these semantics belong to the distribution that was sampled from (Source: CONSISTENCY.md,
    section 4; vector V12)."""
    truncated = sampling.top_p < 1.0 or sampling.top_k > 0
    if semantics is LogprobSemantics.PROCESSED:
        return True
    return not truncated and (semantics is LogprobSemantics.TEMPERATURE or sampling.temperature == 1.0)


def _check_tokenizer(who: str, expected: TokenizerIdentity, got: TokenizerIdentity) -> None:
    names = differences(expected, got)
    if not names:
        return
    mine, trainers = (
        side.fingerprint_fields | {f"probe {name}": digest for name, digest in side.probes.items()}
        for side in (got, expected)
    )
    differing = "; ".join(
        f"{name}: got {mine.get(name, 'nothing')[:12]}, expected {trainers.get(name, 'nothing')[:12]}" for name in names
    )
    raise TokenizerMismatchError(
        f"{who} tokenizes otherwise than the trainer ({differing}), and no importance weight repairs other tokens: it "
        "gets no work. Give it the files of the trainer's model directory (tokenizer.json, tokenizer_config.json, "
        "chat_template.jinja) and, where only probes differ, the same version of the tokenizers package"
    )


def _check_declared(who: str, expected: Expectation, tag: EngineTag) -> None:
    engine, sampling = expected.engine, expected.sampling
    rows = (
        ("weights_dtype", tag.weights_dtype, engine.dtype, "engine.dtype"),
        ("kv_dtype", tag.kv_dtype, engine.dtype, "engine.dtype"),
        ("quantization", tag.quantization, "none", "the trainer publishes weights as they are"),
        ("kv_across_versions", tag.kv_across_versions, engine.kv_across_versions, "engine.kv_across_versions"),
        ("temperature", tag.temperature, sampling.temperature, "sampling.temperature"),
        ("top_p", tag.top_p, sampling.top_p, "sampling.top_p"),
        ("top_k", tag.top_k, sampling.top_k, "sampling.top_k"),
    )
    wrong = [f"{name}: got {got!r}, expected {wanted!r} ({why})" for name, got, wanted, why in rows if got != wanted]
    if not semantics_fit(tag.logprob_semantics, sampling):
        wrong.append(
            f"logprob_semantics: got {str(tag.logprob_semantics)!r}, expected 'processed' (sampling at temperature "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k} is from another distribution)"
        )
    if tag.truncates and not tag.lists_supports:
        wrong.append(
            "lists_supports: got False, expected True (which tokens a truncated draw kept is part of the policy: an "
            "engine that cannot say so serves with sampling.top_p = 1 and sampling.top_k = 0 only)"
        )
    if wrong:
        raise RegistrationError(
            f"{who} declares what this run does not ask for ({'; '.join(wrong)}), so its log-probs would belong to "
            "another policy: it gets no work. Set the config to what the engine does, or the engine to the config"
        )


def _check_weights(who: str, manifest: WeightManifest, ceiling_nats: float, started: Started) -> float:
    if started.tag.weights_digest != manifest.digest:
        raise WeightSyncError(
            f"{who} loaded weights with digest {started.tag.weights_digest[:12]}, the trainer published "
            f"{manifest.digest[:12]} as {manifest.policy.key}"
        )
    gap = canary_gap(manifest, started.canary_logprobs)
    if not gap <= ceiling_nats:
        raise WeightSyncError(
            f"{who} differs from the trainer by {gap:.3g} nats a token on the canary at {manifest.policy.key}, more "
            f"than weights.canary_ceiling_nats = {ceiling_nats:g}; the engine computes another model (dtype, "
            "quantisation, missing tensors)"
        )
    return gap
