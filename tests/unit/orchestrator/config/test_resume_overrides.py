"""`concord resume --set`: what was refused is not kept for the next resume."""

import os
import socket
from pathlib import Path

import pytest
from support.paths import MODEL

from orchestrator.commands.run import run_again
from orchestrator.config import RunConfig, parse_config
from orchestrator.run_dir.layout import RunDir, create_run_dir
from rollout.errors import UserError


def run_of(folder: Path, *overrides: str) -> tuple[RunDir, RunConfig]:
    """A run directory with nothing in it but its config."""
    config = parse_config(
        {}, "test", (f"run.dir={folder}", "run.name=mine", "model.type=local", f"model.path={MODEL}", *overrides)
    )
    return create_run_dir(config, "test"), config


def test_an_override_that_cannot_work_leaves_the_config_as_it_was(tmp_path: Path):
    run, config = run_of(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"set exporter\.port to a free port"):
            run_again(run.path, [f"exporter.port={taken.getsockname()[1]}"])
    with pytest.raises(UserError, match="no-such-model"):
        run_again(run.path, ["model.path=no-such-model"])
    assert RunConfig.model_validate_json(run.config.read_text()) == config


def test_a_disk_that_refuses_the_new_config_is_a_user_error(tmp_path: Path):
    run, _ = run_of(tmp_path)
    (run.path / f".config.json.{os.getpid()}.tmp").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*config\.json .*free space.*Is a directory"):
        run_again(run.path, ["run.steps=7"])
