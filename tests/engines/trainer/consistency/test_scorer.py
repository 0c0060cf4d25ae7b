"""The scorer repeats the trainer's own log-probs, token by token at the version that sampled it, from published
directories alone."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import build_trajectory
from support.trainer.torch_models import Reference
from support.trainer.trainer_room import VOCABULARY, write_model
from support.trainer.trainer_scenarios import build, step
from transformers import DynamicCache

from rollout.errors import UserError, WeightSyncError
from rollout.published.manifest import read_manifest
from rollout.types.trajectory import RoutingTrace, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.consistency.scoring.scorer import Scorer

PROMPT = 4
SAMPLED = 9
PLAIN = ScoreOptions()
ROOMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "moe": {"moe": True},
    "bfloat16": {},
}


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a trainer published at versions 0, 1 and 2, and its own scores then."""

    model_dir: Path
    weights: Path
    dtype: str
    trained: dict[int, NDArray[np.float32]]
    """Version -> raw log-probs [T - 1] of `trajectory`'s tokens."""

    def scorer(
        self, weights: Path | None = None, *, dtype: str | None = None, batch_tokens: int = 1000, max_versions: int = 3
    ) -> Scorer:
        cpu = torch.device("cpu")
        versions = HeldVersions(
            self.model_dir, weights or self.weights, dtype or self.dtype, 5, max_versions=max_versions, device=cpu
        )
        return Scorer(versions, batch_tokens)


Rooms = Callable[[str], Room]


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Rooms:
    folder = tmp_path_factory.mktemp("rooms")

    @cache
    def room(name: str) -> Room:
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        model_dir = write_model(folder / name, **ROOMS[name])
        trainer = build(folder, name, model=name, config={"dtype": dtype})
        trained: dict[int, NDArray[np.float32]] = {}
        for version in range(3):
            if version:
                step(trainer, version)
            trainer.publish(PolicyVersion(1, version), folder / f"weights-{name}" / f"e1-v{version}")
            trained[version] = trainer.score(trajectory((0, SAMPLED)).token_ids)
        trainer.close()
        return Room(model_dir=model_dir, weights=folder / f"weights-{name}", dtype=dtype, trained=trained)

    return room


def trajectory(*spans: tuple[int, int], index: int = 0, epoch: int = 1, **tag: Any) -> Trajectory:
    """Four given tokens, then (version, length) a span; the tokens depend on their number and on `index` alone."""
    named = [(PolicyVersion(epoch, version), length) for version, length in spans]
    built = build_trajectory(index=index, prompt_tokens=PROMPT, spans=named, vocab_size=VOCABULARY)
    return replace(built, tag=replace(built.tag, **tag))


def sampled_scores(scorer: Rescorer, item: Trajectory, options: ScoreOptions = PLAIN) -> NDArray[np.float32]:
    return scorer.score([item], options)[0][item.sampled]


@pytest.mark.parametrize("name", ROOMS)
def test_scores_are_the_trainers_own_at_every_version(rooms: Rooms, name: str):
    room = rooms(name)
    scorer = room.scorer()
    for version in (2, 0, 1, 2):  # also back at one that was used before
        scores = scorer.score([trajectory((version, SAMPLED))], PLAIN)[0]
        assert scores.dtype == np.float32
        assert not scores[:PROMPT].any()
        np.testing.assert_allclose(scores[PROMPT:], room.trained[version][PROMPT - 1 :], rtol=0, atol=1e-6)
    assert np.abs(room.trained[1] - room.trained[2]).max() > 1e-3


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_each_span_is_scored_at_its_own_version_over_the_whole_prefix(rooms: Rooms, name: str):
    room = rooms(name)
    item = trajectory((0, 3), (2, 2), (1, 4))
    scores = room.scorer().score([item], PLAIN)[0]
    for span in item.version_spans:
        plain = Reference(room.weights / span.policy.key).logprobs(
            item.token_ids[: span.start].tolist(), item.token_ids[span.start : span.end]
        )
        np.testing.assert_allclose(scores[span.start : span.end], plain, rtol=0, atol=1e-5)


