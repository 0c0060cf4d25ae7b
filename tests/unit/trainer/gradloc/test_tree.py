"""The search of a segment tree: golden traces, and all culprits within two passes a level."""

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.paths import GOLDEN_FOLDER
from support.trainer.gradloc_fakes import VectorProbe

from trainer.gradloc.tree import Hit, PassBudget, Segment, TreeSearch

V7: dict[str, Any] = json.loads((GOLDEN_FOLDER / "golden_vectors.json").read_text())["V7_dfs"]


def search(
    probe: VectorProbe, budget: int = 10_000, *, non_finite: bool = False
) -> tuple[list[Hit], PassBudget, TreeSearch]:
    passes = PassBudget(budget)
    tree = TreeSearch(probe, passes, non_finite=non_finite)
    return list(tree.hits()), passes, tree


@pytest.mark.parametrize("name", ["one", "two", "two_budget6", "two_budget7", "sibling_hits"])
def test_hits_their_order_and_the_passes_are_those_of_the_golden_vectors(name: str):
    case = V7[name]
    norms, tau = V7["two"]["s"] if "s" not in case else case["s"], case.get("tau", 10)
    probe = VectorProbe.orthogonal(norms, tau)
    hits, passes, tree = search(probe, case.get("budget", 100))
    assert [[hit.leaf, hit.norm] for hit in hits] == pytest.approx(
        [pytest.approx(expected) for expected in case["hits"]]
    )
    assert passes.used == case["used"]
    if "left" in case:
        assert [[s.start, s.end - 1] for s in tree.left] == case["left"]
    if "trace" in case:
        measured = [[child[:2] for child in children] for _, children in case["trace"]]
        assert [[s.start, s.end - 1] for s in probe.asked] == [child for children in measured for child in children]


def test_a_token_over_tau_can_hide_in_a_batch_below_its_threshold():
    blind = V7["blind_spot"]
    probe = VectorProbe.orthogonal(blind["s"], blind["tau"])
    root = Segment(0, probe.num_leaves)
    assert probe.norm(root) / root.size == pytest.approx(blind["root"])
    assert not probe.fires(probe.norm(root), root)


def planted(rng: np.random.Generator, leaves: int, culprits: list[int], size: float) -> NDArray[np.float32]:
    vectors = rng.standard_normal((leaves, 64)).astype(np.float32)
    vectors[culprits] *= np.float32(size)
    return vectors


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("size", [30.0, 1e3, 1e6])
def test_one_culprit_is_found_with_two_passes_a_level(leaves: int, size: float):
    rng = np.random.default_rng(leaves)
    for _ in range(20):
        culprit = int(rng.integers(leaves))
        hits, passes, _ = search(VectorProbe(planted(rng, leaves, [culprit], size * math.sqrt(leaves)), 24.0))
        assert [hit.leaf for hit in hits] == [culprit]
        assert passes.used <= 2 * math.ceil(math.log2(max(leaves, 2)))


def test_two_culprits_of_very_different_size_are_both_found():
    rng = np.random.default_rng(3)
    for _ in range(100):
        first, second = (int(i) for i in rng.choice(64, 2, replace=False))
        vectors = planted(rng, 64, [first, second], 300.0)
        vectors[first] *= 1e4
        hits, _, _ = search(VectorProbe(vectors, 24.0))
        assert {hit.leaf for hit in hits} == {first, second}


def test_nan_and_infinity_are_found_by_what_is_not_finite():
    for value in (np.nan, np.inf):
        vectors = planted(np.random.default_rng(0), 33, [], 1.0)
        vectors[[5, 32], 0] = value
        hits, passes, tree = search(VectorProbe(vectors, 24.0, non_finite=True), non_finite=True)
        assert sorted(hit.leaf for hit in hits) == [5, 32]
        assert passes.used <= 2 * 2 * 6
        assert {5, 32} <= tree.measured_leaves


def test_a_search_without_passes_leaves_the_root():
    hits, passes, tree = search(VectorProbe.orthogonal([1, 100], 10.0), budget=1)
    assert (hits, passes.used, passes.refused, tree.left) == ([], 0, True, [Segment(0, 2)])


def test_the_last_pass_still_halves_what_is_not_finite():
    vectors = planted(np.random.default_rng(0), 8, [], 1.0)
    vectors[6, 0] = np.nan
    hits, passes, tree = search(VectorProbe(vectors, 24.0, non_finite=True), 1, non_finite=True)
    assert (hits, passes.used) == ([], 1)
    assert tree.left == [Segment(4, 8)]
    vectors[0, 0] = np.nan
    hits, passes, tree = search(VectorProbe(vectors[:2], 24.0, non_finite=True), 1, non_finite=True)
    assert ([hit.leaf for hit in hits], passes.used, passes.refused) == ([0], 1, True)
    assert tree.left == [Segment(1, 2)]
