"""The set-up of a fresh checkout asks pip before it downloads, and says what it lacks."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from support.paths import ROOT

SETUP = ROOT / "deploy" / "setup"


def write_wheel(folder: Path, version: str) -> None:
    """A wheel named torch with nothing in it."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def ask(folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask about torch where pip sees the wheels of `folder` and nothing else."""
    code = "import environment; environment.refuse_cuda_build('torch==2.13.0')"
    pip_sees = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    env = {**os.environ, **pip_sees, "PYTHONPATH": str(SETUP), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_cpu_build_of_torch_is_accepted(tmp_path: Path):
    write_wheel(tmp_path, "2.13.0")
    write_wheel(tmp_path, "2.13.0+cpu")
    done = ask(tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_cuda_build_of_torch_is_refused_with_the_cure(tmp_path: Path):
    write_wheel(tmp_path, "2.13.0")
    error = ask(tmp_path).stderr
    assert "pip resolves torch==2.13.0 to 2.13.0, a CUDA build" in error
    assert "PIP_EXTRA_INDEX_URL" in error
    assert "package index for CPU builds" in error


def test_a_torch_that_pip_does_not_find_is_reported_with_what_pip_said(tmp_path: Path):
    error = ask(tmp_path).stderr
    assert "pip does not find torch==2.13.0" in error
    assert "No matching distribution" in error


def test_an_unfit_python_is_refused_by_name(tmp_path: Path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.9.2;; *) exit 1;; esac\n")
    old.chmod(0o755)
    done = subprocess.run(
        [SETUP / "setup.sh"],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert f"got {old} = Python 3.9.2; expected Python 3.11 or 3.12" in done.stderr


def test_an_installed_package_starts_no_service_unless_the_machine_has_a_policy(tmp_path: Path):
    policy = tmp_path / "policy-rc.d"
    code = "import environment, os, sys, pathlib, subprocess; p = pathlib.Path(sys.argv[1])\n"
    code += "with environment.no_services_started(p): print(subprocess.run([p]).returncode)"
    env = {**os.environ, "PYTHONPATH": str(SETUP), "PYTHONDONTWRITEBYTECODE": "1"}

    def status() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(policy)], env=env, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    assert (status(), policy.exists()) == ("101", False)
    policy.write_text("#!/bin/sh\nexit 0\n")
    policy.chmod(0o755)
    assert (status(), policy.exists()) == ("0", True)


def test_a_set_up_checkout_on_a_machine_that_lacks_a_program_is_not_up_to_date(tmp_path: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("g++", "prometheus", "promtool", "chromium"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    code = (
        "import environment, pathlib, sys; environment.STAMP = pathlib.Path(sys.argv[1]); environment.CHECK = "
        "[sys.executable, '-c', '']\n"
    )
    code += (
        "environment.STAMP.write_text(environment.stamp()); print(environment.is_current(), "
        "*environment.missing_system_packages())"
    )
    env = {**os.environ, "PATH": str(programs), "PYTHONPATH": str(SETUP), "PYTHONDONTWRITEBYTECODE": "1"}

    def answer() -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "stamp")]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    assert answer() == "True"
    (programs / "chromium").unlink()
    assert answer() == "False chromium"
