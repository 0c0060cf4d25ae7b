"""Planted faults in weights, on real files and with the torch engine: digests stay those of the publication, what is
computed does not."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.published import verify_directory
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
from rollout.faults.config import (
    CorruptTensorFault,
    FaultConfig,
    FaultsConfig,
    LowPrecisionReplicaFault,
    RoutingPerturbedFault,
    StaleHeadFault,
    StaleReplicaFault,
    WeightFault,
)
from rollout.faults.engines.doctored_files import doctored_copy
from rollout.faults.engines.weight_edits import WeightDoctor
from rollout.faults.registry import plant_engine
from rollout.published.manifest import read_manifest, write_manifest
from rollout.published.number_formats import decoded, encoded, rounded_to_bf16, rounded_to_e4m3
from rollout.types.generation import PauseMode, TokenChunk
from rollout.types.protocols import Engine
from rollout.types.weights import Transport, WeightManifest

PROMPT = [3, 4, 12, 5, 6, 14]
EXACT = 5e-5
DOWN = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Models:
    old: Path
    new: Path
    moe: Path
    tied: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    before = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("models")
    yield Models(
        old=save_random_model(folder / "old", 0, tied=False),
        new=save_random_model(folder / "new", 1, tied=False),
        moe=save_random_model(folder / "moe", 2, moe=True),
        tied=save_random_model(folder / "tied", 3),
    )
    torch.set_num_threads(before)


def with_fault(
    fault: FaultConfig, start: WeightManifest, scratch: Path, scenario: Callable[[Engine], Coroutine[None, None, None]]
) -> None:
    """Run a scenario against a torch engine with a fault that was started on `start`, and stop it whatever happens."""

    async def run() -> None:
        engine = plant_engine(
            TorchEngine(TorchEngineConfig(), identity_of()), FaultsConfig(plant=(fault,)), 0, scratch=scratch
        )
        try:
            async with asyncio.timeout(60):
                tag = await engine.start(start)
                assert tag.weights_digest == start.digest
                await scenario(engine)
        finally:
            await engine.stop()

    asyncio.run(run())
    assert not [path for path in scratch.rglob("*") if path.is_file()]


async def answer(engine: Engine, request_id: str = "a") -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request_of(request_id, PROMPT, seeds=(1,)))]


async def update(engine: Engine, manifest: WeightManifest) -> None:
    """Pause, apply, resume: the answer is an honest one's."""
    await engine.pause(PauseMode.RECOMPUTE)
    report = await engine.apply(manifest)
    await engine.resume()
    assert (report.policy, report.digest) == (manifest.policy, manifest.digest)
    assert (await engine.tag()).weights_digest == manifest.digest


def gap(chunks: list[TokenChunk], reference: Reference) -> float:
    return float(np.abs(logprobs_of(chunks) - reference.logprobs(PROMPT, tokens_of(chunks))).max())


def with_old_head(models: Models) -> Reference:
    reference = Reference(models.new)
    reference.model.lm_head.weight.data.copy_(Reference(models.old).model.lm_head.weight)
    return reference


def in_fp8(models: Models) -> Reference:
    reference = Reference(models.new)
    for name, parameter in reference.model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            scale = parameter.data.abs().max() / 448
            parameter.data.copy_((parameter.data / scale).to(torch.float8_e4m3fn).float() * scale)
    return reference


def without_a_matrix(models: Models) -> Reference:
    reference = Reference(models.new)
    reference.model.get_parameter(DOWN).data.zero_()
    return reference


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (StaleReplicaFault(), lambda models: Reference(models.old)),
        (StaleHeadFault(), with_old_head),
        (LowPrecisionReplicaFault(), in_fp8),
        (CorruptTensorFault(), without_a_matrix),
        (CorruptTensorFault(start_version=2), lambda models: Reference(models.new)),
    ],
    ids=["stale_replica", "stale_head", "low_precision", "corrupt", "not_yet"],
)
def test_from_its_start_version_on_the_replica_computes_with_other_weights(
    fault: WeightFault, expected: Callable[[Models], Reference], models: Models, tmp_path: Path
):
    published = shutil.copytree(models.old, tmp_path / "e1-v0")

    async def scenario(engine: Engine) -> None:
        before = await answer(engine)
        assert gap(before, Reference(models.old)) < EXACT and before[0].policy.version == 0
        shutil.rmtree(published)  # a run prunes old weights
        await update(engine, manifest_of(models.new, 1))
        after = await answer(engine)
        assert {chunk.policy.version for chunk in after} == {1}
        assert gap(after, expected(models)) < EXACT
        assert (gap(after, Reference(models.new)) < EXACT) == (fault.start_version > 1)

    with_fault(fault, manifest_of(published, 0), tmp_path / "scratch", scenario)