def test_scores_depend_neither_on_neighbours_nor_on_the_budget(rooms: Rooms):
    room = rooms("dense")
    items = [trajectory((1, 2 + index), (2, 11 - index), index=index) for index in range(5)] + [
        trajectory((0, 1), index=5)
    ]
    scorer = room.scorer()
    alone = [scorer.score([item], PLAIN)[0] for item in items]
    for budget in (1, 30, 1000):
        for one, together in zip(alone, room.scorer(batch_tokens=budget).score(items, PLAIN), strict=True):
            np.testing.assert_allclose(together, one, rtol=0, atol=1e-5)


def test_a_token_without_a_predecessor_is_unknown(rooms: Rooms):
    item = replace(
        trajectory((0, SAMPLED)),
        sampled=np.ones(PROMPT + SAMPLED, dtype=np.bool_),
        version_spans=(VersionSpan(PolicyVersion(1, 0), 0, 13),),
    )
    scores = rooms("dense").scorer().score([item], PLAIN)[0]
    assert np.isnan(scores[0]) and np.isfinite(scores[1:]).all()


def test_a_version_that_is_not_there_is_unknown_and_nothing_takes_its_place(rooms: Rooms):
    scorer = rooms("dense").scorer()
    item = trajectory((1, 4), (7, 5))
    scores = scorer.score([item, trajectory((2, 3))], PLAIN)
    assert np.isnan(scores[0][PROMPT + 4 :]).all()
    assert np.isfinite(scores[0][: PROMPT + 4]).all() and np.isfinite(scores[1]).all()
    assert list(scorer.unknown) == ["e1-v7"] and "removed" in scorer.unknown["e1-v7"]
    assert (
        sampled_scores(scorer, trajectory((2, 3))).size == 3 and not scorer.unknown
    )  # reasons are those of the last call


def test_a_directory_that_is_being_removed_is_gone(rooms: Rooms, tmp_path: Path):
    weights = shutil.copytree(rooms("dense").weights, tmp_path / "weights")
    next(iter(sorted((weights / "e1-v1").glob("*.safetensors")))).unlink()
    (weights / "e1-v2" / "manifest.json").unlink()
    scorer = rooms("dense").scorer(weights)
    assert np.isnan(sampled_scores(scorer, trajectory((1, 4), (2, 5)))).all()
    assert set(scorer.unknown) == {"e1-v1", "e1-v2"}


def test_a_directory_under_another_name_is_an_error(rooms: Rooms, tmp_path: Path):
    shutil.copytree(rooms("dense").weights / "e1-v1", tmp_path / "e1-v5")
    with pytest.raises(WeightSyncError, match="holds e1-v1, expected e1-v5"):
        rooms("dense").scorer(tmp_path).score([trajectory((5, 3))], PLAIN)


@pytest.mark.parametrize("name", ["dense", "tied", "moe", "bfloat16"])
def test_a_held_version_costs_its_weights_and_serves_without_its_files(rooms: Rooms, tmp_path: Path, name: str):
    room = rooms(name)
    weights = shutil.copytree(room.weights, tmp_path / "weights")
    scorer = room.scorer(weights, max_versions=1)
    manifest = read_manifest(weights / "e1-v2")
    assert scorer.held == {"v0": ""} and scorer.held_bytes == manifest.num_bytes
    before = sampled_scores(scorer, trajectory((2, SAMPLED)))
    assert scorer.held == {"v0": "", "e1-v2": manifest.digest} and scorer.held_bytes == 2 * manifest.num_bytes
    shutil.rmtree(weights / "e1-v2")
    np.testing.assert_array_equal(sampled_scores(scorer, trajectory((2, SAMPLED))), before)
    sampled_scores(scorer, trajectory((1, 2)))
    assert list(scorer.held) == ["v0", "e1-v1"] and scorer.held_bytes == 2 * manifest.num_bytes
    assert np.isnan(sampled_scores(scorer, trajectory((2, 2)))).all()


def test_the_version_used_longest_ago_makes_room(rooms: Rooms):
    scorer = rooms("dense").scorer(max_versions=2)
    for version in (1, 2, 1):
        sampled_scores(scorer, trajectory((version, 2)))
    assert list(scorer.held) == ["v0", "e1-v2", "e1-v1"]


