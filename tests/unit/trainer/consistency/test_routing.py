"""Agreement of two routings: the golden numbers, what counts as evidence, and the layout that a replay reads."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.builders import BASE, build_group, build_routing

from rollout.errors import UserError
from rollout.types.codec import encode
from rollout.types.trajectory import RoutingTrace
from trainer.consistency.checks.routing import RoutingAgreement, flat_routing, merge_agreements, routing_agreement

EXPERTS = 8


def choices(rows: int, seed: int, blocks: int = 3, top_k: int = 2) -> NDArray[np.uint8]:
    """[rows, blocks, top_k] random sets without repeats."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, blocks, EXPERTS)), axis=2)[:, :, :top_k].astype(np.uint8)


def compare(
    rollout: NDArray[np.uint8], trainer: NDArray[np.uint8], covered: NDArray[np.bool_] | None = None, **options: Any
) -> RoutingAgreement:
    every = np.ones(rollout.shape[0], dtype=np.bool_)
    return routing_agreement(
        rollout,
        trainer,
        covered=every if covered is None else covered,
        predicting=options.pop("predicting", every),
        num_experts=EXPERTS,
        **options,
    )


def test_agreement_is_the_golden_one(golden: dict[str, Any]):
    vector = golden["V13_routing"]
    agreement = compare(np.array(vector["rollout"], dtype=np.uint8), np.array(vector["trainer"], dtype=np.uint8))
    for value, key in (
        (agreement.mismatch, "cell_set_mismatch_frac"),
        (agreement.token_any_mismatch, "token_any_layer_frac"),
        (agreement.jaccard, "jaccard_mean"),
        ((agreement.jaccard_sums / agreement.num_rows).tolist(), "per_layer_jaccard"),
    ):
        assert value == pytest.approx(vector[key], rel=1e-9), key
    assert agreement.block_mismatch.tolist() == [0.25, 0.25]
    assert (agreement.num_rows, agreement.coverage) == (4, 1.0)


def test_token_any_is_counted_and_not_derived_from_the_blocks():
    native = choices(10, seed=0)
    gathered, scattered = native.copy(), native.copy()
    gathered[0] = (native[0] + 1) % EXPERTS
    for block in range(3):
        scattered[block, block] = (native[block, block] + 1) % EXPERTS
    one, three = compare(gathered, native), compare(scattered, native)
    assert one.block_mismatch.tolist() == three.block_mismatch.tolist() == [0.1] * 3
    assert (one.token_any_mismatch, three.token_any_mismatch) == (0.1, 0.3)


def test_order_within_a_cell_is_no_mismatch():
    native = choices(5, seed=1)
    agreement = compare(native[:, :, ::-1], native)
    assert (agreement.mismatch, agreement.token_any_mismatch, agreement.jaccard) == (0.0, 0.0, 1.0)


def test_a_flip_at_a_tie_weighs_nothing_and_a_certain_one_weighs_whole():
    native = np.tile(np.array([0, 1], dtype=np.uint8), (4, 1, 1))
    flipped = native.copy()
    flipped[:, 0, 1] = 2
    for gap, weight in ((0.0, 0.0), (1.0, math.tanh(0.5)), (math.inf, 1.0)):
        assert compare(flipped, native, gate_gap=np.full((4, 1), gap)).gate_gap_mismatch == pytest.approx(
            weight, rel=1e-12
        )
        assert compare(native, native, gate_gap=np.full((4, 1), gap)).gate_gap_mismatch == 0.0
    # tanh(gap / 2) = (p - q) / (p + q) of the two probabilities.
    p, q = math.exp(1.0), math.exp(0.0)
    assert math.tanh(0.5) == pytest.approx((p - q) / (p + q))
    assert compare(flipped, native).gate_gap_mismatch is None


def test_a_gap_below_zero_or_unknown_is_refused_where_it_counts():
    native, covered = choices(2, seed=0, blocks=1), np.array([True, False])
    for bad in (-0.1, math.nan):
        assert compare(native, native, covered, gate_gap=np.array([[0.5], [bad]])).gate_gap_mismatch == 0.0
        with pytest.raises(ValueError, match="negative or NaN"):
            compare(native, native, covered, gate_gap=np.array([[bad], [0.5]]))


def test_rows_without_evidence_are_not_compared_but_missed():
    native = choices(4, seed=2)
    reported = native.copy()
    reported[[0, 2]] = 0  # what a buffer holds where nothing was written
    agreement = compare(
        reported, native, np.array([False, True, False, True]), predicting=np.array([False, True, True, True])
    )
    assert (agreement.num_rows, agreement.mismatch) == (2, 0.0)
    assert agreement.coverage == pytest.approx(2 / 3)
    assert agreement.hollow_cells.tolist() == [0, 0, 0]


