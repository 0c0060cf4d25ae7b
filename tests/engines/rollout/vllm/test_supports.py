"""What vLLM's log-probs say about the tokens that a truncated draw kept."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.builders import BASE

from rollout.config import SamplingConfig, VllmConfig
from rollout.engines.vllm.launch import engine_arguments
from rollout.engines.vllm.requests import MOST_LOGPROBS, Limits, chunks_of, parts_of
from rollout.errors import EngineError
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk

OUT = -np.inf


def asked(vocab_size: int, **sampling: Any) -> tuple[Any, int]:
    """The one vLLM request of one sample, and how many likeliest tokens of each draw it asks for."""
    request = GenerationRequest(
        request_id="r",
        prompt_ids=np.array([2, 3, 4], dtype=np.int32),
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=4, ignore_eos=True, **sampling),
        eos_ids=(),
    )
    (part,) = parts_of(request, np.zeros(0, dtype=np.int32), Limits(64, vocab_size))
    return part, part.params.logprobs or 0


def answer(part: Any, rows: list[list[tuple[int, float]]]) -> list[TokenChunk]:
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    for row in rows:
        ids, nats = zip(*row, strict=True)
        flat.append_fast(list(ids), list(nats), chain(range(len(row))), [None] * len(row))
    half = len(rows) // 2
    spans = [SimpleNamespace(version="a", start=0, end=half), SimpleNamespace(version="b", start=half, end=len(rows))]
    completion: Any = SimpleNamespace(
        index=0, finish_reason="length", token_ids=[row[0][0] for row in rows], logprobs=flat, weight_versions=spans
    )
    later = type(BASE)(1, 1)
    output: Any = SimpleNamespace(outputs=[completion])
    return chunks_of("r", part, output, {"a": BASE, "b": later}, BASE)


@pytest.mark.parametrize(
    ("sampling", "vocab_size", "width"),
    [
        ({}, 1000, 0),
        ({"top_k": 3}, 1000, 4),
        ({"top_k": 64}, 1000, 65),
        ({"top_k": 500}, 1000, 65),
        ({"top_p": 0.9}, 1000, 65),
        ({"top_p": 0.9, "top_k": 7}, 1000, 8),
        ({"top_p": 0.9}, 24, 24),
    ],
)
def test_one_token_more_than_can_be_kept_is_asked_for(sampling: dict[str, Any], vocab_size: int, width: int):
    assert asked(vocab_size, **sampling)[1] == width <= MOST_LOGPROBS
    identity = EngineIdentity(replica=0, seed=0, deterministic=False, sampling=SamplingConfig())
    assert engine_arguments("m", VllmConfig(), identity, on_cpu=True)["max_logprobs"] == MOST_LOGPROBS


def test_tokens_within_reach_are_listed_unless_there_may_be_more():
    part, width = asked(1000, top_p=0.9, top_k=2)
    assert width == 3
    first, last = answer(
        part,
        [
            [(5, -0.1), (5, -0.1), (9, -2.0), (1, OUT)],
            [(7, 0.0), (7, 0.0), (2, OUT), (3, OUT)],
            [(8, -1.0), (4, -0.5), (8, -1.0), (6, OUT)],
            [(9, -1.5), (3, -1.0), (9, -1.5), (2, -1.5)],
        ],
    )
    assert first.supports is not None and last.supports is not None
    assert (first.supports.counts.tolist(), first.supports.ids.tolist()) == ([2, 1], [5, 9, 7])
    assert (last.supports.counts.tolist(), last.supports.ids.tolist()) == ([2, 0], [4, 8])
    assert [first.logprobs.tolist(), last.logprobs.tolist()] == [[np.float32(-0.1), 0.0], [-1.0, -1.5]]


def test_a_request_that_cuts_nothing_lists_nothing():
    part, _ = asked(1000)
    assert all(chunk.supports is None for chunk in answer(part, [[(5, -0.5)], [(6, -0.25)]]))


def test_an_answer_with_fewer_log_probs_than_asked_for_is_an_engine_error():
    part, _ = asked(1000, top_k=2)
    with pytest.raises(EngineError, match="answered 2 tokens with 4 log-probs; expected 4 each"):
        answer(part, [[(5, -0.5), (5, -0.5)], [(6, -0.25), (6, -0.25)]])
