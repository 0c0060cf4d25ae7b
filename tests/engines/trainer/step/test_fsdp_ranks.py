"""Several gloo ranks train as one does: the result does not depend on their number, nor does a checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.trainer import trainer_scenarios as scenarios
from support.trainer.trainer_room import run_ranks, write_model

from trainer.step.policy_trainer import PolicyTrainer

pytestmark = pytest.mark.timeout(240)
WORLD = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank did and what two did, on the same seeded batches."""
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder / "dense", tie_word_embeddings=True)
    write_model(folder / "moe", moe=True, tie_word_embeddings=False)
    scenarios.begin_alone(folder)
    run_ranks(WORLD, scenarios.all_together, folder, deadline_s=200)
    for name in scenarios.CASES:
        scenarios.run_case(0, 1, folder, name)
    return folder


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = scenarios.tensors(first), scenarios.tensors(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", list(scenarios.CASES))
def test_weights_after_three_steps_do_not_depend_on_the_number_of_ranks(folder: Path, name: str):
    assert_same_weights(folder / f"{name}-w1", folder / f"{name}-w{WORLD}")
    start = scenarios.tensors(folder / scenarios.CASES[name][0])
    moved = [np.abs(value - start[tensor]).max() for tensor, value in scenarios.tensors(folder / f"{name}-w1").items()]
    assert min(moved) > 1e-3, "a parameter that never moved proves nothing"


@pytest.mark.parametrize("name", list(scenarios.CASES))
def test_loss_gradient_norm_and_means_do_not_depend_on_the_number_of_ranks(folder: Path, name: str):
    alone, together = (json.loads((folder / f"{name}-w{world}.json").read_text()) for world in (1, WORLD))
    apart = {"num_micro_batches", "num_tokens_forwarded"}
    for one, many in zip(alone, together, strict=True):
        assert one["grad_norm"] > 1e-3
        for key in one.keys() - apart:
            np.testing.assert_allclose(many[key], one[key], rtol=1e-4, atol=1e-6, err_msg=key)
    if "micro_batch_tokens" in scenarios.CASES[name][1]:
        assert alone[0]["num_micro_batches"] % 2 == 1
        assert together[0]["num_micro_batches"] > 1


def test_a_checkpoint_of_one_rank_continues_on_two(folder: Path):
    assert_same_weights(folder / "unbroken-2", folder / "resumed-2")


def test_a_checkpoint_of_two_ranks_continues_on_one(folder: Path):
    trainer = scenarios.build(folder, "third")
    try:
        state = trainer.load_checkpoint(folder / "saved-many")
        scenarios.step(trainer, 3)
        trainer.publish(state.policy, folder / "resumed-3")
    finally:
        trainer.close()
    assert_same_weights(folder / "unbroken-3", folder / "resumed-3")


def test_when_one_rank_cannot_write_all_ranks_say_so(folder: Path):
    messages = [(folder / f"failure-{rank}").read_text() for rank in range(WORLD)]
    assert all("exists already" in message for message in messages)


def test_one_process_is_one_rank(folder: Path):
    trainer = scenarios.build(folder, "first-of-two")
    try:
        with pytest.raises(Exception, match="already runs a trainer rank"):
            scenarios.build(folder, "second-of-two")
    finally:
        trainer.close()
    assert isinstance(trainer, PolicyTrainer)
