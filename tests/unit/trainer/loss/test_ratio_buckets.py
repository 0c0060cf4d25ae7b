"""Log-ratios counted by bucket in the trainer are those that numpy counts, and add up over micro-batches."""

import numpy as np
import pytest
import torch

from trainer.loss.ratio_buckets import PARTS, RATIO_SUMS, log_ratios, ratio_sums
from trainer.types.histograms import LOG_RATIO_EDGES, bucket_counts
from trainer.types.step import OldLogprobSource


def drawn(seed: int, tokens: int = 500) -> list[torch.Tensor]:
    """One [N] tensor a part; ends of buckets and a zero among them."""
    random = np.random.default_rng(seed)
    ends = np.array([*LOG_RATIO_EDGES, 0.0], dtype=np.float32)
    return [torch.from_numpy(np.concatenate([random.normal(0, 0.4, tokens).astype(np.float32), ends])) for _ in PARTS]


def test_counts_and_sums_are_those_of_numpy():
    parts = drawn(0)
    found = dict(
        log_ratios(dict(zip(RATIO_SUMS, ratio_sums(parts).tolist(), strict=True)), OldLogprobSource.RECOMPUTED)
    )
    for part, values in zip(PARTS, parts, strict=True):
        expected = bucket_counts(values.numpy(), np.array(LOG_RATIO_EDGES, dtype=np.float32).tolist())
        assert found[part].counts == expected.counts
        assert found[part].total == pytest.approx(expected.total, rel=1e-12)


def test_micro_batches_add_up_to_the_whole():
    first, second = drawn(1, 40), drawn(2, 70)
    whole = ratio_sums([torch.cat(pair) for pair in zip(first, second, strict=True)])
    torch.testing.assert_close(ratio_sums(first) + ratio_sums(second), whole, rtol=1e-12, atol=0)


def test_without_recomputed_log_probs_only_the_total_is_known():
    sums = dict(zip(RATIO_SUMS, ratio_sums(drawn(3)).tolist(), strict=True))
    assert [part for part, _ in log_ratios(sums, OldLogprobSource.ROLLOUT)] == ["total"]
    assert [part for part, _ in log_ratios(sums, OldLogprobSource.RECOMPUTED)] == list(PARTS)


def test_a_ratio_that_is_not_a_number_is_above_all_buckets():
    """Its step is skipped; the other tokens keep their places."""
    parts = [torch.tensor([float("nan"), 0.0])] * len(PARTS)
    counts = ratio_sums(parts)[: len(LOG_RATIO_EDGES) + 1].tolist()
    assert (counts[-1], sum(counts)) == (1.0, 2.0)
