"""What a trainer would send from GPU to GPU is, tensor by tensor, what it published to disk."""

from pathlib import Path
from typing import Literal

import pytest
from support.trainer.trainer_room import write_model

from rollout.errors import UserError
from rollout.published.digests import manifest_digest
from rollout.types.weights import PolicyVersion, TensorEntry
from trainer.config.trainer import TrainerConfig, WeightsConfig
from trainer.step.assembly import policy_trainer
from trainer.weights.weight_writer import tensor_entry


@pytest.mark.parametrize(("moe", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_a_pass_over_the_source_repeats_the_publication(
    tmp_path: Path, moe: bool, dtype: Literal["bfloat16", "float32"]
):
    model_dir = write_model(tmp_path / "model", moe=moe)
    weights = WeightsConfig(shard_bytes=4096)
    config = TrainerConfig(dtype=dtype)
    trainer = policy_trainer(
        model_dir=model_dir,
        config=config,
        weights=weights,
        total_steps=1,
        seed=0,
        rank=0,
        init_method=f"file://{tmp_path / 'ranks'}",
    )
    try:
        manifest = trainer.publish(PolicyVersion(1, 1), tmp_path / "published")
        assert manifest is not None
        writer = trainer._writer
        for _ in range(2):
            entries: list[TensorEntry] = [tensor_entry(name, tensor) for name, tensor in writer.whole_tensors()]
            assert [entry.name for entry in entries] == sorted(writer.order, key=writer.order.__getitem__)
            assert manifest_digest(entries) == manifest.digest
        with pytest.raises(UserError, match=r"weights\.transport"):
            trainer.send(manifest)
    finally:
        trainer.close()
