"""The vLLM engine on CPU with other models and settings: untied, mixture of experts, KV kept across versions, and a
core that is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.vllm_room import (
    EXACT_NATS,
    VOCAB,
    VllmRoom,
    ask,
    assert_each_tensor_counts,
    build_manifest,
    forward,
    gap,
    save_model,
    tokens_of,
)

from rollout.config import VllmConfig
from rollout.errors import EngineError, UserError
from rollout.types.generation import PauseMode, TokenChunk
from rollout.types.weights import PolicyVersion

pytestmark = [
    pytest.mark.timeout(400),  # the first test starts the engine
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    ),  # torch itself, imported by vLLM
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),  # vLLM after a start that failed
]
V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
PROMPT = [5, 9, 14, 3, 27, 8]
EAGER = VllmConfig(kv_cache_gib=0.25, max_num_seqs=32, enforce_eager=True)
Models = dict[PolicyVersion, Path]


def save_models(folder: Path, *, tied: bool, moe: bool) -> Models:
    models = {policy: folder / policy.key for policy in (V0, V1)}
    for policy, path in models.items():
        save_model(path, seed=10 + policy.version, tied=tied, moe=moe)
    return models


async def update(room: VllmRoom, models: Models, policy: PolicyVersion, mode: PauseMode) -> None:
    await room.engine.pause(mode)
    report = await room.engine.apply(build_manifest(models[policy], policy))
    await room.engine.resume()
    assert report.digest == build_manifest(models[policy], policy).digest


def assert_every_parameter_arrives(room: VllmRoom, models: Models) -> None:
    ids = [int(token) for token in np.random.default_rng(0).integers(2, VOCAB, size=120)]
    assert_each_tensor_counts(models[V0], models[V1], ids)
    for policy in (V1, V0, V1):
        room.run(update(room, models, policy, PauseMode.RECOMPUTE))
        scored = room.run(room.engine.score(np.array(ids, dtype=np.int32)))
        assert np.abs(scored - forward(models[policy], ids)).mean() <= EXACT_NATS, policy


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmRoom, Models]]:
    """An untied mixture of experts whose KV cache is kept across versions; the last test kills its core."""
    models = save_models(tmp_path_factory.mktemp("experts"), tied=False, moe=True)
    room = VllmRoom(build_manifest(models[V0], V0), EAGER.model_copy(update={"kv_across_versions": "keep"}))
    try:
        yield room, models
    finally:
        room.close()


def test_every_parameter_of_an_untied_mixture_of_experts_arrives(experts: tuple[VllmRoom, Models]):
    assert_every_parameter_arrives(*experts)


def test_kept_keys_and_values_leave_labels_true_and_later_tokens_beyond_recomputation(experts: tuple[VllmRoom, Models]):
    room, models = experts

    async def keep() -> list[TokenChunk]:
        await update(room, models, V0, PauseMode.RECOMPUTE)
        running = asyncio.ensure_future(room.gather(ask("kept", PROMPT, new_tokens=200)))
        for _ in range(3):
            await room.engine.score(np.array([2, 3], dtype=np.int32))
        await update(room, models, V1, PauseMode.KEEP)
        return await running

    old, new = room.run(keep())
    assert (room.tag.kv_across_versions, old.policy, new.policy) == ("keep", V0, V1)
    assert gap([old], PROMPT, models) <= EXACT_NATS
    assert gap([old, new], PROMPT, models) > 1000 * EXACT_NATS
    fresh = room.collect(ask("fresh", [*PROMPT, *tokens_of([old])], new_tokens=20))
    assert gap(fresh, [*PROMPT, *tokens_of([old])], models) <= EXACT_NATS  # no new request starts from old KV


def test_a_killed_core_fails_what_waits_with_its_death_and_stop_still_cleans_up(experts: tuple[VllmRoom, Models]):
    room, _ = experts
    family = [psutil.Process(room.core_pid), *psutil.Process(room.core_pid).children(recursive=True)]

    async def kill() -> list[BaseException | list[TokenChunk]]:
        running = [
            asyncio.ensure_future(room.gather(ask(f"doomed-{i}", PROMPT, num_samples=4, new_tokens=400)))
            for i in range(4)
        ]
        await room.engine.score(np.array([2, 3], dtype=np.int32))
        assert await room.engine.healthy()
        os.kill(room.core_pid, signal.SIGKILL)
        async with asyncio.timeout(30.0):
            answers = await asyncio.gather(*running, return_exceptions=True)
            assert not await room.engine.healthy()
        return answers

    pid, answers = room.core_pid, room.run(kill())
    # Said by the watch over the process; what vLLM itself says of its core, seconds later, reads otherwise.
    assert all(
        isinstance(answer, EngineError) and f"engine core (process {pid}) has died" in str(answer) for answer in answers
    )
    with pytest.raises(EngineError, match="has died"):
        room.collect(ask("after", PROMPT))
    with pytest.raises(EngineError, match="has died"):
        room.run(room.engine.pause(PauseMode.RECOMPUTE))
    room.run(room.engine.stop())
    assert not [process for process in family if process.is_running()]


def test_a_cache_too_small_for_the_context_names_the_key_to_change(tmp_path: Path):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    models = save_models(tmp_path, tied=True, moe=False)
    with pytest.raises(UserError, match=r"engine\.kv_cache_gib = 1e-05"):
        VllmRoom(build_manifest(models[V0], V0), EAGER.model_copy(update={"kv_cache_gib": 0.00001}))
    assert not [
        p for p in psutil.Process().children(recursive=True) if p.pid not in before and "EngineCore" in p.name()
    ]


def test_a_context_beyond_the_model_is_refused_before_anything_starts(tmp_path: Path):
    models = save_models(tmp_path, tied=True, moe=False)
    with pytest.raises(UserError, match=r"engine\.max_model_len = 4096"):
        VllmRoom(build_manifest(models[V0], V0), EAGER.model_copy(update={"max_model_len": 4096}))


def test_a_broken_model_directory_is_refused_before_anything_starts(tmp_path: Path):
    models = save_models(tmp_path, tied=True, moe=False)
    manifest = build_manifest(models[V0], V0)
    weights = models[V0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="broken"):
        VllmRoom(manifest, EAGER)
    (models[V1] / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        VllmRoom(build_manifest(models[V1], V1), EAGER)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "moe"), [(False, False), (True, True)], ids=["untied", "tied-experts"])
def test_every_parameter_of_other_kinds_arrives(tmp_path: Path, tied: bool, moe: bool):
    models = save_models(tmp_path, tied=tied, moe=moe)
    room = VllmRoom(build_manifest(models[V0], V0), VllmConfig(kv_cache_gib=0.25, max_num_seqs=32))
    try:
        assert_every_parameter_arrives(room, models)
    finally:
        room.close()


@pytest.mark.slow
def test_weights_in_half_precision_come_back_bit_for_bit(tmp_path: Path):
    """Packed layouts differ by dtype. There and back again the log-probs are the same bits; in between they are the
    other weights', to bf16's precision."""
    models, ids = (
        save_models(tmp_path, tied=True, moe=True),
        [int(token) for token in np.random.default_rng(0).integers(2, VOCAB, size=120)],
    )
    room = VllmRoom(build_manifest(models[V0], V0), EAGER.model_copy(update={"dtype": "bfloat16"}))
    try:
        scores = [room.run(room.engine.score(np.array(ids, dtype=np.int32)))]
        for policy in (V1, V0):
            room.run(update(room, models, policy, PauseMode.RECOMPUTE))
            scores.append(room.run(room.engine.score(np.array(ids, dtype=np.int32))))
    finally:
        room.close()
    assert np.array_equal(scores[0], scores[2])
    assert np.abs(scores[1] - forward(models[V1], ids)).mean() < 0.1 < np.abs(scores[1] - scores[0]).mean()
