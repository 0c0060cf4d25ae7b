"""From a step to its culprits over micro-batches and ranks: what is found, what it costs, and what the outcomes
mean."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from support.trainer.gradloc_fakes import TermsProbe

from trainer.gradloc.probe.step_terms import RankTerms, StepTerms, Terms, step_terms
from trainer.gradloc.search import SearchLimits, SearchResult, StepSearch
from trainer.types.gradloc import Outcome

NONE: Terms = np.zeros(0, dtype=np.int64)
TAU = 24.0
"""Three times the norm of a healthy term here."""
BFLOAT16 = 2.0**-7
"""Its rounding."""


def table_of(micro_batches: int, world: int, tokens: int) -> StepTerms:
    rows, positions = (
        np.repeat(np.arange(2, dtype=np.int32), tokens // 2),
        np.tile(np.arange(1, tokens // 2 + 1, dtype=np.int32), 2),
    )
    one = RankTerms(
        rows=(rows,) * micro_batches,
        positions=(positions,) * micro_batches,
        weights=(np.ones(2, dtype=np.float32),) * micro_batches,
        trajectory_ids=(("a", "b"),) * micro_batches,
        widest_tokens=2 * tokens,
    )
    return step_terms([one] * world)


def healthy_vectors(table: StepTerms, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((table.position.size, 64)).astype(np.float32)


def searched(
    table: StepTerms,
    vectors: NDArray[np.float32],
    suspects: Terms = NONE,
    *,
    budget: int = 1000,
    parts: bool = False,
    eps: float = 2.0**-23,
) -> tuple[SearchResult, TermsProbe]:
    probe = TermsProbe(vectors, eps)
    with np.errstate(invalid="ignore"):
        norm = float(np.linalg.norm(vectors.sum(axis=0).astype(np.float64)))
        known = [
            [np.linalg.norm(vectors[table.of(m, r)].sum(axis=0)) for r in range(table.world)]
            for m in range(table.num_micro_batches)
        ]
        search = StepSearch(probe, table, SearchLimits(tau=TAU, budget=budget, max_hits=4), norm)
        return search.run(suspects, np.array(known, dtype=np.float64) if parts else None), probe


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_spike_is_found_wherever_it_is_within_the_published_bound(world: int, micro_batches: int):
    table, rng = table_of(micro_batches, world, 64), np.random.default_rng(world)
    for seed in range(40):
        vectors, culprit = healthy_vectors(table, seed), int(rng.integers(table.position.size))
        vectors[culprit] *= 30 * math.sqrt(table.position.size) * 10 ** rng.uniform(0.5, 4)
        result, probe = searched(table, vectors)
        assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == [culprit]
        assert result.passes == probe.passes <= micro_batches + 2 * math.log2(world) + 2 * 6 + 1


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_with_the_norms_of_parts_at_hand_a_spike_takes_two_passes_a_level_and_one(world: int, micro_batches: int):
    table, rng = table_of(micro_batches, world, 64), np.random.default_rng(world)
    for seed in range(40):
        vectors, culprit = healthy_vectors(table, seed), int(rng.integers(table.position.size))
        vectors[culprit] *= 30 * math.sqrt(table.position.size) * 10 ** rng.uniform(0.5, 3.5)
        result, _ = searched(table, vectors, parts=True)
        assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == [culprit]
        assert result.passes <= 2 * 6 + 1


def test_two_spikes_on_different_ranks_and_micro_batches_are_both_found():
    table, rng = table_of(4, 2, 64), np.random.default_rng(5)
    for seed in range(100):
        first, second = (
            int(rng.choice(table.of(int(m), int(r))))
            for m, r in zip(rng.choice(4, 2, replace=False), rng.integers(2, size=2), strict=True)
        )
        vectors = healthy_vectors(table, seed)
        vectors[first] *= 3000 * 10 ** rng.uniform(0, 2)
        vectors[second] *= 3000
        result, _ = searched(table, vectors, parts=bool(seed % 2))
        assert result.outcome is Outcome.LOCATED and {term for term, _ in result.hits} == {first, second}


def test_a_spike_of_all_terms_is_never_located():
    table = table_of(2, 2, 32)
    for seed in range(50):
        result, _ = searched(table, healthy_vectors(table, seed) * 100, budget=60)
        assert result.outcome in (Outcome.DIFFUSE, Outcome.INCONCLUSIVE)


def test_a_short_step_whose_every_term_spikes_is_not_located():
    table = table_of(1, 1, 4)
    for seed in range(50):
        result, _ = searched(table, healthy_vectors(table, seed) * 100)
        assert result.outcome is Outcome.DIFFUSE and len(result.hits) > 2


def test_a_second_spike_as_small_beside_the_first_as_rounding_is_found():
    table = table_of(1, 1, 64)
    for seed in range(50):
        vectors = healthy_vectors(table, seed)
        vectors[3] *= 3e6
        vectors[60] *= 40.0 * math.sqrt(table.position.size)
        result, _ = searched(table, vectors, parts=True)
        assert {3, 60} == {term for term, _ in result.hits}


def test_a_healthy_step_is_not_located_and_not_called_clean_while_leaves_are_unmeasured():
    table = table_of(2, 2, 32)
    for seed in range(50):
        result, _ = searched(table, healthy_vectors(table, seed))
        assert result.outcome is Outcome.DIFFUSE and not result.hits


def test_clean_needs_every_leaf_measured():
    table = table_of(1, 1, 2)
    vectors = np.zeros((2, 64), dtype=np.float32)
    vectors[:, 0] = 0.9 * TAU  # together over their threshold, each below its own
    result, _ = searched(table, vectors)
    assert result.outcome is Outcome.CLEAN and result.passes == 2


def test_a_suspect_that_carries_the_spike_takes_two_passes():
    table = table_of(4, 2, 64)
    vectors = healthy_vectors(table, 0)
    vectors[100] *= 1e4
    for suspects, passes in (([100], 2), ([90, 100], 4)):
        result, _ = searched(table, vectors, np.array(suspects, dtype=np.int64))
        assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == [100]
        assert result.passes <= passes


@pytest.mark.parametrize("factor", [300, 2000, 1e6])
def test_a_right_suspect_takes_two_passes_in_bfloat16_however_large_the_spike(factor: float):
    table = table_of(4, 2, 64)
    usual = math.sqrt(table.position.size)
    for seed in range(20):
        vectors = healthy_vectors(table, seed)
        vectors[100] *= factor * usual
        result, probe = searched(table, vectors, np.array([100]), parts=True, eps=BFLOAT16)
        assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == [100]
        assert result.passes == probe.passes == 2 and result.explained > 0.99
        alone, _ = searched(table, vectors, parts=True, eps=BFLOAT16)
        assert alone.outcome is Outcome.LOCATED and alone.hits[0][0] == 100 and alone.passes <= 2 * 6 + 1


def test_spikes_that_rounding_would_hide_are_all_found_in_bfloat16():
    table, rng = table_of(4, 2, 64), np.random.default_rng(6)
    for seed in range(60):
        hidden, suspect = rng.choice(table.position.size, 2, replace=False)
        vectors = healthy_vectors(table, seed)
        vectors[suspect] *= 1e6
        vectors[hidden] *= 3e3
        result, probe = searched(table, vectors, np.array([suspect]), parts=True, eps=BFLOAT16)
        assert result.outcome is Outcome.LOCATED and {term for term, _ in result.hits} == {hidden, suspect}
        assert result.passes == probe.passes <= 2 + 2 * (2 * 6 + 1)


def test_a_part_that_is_nothing_but_the_hit_needs_no_pass_to_be_without_it():
    alone = RankTerms(
        rows=(np.zeros(1, dtype=np.int32),) * 2,
        positions=(np.ones(1, dtype=np.int32),) * 2,
        weights=(np.ones(1, dtype=np.float32),) * 2,
        trajectory_ids=(("a",), ("b",)),
        widest_tokens=2,
    )
    vectors = np.ones((2, 64), dtype=np.float32)
    vectors[0] *= 1e6
    result, probe = searched(step_terms([alone]), vectors, np.array([0]), parts=True, eps=BFLOAT16)
    assert result.outcome is Outcome.LOCATED and result.passes == probe.passes == 1


def test_terms_that_are_not_finite_are_found_on_every_rank():
    table = table_of(2, 2, 32)
    vectors = healthy_vectors(table, 0)
    vectors[[10, 90]] = np.nan
    result, _ = searched(table, vectors)
    assert result.outcome is Outcome.LOCATED and sorted(term for term, _ in result.hits) == [10, 90]


@pytest.mark.parametrize("budget", range(2, 30, 3))
def test_a_search_never_takes_more_passes_than_its_budget(budget: int):
    table = table_of(2, 2, 32)
    vectors = healthy_vectors(table, 0)
    vectors[[10, 90]] *= 1e4
    result, probe = searched(table, vectors, budget=budget)
    assert result.passes == probe.passes <= budget
    assert result.outcome in (Outcome.INCONCLUSIVE, Outcome.LOCATED)


def test_ranks_with_different_numbers_of_micro_batches_are_refused():
    none = RankTerms(rows=(), positions=(), weights=(), trajectory_ids=(), widest_tokens=0)
    place = np.ones(1, dtype=np.int32)
    one = RankTerms(
        rows=(place,),
        positions=(place,),
        weights=(np.ones(2, dtype=np.float32),),
        trajectory_ids=(("a", "b"),),
        widest_tokens=4,
    )
    with pytest.raises(ValueError, match="filler row"):
        step_terms([none, one])


def likely(table: StepTerms, vectors: NDArray[np.float32], terms: list[int], budget: int = 1000) -> SearchResult:
    probe, norm = TermsProbe(vectors), float(np.linalg.norm(vectors.sum(axis=0)))
    search = StepSearch(probe, table, SearchLimits(tau=TAU, budget=budget, max_hits=4), norm)
    result = search.run(NONE, likely=np.array(terms, dtype=np.int64))
    assert result.passes == probe.passes
    return result


@pytest.mark.parametrize("culprits", [[5], [200, 5]])
def test_likely_terms_that_are_the_culprits_end_the_search_after_a_pass_each_and_one(culprits: list[int]):
    table = table_of(4, 2, 64)
    vectors = healthy_vectors(table, 3)
    vectors[culprits] *= 1e5
    result = likely(table, vectors, culprits)
    assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == culprits
    assert result.passes == (1 if len(culprits) == 1 else 3)


def test_a_likely_term_that_is_innocent_costs_one_pass_and_hides_nothing():
    table, culprit = table_of(4, 2, 64), 300
    vectors = healthy_vectors(table, 4)
    vectors[culprit] *= 1e5
    straight, misled = likely(table, vectors, []), likely(table, vectors, [7, culprit])
    assert misled.outcome is Outcome.LOCATED and misled.hits == straight.hits == ((culprit, straight.hits[0][1]),)
    assert misled.passes == straight.passes + 1


def test_a_likely_hit_that_does_not_explain_the_step_is_not_the_end():
    """The search goes on over micro-batches until what is left is below its threshold."""
    table = table_of(4, 2, 64)
    vectors = healthy_vectors(table, 5)
    vectors[40] *= 1e4
    vectors[400] *= 1e5
    result = likely(table, vectors, [40])
    assert result.outcome is Outcome.LOCATED and {term for term, _ in result.hits} == {40, 400}


def test_likely_terms_of_a_spike_of_all_terms_are_not_the_cause():
    table = table_of(2, 2, 32)
    for seed in range(20):
        assert likely(table, healthy_vectors(table, seed) * 100, [3, 9, 30], budget=60).outcome is not Outcome.LOCATED


def test_hits_that_leave_too_much_are_not_the_cause_when_the_passes_end_before_the_search():
    """Differences are mostly rounding under this threshold, so what is left is only known to lie between the largest
    part and the sum of all."""
    table = table_of(2, 2, 32)
    vectors, limits = healthy_vectors(table, 6), SearchLimits(tau=1e-9, budget=6, max_hits=8)
    hardest = np.argsort(-np.linalg.norm(vectors, axis=1))[:2]
    vectors[hardest] *= 30
    probe, norm = TermsProbe(vectors), float(np.linalg.norm(vectors.sum(axis=0)))
    known = np.array(
        [[np.linalg.norm(vectors[table.of(m, r)].sum(axis=0)) for r in range(2)] for m in range(2)], dtype=np.float64
    )
    result = StepSearch(probe, table, limits, norm).run(NONE, known, likely=hardest)
    assert len(result.hits) == 2 and result.explained > 0.5
    assert result.outcome is Outcome.INCONCLUSIVE


def suspected(
    table: StepTerms, vectors: NDArray[np.float32], suspects: list[int], *, only: bool = False
) -> SearchResult:
    probe, norm = TermsProbe(vectors), float(np.linalg.norm(vectors.sum(axis=0)))
    return StepSearch(probe, table, SearchLimits(tau=TAU, budget=1000, max_hits=4, suspect_factor=0.5), norm).run(
        np.array(suspects, dtype=np.int64), only_suspects=only
    )


@pytest.mark.parametrize("times_tau", [0.7, 1.5])
@pytest.mark.parametrize("innocents", [[9], [9, 20, 31, 70, 200, 310, 400]])
def test_innocent_suspects_over_a_threshold_of_their_own_are_neither_named_nor_hide_the_culprit(
    times_tau: float, innocents: list[int]
):
    table, culprit = table_of(4, 2, 64), 300
    vectors = healthy_vectors(table, 8)
    vectors[innocents] *= times_tau * TAU / np.linalg.norm(vectors[innocents], axis=1, keepdims=True)
    vectors[culprit] *= 1e5
    for suspects in (innocents, sorted([*innocents, culprit])):
        result = suspected(table, vectors, suspects)
        assert result.outcome is Outcome.LOCATED and [term for term, _ in result.hits] == [culprit]
        assert result.explained > 0.99


def test_a_hit_that_the_step_needs_to_be_below_its_threshold_is_kept_however_small_beside_the_other():
    table = table_of(1, 1, 64)
    vectors = healthy_vectors(table, 9)
    vectors[7] *= 1e5
    vectors[50] *= 40.0 * math.sqrt(table.position.size)
    assert {term for term, _ in suspected(table, vectors, [7, 50]).hits} == {7, 50}


def test_suspects_of_a_step_below_its_threshold_must_explain_half_of_it():
    table = table_of(1, 1, 64)
    vectors = healthy_vectors(table, 10)
    vectors[7] *= 0.7 * TAU / np.linalg.norm(vectors[7])
    assert suspected(table, vectors, [7], only=True).outcome is Outcome.INCONCLUSIVE
    vectors[7] *= 8
    assert [term for term, _ in suspected(table, vectors, [7], only=True).hits] == [7]


def test_two_culprits_of_which_one_is_suspected_take_no_more_than_one_pass_more():
    table = table_of(4, 2, 64)
    vectors = healthy_vectors(table, 11)
    vectors[40] *= 1e6
    vectors[400] *= 1e5
    norm = float(np.linalg.norm(vectors.sum(axis=0)))
    for suspects in ([40], [400], [3]):
        search = StepSearch(TermsProbe(vectors), table, SearchLimits(tau=TAU, budget=1000, max_hits=4), norm)
        result = search.run(np.array(suspects, dtype=np.int64), likely=np.array([40, 400], dtype=np.int64))
        assert {term for term, _ in result.hits} == {40, 400} and result.passes <= 4


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_with_a_likely_term_that_misleads_a_hit_takes_no_pass_more_than_that_one(world: int, micro_batches: int):
    table, rng = table_of(micro_batches, world, 64), np.random.default_rng(world)
    for seed in range(40):
        vectors, (culprit, innocent) = healthy_vectors(table, seed), rng.choice(table.position.size, 2, replace=False)
        vectors[culprit] *= 30 * math.sqrt(table.position.size) * 10 ** rng.uniform(0.5, 3.5)
        known = [
            [np.linalg.norm(vectors[table.of(m, r)].sum(axis=0)) for r in range(world)] for m in range(micro_batches)
        ]
        norm = float(np.linalg.norm(vectors.sum(axis=0).astype(np.float64)))
        search = StepSearch(TermsProbe(vectors), table, SearchLimits(tau=TAU, budget=1000, max_hits=4), norm)
        result = search.run(NONE, np.array(known, dtype=np.float64), likely=np.array([innocent], dtype=np.int64))
        assert [term for term, _ in result.hits] == [culprit] and result.passes <= 2 * 6 + 2
