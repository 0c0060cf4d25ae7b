"""Run directories of older versions open."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import parse_config
from orchestrator.run_dir.layout import RunDir, create_run_dir, open_run_dir
from rollout.errors import UserError


def stored(tmp_path: Path, section: dict[str, Any]) -> RunDir:
    """A run whose stored config has `section` besides in `[trainer.gradloc]`."""
    run = create_run_dir(parse_config({"run": {"dir": str(tmp_path)}}, "test"), "run")
    document = json.loads(run.config.read_text())
    document["trainer"]["gradloc"] |= section
    run.config.write_text(json.dumps(document))
    return run


def test_a_stored_key_that_no_longer_chooses_anything_is_no_trouble(tmp_path: Path):
    run = stored(tmp_path, {"subtract": True})
    assert open_run_dir(run.path)[1].trainer.gradloc.enabled


@pytest.mark.parametrize("text", ["[]", '{"trainer": 1}', '{"trainer": {"gradloc": []}}'])
def test_a_stored_config_that_is_none_is_refused(tmp_path: Path, text: str):
    run = stored(tmp_path, {})
    run.config.write_text(text)
    with pytest.raises(UserError):
        open_run_dir(run.path)


def test_a_stored_key_that_nobody_knows_is_refused(tmp_path: Path):
    run = stored(tmp_path, {"subtracted": True})
    with pytest.raises(UserError, match=r"(?s)another version of Concord wrote .*trainer\.gradloc\.subtracted"):
        open_run_dir(run.path)