def test_padding_that_claims_to_be_evidence_is_counted_by_block():
    native = choices(5, seed=3)
    reported = native.copy()
    reported[1, 2] = 0  # one expert twice
    reported[3, 0] = EXPERTS + np.arange(2)  # no expert of this model
    agreement = compare(reported, native)
    assert agreement.hollow_cells.tolist() == [1, 0, 1]
    assert (agreement.num_rows, agreement.num_predicting_compared, agreement.mismatch) == (3, 3, 0.0)


def test_no_evidence_is_no_agreement():
    native = choices(3, seed=4)
    agreement = compare(native, native, np.zeros(3, dtype=np.bool_))
    assert (agreement.num_rows, agreement.coverage) == (0, 0.0)
    assert math.isnan(agreement.mismatch) and math.isnan(agreement.token_any_mismatch) and math.isnan(agreement.jaccard)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 1000))
def test_merged_segments_agree_like_their_concatenation(lengths: list[int], seed: int):
    total = sum(lengths)
    rollout, trainer, gap = (
        choices(total, seed),
        choices(total, seed + 1),
        np.random.default_rng(seed).random((total, 3)),
    )
    covered, predicting = (np.random.default_rng(seed + offset).random(total) < 0.7 for offset in (1, 2))
    ends = np.cumsum(lengths)
    slices = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    parts = [compare(rollout[s], trainer[s], covered[s], predicting=predicting[s], gate_gap=gap[s]) for s in slices]
    merged, whole = merge_agreements(parts), compare(rollout, trainer, covered, predicting=predicting, gate_gap=gap)
    for name in RoutingAgreement.__dataclass_fields__:
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_a_segment_without_gaps_leaves_the_merged_weighting_unknown():
    native = choices(2, seed=0)
    with_gap, without = compare(native, native, gate_gap=np.ones((2, 3))), compare(native, native)
    assert merge_agreements([with_gap, without]).gate_gap_mismatch is None
    with pytest.raises(ValueError, match="over \\[2, 3\\] blocks"):
        merge_agreements([without, compare(native[:, :2], native[:, :2])])


def test_shapes_that_do_not_match_are_refused():
    native = choices(3, seed=0)
    with pytest.raises(ValueError, match="expected \\[rows, blocks, top_k\\] twice"):
        compare(native, native[:2])
    with pytest.raises(ValueError, match="expected \\[rows, blocks\\]"):
        compare(native, native, gate_gap=np.ones((3, 2)))


def test_traces_lie_at_the_inputs_of_their_rows():
    first, second = (
        RoutingTrace(experts=choices(rows, seed), covered=np.ones(rows, dtype=np.bool_))
        for rows, seed in ((3, 5), (2, 6))
    )
    second.covered[0] = False
    experts, covered = flat_routing(
        [("a", first), ("b", second), ("", None)], width=4, num_experts=EXPERTS, cell=(3, 2)
    )
    assert covered.nonzero()[0].tolist() == [0, 1, 2, 5] and covered.size == 12
    assert np.array_equal(experts[:3], first.experts) and np.array_equal(experts[5], second.experts[1])
    assert not experts[~covered].any() and experts.dtype == np.uint8


def test_hollow_routing_is_not_covered():
    trace = RoutingTrace(experts=choices(3, seed=7), covered=np.ones(3, dtype=np.bool_))
    trace.experts[1, 2] = 4
    _, covered = flat_routing([("a", trace), ("", None)], width=4, num_experts=EXPERTS, cell=(3, 2))
    assert covered.nonzero()[0].tolist() == [0, 2]


def test_experts_beyond_a_byte_are_kept_whole():
    experts = np.array([[[300, 2]]], dtype=np.uint16)
    trace = RoutingTrace(experts=experts, covered=np.ones(1, dtype=np.bool_))
    assert flat_routing([("a", trace)], width=2, num_experts=512, cell=(1, 2))[0][0].tolist() == [[300, 2]]


def test_a_trace_of_another_model_is_refused_by_name():
    with pytest.raises(UserError, match="trajectory a has routing"):
        flat_routing([("a", build_routing(3))], width=6, num_experts=EXPERTS, cell=(2, 3))


def test_a_stored_expert_takes_one_byte(golden: dict[str, Any]):
    vector = golden["V13_mem"]
    tokens, blocks, top_k = vector["tokens"], vector["layers"], vector["topk"]
    groups = [
        build_group(rewards=(1.0,), prompt_tokens=2, spans=((BASE, tokens - 2),), routing=shape)
        for shape in (None, (blocks, top_k))
    ]
    sizes = [encode(group).header.num_bytes for group in groups]
    rows, cell = tokens - 1, blocks * top_k
    assert rows * cell == vector["uint8_bytes"] - cell == vector["miles_bytes"] // 4
    assert 4 * vector["uint8_bytes"] == vector["int32_bytes"]
    assert vector["miles_bytes"] / 2**20 == pytest.approx(vector["MiB"], rel=1e-9)
    assert 0 <= sizes[1] - sizes[0] - rows * (cell + 1) < 100  # and one of coverage a row; the rest is the header's
