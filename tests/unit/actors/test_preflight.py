"""The four rooms resolve under one root, or the error names the intruder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from actors.preflight import PACKAGES, check_packages

CHECK = """
import sys
sys.path.extend({appended!r})
import importlib.util
spec = importlib.util.spec_from_file_location("preflight", {file!r})
preflight = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preflight)
try:
    print(preflight.check_packages())
except Exception as error:
    print(type(error).__name__)
    print(error)
assert "ray" not in sys.modules
"""


def run_check(pythonpath: Path, *, root_on_path: bool = True) -> str:
    """What the preflight says in a fresh interpreter with `pythonpath` ahead of Concord."""
    code = CHECK.format(appended=[str(ROOT)] * root_on_path, file=str(ROOT / "actors" / "preflight.py"))
    env = {**os.environ, "PYTHONPATH": str(pythonpath)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=pythonpath, env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_four_packages_resolve_under_the_folder_of_this_checkout():
    assert check_packages() == ROOT


def test_a_clean_path_passes(tmp_path: Path):
    assert run_check(tmp_path).strip() == str(ROOT)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_intruding_package_is_named_with_the_cure(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    output = run_check(tmp_path)
    assert output.startswith("UserError\n")
    assert f"{name}: got {tmp_path / name}; expected {ROOT / name}" in output
    assert f"Take {tmp_path} off PYTHONPATH" in output
    assert sum(": got" in line for line in output.splitlines()) == 1


def test_an_intruding_module_file_is_named(tmp_path: Path):
    (tmp_path / "trainer.py").touch()
    assert f"trainer: got {tmp_path / 'trainer.py'}; expected {ROOT / 'trainer'}" in run_check(tmp_path)


def test_a_folder_without_modules_that_takes_the_place_of_a_package_is_named(tmp_path: Path):
    """It wins over an editable install, whose finder comes after the path."""
    (tmp_path / "trainer").mkdir()
    assert f"trainer: got {tmp_path / 'trainer'}; expected {ROOT / 'trainer'}" in run_check(
        tmp_path, root_on_path=False
    )
