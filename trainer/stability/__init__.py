"""Stability tools: each names the layer of diagnosis that it belongs to (3, numerical updates) and refuses to pose as a cure for another."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.stability.gradloc import GradLoc, GradLocReport

__all__ = ["GradLoc", "GradLocReport"]

_PLACES = {"GradLoc": "trainer.stability.gradloc", "GradLocReport": "trainer.stability.gradloc"}
"""Loaded on first use, so that `trainer.stability.config` costs no torch."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
