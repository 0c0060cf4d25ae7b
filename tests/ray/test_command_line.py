"""What the command says before it starts anything: bad input ends with status 2 and the cure, and leaves nothing
behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import STEP_S, ConcordProcess, write_config

Start = Callable[..., ConcordProcess]


def refused(process: ConcordProcess) -> str:
    """The error output of a command that must end with status 2 before it started any process; without a traceback."""
    assert process.exit_status(STEP_S) == 2, process.errors
    assert "Traceback" not in process.errors
    assert not any("starting Ray" in line for line in process.output)
    return process.errors


def test_version_is_that_of_the_installed_package(concord: Start):
    process = concord("version")
    assert process.exit_status(STEP_S) == 0
    assert process.output == ["0.1.0\n"]


def test_a_dry_run_prints_config_and_plan_and_starts_nothing(concord: Start, tmp_path: Path):
    process = concord("run", write_config(tmp_path), "--dry-run", "--set", "engine.replicas=3")
    assert process.exit_status(STEP_S) == 0, process.errors
    output = "".join(process.output)
    assert '"replicas": 3' in output
    assert "nothing was started" in output
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_directory_is_named_with_the_cure(concord: Start, tmp_path: Path):
    errors = refused(concord("run", write_config(tmp_path), "--set", f"model.path={tmp_path / 'nowhere'}"))
    assert str(tmp_path / "nowhere") in errors
    assert not (tmp_path / "runs").exists()


def test_an_unknown_key_is_named_with_the_nearest_known_one(concord: Start, tmp_path: Path):
    assert "nearest known key is 'replicas'" in refused(
        concord("run", write_config(tmp_path), "--set", "engine.replics=2")
    )


def test_a_folder_that_is_no_run_cannot_be_resumed(concord: Start, tmp_path: Path):
    assert f"{tmp_path} is not a run directory" in refused(concord("resume", tmp_path))


def test_a_run_directory_that_cannot_be_made_is_named(concord: Start, tmp_path: Path):
    errors = refused(concord("run", write_config(tmp_path), "--set", "run.dir=/proc/concord"))
    assert "cannot write the run directory /proc/concord/run" in errors


@pytest.mark.parametrize("name", ["rollout", "trainer", "actors"])
def test_a_package_of_the_same_name_ahead_on_the_path_is_named(concord: Start, tmp_path: Path, name: str):
    (tmp_path / "elsewhere" / name).mkdir(parents=True)
    (tmp_path / "elsewhere" / name / "__init__.py").touch()
    errors = refused(concord("run", write_config(tmp_path), environment={"PYTHONPATH": str(tmp_path / "elsewhere")}))
    assert f"{name}: got {tmp_path / 'elsewhere' / name}" in errors
    assert f"Take {tmp_path / 'elsewhere'} off PYTHONPATH" in errors
