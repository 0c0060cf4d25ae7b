"""The scripted engine: slots, latencies, and weight updates in mid-generation, on a clock that the test moves."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.manual_clock import ManualClock

from rollout.config import SamplingConfig, ScriptedConfig
from rollout.engines.registry import build_engine
from rollout.engines.scripted.draws import ScriptedDraws, draw_bits
from rollout.engines.scripted.engine import ScriptedEngine
from rollout.errors import EngineError, UserError
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, SamplingParams, TokenChunk
from rollout.types.trajectory import FinishReason
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest

CANARY = Canary(token_ids=np.array([2, 3, 4], dtype=np.int32), logprobs=np.array([-1.5, -0.25], dtype=np.float32))


def manifest(version: int, location: str = "", num_bytes: int = 0) -> WeightManifest:
    return WeightManifest(
        policy=PolicyVersion(1, version),
        transport=Transport.DISK,
        location=location,
        tensors=(),
        digest=manifest_digest(()),
        canary=CANARY,
        num_bytes=num_bytes,
    )


def request(
    request_id: str, num_samples: int = 1, max_new_tokens: int = 100, seeds: tuple[int, ...] = ()
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=np.array([2, 3], dtype=np.int32),
        num_samples=num_samples,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        eos_ids=(1,),
        seeds=seeds,
    )


def identity(replica: int = 0) -> EngineIdentity:
    return EngineIdentity(replica=replica, seed=3, deterministic=False, sampling=SamplingConfig())


async def collect(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


def run(
    scenario: Callable[[ScriptedEngine, ManualClock], Coroutine[None, None, None]],
    shortest: int | None = None,
    **config: object,
) -> None:
    """A scenario against a started engine on a manual clock."""

    async def body() -> None:
        clock = ManualClock()
        engine = ScriptedEngine(ScriptedConfig.model_validate(config), identity(), clock, shortest)
        await engine.start(manifest(0))
        async with asyncio.timeout(20):
            await scenario(engine, clock)

    asyncio.run(body())


def sizes(chunks: list[TokenChunk]) -> list[tuple[int, int]]:
    return [(chunk.policy.version, chunk.token_ids.size) for chunk in chunks]


@pytest.mark.parametrize("mode", [PauseMode.RECOMPUTE, PauseMode.KEEP])
def test_an_update_splits_a_running_sample_where_its_time_stood(mode: PauseMode):
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        running = asyncio.create_task(collect(engine.generate(request("a"))))
        await clock.advance(3.0)
        await engine.pause(mode)
        await clock.advance(50.0)
        report = asyncio.create_task(engine.apply(manifest(1)))
        await clock.advance(2.0)
        assert (await report).interrupted == 1 and (await report).pause_s == pytest.approx(52.0)
        await engine.resume()
        await clock.advance(6.9)
        assert not running.done()
        await clock.advance(0.2)
        assert sizes(await running) == [(0, 30), (1, 70)]
        assert [chunk.finish_reason for chunk in await running] == [None, FinishReason.LENGTH]
        assert (await engine.load()).busy_s == pytest.approx(10.0)

    run(scenario, latency_mean_s=10.0, apply_s=2.0)


def test_a_sample_without_progress_belongs_to_the_new_weights_alone():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        running = asyncio.create_task(collect(engine.generate(request("a", num_samples=2))))
        await clock.advance(5.0)
        await engine.pause(PauseMode.RECOMPUTE)
        await engine.apply(manifest(1))
        await engine.resume()
        await clock.advance(15.0)
        by_index = {index: sizes([c for c in await running if c.sample_index == index]) for index in (0, 1)}
        assert by_index == {0: [(0, 50), (1, 50)], 1: [(1, 100)]}

    run(scenario, latency_mean_s=10.0, slots=1)


def test_several_updates_make_several_spans():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        running = asyncio.create_task(collect(engine.generate(request("a"))))
        for version in (1, 2):
            await clock.advance(2.5)
            await engine.pause(PauseMode.RECOMPUTE)
            await engine.apply(manifest(version))
            await engine.resume()
        await clock.advance(5.0)
        assert sizes(await running) == [(0, 25), (1, 25), (2, 50)]

    run(scenario, latency_mean_s=10.0)


def test_a_drain_finishes_all_accepted_samples_and_holds_new_requests():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        accepted = asyncio.create_task(collect(engine.generate(request("a", num_samples=2))))
        await clock.advance(1.0)
        pause = asyncio.create_task(engine.pause(PauseMode.DRAIN))
        await clock.advance(0.0)
        later = asyncio.create_task(collect(engine.generate(request("b"))))
        await clock.advance(18.0)
        assert not pause.done()
        with pytest.raises(EngineError, match="pause the engine first"):
            await engine.apply(manifest(1))
        await clock.advance(40.0)
        assert pause.done() and accepted.done() and not later.done()
        await engine.apply(manifest(1))
        await engine.resume()
        await clock.advance(10.0)
        assert {chunk.policy.version for chunk in await accepted} == {0}
        assert sizes(await later) == [(1, 100)]

    run(scenario, latency_mean_s=10.0, slots=1)


def test_no_more_samples_run_than_there_are_slots_and_the_others_wait_in_order():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        tasks = [asyncio.create_task(collect(engine.generate(request(f"r{i}", num_samples=2)))) for i in range(3)]
        for done in range(4):
            await clock.advance(0.0)
            assert [task.done() for task in tasks] == [done > i for i in range(3)]
            await clock.advance(10.0)
        assert (await engine.load()).busy_s == pytest.approx(30.0)

    run(scenario, latency_mean_s=10.0, slots=2)


def test_without_latency_a_request_is_answered_at_once_and_waits_only_in_a_pause():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        assert sizes(await collect(engine.generate(request("a", num_samples=2)))) == [(0, 100), (0, 100)]
        await engine.pause(PauseMode.RECOMPUTE)
        waiting = asyncio.create_task(collect(engine.generate(request("b", num_samples=20))))
        await clock.advance(1.0)
        assert not waiting.done()
        await engine.apply(manifest(1))
        await engine.resume()
        await clock.advance(0.0)
        assert sizes(await waiting) == [(1, 100)] * 20

    run(scenario, slots=4)


def test_what_is_drawn_depends_on_the_seeds_alone():
    async def tokens(replica: int, seeds: tuple[int, ...], request_id: str) -> list[int]:
        engine = ScriptedEngine(ScriptedConfig(), identity(replica))
        await engine.start(manifest(0))
        return [
            token
            for chunk in await collect(engine.generate(request(request_id, 2, seeds=seeds)))
            for token in chunk.token_ids.tolist()
        ]

    async def body() -> None:
        assert await tokens(0, (5, 6), "a") == await tokens(1, (5, 6), "b")
        assert await tokens(0, (5, 6), "a") != await tokens(0, (5, 7), "a")
        assert await tokens(0, (), "a") == await tokens(0, (), "a")
        assert await tokens(0, (), "a") != await tokens(1, (), "a")

    asyncio.run(body())


def test_a_continued_sample_is_the_rest_of_the_whole_one():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        (whole,) = await collect(engine.generate(request("a", seeds=(9,))))
        (rest,) = await collect(engine.resume_from(request("a", seeds=(9,)), whole.token_ids[:40]))
        assert np.array_equal(rest.token_ids, whole.token_ids[40:]) and np.array_equal(
            rest.logprobs, whole.logprobs[40:]
        )

    run(scenario)


def test_shorter_samples_end_with_the_end_token_and_no_other_token_is_one():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        chunks = await collect(engine.generate(request("a", num_samples=200, max_new_tokens=10)))
        for chunk in chunks:
            stopped = chunk.finish_reason is FinishReason.STOP
            assert (
                stopped == (chunk.token_ids.size < 10)
                and 1 not in chunk.token_ids[:-1]
                and (chunk.token_ids[-1] == 1) == stopped
            )
        assert {chunk.token_ids.size for chunk in chunks} == set(range(4, 11))

    run(scenario, shortest=4)


def test_latencies_have_the_configured_mean_whatever_sigma_is():
    for sigma in (0.0, 0.8):
        draws = ScriptedDraws(32, 2.0, sigma)
        latencies = np.array([draws.latency_s(draw_bits(key)) for key in range(20_000)])
        assert latencies.mean() == pytest.approx(2.0, rel=0.03)
        assert np.log(latencies).std() == pytest.approx(sigma, abs=0.02)


def test_a_longer_pool_begins_with_the_shorter_one():
    short, long = ScriptedDraws(32, 0, 0), ScriptedDraws(32, 0, 0)
    bits = draw_bits(11)
    head = short.tokens(bits, 0, 50, (1,)), short.logprobs(bits, 0, 50)
    long.tokens(bits, 0, 300_000, (1,))
    long.logprobs(bits, 0, 300_000)
    assert np.array_equal(long.tokens(bits, 0, 50, (1,)), head[0]) and np.array_equal(
        long.logprobs(bits, 0, 50), head[1]
    )


def test_an_abort_ends_running_and_waiting_samples_and_frees_their_slots():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        gone = asyncio.create_task(collect(engine.generate(request("a", num_samples=2))))
        other = asyncio.create_task(collect(engine.generate(request("b"))))
        await clock.advance(4.0)
        await engine.abort("a")
        await engine.abort("unknown")
        assert [(chunk.token_ids.size, chunk.finish_reason) for chunk in await gone] == [
            (40, FinishReason.ABORT),
            (0, FinishReason.ABORT),
        ]
        await clock.advance(10.0)
        assert other.done()

    run(scenario, latency_mean_s=10.0, slots=1)


def test_a_reader_that_leaves_frees_its_slots():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        reader = asyncio.create_task(collect(engine.generate(request("a", num_samples=5))))
        await clock.advance(1.0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert (await engine.load()).running == 0
        other = asyncio.create_task(collect(engine.generate(request("a"))))
        await clock.advance(10.0)
        assert other.done()

    run(scenario, latency_mean_s=10.0, slots=2)


def test_an_id_that_runs_is_refused():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        running = asyncio.create_task(collect(engine.generate(request("a"))))
        await clock.advance(1.0)
        with pytest.raises(EngineError, match="already running"):
            await collect(engine.generate(request("a")))
        await clock.advance(10.0)
        assert running.done()

    run(scenario, latency_mean_s=10.0)


def test_stopping_fails_what_runs_and_refuses_what_comes():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        running = asyncio.create_task(collect(engine.generate(request("a"))))
        await clock.advance(1.0)
        assert await engine.healthy()
        await engine.stop()
        with pytest.raises(EngineError, match="was stopped while it ran"):
            await running
        with pytest.raises(EngineError, match="not running"):
            await collect(engine.generate(request("b")))
        assert not await engine.healthy()

    run(scenario, latency_mean_s=10.0)


def test_the_answer_to_a_manifest_is_the_digest_of_the_files_that_are_there(tmp_path: Path):
    save_file({"w": np.ones(3, dtype=np.float32)}, tmp_path / "model.safetensors")

    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        await engine.pause(PauseMode.RECOMPUTE)
        report = await engine.apply(manifest(1, str(tmp_path), num_bytes=12))
        assert report.digest == manifest_digest(digest_directory(tmp_path)) == (await engine.tag()).weights_digest
        with pytest.raises(UserError):
            await engine.apply(manifest(2, str(tmp_path / "missing"), num_bytes=12))

    run(scenario)


def test_the_canary_scores_what_the_trainer_said_and_other_ids_what_the_weights_say():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        assert np.array_equal(await engine.score(CANARY.token_ids), CANARY.logprobs)
        ids = np.array([5, 6, 7, 8], dtype=np.int32)
        first = await engine.score(ids)
        assert first.shape == (3,) and np.array_equal(first, await engine.score(ids)) and (first < 0).all()

    run(scenario)


def test_a_prompt_without_room_is_a_users_error():
    async def scenario(engine: ScriptedEngine, clock: ManualClock) -> None:
        with pytest.raises(UserError, match="2 prompt tokens and 0 produced ones leave no room"):
            await collect(engine.generate(request("a")))

    run(scenario, max_model_len=2)


def test_choosing_the_scripted_engine_imports_no_torch_and_no_engine_library():
    engine = build_engine(ScriptedConfig(), identity())
    assert isinstance(engine, ScriptedEngine)
    code = (
        "import sys; from rollout.config import *; from rollout.engines.registry import *;"
        "identity = EngineIdentity(replica=0, seed=0, deterministic=False, sampling=SamplingConfig());"
        "build_engine(ScriptedConfig(), identity);"
        "sys.exit(bool({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
