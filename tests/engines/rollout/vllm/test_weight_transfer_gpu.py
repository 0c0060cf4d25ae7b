"""A trainer updates a real vLLM engine from GPU to GPU: bytes and log-probs are those that it published. Skipped where
there are too few GPUs."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.trainer.trainer_room import write_model
from support.vllm_room import VllmRoom

from rollout.config import VllmConfig
from rollout.types.generation import PauseMode
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest
from trainer.config.trainer import TrainerConfig, WeightsConfig
from trainer.step.assembly import policy_trainer
from trainer.step.policy_trainer import PolicyTrainer

DEADLINE_S = 120.0
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 512}
CLOSE_NATS = 2e-3
"""Mean |log-prob difference| of fp32 on two kernels; a missing tensor makes it larger by far."""


@contextmanager
def trainer_of(tmp_path: Path, transport: Literal["nccl", "ipc"]) -> Generator[PolicyTrainer]:
    trainer = policy_trainer(
        model_dir=write_model(tmp_path / "model", scale=4.0, **SHAPE),
        config=TrainerConfig(num_gpus=0.5 if transport == "ipc" else 1),
        weights=WeightsConfig(transport=transport),
        total_steps=1,
        seed=0,
        rank=0,
        init_method=f"file://{tmp_path / 'ranks'}",
    )
    try:
        yield trainer
    finally:
        trainer.close()


def publish(trainer: PolicyTrainer, version: int, tmp_path: Path) -> WeightManifest:
    """Other weights than those of the version before, on disk."""
    with torch.no_grad():
        for parameter in trainer._model.parameters():
            parameter.mul_(1.0 + 0.1 * version)
    manifest = trainer.publish(PolicyVersion(1, version), tmp_path / f"v{version}")
    assert manifest is not None
    return manifest


def assert_taken_over(room: VllmRoom, report: ApplyReport, manifest: WeightManifest) -> None:
    assert (report.policy, report.digest) == (manifest.policy, manifest.digest)
    room.run(room.engine.resume())
    scored = room.run(room.engine.score(manifest.canary.token_ids))
    assert float(np.abs(scored - manifest.canary.logprobs).mean()) < CLOSE_NATS


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a trainer and an engine")
def test_nccl_updates_an_engine_and_meets_a_new_incarnation_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with trainer_of(tmp_path, "nccl") as trainer:
        first = publish(trainer, 0, tmp_path)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # for the engine's processes; this one has its GPU already
        room = VllmRoom(first, VllmConfig(num_gpus=1, dtype="float32", max_model_len=512, gpu_memory_utilization=0.2))
        try:
            meetings: list[str] = []
            for version, incarnation in ((1, 1), (2, 1), (3, 2)):
                manifest = publish(trainer, version, tmp_path)
                announced = trainer.open_transfer(manifest, ((0, incarnation),), 1, "127.0.0.1")
                meetings.append(announced.location)
                room.run(room.engine.pause(PauseMode.RECOMPUTE))

                async def both(announced: WeightManifest = announced) -> ApplyReport:
                    report, _ = await asyncio.gather(
                        room.engine.apply(announced), asyncio.to_thread(trainer.send, announced)
                    )
                    return report

                assert_taken_over(room, room.run(both(), DEADLINE_S), manifest)
            assert meetings[0] == meetings[1] != meetings[2]
        finally:
            room.close()


@pytest.mark.gpu
@pytest.mark.slow
def test_ipc_updates_an_engine_on_the_same_gpu(tmp_path: Path):
    with trainer_of(tmp_path, "ipc") as trainer:
        room = VllmRoom(
            publish(trainer, 0, tmp_path),
            VllmConfig(num_gpus=0.5, dtype="float32", max_model_len=512, gpu_memory_utilization=0.2),
        )
        try:
            for version in (1, 2):
                manifest = publish(trainer, version, tmp_path)
                announced = trainer.open_transfer(manifest, ((0, 1),), 1, str(tmp_path / "exports"))
                trainer.send(announced)
                room.run(room.engine.pause(PauseMode.RECOMPUTE))
                assert_taken_over(room, room.run(room.engine.apply(announced), DEADLINE_S), manifest)
        finally:
            room.close()
