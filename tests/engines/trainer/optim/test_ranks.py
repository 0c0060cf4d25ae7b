"""Clips and optimizers on several gloo ranks do what they do on one, and a checkpoint carries their memory between the
two."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trainer import stability_scenarios as scenarios
from support.trainer.trainer_room import run_ranks, write_model
from support.trainer.trainer_scenarios import tensors

pytestmark = pytest.mark.timeout(240)
WORLD = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank did and what two did, on the same seeded batches."""
    folder = tmp_path_factory.mktemp("stability")
    write_model(folder / "dense", tie_word_embeddings=True)
    write_model(folder / "moe", moe=True, tie_word_embeddings=False)
    for name in scenarios.CASES:
        scenarios.run_case(0, 1, folder, name)
    run_ranks(WORLD, scenarios.all_together, folder, deadline_s=200)
    for name in scenarios.CASES:
        scenarios.resume_case(0, 1, folder, name, written_by=WORLD)
    return folder


def reports(folder: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{name}.json").read_text())


def assert_same_reports(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(other["norm"], one["norm"], rtol=1e-4)
        for key in ("norms", "scales"):
            assert [block for block, _ in one[key]] == [block for block, _ in other[key]]
            np.testing.assert_allclose(
                [value for _, value in other[key]], [value for _, value in one[key]], rtol=1e-4, atol=1e-6
            )


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", list(scenarios.CASES))
def test_norms_scales_and_weights_do_not_depend_on_the_number_of_ranks(folder: Path, name: str):
    assert_same_reports(reports(folder, f"{name}-w1"), reports(folder, f"{name}-w{WORLD}"))
    assert_same_weights(folder / f"{name}-w1", folder / f"{name}-w{WORLD}")


@pytest.mark.parametrize("name", ["layerclip", "adagc"])
def test_block_norms_make_up_the_global_norm_and_some_blocks_are_clipped(folder: Path, name: str):
    steps = reports(folder, f"{name}-w{WORLD}")
    for step in steps:
        np.testing.assert_allclose(np.linalg.norm([value for _, value in step["norms"]]), step["norm"], rtol=1e-9)
    scales = [value for step in steps for _, value in step["scales"]]
    assert min(scales) < 1, "a clip that never acts proves nothing"
    names = [block for block, _ in steps[0]["norms"]]
    edges = (["embeddings_and_head"], []) if name == "layerclip" else (["embeddings"], ["head"])
    assert names == [*edges[0], "model.layers.0", "model.layers.1", *edges[1]]


@pytest.mark.parametrize("name", list(scenarios.CASES))
@pytest.mark.parametrize("world", [1, WORLD])
def test_the_clip_and_the_optimizer_go_on_from_a_checkpoint_of_another_number_of_ranks(
    folder: Path, name: str, world: int
):
    assert_same_reports(reports(folder, f"{name}-w1")[-1:], reports(folder, f"{name}-w{world}-resumed"))
    assert_same_weights(folder / f"{name}-w1", folder / f"{name}-w{world}-resumed")


def test_a_checkpoint_of_another_kind_of_clip_starts_without_a_history_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    trainer = scenarios.scenarios.build(folder, "other-clip", model="dense")
    try:
        with caplog.at_level(logging.WARNING):
            trainer.load_checkpoint(folder / "layerclip-w1-saved")
    finally:
        trainer.close()
    assert "history of a clip of kind layerclip; the clip of kind global starts without one" in caplog.text


def test_a_norm_counts_every_part_once_on_any_mesh(folder: Path):
    whole = float(np.linalg.norm(np.arange(15.0)))
    for rank in range(WORLD):
        norms = json.loads((folder / f"norms-{rank}.json").read_text())
        wanted = dict.fromkeys(norms, whole) | {"mixed": whole * 3**0.5}
        assert norms == pytest.approx(wanted, rel=1e-6)
