"""GSPO: the ratio of a sequence against golden vectors, its gradient against the published objective in float64, and
the same loss however sequences are packed and dealt out over ranks."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.algorithms.registry import build_algorithm
from trainer.batching.packing import pack
from trainer.config.consistency import (
    ConsistencyConfig,
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
from trainer.config.trainer import GspoConfig, check_algorithm
from trainer.loss.policy_loss import PolicyLoss, loss_tokens
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import MicroBatch, OldLogprobSource, TrainingSample

CPU = torch.device("cpu")
GSPO = build_algorithm(GspoConfig())


def tokens(sequences: Sequence[Sequence[float]], advantages: Sequence[float]) -> tuple[Tensor, LossTokens]:
    """Log-probs with a graph whose differences to the old ones are `sequences`, and their tokens: weights 1/(S n)."""
    lengths = [len(sequence) for sequence in sequences]
    rows = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(lengths))
    old = torch.linspace(-3.0, -0.5, sum(lengths), dtype=torch.float64)
    difference = torch.tensor([d for sequence in sequences for d in sequence], dtype=torch.float64)
    empty = torch.zeros(0, dtype=torch.int64)
    weights = torch.tensor([1 / (len(lengths) * n) for n in lengths], dtype=torch.float64)
    flat = LossTokens(
        token_ids=torch.zeros((len(sequences), 2), dtype=torch.int64),
        positions=empty,
        targets=empty,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64)[rows],
        weights=weights[rows],
        rows=rows,
    )
    return (old + difference).requires_grad_(), flat


@pytest.mark.parametrize(
    ("d", "s", "clipped", "advantage"),
    [("d", "s", "clipped_if_Apos", 1.0), ("d2", "s2", "clipped2_if_Apos", 1.0), ("d2", "s2", "clipped2_if_Aneg", -1.0)],
)
def test_the_sequence_ratio_and_its_clip_are_the_golden_ones(
    golden: dict[str, Any], d: str, s: str, clipped: str, advantage: float
):
    vector = golden["V5_gspo"]
    config = GspoConfig()
    np.testing.assert_allclose([1 - config.clip_low, 1 + config.clip_high], [vector["clip_lo"], vector["clip_hi"]])
    logprobs, flat = tokens([vector[d]], [advantage])
    low, high, ratio, _ = GSPO.measure(logprobs, flat)
    np.testing.assert_allclose(ratio.detach(), [vector[s]] * 3, rtol=1e-9)
    assert not low.any() and high.tolist() == [float(vector[clipped])] * 3
    (gradient,) = torch.autograd.grad(torch.dot(GSPO.loss(logprobs, flat), flat.weights), logprobs)
    wanted = [0.0 if vector[clipped] else -advantage * vector[s] / 3] * 3
    np.testing.assert_allclose(gradient, wanted, rtol=1e-9)


def test_loss_and_gradient_are_those_of_the_published_objective():
    """-mean over sequences of min(s A, clip(s) A), with the graph through the mean: arXiv 2507.18071, eq. 5."""
    rng = np.random.default_rng(0)
    sequences = [(rng.standard_normal(n) * 6e-4).tolist() for n in rng.integers(1, 9, 60)]
    advantages = rng.standard_normal(60).tolist()
    logprobs, flat = tokens(sequences, advantages)
    loss = torch.dot(GSPO.loss(logprobs, flat), flat.weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    objective = torch.zeros((), dtype=torch.float64)
    for row, advantage in enumerate(advantages):
        s = (logprobs - flat.old_logprobs)[flat.rows == row].mean().exp()
        objective = objective + torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / len(advantages)
    (wanted,) = torch.autograd.grad(-objective, logprobs)
    torch.testing.assert_close(loss, -objective, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    low, high, *_ = GSPO.measure(logprobs, flat)
    assert 0 < low.mean() < 1 and 0 < high.mean() < 1 and (gradient == 0).any()


class Table:
    """Stands where the model stands: one log-prob for each token id, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(50, generator=generator, dtype=torch.float64).requires_grad_()

    def __call__(
        self, token_ids: Tensor, positions: Tensor, targets: Tensor, temperature: float, support: object = None
    ):
        logprobs = torch.log_softmax(self.logits, dim=0)[targets]
        return logprobs, torch.zeros_like(logprobs)


