"""Stability tools: each names the layer of diagnosis that it belongs to (3, numerical updates) and refuses to pose as a
cure for another."""

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
