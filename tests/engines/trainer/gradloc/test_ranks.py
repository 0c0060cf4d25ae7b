"""The search over several ranks: flat and hybrid meshes, and in the trainer's step."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.trainer import trainer_scenarios as scenarios
from support.trainer.gradloc_live_room import mask_two_culprits, usual_tau
from support.trainer.gradloc_room import hybrid_ranks_find_the_same, ranks_find_what_was_planted
from support.trainer.trainer_room import run_ranks, write_model

pytestmark = pytest.mark.timeout(240)


def test_two_ranks_find_a_culprit_on_each_and_report_alike(tmp_path: Path):
    run_ranks(2, ranks_find_what_was_planted, tmp_path, deadline_s=200)


def test_a_hybrid_mesh_finds_the_same_culprits_with_the_same_norms(tmp_path: Path):
    run_ranks(4, hybrid_ranks_find_the_same, tmp_path, deadline_s=200)


def test_two_trainer_ranks_mask_what_one_masks(tmp_path: Path):
    write_model(tmp_path / "dense", tie_word_embeddings=True)
    (tmp_path / "tau.json").write_text(json.dumps(usual_tau(tmp_path, "usual", multiple=30.0)))
    mask_two_culprits(0, 1, tmp_path)
    run_ranks(2, mask_two_culprits, tmp_path, deadline_s=200)
    alone, *both = (json.loads((tmp_path / f"seen-{name}.json").read_text()) for name in ("w1-0", "w2-0", "w2-1"))
    assert both[0] == both[1]
    assert (alone["acted"], alone["tokens"]) == (both[0]["acted"], both[0]["tokens"]) == ("masked", both[0]["tokens"])
    assert both[0]["norm"] == pytest.approx(alone["norm"], rel=1e-4)
    for mine, theirs in zip(alone["culprits"], both[0]["culprits"], strict=True):
        assert mine[:2] == theirs[:2] and mine[2:] == pytest.approx(theirs[2:], rel=1e-3)
    ours, others = scenarios.tensors(tmp_path / "masked-w1"), scenarios.tensors(tmp_path / "masked-w2")
    for name, value in ours.items():
        np.testing.assert_allclose(value, others[name], rtol=2e-4, atol=2e-5, err_msg=name)
