"""A folder with a small model, and a threshold that a planted spike is above."""

from pathlib import Path
from typing import Any

import pytest
from support.trainer.gradloc_live_room import usual_tau
from support.trainer.trainer_room import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "dense", tie_word_embeddings=True)
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    (tmp_path / "dense").symlink_to(models / "dense")
    return tmp_path


@pytest.fixture
def given(folder: Path) -> dict[str, Any]:
    return {"type": "given", "tau": usual_tau(folder, "usual")}
