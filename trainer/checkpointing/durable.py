"""Directories that are either complete or absent: written under a temporary name, synced, renamed. It knows nothing of
what is in them."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollout.errors import UserError

_TEMPORARY = ".partial-"


def begin_directory(directory: Path) -> Path:
    """An empty directory under a temporary name beside `directory`; what an earlier crash left there is removed.

    Raises:
        UserError: `directory` exists already, or the place cannot be written.
    """
    if directory.exists():
        raise UserError(f"{directory} exists already; a version is written once: choose another run name or directory")
    temporary = directory.with_name(_TEMPORARY + directory.name)
    with _writing(directory):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
    return temporary


@contextmanager
def _writing(directory: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {directory}: {error.strerror}; free space, or choose a run directory that can be written"
        ) from error


def complete_directory(temporary: Path, directory: Path, synced: frozenset[Path] = frozenset()) -> None:
    """Make everything below `temporary` durable and give it its final name.

    Args:
        synced: files that are durable already (links to files that were).

    Raises:
        UserError: the disk is full or cannot be written; `directory` is then absent.
    """
    with _writing(directory):
        for path in temporary.rglob("*"):
            if path not in synced:
                sync(path)
        sync(temporary)
        temporary.rename(directory)
        sync(directory.parent)


def partial_directories(parent: Path) -> list[Path]:
    """Directories that were begun below `parent` and never completed."""
    return sorted(path for path in parent.glob(f"{_TEMPORARY}*") if path.is_dir())


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
