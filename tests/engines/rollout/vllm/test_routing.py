"""vLLM's answer about experts becomes a trace: its option is set only when asked for, columns are blocks with experts,
and rows lie beside their tokens."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.builders import BASE
from support.trainer.torch_models import manifest_of, save_random_model

from rollout.config import SamplingConfig, VllmConfig
from rollout.engines.vllm.engine import VllmEngine
from rollout.engines.vllm.launch import engine_arguments
from rollout.engines.vllm.requests import Limits, chunks_of, parts_of
from rollout.engines.vllm.routing import expert_layers, trace_of
from rollout.errors import UserError
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams

ASKED = VllmConfig(return_routing=True, num_gpus=1)
IDENTITY = EngineIdentity(replica=0, seed=0, deterministic=False, sampling=SamplingConfig())


def test_vllm_is_asked_only_where_the_config_asks():
    assert engine_arguments("m", ASKED, IDENTITY, on_cpu=False)["enable_return_routed_experts"] is True
    assert engine_arguments("m", ASKED, IDENTITY, on_cpu=False)["enable_prefix_caching"] is True
    assert "enable_return_routed_experts" not in engine_arguments("m", VllmConfig(num_gpus=1), IDENTITY, on_cpu=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_knows_the_option():
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import CompletionOutput

    assert "enable_return_routed_experts" in {field.name for field in fields(AsyncEngineArgs)}
    assert "routed_experts" in {field.name for field in fields(CompletionOutput)}


def test_layers_with_experts_are_read_from_tensor_names():
    names = [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.11.block_sparse_moe.experts.3.w1.weight",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "lm_head.weight",
    ]
    assert expert_layers(names) == (1, 2, 11)


def test_a_trace_has_a_column_for_each_block_with_experts():
    routed = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    trace = trace_of(routed, 4, (1, 2, 61))
    assert trace is not None and trace.covered.all()
    np.testing.assert_array_equal(trace.experts, routed[:, [1, 2]])
    wide = trace_of(routed.astype(np.int16), 4, (0,))
    assert wide is not None and wide.experts.dtype == np.uint16


@pytest.mark.parametrize("rows", [3, 5])
def test_an_answer_that_does_not_lie_beside_the_tokens_covers_none(rows: int):
    trace = trace_of(np.ones((4, 2, 2), dtype=np.uint8), rows, (0, 1))
    assert trace is not None and trace.experts.shape == (rows, 2, 2)
    assert not trace.covered.any() and not trace.experts.any()


def test_without_an_answer_or_without_experts_there_is_no_trace():
    assert trace_of(None, 4, (0,)) is None
    assert trace_of(np.ones((4, 2, 2), dtype=np.uint8), 4, ()) is None


def test_the_last_chunk_of_a_sample_carries_the_routing_of_the_whole_sequence():
    from vllm.logprobs import FlatLogprobs

    request = GenerationRequest(
        request_id="r",
        prompt_ids=np.array([2, 3, 4], dtype=np.int32),
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=4, ignore_eos=True),
        eos_ids=(),
    )
    (part,) = parts_of(request, np.zeros(0, dtype=np.int32), Limits(64, 32))
    logprobs = FlatLogprobs()
    logprobs.logprobs = [-1.0] * 4
    spans = [SimpleNamespace(version="a", start=0, end=3), SimpleNamespace(version="b", start=3, end=4)]
    completion: Any = SimpleNamespace(
        index=0,
        finish_reason="length",
        token_ids=[5, 6, 7, 8],
        logprobs=logprobs,
        weight_versions=spans,
        routed_experts=np.ones((6, 2, 2), dtype=np.uint8),
    )
    output: Any = SimpleNamespace(outputs=[completion])
    first, last = chunks_of("r", part, output, {"a": BASE, "b": BASE}, BASE, (1,))
    assert first.routing is None
    assert last.routing is not None and last.routing.experts.shape == (6, 1, 2) and last.routing.covered.all()
    assert all(chunk.routing is None for chunk in chunks_of("r", part, output, {"a": BASE, "b": BASE}, BASE))


def test_a_dense_model_that_is_asked_for_routing_does_not_start(tmp_path: Path):
    engine = VllmEngine(ASKED, IDENTITY)
    with pytest.raises(UserError, match="not a mixture of experts; set it to false"):
        asyncio.run(engine.start(manifest_of(save_random_model(tmp_path / "base", 0), 0)))
