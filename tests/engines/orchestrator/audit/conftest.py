"""A model, sequences that it sampled, and audits of dumps of them."""

from pathlib import Path

import pytest
from support.consistency.audit_room import Audits, Sequences, sample
from support.trainer.trainer_room import write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("audit") / "model")


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> Sequences:
    return sample(model_dir)


@pytest.fixture
def audits(tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Audits:
    return Audits(tmp_path, model_dir, capsys)
