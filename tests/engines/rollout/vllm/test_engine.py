"""The vLLM engine on CPU, real: a tied dense fp32 model that samples, is updated in mid-generation, aborted, scored and
stopped."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.vllm_room import (
    CONTEXT,
    EOS,
    EXACT_NATS,
    VOCAB,
    VllmRoom,
    ask,
    assert_each_tensor_counts,
    build_manifest,
    forward,
    gap,
    save_model,
    scores_of,
    tokens_of,
    trajectories_of,
)

from rollout.config import VllmConfig
from rollout.errors import EngineError, UserError
from rollout.types.generation import PauseMode, SamplingParams, TokenChunk
from rollout.types.trajectory import FinishReason
from rollout.types.weights import PolicyVersion, WeightManifest

pytestmark = [
    pytest.mark.timeout(600),  # the first test starts the engine and compiles
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    ),  # torch itself, imported by vLLM
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),  # vLLM after a start that failed
]
V0, V1, V2, V3 = (PolicyVersion(1, version) for version in range(4))
PROMPT = [5, 9, 14, 3, 27, 8]


@dataclass(frozen=True)
class Served:
    """The shared engine with its four generations of weights. Each test leaves it running, unpaused, at whatever
    version it reached."""

    room: VllmRoom
    models: dict[PolicyVersion, Path]

    def manifest(self, policy: PolicyVersion) -> WeightManifest:
        return build_manifest(self.models[policy], policy)

    async def update(self, policy: PolicyVersion, mode: PauseMode = PauseMode.RECOMPUTE) -> None:
        engine, manifest = self.room.engine, self.manifest(policy)
        await engine.pause(mode)
        report = await engine.apply(manifest)
        await engine.resume()
        assert report.policy == policy
        assert report.digest == manifest.digest

    async def advance(self, rounds: int = 3) -> None:
        """Let running requests take some steps: a score goes through the same batch."""
        for _ in range(rounds):
            await self.room.engine.score(np.array([2, 3], dtype=np.int32))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {policy: folder / policy.key for policy in (V0, V1, V2, V3)}
    for policy, path in models.items():
        save_model(path, seed=policy.version)
    room = VllmRoom(build_manifest(models[V0], V0), VllmConfig(kv_cache_gib=0.25, max_num_seqs=32))
    try:
        yield Served(room, models)
    finally:
        room.close()


def test_the_tag_names_engine_numerics_and_weights(served: Served):
    tag = served.room.tag
    assert (tag.engine, tag.engine_version, tag.weights_dtype, tag.kv_across_versions) == (
        "vllm",
        "0.32.0",
        "float32",
        "recompute",
    )
    assert tag.logprob_semantics == "processed"
    assert tag.weights_digest == served.manifest(V0).digest


def test_sampled_logprobs_equal_a_plain_forward(served: Served):
    served.room.run(served.update(V0))
    chunks = served.room.collect(ask("exact", PROMPT, num_samples=8, new_tokens=40))
    assert sorted({chunk.sample_index for chunk in chunks}) == list(range(8))
    assert len({tuple(tokens_of(chunks, sample)) for sample in range(8)}) == 8
    assert all(gap(chunks, PROMPT, served.models, sample) <= EXACT_NATS for sample in range(8))


def test_logprobs_are_of_the_distribution_that_was_sampled_from(served: Served):
    served.room.run(served.update(V0))
    chunks = served.room.collect(
        ask("cool", PROMPT, sampling=SamplingParams(max_new_tokens=40, temperature=0.6, ignore_eos=True))
    )
    expected = forward(served.models[V0], [*PROMPT, *tokens_of(chunks)], temperature=0.6)[len(PROMPT) - 1 :]
    assert np.abs(np.concatenate([chunk.logprobs for chunk in chunks]) - expected).mean() <= EXACT_NATS
    single = served.room.collect(
        ask("forced", PROMPT, sampling=SamplingParams(max_new_tokens=4, top_k=1, ignore_eos=True))
    )
    assert np.all(single[0].logprobs == 0.0)  # the only token left has probability 1


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.8, "top_k": 9, "temperature": 0.7}])
def test_what_a_truncated_draw_kept_comes_back_and_the_scorer_agrees(served: Served, cut: dict[str, Any]):
    served.room.run(served.update(V0))
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True, **cut)
    request = ask("cut-" + "-".join(cut), PROMPT, num_samples=4, sampling=sampling)
    for trajectory in trajectories_of(request, served.room.collect(request)):
        assert trajectory.supports is not None
        counts = trajectory.supports.counts[trajectory.sampled]
        assert set(counts.tolist()) == {5} if cut == {"top_k": 5} else len(set(counts.tolist())) > 1
        for one in (trajectory, replace(trajectory, supports=None)):
            assert np.abs(scores_of(served.models[V0], one) - one.rollout_logprobs).mean() <= EXACT_NATS


def test_a_stop_token_ends_a_sample_and_belongs_to_it(served: Served):
    chunks = served.room.collect(ask("stopping", PROMPT, num_samples=16, sampling=SamplingParams(max_new_tokens=200)))
    ended = {chunk.sample_index: chunk for chunk in chunks if chunk.finish_reason is not None}
    stopped = [chunk for chunk in ended.values() if chunk.finish_reason is FinishReason.STOP]
    assert len(ended) == 16
    assert stopped
    assert all(chunk.token_ids[-1] == EOS and EOS not in chunk.token_ids[:-1] for chunk in stopped)


def test_an_update_in_mid_generation_leaves_spans_that_are_true_to_their_versions(served: Served):
    async def sample_through_updates() -> list[list[TokenChunk]]:
        await served.update(V0)
        running = [
            asyncio.ensure_future(served.room.gather(ask(f"through-{i}", PROMPT, num_samples=8, new_tokens=300)))
            for i in range(2)
        ]
        await served.advance()
        await served.update(V1)
        await served.advance()
        await served.update(V2)
        return await asyncio.gather(*running)

    for chunks in served.room.run(sample_through_updates()):
        for sample in range(8):
            own = [chunk for chunk in chunks if chunk.sample_index == sample]
            assert [chunk.policy for chunk in own] == [V0, V1, V2]
            assert sum(chunk.token_ids.size for chunk in own) == 300
            assert [chunk.finish_reason for chunk in own] == [None, None, FinishReason.LENGTH]
            assert gap(chunks, PROMPT, served.models, sample) <= EXACT_NATS


def test_every_parameter_of_a_tied_model_arrives(served: Served):
    ids = list(np.random.default_rng(0).integers(2, VOCAB, size=60))
    assert_each_tensor_counts(served.models[V2], served.models[V3], ids)
    served.room.run(served.update(V2))
    served.room.run(served.update(V3))
    scored = served.room.run(served.room.engine.score(np.array(ids, dtype=np.int32)))
    assert np.abs(scored - forward(served.models[V3], ids)).mean() <= EXACT_NATS


def test_no_key_or_value_of_older_weights_serves_a_newer_version(served: Served):
    prompt = list(np.random.default_rng(1).integers(2, VOCAB, size=300))
    for policy in (V0, V1):
        served.room.run(served.update(policy))
        chunks = served.room.collect(ask(f"again-{policy.key}", prompt, num_samples=2, new_tokens=20))
        assert {chunk.policy for chunk in chunks} == {policy}
        assert all(gap(chunks, prompt, served.models, sample) <= EXACT_NATS for sample in range(2))


def test_an_update_of_a_saturated_engine_loses_no_request(served: Served):
    async def saturate() -> list[list[TokenChunk]]:
        running = [
            asyncio.ensure_future(served.room.gather(ask(f"full-{i}", PROMPT, num_samples=8, new_tokens=60)))
            for i in range(12)
        ]
        for policy in (V0, V1, V2):
            await served.advance(1)
            await served.update(policy)
        return await asyncio.gather(*running)

    for chunks in served.room.run(saturate()):
        assert all(len(tokens_of(chunks, sample)) == 60 for sample in range(8))


def test_a_score_does_not_wait_for_a_place_in_a_full_batch(served: Served):
    async def overtake() -> bool:
        running = [
            asyncio.ensure_future(served.room.gather(ask(f"long-{i}", PROMPT, num_samples=8, new_tokens=300)))
            for i in range(8)
        ]
        await served.advance(2)  # twice the samples that fit into the batch: half of them wait
        first = not any(request.done() for request in running)
        await asyncio.gather(*running)
        return first

    assert served.room.run(overtake())


def test_drain_finishes_what_runs_under_the_old_weights(served: Served):
    async def drain() -> list[TokenChunk]:
        await served.update(V0)
        running = asyncio.ensure_future(served.room.gather(ask("drained", PROMPT, num_samples=4, new_tokens=100)))
        await served.advance(1)
        await served.update(V1, PauseMode.DRAIN)
        return await running

    assert {chunk.policy for chunk in served.room.run(drain())} == {V0}


def test_an_aborted_request_answers_what_it_has_and_can_be_continued(served: Served):
    async def abort() -> tuple[list[TokenChunk], list[TokenChunk]]:
        await served.update(V0)
        running = asyncio.ensure_future(served.room.gather(ask("cut", PROMPT, new_tokens=300)))
        await served.advance()
        await served.room.engine.abort("cut")
        first = await running
        await served.update(V1)
        produced = np.array(tokens_of(first), dtype=np.int32)
        rest = [chunk async for chunk in served.room.engine.resume_from(ask("cut", PROMPT, new_tokens=300), produced)]
        return first, rest

    first, rest = served.room.run(abort())
    assert first[-1].finish_reason is FinishReason.ABORT
    assert 0 < len(tokens_of(first)) < 300
    assert len(tokens_of(first)) + len(tokens_of(rest)) == 300
    assert [chunk.policy for chunk in (*first, *rest)] == [V0, V1]
    assert gap([*first, *rest], PROMPT, served.models) <= EXACT_NATS


def test_an_abort_before_the_first_token_ends_every_sample(served: Served):
    async def abort() -> list[TokenChunk]:
        await served.room.engine.pause(PauseMode.RECOMPUTE)
        running = asyncio.ensure_future(served.room.gather(ask("early", PROMPT, num_samples=3)))
        await asyncio.sleep(0)
        await served.room.engine.abort("early")
        chunks = await running
        await served.room.engine.resume()
        return chunks

    chunks = served.room.run(abort())
    assert [(chunk.sample_index, chunk.token_ids.size, chunk.finish_reason) for chunk in chunks] == [
        (i, 0, FinishReason.ABORT) for i in range(3)
    ]


def test_a_caller_that_goes_away_frees_its_samples(served: Served):
    async def leave() -> int:
        running = asyncio.ensure_future(served.room.gather(ask("gone", PROMPT, num_samples=8, new_tokens=400)))
        await served.advance(1)
        running.cancel()
        await asyncio.wait({running})
        await served.room.gather(ask("gone", PROMPT, num_samples=2, new_tokens=4))  # the id is free again
        return (await served.room.engine.load()).running

    assert served.room.run(leave()) == 0


def test_a_running_id_is_refused(served: Served):
    async def twice() -> list[TokenChunk]:
        running = asyncio.ensure_future(served.room.gather(ask("same", PROMPT, new_tokens=100)))
        await served.advance(1)
        with pytest.raises(EngineError, match="same is already running"):
            await served.room.gather(ask("same", PROMPT))
        return await running

    assert len(tokens_of(served.room.run(twice()))) == 100


def test_seeds_fix_every_sample_by_itself(served: Served):
    first = served.room.collect(ask("seeded-a", PROMPT, 3, 30, seeds=(11, 2**62, 13)))
    again = served.room.collect(ask("seeded-b", PROMPT, 2, 30, seeds=(2**62, 13)))
    assert [tokens_of(first, 1), tokens_of(first, 2)] == [tokens_of(again, 0), tokens_of(again, 1)]
    assert tokens_of(first, 0) != tokens_of(first, 1)


def test_score_is_raw_and_refuses_what_it_cannot_score(served: Served):
    async def score(ids: list[int]) -> np.ndarray:
        return await served.room.engine.score(np.array(ids, dtype=np.int32))

    served.room.run(served.update(V0))
    ids = list(np.random.default_rng(2).integers(2, VOCAB, size=CONTEXT - 1))
    assert np.abs(served.room.run(score(ids)) - forward(served.models[V0], ids)).mean() <= EXACT_NATS
    assert served.room.run(score([5])).shape == (0,)
    with pytest.raises(UserError, match="context of 512"):
        served.room.run(score([2] * CONTEXT))
    with pytest.raises(UserError, match="0 to 47"):
        served.room.run(score([5, VOCAB]))
    assert served.room.run(served.room.engine.healthy())


def test_a_prompt_that_leaves_no_room_is_refused_and_a_long_one_ends_at_the_context(served: Served):
    with pytest.raises(UserError, match="leave no room for a token"):
        served.room.collect(ask("full", [2] * CONTEXT))
    chunks = served.room.collect(ask("nearly", [2] * (CONTEXT - 3), new_tokens=16))
    assert len(tokens_of(chunks)) == 3
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def test_weights_that_are_not_the_models_are_refused_and_change_nothing(served: Served, tmp_path: Path):
    tensors = load_file(served.models[V1] / "model.safetensors")
    norm = "model.norm.weight"
    broken = {
        "missing": {k: v for k, v in tensors.items() if k != norm},
        "wider": tensors | {norm: tensors[norm].repeat(2)},
    }

    async def offer(path: Path) -> None:
        await served.room.engine.pause(PauseMode.RECOMPUTE)
        try:
            await served.room.engine.apply(build_manifest(path, V1))
        finally:
            await served.room.engine.resume()

    served.room.run(served.update(V0))
    for name, content in broken.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
        with pytest.raises(EngineError, match=norm):
            served.room.run(offer(tmp_path / name))
    chunks = served.room.collect(ask("unharmed", PROMPT))
    assert {chunk.policy for chunk in chunks} == {V0}
    assert gap(chunks, PROMPT, served.models) <= EXACT_NATS


def test_the_order_pause_apply_resume_is_kept(served: Served):
    with pytest.raises(EngineError, match="pause the engine first"):
        served.room.run(served.room.engine.apply(served.manifest(V1)))
    with pytest.raises(EngineError, match='set it to "keep"'):
        served.room.run(served.room.engine.pause(PauseMode.KEEP))
    served.room.run(served.room.engine.resume())  # not paused: nothing to do
    assert len(tokens_of(served.room.collect(ask("after", PROMPT)))) == 16


def test_load_counts_samples_and_tokens(served: Served):
    async def watch() -> tuple[int, int, float]:
        before = await served.room.engine.load()
        running = asyncio.ensure_future(served.room.gather(ask("counted", PROMPT, num_samples=5, new_tokens=50)))
        await served.advance(1)
        during = await served.room.engine.load()
        await running
        after = await served.room.engine.load()
        return during.running, after.generated_tokens - before.generated_tokens, after.busy_s - before.busy_s

    running, tokens, busy_s = served.room.run(watch())
    assert (running, tokens) == (5, 250)
    assert busy_s > 0


@pytest.mark.slow
def test_updates_under_load_do_not_gather_memory(served: Served):
    """Each update packs every layer anew: the old copies must go."""

    async def update_often(first: int, times: int) -> list[float]:
        pauses: list[float] = []
        for version in range(first, first + times):
            running = asyncio.ensure_future(
                served.room.gather(ask(f"busy-{version}", PROMPT, num_samples=8, new_tokens=20))
            )
            await served.advance(1)
            await served.room.engine.pause(PauseMode.RECOMPUTE)
            report = await served.room.engine.apply(build_manifest(served.models[V1], PolicyVersion(2, version)))
            await served.room.engine.resume()
            pauses.append(report.pause_s)
            await running
        return pauses

    core = psutil.Process(served.room.core_pid)
    pauses = served.room.run(update_often(0, 50), 120.0)
    memory = [core.memory_info().rss]
    for part in range(1, 10):
        pauses += served.room.run(update_often(50 * part, 50), 120.0)
        memory.append(core.memory_info().rss)
    print(  # noqa: T201
        f"pause p50 {np.percentile(pauses, 50) * 1e3:.0f} ms, p99 {np.percentile(pauses, 99) * 1e3:.0f} ms; MiB "
        f"{[round(m / 2**20, 1) for m in memory]}"
    )
    assert memory[-1] < 1.02 * memory[0]


def test_stop_leaves_no_process(served: Served):
    core = psutil.Process(served.room.core_pid)
    family = [core, *core.children(recursive=True)]
    served.room.run(served.room.engine.stop())
    assert not [process for process in family if process.is_running()]
    assert not served.room.run(served.room.engine.healthy())
    with pytest.raises(EngineError, match="is not running"):
        served.room.collect(ask("late", PROMPT))