def samples(table: Table) -> list[TrainingSample]:
    """Sequences that the policy has moved away from a little, some farther than the clip."""
    rng = np.random.default_rng(3)
    now = torch.log_softmax(table.logits.detach(), dim=0).numpy()
    built: list[TrainingSample] = []
    for index, length in enumerate(rng.integers(3, 14, 9).tolist()):
        ids, mask = rng.integers(1, 50, length).astype(np.int32), np.arange(length) >= 2
        old = np.where(mask, now[ids] + rng.standard_normal(length) * 1e-3, 0).astype(np.float32)
        built.append(
            TrainingSample(
                trajectory_id=f"t-{index}",
                token_ids=ids,
                loss_mask=mask,
                old_logprobs=old,
                old_logprob_source=OldLogprobSource.ROLLOUT,
                rollout_logprobs=old,
                advantages=np.full(length, rng.standard_normal(), dtype=np.float32),
                token_weight=1 / (9 * int(mask.sum())),
            )
        )
    return built


def double(micro: MicroBatch) -> LossTokens:
    """Its loss tokens with everything in float64, as the table answers."""
    flat = loss_tokens(micro, CPU)
    names = ("old_logprobs", "rollout_logprobs", "advantages", "weights")
    values = {name: getattr(flat, name).double() for name in names}
    return LossTokens(
        token_ids=flat.token_ids, positions=flat.positions, targets=flat.targets, rows=flat.rows, **values
    )


def gradient(loss: PolicyLoss, table: Table, micro_batches: Sequence[MicroBatch], only: bool = False) -> Tensor:
    """Summed over micro-batches, or with `only` over passes that each ask for one token's term."""
    total = torch.zeros_like(table.logits)
    for micro in micro_batches:
        flat = double(micro)
        for chosen in torch.arange(flat.targets.numel()).split(1) if only else [None]:
            value, _ = loss(cast(PolicyModel, cast(Any, table)), flat, 1.0, OldLogprobSource.ROLLOUT, chosen)
            total += torch.autograd.grad(value, table.logits)[0]
    return total


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_the_gradient_depends_neither_on_packing_nor_on_ranks_and_is_a_sum_over_tokens(ranks: int, budget: int):
    table = Table()
    loss = PolicyLoss(GspoConfig(), GSPO, None, NoCorrection())
    (whole,) = pack(samples(table), 1, 10_000)[0]
    wanted = gradient(loss, table, [whole])
    assert wanted.any()
    dealt = [micro for rank in pack(samples(table), ranks, budget) for micro in rank]
    torch.testing.assert_close(gradient(loss, table, dealt), wanted, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(gradient(loss, table, dealt, only=True), wanted, rtol=1e-10, atol=1e-14)


def test_another_token_that_is_no_number_spoils_its_own_sequence_alone():
    """A search asks for terms one by one: those of other sequences stay numbers."""
    logprobs, flat = tokens([[1e-4, float("nan")], [2e-4, 0.0]], [1.0, 1.0])
    terms = GSPO.loss(logprobs, flat)
    assert torch.isfinite(terms).tolist() == [False, False, True, True]
    assert PolicyLoss(GspoConfig(), GSPO, None, NoCorrection()).couples_tokens


@pytest.mark.parametrize("correction", [NoCorrection(veto=1e-4), SeqClipConfig(), GeoRsConfig(), OpsmConfig()])
def test_corrections_that_keep_or_drop_go_with_it(correction: CorrectionConfig):
    for mode in ("off", "gate"):
        check_algorithm(GspoConfig(), 4, ConsistencyConfig(mode=mode, correction=correction))


@pytest.mark.parametrize("correction", [TisConfig(), IcePopConfig(), MisTokenConfig(), MisSequenceConfig()])
def test_weights_that_are_a_ratio_go_with_it_only_where_old_logprobs_are_recomputed(correction: CorrectionConfig):
    check_algorithm(GspoConfig(), 4, ConsistencyConfig(mode="gate", correction=correction))
    for config in (ConsistencyConfig(mode="audit"), ConsistencyConfig(mode="gate", when_behind="audit")):
        with pytest.raises(ValueError, match=r'"geo_rs", "opsm" or "none", or consistency.mode = "gate"'):
            check_algorithm(GspoConfig(), 4, config.model_copy(update={"correction": correction}))


def test_decoupled_leaves_no_sequence_ratio_and_is_refused():
    with pytest.raises(ValueError, match=r'set consistency.correction.type to "seq_clip", "geo_rs", "opsm" or "none"$'):
        check_algorithm(GspoConfig(), 4, ConsistencyConfig(mode="gate", correction=DecoupledConfig()))
