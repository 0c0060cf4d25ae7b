"""The torch engine as episodes and the driver see it: asynchronous requests, pauses, ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainer.torch_models import (
    Reference,
    identity_of,
    logprobs_of,
    manifest_of,
    request_of,
    save_random_model,
    tokens_of,
)

from rollout.config import TorchEngineConfig
from rollout.engines.torch.engine import TorchEngine
from rollout.errors import EngineError, UserError
from rollout.types.generation import PauseMode, SamplingParams, TokenChunk
from rollout.types.trajectory import FinishReason, LogprobSemantics

PROMPT = [3, 4, 12, 5, 6, 14]
ENDLESS = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    before = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("models")
    yield save_random_model(folder / "old", 0), save_random_model(folder / "new", 1)
    torch.set_num_threads(before)


def with_engine(directory: Path, scenario: Callable[[TorchEngine], Coroutine[None, None, None]]) -> None:
    """Run a scenario against a started engine, and stop it whatever happens."""

    async def run() -> None:
        engine = TorchEngine(TorchEngineConfig(), identity_of())
        await engine.start(manifest_of(directory, 0))
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            await engine.stop()

    asyncio.run(run())


async def collect(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


def test_requests_in_flight_together_all_end_with_exact_logprobs(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        outputs = await asyncio.gather(
            *[collect(engine.generate(request_of(f"r{i}", PROMPT, seeds=(2 * i, 2 * i + 1)))) for i in range(6)]
        )
        reference = Reference(models[0])
        for chunks in outputs:
            assert sorted(chunk.sample_index for chunk in chunks) == [0, 1]
            for chunk in chunks:
                assert chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert np.abs(chunk.logprobs - reference.logprobs(PROMPT, chunk.token_ids)).max() < 5e-5
        load = await engine.load()
        assert load.running == 0 and load.busy_s > 0
        assert load.generated_tokens == sum(chunk.token_ids.size for chunks in outputs for chunk in chunks)

    with_engine(models[0], scenario)


def test_a_request_in_a_pause_waits_and_is_sampled_by_the_new_weights(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        await engine.pause(PauseMode.RECOMPUTE)
        waiting = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT))))
        manifest = manifest_of(models[1], 1)
        report = await engine.apply(manifest)
        assert (report.policy, report.digest, report.interrupted) == (manifest.policy, manifest.digest, 0)
        assert not waiting.done() and (await engine.load()).generated_tokens == 0
        await engine.resume()
        for chunk in await waiting:
            assert chunk.policy.version == 1
            assert np.abs(chunk.logprobs - Reference(models[1]).logprobs(PROMPT, chunk.token_ids)).max() < 5e-5
        assert (await engine.tag()).weights_digest == manifest.digest

    with_engine(models[0], scenario)


def test_a_drain_returns_when_running_requests_have_ended(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(
            collect(
                engine.generate(request_of("a", PROMPT, sampling=SamplingParams(max_new_tokens=40, ignore_eos=True)))
            )
        )
        await asyncio.sleep(0)  # let the task submit
        await engine.pause(PauseMode.DRAIN)
        assert (await engine.load()).running == 0
        assert {chunk.policy.version for chunk in await running} == {0}
        await engine.resume()

    with_engine(models[0], scenario)


def test_a_pause_that_is_given_up_leaves_an_engine_that_goes_on(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT, sampling=ENDLESS))))
        await asyncio.sleep(0)  # let the task submit
        pause = asyncio.create_task(engine.pause(PauseMode.DRAIN))
        await engine.score(np.array(PROMPT, dtype=np.int32))
        pause.cancel()
        await asyncio.wait({pause})
        await engine.abort("a")
        await running
        await engine.resume()
        assert [chunk.finish_reason for chunk in await collect(engine.generate(request_of("b", PROMPT)))]
        assert await engine.healthy()

    with_engine(models[0], scenario)


def test_an_id_that_runs_is_refused_and_free_again_when_it_has_ended(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        first = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT, sampling=ENDLESS))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already running"):
            await collect(engine.generate(request_of("a", PROMPT)))
        await engine.abort("a")
        assert [chunk.finish_reason for chunk in await first if chunk.finish_reason] == [FinishReason.ABORT] * 2
        assert len(await collect(engine.generate(request_of("a", PROMPT)))) == 2
        await engine.abort("a")  # unknown by now: ignored

    with_engine(models[0], scenario)


def test_a_reader_that_leaves_frees_its_rows(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        reader = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT, sampling=ENDLESS))))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await engine.score(np.array(PROMPT, dtype=np.int32))  # behind the abort in the thread's queue
        assert (await engine.load()).running == 0

    with_engine(models[0], scenario)


def test_a_prompt_without_room_fails_alone(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        good, bad = await asyncio.gather(
            collect(engine.generate(request_of("good", PROMPT))),
            collect(engine.generate(request_of("bad", [5] * 512))),
            return_exceptions=True,
        )
        assert isinstance(bad, UserError) and isinstance(good, list) and len(good) == 2
        assert await engine.healthy()

    with_engine(models[0], scenario)


def test_weights_that_are_not_whole_fail_running_requests_and_make_the_engine_unhealthy(
    models: tuple[Path, Path], tmp_path: Path
):
    async def scenario(engine: TorchEngine) -> None:
        reader = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT, sampling=ENDLESS))))
        await asyncio.sleep(0)
        await engine.pause(PauseMode.RECOMPUTE)
        manifest = manifest_of(save_random_model(tmp_path / "bad", 2), 1)
        (tmp_path / "bad" / "model.safetensors").write_bytes(b"not a safetensors file")
        with pytest.raises((EngineError, UserError)):
            await engine.apply(manifest)
        with pytest.raises((EngineError, UserError)):
            await reader
        assert not await engine.healthy()

    with_engine(models[0], scenario)


def test_stopping_fails_what_runs_and_refuses_what_comes(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        reader = asyncio.create_task(collect(engine.generate(request_of("a", PROMPT, sampling=ENDLESS))))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineError, match="it was stopped"):
            await reader
        with pytest.raises(EngineError, match="not running"):
            await collect(engine.generate(request_of("b", PROMPT)))
        assert not await engine.healthy()

    with_engine(models[0], scenario)


def test_a_continued_sample_yields_only_the_rest(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        sampling = SamplingParams(max_new_tokens=10, ignore_eos=True)
        whole = tokens_of(await collect(engine.generate(request_of("a", PROMPT, seeds=(3,), sampling=sampling))))
        rest = await collect(engine.resume_from(request_of("a", PROMPT, seeds=(3,), sampling=sampling), whole[:4]))
        assert tokens_of(rest).tolist() == whole[4:].tolist() and logprobs_of(rest).size == 6

    with_engine(models[0], scenario)


def test_the_tag_names_what_was_sampled_with(models: tuple[Path, Path]):
    async def scenario(engine: TorchEngine) -> None:
        tag = await engine.tag()
        assert (tag.engine, tag.logprob_semantics, tag.weights_dtype) == (
            "torch",
            LogprobSemantics.PROCESSED,
            "float32",
        )
        assert tag.weights_digest == manifest_of(models[0], 0).digest

    with_engine(models[0], scenario)


def test_an_engine_that_was_not_started_says_so():
    with pytest.raises(EngineError, match="call start first"):
        asyncio.run(TorchEngine(TorchEngineConfig(), identity_of()).tag())
