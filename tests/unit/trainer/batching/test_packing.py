"""Micro-batches: every sample once, the same number for every rank, within the budget, always the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.batching.packing import pack
from trainer.types.step import MicroBatch, OldLogprobSource, TrainingSample


def sample(index: int, length: int) -> TrainingSample:
    rng = np.random.default_rng([index, length])
    mask = np.arange(length) > 0
    return TrainingSample(
        trajectory_id=f"t-{index}",
        token_ids=rng.integers(1, 100, size=length, dtype=np.int32),
        loss_mask=mask,
        old_logprobs=np.where(mask, rng.standard_normal(length), 0).astype(np.float32),
        old_logprob_source=OldLogprobSource.ROLLOUT,
        rollout_logprobs=np.where(mask, rng.standard_normal(length), 0).astype(np.float32),
        advantages=np.where(mask, rng.standard_normal(length), 0).astype(np.float32),
        token_weight=0.25,
    )


def ids(batches: tuple[MicroBatch, ...]) -> list[str]:
    return [trajectory_id for batch in batches for trajectory_id in batch.trajectory_ids if trajectory_id]


lengths_lists = st.lists(st.integers(2, 60), max_size=30)


@given(lengths=lengths_lists, ranks=st.integers(1, 4), budget=st.integers(1, 200))
def test_every_sample_is_in_one_micro_batch_of_one_rank(lengths: list[int], ranks: int, budget: int):
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    packed = pack(samples, ranks, budget)
    assert sorted(i for rank in packed for i in ids(rank)) == sorted(s.trajectory_id for s in samples)
    assert {len(rank) for rank in packed} == {len(packed[0])}
    assert len(packed) == ranks
    assert len(packed[0]) >= 1


@given(lengths=lengths_lists, ranks=st.integers(1, 4), budget=st.integers(1, 200))
def test_no_micro_batch_exceeds_the_budget_unless_one_row_does(lengths: list[int], ranks: int, budget: int):
    for batch in (b for rank in pack([sample(i, n) for i, n in enumerate(lengths)], ranks, budget) for b in rank):
        assert batch.token_ids.size <= max(budget, batch.token_ids.shape[1])


@given(lengths=lengths_lists, ranks=st.integers(1, 4), budget=st.integers(1, 200))
def test_a_filler_row_has_no_name_and_no_loss_and_stands_alone(lengths: list[int], ranks: int, budget: int):
    for batch in (b for rank in pack([sample(i, n) for i, n in enumerate(lengths)], ranks, budget) for b in rank):
        if "" in batch.trajectory_ids:
            assert batch.trajectory_ids == ("",)
            assert not batch.loss_mask.any()
            assert not batch.token_weights.any()


@given(lengths=lengths_lists, ranks=st.integers(1, 4), budget=st.integers(1, 200))
def test_rows_keep_their_tokens_and_padding_is_outside_the_loss(lengths: list[int], ranks: int, budget: int):
    samples = {f"t-{i}": sample(i, n) for i, n in enumerate(lengths)}
    for batch in (b for rank in pack(list(samples.values()), ranks, budget) for b in rank):
        for row, trajectory_id in enumerate(batch.trajectory_ids):
            if trajectory_id:
                source, length = samples[trajectory_id], samples[trajectory_id].token_ids.size
                np.testing.assert_array_equal(batch.token_ids[row, :length], source.token_ids)
                np.testing.assert_array_equal(batch.old_logprobs[row, :length], source.old_logprobs)
                np.testing.assert_array_equal(batch.rollout_logprobs[row, :length], source.rollout_logprobs)
                np.testing.assert_array_equal(batch.loss_mask[row, :length], source.loss_mask)
                assert not batch.loss_mask[row, length:].any()
                np.testing.assert_array_equal(batch.advantages[row, :length], source.advantages)
                assert batch.token_weights[row] == source.token_weight


@given(lengths=st.lists(st.integers(2, 60), min_size=8, max_size=40), ranks=st.integers(2, 4))
def test_ranks_get_like_amounts_of_tokens(lengths: list[int], ranks: int):
    samples = {f"t-{i}": sample(i, n) for i, n in enumerate(lengths)}
    shares = [sum(samples[i].token_ids.size for i in ids(rank)) for rank in pack(list(samples.values()), ranks, 200)]
    assert max(shares) - min(shares) <= 2 * max(lengths)


def test_packing_is_the_same_every_time():
    samples = [sample(i, n) for i, n in enumerate((5, 9, 9, 2, 30, 9))]
    first, second = pack(samples, 2, 40), pack(samples, 2, 40)
    assert [[b.trajectory_ids for b in rank] for rank in first] == [[b.trajectory_ids for b in rank] for rank in second]


def test_like_lengths_share_a_micro_batch():
    lengths = (4, 40, 5, 39, 4, 41)
    first, second = pack([sample(i, n) for i, n in enumerate(lengths)], 1, 125)[0]
    assert sorted(first.trajectory_ids) == ["t-1", "t-3", "t-5"]
    assert second.token_ids.shape == (3, 5)
