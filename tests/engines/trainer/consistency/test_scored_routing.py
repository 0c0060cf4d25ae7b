"""The scorer compares an engine's experts with its own, row by row at the version that sampled, and counts what it
could not compare."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import BASE, build_tag, build_trajectory
from support.trainer.torch_models import (
    by_sample,
    core_of,
    logprobs_of,
    request_of,
    run_dry,
    save_random_model,
    tokens_of,
)
from support.trainer.trainer_room import VOCABULARY, write_model
from support.trainer.trainer_scenarios import build, step
from transformers import AutoModelForCausalLM

from rollout.types.generation import TokenChunk
from rollout.types.trajectory import FinishReason, RoutingTrace, Timings, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.scorer import Scorer
from trainer.model.routing_capture import RoutingRecorder

PROMPT, EXPERTS, CELL = 4, 12, (2, 2)
PLAIN = ScoreOptions()


@dataclass(frozen=True, kw_only=True)
class Room:
    """Published versions 0 and 1 of one mixture of experts."""

    model_dir: Path
    weights: Path

    def scorer(self, batch_tokens: int = 1000) -> Scorer:
        return Scorer(HeldVersions(self.model_dir, self.weights, "float32", 8, 3, torch.device("cpu")), batch_tokens)

    def native(self, item: Trajectory) -> NDArray[np.uint8]:
        """[T - 1, blocks, top_k] each row at the version that sampled the next token (of given tokens: the first
        one's)."""
        found = np.zeros((item.token_ids.size - 1, *CELL), dtype=np.uint8)
        for span in item.version_spans:
            model: Any = AutoModelForCausalLM.from_pretrained(self.weights / span.policy.key)
            recorder = RoutingRecorder(model, EXPERTS, CELL[1])
            with torch.no_grad(), recorder.recording():
                model(input_ids=torch.from_numpy(item.token_ids[None, : span.end - 1]).long(), use_cache=False)
            first = 0 if span is item.version_spans[0] else span.start - 1
            found[first : span.end - 1] = recorder.take().experts[first:]
        return found


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    folder = tmp_path_factory.mktemp("routing")
    model_dir = write_model(folder / "moe", moe=True)
    trainer = build(folder, "moe", model="moe", config={"optimizer": {"learning_rate": 0.3}})
    trainer.publish(PolicyVersion(1, 0), folder / "weights" / "e1-v0")
    step(trainer, 1)
    trainer.publish(PolicyVersion(1, 1), folder / "weights" / "e1-v1")
    trainer.close()
    return Room(model_dir=model_dir, weights=folder / "weights")


def trajectory(*spans: tuple[int, int], index: int = 0) -> Trajectory:
    named = [(PolicyVersion(1, version), length) for version, length in spans]
    return build_trajectory(index=index, prompt_tokens=PROMPT, spans=named, vocab_size=VOCABULARY)


def traced(item: Trajectory, experts: NDArray[np.uint8], covered: NDArray[np.bool_] | None = None) -> Trajectory:
    return replace(
        item,
        routing=RoutingTrace(
            experts=experts, covered=np.ones(experts.shape[0], dtype=np.bool_) if covered is None else covered
        ),
    )


def agreement(scorer: Scorer, item: Trajectory, options: ScoreOptions = PLAIN) -> RoutingAgreement:
    found = scorer.score_with_routing([item], options)[1][0]
    assert found is not None
    return found


def moved(experts: NDArray[np.uint8], *rows: int) -> NDArray[np.uint8]:
    """Other experts in block 1 of some rows."""
    changed = experts.copy()
    changed[list(rows), 1] = (changed[list(rows), 1] + 1) % EXPERTS
    return changed


def test_each_row_is_compared_at_the_version_that_sampled_its_next_token(room: Room):
    item = trajectory((0, 6), (1, 7))
    experts = room.native(item)
    found = agreement(room.scorer(), traced(item, experts))
    assert (found.mismatch, found.coverage, found.num_rows) == (0.0, 1.0, 13)
    stale = replace(item, version_spans=(VersionSpan(PolicyVersion(1, 0), PROMPT, 17),))
    assert agreement(room.scorer(), traced(item, room.native(stale))).mismatch > 0


def test_rows_that_predict_given_tokens_are_left_out_and_sampled_ones_count_by_block_and_by_token(room: Room):
    item = trajectory((0, 8))
    experts = room.native(item)
    assert agreement(room.scorer(), traced(item, moved(experts, 0, 1, 2))).mismatch == 0.0
    found = agreement(room.scorer(), traced(item, moved(experts, PROMPT - 1, PROMPT + 6)))
    assert found.block_mismatch.tolist() == [0.0, 0.25]
    assert (found.token_any_mismatch, found.mismatch) == (0.25, 0.125)
    assert found.gate_gap_mismatch is not None and 0.0 < found.gate_gap_mismatch < found.mismatch


def test_neighbours_padding_and_budget_change_nothing(room: Room):
    items = [trajectory((0, 3 + index), (1, 9 - index), index=index) for index in range(4)]
    items = [traced(item, moved(room.native(item), PROMPT + index)) for index, item in enumerate(items)]
    items.insert(2, trajectory((1, 20), index=7))
    for budget in (1, 40, 1000):
        found = room.scorer(budget).score_with_routing(items, PLAIN)[1]
        assert [part is None for part in found] == [False, False, True, False, False]
        assert [round(part.token_any_mismatch * 12) for part in found if part is not None] == [1, 1, 1, 1]


def test_scores_are_the_same_with_and_without_a_comparison(room: Room):
    item = trajectory((0, 6), (1, 7))
    scorer = room.scorer()
    np.testing.assert_array_equal(
        scorer.score_with_routing([traced(item, room.native(item))], PLAIN)[0][0], scorer.score([item], PLAIN)[0]
    )


def test_missing_and_hollow_rows_lower_the_coverage_and_nothing_stands_in_for_them(room: Room):
    item = trajectory((0, 8))
    experts, covered = room.native(item), np.ones(11, dtype=np.bool_)
    covered[[PROMPT, PROMPT + 1]] = False
    experts[PROMPT + 2] = 0
    found = agreement(room.scorer(), traced(item, experts, covered))
    assert (found.coverage, found.mismatch, found.hollow_cells.tolist()) == (5 / 8, 0.0, [1, 1])


def test_a_trace_of_another_model_covers_nothing(room: Room):
    item = trajectory((0, 8))
    found = agreement(room.scorer(), traced(item, np.zeros((11, 3, 2), dtype=np.uint8)))
    assert (found.coverage, found.num_rows) == (0.0, 0)


def test_tokens_of_a_version_that_is_gone_are_not_asked_of_the_engine(room: Room):
    item = trajectory((0, 6), (9, 7))
    experts = np.concatenate([room.native(trajectory((0, 6))), np.zeros((7, *CELL), dtype=np.uint8)])
    assert agreement(room.scorer(), traced(item, experts)).num_predicting == 6
    assert room.scorer().score_with_routing([traced(trajectory((9, 8)), experts[:11])], PLAIN)[1] == [None]


def test_under_a_replay_the_native_choice_is_compared(room: Room):
    item = trajectory((0, 8))
    other = moved(room.native(item), *range(11))
    assert agreement(room.scorer(), traced(item, other), ScoreOptions(replay_routing=True)).token_any_mismatch == 1.0


def test_a_dense_model_compares_nothing(tmp_path: Path):
    scorer = Scorer(HeldVersions(write_model(tmp_path / "dense"), tmp_path, "float32", 8, 1, torch.device("cpu")), 100)
    item = trajectory((0, 3))
    assert scorer.score_with_routing([traced(item, np.zeros((6, 2, 2), dtype=np.uint8))], PLAIN)[1] == [None]


@pytest.mark.parametrize("halved", [False, True])
def test_the_torch_engines_routing_is_the_trainers(tmp_path: Path, halved: bool):
    directory = save_random_model(tmp_path / "base", 0, moe=True)
    core = core_of(directory, return_routing=True)
    core.submit(request_of("r", [3, 4, 5, 6], eos_ids=()))
    answer = by_sample(run_dry(core))
    scorer = Scorer(HeldVersions(directory, tmp_path, "float32", 8, 1, torch.device("cpu")), 1000)
    items = [_of_engine(index, answer["r", index]) for index in range(2)]
    if halved:
        items = [
            replace(item, routing=replace(item.routing, covered=np.arange(item.token_ids.size - 1) % 2 == 0))
            for item in items
            if item.routing
        ]
    for found in scorer.score_with_routing(items, PLAIN)[1]:
        assert found is not None
        assert (found.mismatch, found.coverage) == (0.0, 0.5 if halved else 1.0)


def _of_engine(index: int, chunks: list[TokenChunk]) -> Trajectory:
    tokens, logprobs = tokens_of(chunks), logprobs_of(chunks)
    total = 4 + tokens.size
    return Trajectory(
        trajectory_id=f"r-{index}",
        dispatch_id="r",
        prompt_id="p",
        environment="e",
        token_ids=np.concatenate([np.array([3, 4, 5, 6], dtype=np.int32), tokens]),
        sampled=np.arange(total) >= 4,
        rollout_logprobs=np.concatenate([np.zeros(4, dtype=np.float32), logprobs]),
        version_spans=(VersionSpan(BASE, 4, total),),
        turns=1,
        tag=build_tag(),
        finish_reason=FinishReason.LENGTH,
        timings=Timings(started_at_s=0.0, generation_s=0.0),
        routing=chunks[-1].routing,
    )