@pytest.mark.parametrize("name", ["dense", "tied"])
def test_a_version_in_use_is_pointed_to_and_tied_heads_stay_tied(rooms: Rooms, name: str):
    scorer = rooms(name).scorer()
    for version in (1, 2, 1, 0):
        sampled_scores(scorer, trajectory((version, 2)))
        versions = scorer._versions
        used = versions._held[PolicyVersion(1, version)] if version else versions._base
        model: Any = versions.model.causal_lm
        assert model.model.embed_tokens.weight is used.tensors["model.embed_tokens.weight"]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")


def test_an_offset_asks_for_the_neighbour(rooms: Rooms):
    scorer = rooms("dense").scorer()
    earlier = ScoreOptions(version_offset=-1)
    np.testing.assert_array_equal(
        sampled_scores(scorer, trajectory((2, SAMPLED)), earlier), sampled_scores(scorer, trajectory((1, SAMPLED)))
    )
    # The first version of a resumed epoch follows one of the epoch before.
    np.testing.assert_array_equal(
        sampled_scores(scorer, trajectory((2, SAMPLED), epoch=2), earlier),
        sampled_scores(scorer, trajectory((1, SAMPLED))),
    )
    assert np.isnan(
        sampled_scores(scorer, trajectory((2, 3), epoch=2))
    ).all()  # as logged, no epoch stands in for another
    assert (
        np.isnan(sampled_scores(scorer, trajectory((0, 3)), earlier)).all()
        and "no version -1" in scorer.unknown["e1-v0-1"]
    )


def test_temperature_is_the_tags_unless_asked_otherwise(rooms: Rooms):
    room = rooms("dense")
    item = trajectory((1, SAMPLED), temperature=0.7)
    logits = torch.from_numpy(vocabulary_logprobs(room, item))
    warm = (
        torch.log_softmax(logits / 0.7, -1).gather(1, torch.from_numpy(item.token_ids[PROMPT:, None]).long()).squeeze(1)
    )
    np.testing.assert_allclose(sampled_scores(room.scorer(), item), warm, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        sampled_scores(room.scorer(), item, ScoreOptions(temperature=1.0)),
        room.trained[1][PROMPT - 1 :],
        rtol=0,
        atol=1e-6,
    )


def test_truncation_renormalises_over_the_tags_top_k(rooms: Rooms):
    room = rooms("dense")
    item = trajectory((1, SAMPLED), top_k=6)
    logprobs = vocabulary_logprobs(room, item)
    own = logprobs[np.arange(SAMPLED), item.token_ids[PROMPT:]]
    kept = [
        set(np.argsort(-row)[:6].tolist()) | {token}
        for row, token in zip(logprobs, item.token_ids[PROMPT:].tolist(), strict=True)
    ]
    mass = np.array([np.exp(row[list(ids)]).sum() for row, ids in zip(logprobs, kept, strict=True)])
    assert {len(ids) for ids in kept} == {6, 7}
    np.testing.assert_allclose(sampled_scores(room.scorer(), item), own - np.log(mass), rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        sampled_scores(room.scorer(), item, ScoreOptions(truncate=False)), own, rtol=0, atol=1e-5
    )


def vocabulary_logprobs(room: Room, item: Trajectory) -> NDArray[np.float32]:
    """[sampled, V] raw log-probs at version 1."""
    model: Any = Reference(room.weights / "e1-v1").model
    with torch.no_grad():
        return torch.log_softmax(
            model(torch.from_numpy(item.token_ids[None]).long()).logits[0, PROMPT - 1 : -1], -1
        ).numpy()


def test_a_kept_cache_is_what_two_models_over_one_cache_give(rooms: Rooms):
    room = rooms("dense")
    item = trajectory((1, 4), (2, 5))
    boundary = PROMPT + 4
    ids = torch.from_numpy(item.token_ids[None]).long()
    past = DynamicCache()
    logits: list[torch.Tensor] = []
    for version, part in ((1, slice(0, boundary - 1)), (2, slice(boundary - 1, -1))):
        model: Any = Reference(room.weights / f"e1-v{version}").model
        with torch.no_grad():
            logits.append(model(ids[:, part], past_key_values=past, use_cache=True).logits[0])
    by_hand = torch.log_softmax(torch.cat(logits)[PROMPT - 1 :], -1).gather(1, ids[0, PROMPT:, None]).squeeze(1).numpy()
    scorer = room.scorer()
    kept, recomputed = sampled_scores(scorer, item, ScoreOptions(keep_kv=True)), sampled_scores(scorer, item)
    np.testing.assert_allclose(kept, by_hand, rtol=0, atol=1e-5)
    np.testing.assert_allclose(kept[:4], recomputed[:4], rtol=0, atol=1e-5)
    assert np.abs(kept - recomputed)[4:].min() > 1e-5


