"""What vLLM's log-probs say about the tokens that a truncated draw kept."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.builders import BASE

from rollout.config import SamplingConfig, VllmConfig
from rollout.engines.vllm.launch import engine_arguments
from rollout.engines.vllm.requests import MOST_LOGPROBS, Limits, chunks_of, parts_of
from rollout.errors import EngineError
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from trainer.model.logprobs import chunked_logprobs
from trainer.types.support import Truncation, support_of

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(5, 1.0, 1.0), (0, 0.7, 1.0), (9, 0.8, 0.7), (200, 1.0, 1.0)]
)
def test_what_vllms_own_sampler_answers_is_the_trainers_distribution(top_k: int, top_p: float, temperature: float):
    """Its sampler and its collector of log-probs, without an engine round them."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows, generator = 20, torch.Generator().manual_seed(0)
    hidden, head = torch.randn(rows, 16, generator=generator), torch.randn(4096, 16, generator=generator)
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((rows,), top_p) if top_p < 1 else None,
        top_k=torch.full((rows,), top_k, dtype=torch.int32) if top_k else None,
        generators={},
        max_num_logprobs=MOST_LOGPROBS,  # another request of the batch asks for as many
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    with torch.compiler.set_stance("force_eager"):
        drawn = Sampler(logprobs_mode="processed_logprobs")(hidden @ head.t(), metadata)
    part, width = asked(4096, top_k=top_k, top_p=top_p, temperature=temperature)
    collector = LogprobsProcessor(
        tokenizer=None,
        logprobs=FlatLogprobs(),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=width,
        num_prompt_logprobs=None,
    )
    assert drawn.logprobs_tensors is not None
    collector._update_sample_logprobs(drawn.logprobs_tensors.tolists())
    tokens = drawn.sampled_token_ids.flatten().long()
    completion: Any = SimpleNamespace(
        index=0,
        finish_reason="length",
        token_ids=tokens.tolist(),
        logprobs=collector.logprobs,
        weight_versions=[SimpleNamespace(version="a", start=0, end=rows)],
    )
    output: Any = SimpleNamespace(outputs=[completion])
    (chunk,) = chunks_of("r", part, output, {"a": BASE}, BASE)
    assert chunk.supports is not None
    assert not chunk.supports.without(chunk.token_ids).size
    assert (chunk.supports.counts == {5: 5, 200: 0}.get(top_k, chunk.supports.counts)).all()
    for supports in (chunk.supports, None):
        support = support_of([(Truncation(top_p=top_p, top_k=top_k, supports=supports), np.arange(rows))])
        ours = chunked_logprobs(hidden, head, tokens, temperature, 7, support)[0]
        np.testing.assert_allclose(ours.numpy(), chunk.logprobs, rtol=0, atol=1e-5)
