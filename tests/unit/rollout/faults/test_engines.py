"""Planted faults at the seams of requests and answers: each does what it says from its start version on, and
nothing else."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.builders import build_dispatch, build_routing, build_tag
from support.episode_fakes import EOS, TOKENIZER, RecordingJudge, TalkingEnv, ToldEngine, chunk, ids, stopping

from rollout.config import SamplingConfig, ScriptedConfig, TorchEngineConfig
from rollout.engines.scripted.engine import ScriptedEngine
from rollout.episodes.episode import EpisodeSettings, run_group
from rollout.episodes.failure import EpisodeFailure
from rollout.errors import EngineError
from rollout.faults.config import (
    Bf16LogprobsFault,
    ConstantSeedFault,
    FaultConfig,
    FaultsConfig,
    KvKeptFault,
    MissingRoutingFault,
    RawLogprobsFault,
    RetokenizedTurnFault,
    ShortLogprobsFault,
    SilentTemperatureFault,
    SilentTopPFault,
    StaleReplicaFault,
    TemplateSpaceFault,
    VersionOffByOneFault,
)
from rollout.faults.draws import selected
from rollout.faults.registry import plant_engine, planted_engine_config
from rollout.published.digests import manifest_digest
from rollout.types.dispatch import FailReason
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, SamplingParams, TokenChunk
from rollout.types.protocols import Engine
from rollout.types.trajectory import FinishReason
from rollout.types.weights import Canary, PolicyVersion, TensorEntry, Transport, WeightManifest

NOWHERE = Path("scratch-that-no-test-writes")
IDENTITY = EngineIdentity(replica=0, seed=3, deterministic=False, sampling=SamplingConfig())


def manifest(version: int) -> WeightManifest:
    """A publication without files."""
    tensors = (TensorEntry(name="w", dtype="F32", shape=(1,), sha256=f"{version:064d}"),)
    canary = Canary(token_ids=ids(3, 4, 5), logprobs=np.array([-1.0, -2.0 - version], dtype=np.float32))
    policy, digest = PolicyVersion(1, version), manifest_digest(tensors)
    return WeightManifest(
        policy=policy, transport=Transport.DISK, location="", tensors=tensors, digest=digest, canary=canary, num_bytes=0
    )


def request(request_id: str, prompt: Sequence[int] = (3, 14), samples: int = 2) -> GenerationRequest:
    seeds = tuple(range(samples))
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=ids(*prompt),
        num_samples=samples,
        sampling=SamplingParams(max_new_tokens=6),
        eos_ids=(EOS,),
        seeds=seeds,
    )


def planted(engine: Engine, *faults: FaultConfig, seed: int = 0) -> Engine:
    return plant_engine(engine, FaultsConfig(plant=faults, seed=seed), 0, scratch=NOWHERE, tokenizer=TOKENIZER)


def scripted() -> ScriptedEngine:
    return ScriptedEngine(ScriptedConfig(), IDENTITY)


async def collect(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


async def update(engine: Engine, version: int, mode: PauseMode = PauseMode.RECOMPUTE) -> None:
    await engine.pause(mode)
    await engine.apply(manifest(version))
    await engine.resume()


def by_version(engine: Engine) -> tuple[list[TokenChunk], list[TokenChunk]]:
    """The answers to one request under version 0, and to another under version 1."""

    async def run() -> tuple[list[TokenChunk], list[TokenChunk]]:
        assert await engine.start(manifest(0)) == await engine.tag()
        before = await collect(engine.generate(request("d-0:0")))
        await update(engine, 1)
        after = await collect(engine.generate(request("d-1:0")))
        assert (await engine.tag()).weights_digest == manifest(1).digest
        return before, after

    return asyncio.run(run())


def contents(chunks: Sequence[TokenChunk]) -> list[object]:
    return [
        (c.request_id, c.sample_index, c.token_ids.tolist(), c.logprobs.tolist(), c.policy, c.finish_reason)
        for c in chunks
    ]


def test_an_engine_without_a_fault_of_its_own_stays_as_it_is():
    engine = scripted()
    assert planted(engine, Bf16LogprobsFault(replica=1), TemplateSpaceFault()) is engine


def test_before_its_start_version_no_fault_changes_an_answer():
    late = (
        Bf16LogprobsFault(start_version=2),
        VersionOffByOneFault(start_version=2),
        ShortLogprobsFault(start_version=2),
        SilentTopPFault(start_version=2),
    )
    assert [contents(chunks) for chunks in by_version(planted(scripted(), *late))] == [
        contents(chunks) for chunks in by_version(scripted())
    ]


def test_bf16_logprobs_lose_all_bits_but_bfloat16s_and_nothing_else():
    (_, honest), (before, after) = by_version(scripted()), by_version(planted(scripted(), Bf16LogprobsFault()))
    assert contents(before) == contents(by_version(scripted())[0])
    for good, rounded in zip(honest, after, strict=True):
        assert not (rounded.logprobs.view(np.uint32) & 0xFFFF).any()
        assert 0 < np.abs(good.logprobs - rounded.logprobs).max() <= np.abs(good.logprobs).max() / 256
        assert good.token_ids.tolist() == rounded.token_ids.tolist() and good.policy == rounded.policy


def test_version_off_by_one_changes_the_label_alone():
    (_, honest), (before, after) = (
        by_version(scripted()),
        by_version(planted(scripted(), VersionOffByOneFault(start_version=0))),
    )
    assert [c.policy.version for c in (*before, *after)] == [0, 0, 0, 0]
    assert [c.logprobs.tolist() for c in after] == [c.logprobs.tolist() for c in honest]


def test_a_chunk_with_a_log_prob_too_few_fails_its_request_as_data():
    engine = planted(ToldEngine(stopping(5)), ShortLogprobsFault(start_version=0))
    settings = EpisodeSettings(sampling=SamplingParams(max_new_tokens=8), max_context=64)

    async def run() -> None:
        await engine.start(manifest(0))
        envs = [TalkingEnv([]), TalkingEnv([])]
        await run_group(
            build_dispatch(),
            engine=engine,
            envs=envs,
            score=RecordingJudge(),
            tag=build_tag(),
            tokenizer=TOKENIZER,
            settings=settings,
        )

    with pytest.raises(EpisodeFailure, match="log-probs in one chunk") as caught:
        asyncio.run(run())
    assert caught.value.reason is FailReason.ENGINE


@pytest.mark.parametrize(("how", "covered"), [("all", None), ("half", [False, True, False, True, False])])
def test_missing_routing_drops_all_rows_or_every_second_one(how: str, covered: list[bool] | None):
    routing = build_routing(5)
    engine = planted(
        ToldEngine(lambda asked: [chunk(asked, 0, (5, EOS), finish=FinishReason.STOP, routing=routing)]),
        MissingRoutingFault.model_validate({"how": how, "start_version": 0}),
    )
    (answer,) = asyncio.run(collect(engine.generate(request("d-0:0", samples=1))))
    if covered is None:
        assert answer.routing is None
        return
    assert answer.routing is not None and answer.routing.covered.tolist() == covered
    assert not answer.routing.experts[~answer.routing.covered].any()
    np.testing.assert_array_equal(answer.routing.experts[1::2], routing.experts[1::2])


def test_a_silent_top_p_reaches_the_engine_and_not_the_tag():
    inner = ToldEngine(stopping(5))
    engine = planted(inner, SilentTopPFault())
    by_version(engine)
    assert [asked.sampling.top_p for asked in inner.requests] == [1.0, 0.9]
    assert asyncio.run(engine.tag()).top_p == 1.0


def test_a_silent_temperature_and_a_constant_seed_reach_the_engine_and_not_the_tag():
    inner = ToldEngine(stopping(5))
    engine = planted(inner, SilentTemperatureFault(), ConstantSeedFault(), seed=11)
    by_version(engine)
    assert [(asked.sampling.temperature, asked.seeds) for asked in inner.requests] == [(1.0, (0, 1)), (0.7, (11, 11))]
    assert asyncio.run(engine.tag()).temperature == 1.0


def test_only_later_turns_are_tokenized_again_and_lose_their_special_tokens():
    inner = ToldEngine(stopping(5))
    engine = planted(inner, RetokenizedTurnFault(start_version=0))

    async def run() -> None:
        await engine.start(manifest(0))
        for request_id in ("d-0:0", "d-0:1:0"):
            await collect(engine.generate(request(request_id, prompt=(3, 14, EOS, 12), samples=1)))

    asyncio.run(run())
    assert [asked.prompt_ids.tolist() for asked in inner.requests] == [[3, 14, EOS, 12], [3, 14, 12]]


def test_raw_logprobs_are_the_scores_of_the_sample_unless_its_weights_are_gone():
    async def run() -> None:
        inner = scripted()
        engine = planted(inner, RawLogprobsFault(start_version=0))
        await engine.start(manifest(0))
        honest = await collect(scripted_twin.generate(request("d-0:0")))
        answered = await collect(engine.generate(request("d-0:0")))
        for good, raw in zip(honest, answered, strict=True):
            assert raw.token_ids.tolist() == good.token_ids.tolist() and raw.logprobs.tolist() != good.logprobs.tolist()
            np.testing.assert_array_equal(
                raw.logprobs, (await inner.score(np.concatenate([ids(3, 14), raw.token_ids])))[1:]
            )
        rest = await collect(engine.resume_from(request("d-1:0", samples=1), answered[0].token_ids[:2]))
        np.testing.assert_array_equal(rest[0].logprobs, answered[0].logprobs[2:])

        outdated = planted(ToldEngine(stopping(5, policy=PolicyVersion(1, 0))), RawLogprobsFault(start_version=0))
        await outdated.start(manifest(1))
        assert [c.logprobs.tolist() for c in await collect(outdated.generate(request("d-0:0", samples=1)))] == [
            pytest.approx([-0.05, -0.01])
        ]

    scripted_twin = scripted()
    asyncio.run(scripted_twin.start(manifest(0)))
    asyncio.run(run())


def test_kept_caches_change_the_pause_alone():
    modes: list[PauseMode] = []

    class Noting(ScriptedEngine):
        async def pause(self, mode: PauseMode) -> None:
            modes.append(mode)
            await super().pause(mode)

    config, faults = TorchEngineConfig(), FaultsConfig(plant=(KvKeptFault(),))
    engine = planted(Noting(ScriptedConfig(kv_across_versions="keep"), IDENTITY), KvKeptFault())

    async def run() -> None:
        await engine.start(manifest(0))
        for version, mode in enumerate((PauseMode.RECOMPUTE, PauseMode.RECOMPUTE, PauseMode.DRAIN), start=1):
            await update(engine, version, mode)
        assert (await engine.tag()).kv_across_versions == "recompute"

    asyncio.run(run())
    assert modes == [PauseMode.RECOMPUTE, PauseMode.KEEP, PauseMode.DRAIN]
    assert planted_engine_config(config, faults, 0).kv_across_versions == "keep"
    assert planted_engine_config(config, faults, 1) is config


@pytest.mark.parametrize(("forge", "canary"), [(False, [-1.0, -2.0]), (True, [-1.0, -4.0])])
def test_a_stale_replica_answers_for_weights_that_it_does_not_have(forge: bool, canary: list[float], tmp_path: Path):
    engine = plant_engine(scripted(), FaultsConfig(plant=(StaleReplicaFault(forge_canary=forge),)), 0, scratch=tmp_path)

    async def run() -> None:
        await engine.start(manifest(0))
        for version in (1, 2):
            await engine.pause(PauseMode.RECOMPUTE)
            report = await engine.apply(manifest(version))
            await engine.resume()
            assert (report.policy, report.digest) == (manifest(version).policy, manifest(version).digest)
        assert (await engine.tag()).weights_digest == manifest(2).digest
        assert {c.policy.version for c in await collect(engine.generate(request("d-0:0")))} == {2}
        assert (await engine.score(manifest(2).canary.token_ids)).tolist() == canary
        await engine.stop()

    asyncio.run(run())
    assert not list(tmp_path.rglob("*-stale_replica"))


def test_the_rate_selects_the_same_requests_every_time():
    keys = [f"d{number:08d}:0" for number in range(2000)]
    half, other = Bf16LogprobsFault(rate=0.25), RawLogprobsFault(rate=0.25)
    chosen = [key for key in keys if selected(half, 7, key)]
    assert chosen == [key for key in keys if selected(half, 7, key)]
    assert 0.2 < len(chosen) / len(keys) < 0.3
    assert chosen != [key for key in keys if selected(half, 8, key)] != [key for key in keys if selected(other, 7, key)]
    assert all(selected(Bf16LogprobsFault(), 7, key) for key in keys)


def test_a_request_that_is_not_drawn_is_answered_honestly():
    fault = VersionOffByOneFault(rate=0.5)
    engine = planted(ToldEngine(stopping(5, policy=PolicyVersion(1, 3))), fault, seed=1)

    async def versions(request_id: str) -> set[int]:
        return {c.policy.version for c in await collect(engine.generate(request(request_id)))}

    for number in range(20):
        wrong = selected(fault, 1, f"d-{number}:0")
        assert asyncio.run(versions(f"d-{number}:0")) == {2 if wrong else 3}


def test_a_fault_that_fails_a_request_ends_it_underneath():
    ended: list[str] = []

    class Endless(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            try:
                while True:
                    yield chunk(request, 0, (5,), PolicyVersion(1, 1))
            finally:
                ended.append(request.request_id)

    engine = planted(Endless(ScriptedConfig(), IDENTITY), Bf16LogprobsFault(), ShortLogprobsFault())

    async def run() -> None:
        with pytest.raises(EngineError):
            await collect(engine.generate(request("d-0:0")))
        assert ended == ["d-0:0"]

    asyncio.run(run())
