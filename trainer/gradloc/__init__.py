"""Stability tools: each names the layer of diagnosis that it belongs to (3, numerical updates) and refuses to pose as a
cure for another."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.gradloc import CalibratedTau, GivenTau, GradLocConfig
    from trainer.gradloc.any_loop import SumOfTerms, micro_batch, ranks_of
    from trainer.gradloc.gradloc import GradLoc, GradLocReport
    from trainer.gradloc.probe.backward_record import BackwardRecord
    from trainer.gradloc.probe.probe import StepData

__all__ = [
    "BackwardRecord",
    "CalibratedTau",
    "GivenTau",
    "GradLoc",
    "GradLocConfig",
    "GradLocReport",
    "StepData",
    "SumOfTerms",
    "micro_batch",
    "ranks_of",
]

_PLACES = {
    **dict.fromkeys(("CalibratedTau", "GivenTau", "GradLocConfig"), "trainer.config.gradloc"),
    **dict.fromkeys(("GradLoc", "GradLocReport"), "trainer.gradloc.gradloc"),
    **dict.fromkeys(("SumOfTerms", "micro_batch", "ranks_of"), "trainer.gradloc.any_loop"),
    "BackwardRecord": "trainer.gradloc.probe.backward_record",
    "StepData": "trainer.gradloc.probe.probe",
}
"""Loaded on first use, so that `trainer.config.gradloc` costs no torch."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
