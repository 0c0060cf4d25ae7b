"""One rank, a small model and a healthy step, shared by the tests of a module that searches gradients."""

from collections.abc import Generator

import pytest
from support.trainer.gradloc_room import on_policy, one_rank, random_step, small_model

from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.step import MicroBatch


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ranks]:
    with one_rank(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(alone: Ranks) -> PolicyModel:
    return small_model(alone)


@pytest.fixture(scope="module")
def healthy(model: PolicyModel, alone: Ranks) -> tuple[MicroBatch, ...]:
    return on_policy(model, alone, random_step(0))