def test_a_new_turn_starts_a_new_cache(rooms: Rooms):
    item = trajectory((1, 4), (2, 5))
    sampled = item.sampled.copy()
    sampled[PROMPT + 4] = False
    logprobs = np.where(sampled, item.rollout_logprobs, np.float32(0))
    first, second = item.version_spans
    item = replace(
        item, sampled=sampled, rollout_logprobs=logprobs, version_spans=(first, replace(second, start=second.start + 1))
    )
    scorer = rooms("dense").scorer()
    np.testing.assert_array_equal(
        sampled_scores(scorer, item, ScoreOptions(keep_kv=True)), sampled_scores(scorer, item)
    )


def test_behind_an_unknown_cache_all_is_unknown(rooms: Rooms):
    scorer = rooms("dense").scorer()
    late, early = ScoreOptions(keep_kv=True), ScoreOptions(keep_kv=True, version_offset=-1)
    for item, options in ((trajectory((7, 4), (2, 5)), late), (trajectory((0, 4), (2, 5)), early)):
        assert np.isnan(sampled_scores(scorer, item, options)).all()
        assert len(scorer.unknown) == 1


def test_another_dtype_is_a_cast_of_the_held_weights_for_one_call(rooms: Rooms):
    room = rooms("dense")
    item = trajectory((1, SAMPLED))
    scorer = room.scorer()
    before = sampled_scores(scorer, item)
    low = sampled_scores(scorer, item, ScoreOptions(dtype="bfloat16"))
    np.testing.assert_array_equal(low, sampled_scores(room.scorer(dtype="bfloat16"), item))
    half = sampled_scores(scorer, item, ScoreOptions(dtype="float16"))
    assert 0 < np.abs(half - before).max() < np.abs(low - before).max()
    eight = sampled_scores(scorer, item, ScoreOptions(weights_dtype="float8_e4m3"))
    assert np.abs(eight - before).max() > 1e-3
    np.testing.assert_array_equal(sampled_scores(scorer, item), before)
    np.testing.assert_array_equal(sampled_scores(scorer, item, ScoreOptions(dtype="float32")), before)


def test_replayed_experts_act_from_their_own_row_on(rooms: Rooms):
    scorer = rooms("moe").scorer()
    others = [trajectory((1, 3), index=1), trajectory((2, 20), index=2)]
    item = trajectory((1, SAMPLED))
    rows = item.token_ids.size - 1
    experts = np.broadcast_to(np.array([3, 7], dtype=np.uint8), (rows, 2, 2)).copy()
    native = sampled_scores(scorer, item)
    replay = ScoreOptions(replay_routing=True)
    for covered, first in ((np.zeros(rows, dtype=np.bool_), SAMPLED), (np.arange(rows) >= PROMPT + 2, 3)):
        traced = replace(item, routing=RoutingTrace(experts=experts, covered=covered))
        scores = scorer.score([*others, traced], replay)[2][item.sampled]
        np.testing.assert_allclose(scores[:first], native[:first], rtol=0, atol=1e-5)
        assert (np.abs(scores - native)[first:] > 1e-5).all()
    hollow = replace(item, routing=RoutingTrace(experts=np.zeros_like(experts), covered=np.ones(rows, dtype=np.bool_)))
    np.testing.assert_array_equal(sampled_scores(scorer, hollow, replay), native)
    with pytest.raises(UserError, match="2 blocks, top_k 2"):
        scorer.score(
            [replace(item, routing=RoutingTrace(experts=experts[:, :1], covered=np.ones(rows, dtype=np.bool_)))], replay
        )


def test_a_dense_model_refuses_to_replay(rooms: Rooms):
    with pytest.raises(UserError, match="names no experts"):
        rooms("dense").scorer().score([trajectory((1, 3))], ScoreOptions(replay_routing=True))