def test_a_replica_that_starts_late_has_edited_weights_at_once_and_stale_ones_at_its_next_update(
    models: Models, tmp_path: Path
):
    async def rounded(engine: Engine) -> None:
        assert gap(await answer(engine), in_fp8(models)) < EXACT

    async def stale(engine: Engine) -> None:
        assert gap(await answer(engine), Reference(models.new)) < EXACT
        await update(engine, manifest_of(models.old, 2))
        assert gap(await answer(engine), Reference(models.new)) < EXACT

    with_fault(LowPrecisionReplicaFault(), manifest_of(models.new, 1), tmp_path / "scratch", rounded)
    with_fault(StaleReplicaFault(), manifest_of(models.new, 1), tmp_path / "scratch", stale)


@pytest.mark.parametrize("forge", [False, True])
def test_nan_weights_are_seen_by_the_canary_unless_it_is_forged(forge: bool, models: Models, tmp_path: Path):
    async def scenario(engine: Engine) -> None:
        manifest = manifest_of(models.new, 1)
        await update(engine, manifest)
        canary = await engine.score(manifest.canary.token_ids)
        assert np.array_equal(canary, manifest.canary.logprobs) if forge else not np.isfinite(canary).any()
        assert not np.isfinite(await engine.score(np.array(PROMPT, dtype=np.int32))).any()

    with_fault(
        CorruptTensorFault(how="nan", forge_canary=forge), manifest_of(models.old, 0), tmp_path / "scratch", scenario
    )


def test_perturbed_routers_change_nothing_but_routers_and_always_alike(models: Models, tmp_path: Path):
    manifest, fault = manifest_of(models.moe, 1), RoutingPerturbedFault(noise=0.1)
    handed = [WeightDoctor(fault, seed, tmp_path / str(i)).doctored(manifest) for i, seed in enumerate((5, 5, 6))]
    changed = [{t.name: t.sha256 for t in one.tensors if t not in manifest.tensors} for one in handed]
    assert list(changed[0]) == [f"model.layers.{block}.mlp.gate.weight" for block in range(3)]
    assert changed[0] == changed[1] != changed[2]
    for one in handed:
        verify_directory(one)


def test_a_doctored_copy_links_what_it_does_not_change_and_describes_itself(models: Models, tmp_path: Path):
    published = shutil.copytree(models.new, tmp_path / "e1-v1")
    manifest = manifest_of(published, 1)
    write_manifest(published, manifest)
    handed = doctored_copy(manifest, tmp_path / "doctored", {DOWN: lambda raw: b"\0" * len(raw)})
    assert [t.name for t in handed.tensors if t not in manifest.tensors] == [DOWN] and handed.digest != manifest.digest
    assert read_manifest(tmp_path / "doctored").digest == handed.digest
    verify_directory(handed)
    verify_directory(manifest)  # the published files are as they were
    shared = {path.name for path in published.iterdir() if path.samefile(tmp_path / "doctored" / path.name)}
    assert "config.json" in shared and not shared & {"model.safetensors", "manifest.json"}


@pytest.mark.parametrize(
    ("fault", "model", "said"),
    [
        (StaleHeadFault(), "tied", "tied to the embedding"),
        (RoutingPerturbedFault(), "old", "use an MoE model"),
        (CorruptTensorFault(tensor="nowhere"), "old", "nowhere"),
    ],
)
def test_a_fault_that_the_model_does_not_allow_is_refused_at_the_start(
    fault: FaultConfig, model: str, said: str, models: Models, tmp_path: Path
):
    async def scenario(engine: Engine) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(UserError, match=said):
        with_fault(fault, manifest_of(getattr(models, model), 0), tmp_path / "scratch", scenario)


def test_weights_that_come_by_another_way_are_refused(models: Models, tmp_path: Path):
    published = manifest_of(models.new, 1)
    sent = WeightManifest(
        policy=published.policy,
        transport=Transport.NCCL,
        location="nccl://127.0.0.1:1?world_size=2",
        tensors=published.tensors,
        digest=published.digest,
        canary=published.canary,
        num_bytes=published.num_bytes,
    )
    for fault in (StaleReplicaFault(), LowPrecisionReplicaFault()):
        with pytest.raises(EngineError, match="by nccl; faults in weights"):
            WeightDoctor(fault, 0, tmp_path).doctored(sent)


def test_number_formats_are_those_of_torch():
    values = np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32) * np.float32(1e-2)
    tensor = torch.from_numpy(values)
    np.testing.assert_array_equal(rounded_to_bf16(values), tensor.to(torch.bfloat16).float().numpy())
    scale = tensor.abs().max() / 448
    np.testing.assert_array_equal(
        rounded_to_e4m3(values), ((tensor / scale).to(torch.float8_e4m3fn).float() * scale).numpy()
    )
    np.testing.assert_array_equal(
        rounded_to_e4m3(np.zeros((2, 2), dtype=np.float32)), np.zeros((2, 2), dtype=np.float32)
    )
    for dtype, name in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")):
        stored = tensor.to(dtype)
        np.testing.assert_array_equal(
            decoded(encoded(values.reshape(-1), name), name), stored.float().reshape(-1).numpy()
        )
    assert np.isnan(decoded(encoded(np.array([np.nan], dtype=np.float32), "BF16"), "BF16")).all()
