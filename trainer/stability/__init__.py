"""Stability tools: each names the layer of diagnosis that it belongs to (3, numerical updates) and refuses to pose as a cure for another."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.stability.any_loop import SumOfTerms, micro_batch, ranks_of
    from trainer.stability.backward_record import BackwardRecord
    from trainer.stability.config import CalibratedTau, GivenTau, GradLocConfig
    from trainer.stability.gradient_probe import StepData
    from trainer.stability.gradloc import GradLoc, GradLocReport

__all__ = ["BackwardRecord", "CalibratedTau", "GivenTau", "GradLoc", "GradLocConfig", "GradLocReport", "StepData", "SumOfTerms", "micro_batch", "ranks_of"]

_PLACES = {
    **dict.fromkeys(("CalibratedTau", "GivenTau", "GradLocConfig"), "trainer.stability.config"),
    **dict.fromkeys(("GradLoc", "GradLocReport"), "trainer.stability.gradloc"),
    **dict.fromkeys(("SumOfTerms", "micro_batch", "ranks_of"), "trainer.stability.any_loop"),
    "BackwardRecord": "trainer.stability.backward_record",
    "StepData": "trainer.stability.gradient_probe",
}
"""Loaded on first use, so that `trainer.stability.config` costs no torch."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
