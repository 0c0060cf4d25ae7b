"""Importance weights of the loss's tokens, one preset a config type. Torch, on flat tensors over the N loss tokens of a
micro-batch.

It owns what a preset means: bounds are ratios, compared in log space (e^d is monotone, so an asymmetric band accepts
what its numbers say, and nothing overflows on the way). No weight is ever raised to a lower bound. It must never know
which policies the log-ratio compares, nor the surrogate it multiplies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import UserError
from trainer.config.consistency import (
    BandSection,
    CorrectionConfig,
    DecoupledConfig,
    GeoRsConfig,
    IcePopConfig,
    MisSequenceConfig,
    MisTokenConfig,
    NoCorrection,
    OpsmConfig,
    SeqClipConfig,
    TisConfig,
)
from trainer.types.loss_tokens import row_means, row_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionInputs:
    """What a correction may look at: flat tensors over the N loss tokens, on one device."""

    log_ratio: Tensor
    """[N] nats, raw: d_engine in mode `gate`, else log pi at the start of the step - log pi_rollout."""
    rows: Tensor
    """[N] int64 in [0, num_rows): the sequence that a token belongs to."""
    num_rows: int
    advantages: Tensor
    """[N]; only `opsm` reads it, as each row's mean."""
    old_minus_now: Tensor
    """[N] nats, log pi_old - log pi_now, where pi_old is the sampler as its log-probs say; only `opsm` reads it."""

    def __post_init__(self) -> None:
        shapes = [tuple(tensor.shape) for tensor in (self.log_ratio, self.rows, self.advantages, self.old_minus_now)]
        if len(set(shapes)) > 1 or self.log_ratio.ndim != 1:
            raise ValueError(f"log-ratio, rows, advantages and old - now have shapes {shapes}; expected one [N]")
        if self.rows.dtype != torch.int64:
            raise ValueError(f"rows are {self.rows.dtype}; expected torch.int64")


def correction_weights(config: CorrectionConfig, inputs: CorrectionInputs) -> Tensor:
    """The weight that multiplies each token's loss term: [N], without a graph, float32 (float64 for a float64
    log-ratio).

    A sequence's quantities run over its loss tokens in this micro-batch, so a row must be whole. `none` and `opsm`
    without a veto do not read the log-ratio.

    Raises:
        ValueError: a loss token has a log-ratio (`opsm`: old - now) that is not finite; the message says how many.
        UserError: a `decoupled` weight without a cap exceeds the float range.

    Source: tis, https://fengyao.notion.site/off-policy-rl; icepop, Ring-1T (arXiv 2510.18855); opsm, DeepSeek-V3.2
    (arXiv 2512.02556);
    decoupled, arXiv 2110.00641 and AReaL (arXiv 2505.24298).
    """
    with torch.no_grad():
        weights = _preset_weights(config, inputs)
        return torch.where(vetoed_tokens(config, inputs), torch.zeros_like(weights), weights)


def vetoed_tokens(config: CorrectionConfig, inputs: CorrectionInputs) -> Tensor:
    """[N] True for every token of a sequence that has a ratio below `config.veto`.

    Raises:
        ValueError: there is a veto and a log-ratio is not finite.
    """
    if config.veto is None:
        return torch.zeros_like(inputs.log_ratio, dtype=torch.bool)
    low = (_log_ratio(inputs) < math.log(config.veto)).double()
    return row_sums(low, inputs.rows, inputs.num_rows) > 0


def _preset_weights(config: CorrectionConfig, inputs: CorrectionInputs) -> Tensor:
    match config:
        case NoCorrection():
            return torch.ones_like(_compute(inputs.log_ratio))
        case TisConfig():
            return torch.exp(_log_ratio(inputs)).clamp(max=config.cap)
        case IcePopConfig() | MisTokenConfig():
            return _ratio_where_inside(_log_ratio(inputs), config)
        case MisSequenceConfig():
            return _ratio_where_inside(row_sums(_log_ratio(inputs), inputs.rows, inputs.num_rows), config)
        case SeqClipConfig():
            mean = _row_means(_log_ratio(inputs), inputs)
            return ((mean > math.log(config.low)) & (mean < math.log(config.high))).to(mean.dtype)
        case GeoRsConfig():
            mean = _row_means(_log_ratio(inputs), inputs)
            return _inside(mean, config).to(mean.dtype)
        case OpsmConfig():
            drift = _row_means(_finite("old - now", inputs.old_minus_now), inputs)
            dropped = (_row_means(inputs.advantages, inputs) < 0) & (drift > config.delta)
            return (~dropped).to(_compute(inputs.log_ratio).dtype)
        case DecoupledConfig():
            return _decoupled(config, _log_ratio(inputs))


def _decoupled(config: DecoupledConfig, log_ratio: Tensor) -> Tensor:
    if config.cap is not None:
        # Above the cap a token is dropped, not clamped, as in the implementation of arXiv 2505.24298.
        return torch.where(log_ratio <= math.log(config.cap), torch.exp(log_ratio), torch.zeros_like(log_ratio))
    weights = torch.exp(log_ratio)
    beyond = int(torch.isinf(weights).sum().item())
    if beyond:
        raise UserError(
            f"got a log-ratio of {float(log_ratio.max().item()):g} with correction decoupled: {beyond} of "
            f"{weights.numel()} weights exceed {weights.dtype}; set consistency.correction.cap"
        )
    return weights


def _ratio_where_inside(log_ratio: Tensor, band: BandSection) -> Tensor:
    return torch.where(_inside(log_ratio, band), torch.exp(log_ratio), torch.zeros_like(log_ratio))


def _inside(log_ratio: Tensor, band: BandSection) -> Tensor:
    """low <= e^log_ratio <= high."""
    return (log_ratio >= math.log(band.low)) & (log_ratio <= math.log(band.high))


def _row_means(values: Tensor, inputs: CorrectionInputs) -> Tensor:
    """[N] each token's mean over its row."""
    return row_means(values, inputs.rows, inputs.num_rows)


def _log_ratio(inputs: CorrectionInputs) -> Tensor:
    return _finite("log-ratio", inputs.log_ratio)


def _finite(name: str, values: Tensor) -> Tensor:
    """The values in compute precision.

    Raises:
        ValueError: one is not finite.
    """
    wide = _compute(values)
    bad = int((~torch.isfinite(wide)).sum().item())
    if bad:
        raise ValueError(
            f"{bad} of {wide.numel()} loss tokens have a {name} that is not finite; expected nats: take these tokens "
            "out of the loss"
        )
    return wide


def _compute(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
