"""What a replay of a saved step came to, and what that says about the cause. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainer.checkpointing.saved_steps import SavedStep

SPIKE_TOLERANCE = 0.1
"""A finite gradient norm is that of the saved step if it is no further from it, relatively."""
KERNEL_TOLERANCE = 0.01
"""Block norms of two runs of the same arithmetic that are further apart, relatively, come from different kernels."""
PRECISION_TOLERANCE = 0.1
"""Block norms in the compute dtype that are further from those in float32, relatively, are not precise."""


class ReplayVerdict(StrEnum):
    """Where the cause of a saved step lies."""

    BATCH = "batch"
    """It comes again with the fixed batch, deterministic and in float32 too: the batch, or the model's own arithmetic
    on it."""
    LOW_PRECISION = "low_precision"
    """Float32 does not show it, or comes to other numbers than the compute dtype."""
    KERNEL = "kernel"
    """It does not come every time, or not with deterministic kernels."""
    OPTIMIZER_STATE = "optimizer_state"
    """Loss and gradient were in order, and are again: optimizer state, float32 masters, or the machine."""
    NOT_REPRODUCED = "not_reproduced"
    """Loss or gradient was not finite, in which the optimizer's state has no part, and batch and published weights do
    not show it: something that neither holds."""


MEANINGS: Mapping[ReplayVerdict, str] = {
    ReplayVerdict.BATCH: "the cause is in the batch, or in the deterministic path of forward and backward",
    ReplayVerdict.LOW_PRECISION: "the cause is low precision: float32 comes to something else",
    ReplayVerdict.KERNEL: "the cause is a kernel: runs of the same arithmetic come to different numbers",
    ReplayVerdict.OPTIMIZER_STATE: (
        "the cause is outside of forward and backward: optimizer state, the float32 masters of the parameters, or the "
        "machine"
    ),
    ReplayVerdict.NOT_REPRODUCED: (
        "the cause is in neither batch nor published weights: something that was injected or changed in the running "
        "trainer (its code, its float32 masters), or the machine; optimizer state has no part in a loss or gradient"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlace:
    """Where a run first met a value that is not finite."""

    micro_batch: int
    """Counted over all ranks: those of rank 0 first."""
    block: str
    """Where it turned: a transformer block, `embeddings`, `head` or `loss`."""
    reached: str = ""
    """Backward: the first block that a gradient reached that is not finite; the block itself where only its own
    parameters have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """One forward and backward pass of the whole batch."""

    name: str
    """configured, again, deterministic or float32."""
    dtype: str
    deterministic: bool
    loss: float
    grad_norm: float
    block_norms: tuple[tuple[str, float], ...]
    forward: ReplayPlace | None
    """First activation that is not finite; None: all are."""
    backward: ReplayPlace | None
    """First place, in backward order, that makes a gradient that is not finite; None: all are."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCulprit:
    """A token whose loss term alone makes the gradient non-finite, or is behind its norm."""

    trajectory_id: str
    position: int
    """Place of the token in its trajectory."""
    token_id: int
    norm: float
    """L2 norm of the gradient of this term alone."""
    blocks: tuple[str, ...]
    """Blocks whose gradient is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Everything that `concord replay` shows."""

    verdict: ReplayVerdict
    reproduces: bool
    """Whether the configured run shows what the step was kept for."""
    device: str
    runs: tuple[ReplayRun, ...]
    search: str
    """Outcome of the search for the tokens; empty where there was nothing to search."""
    culprits: tuple[ReplayCulprit, ...]


def shows_again(run: ReplayRun, saved: SavedStep) -> bool:
    """Whether a run shows what the step was kept for: a value that is not finite, or else the same gradient norm.

    What only the update made non-finite, no forward or backward pass shows.
    """
    if not (math.isfinite(saved.loss) and math.isfinite(saved.grad_norm)):
        return not run.finite
    if saved.reason.startswith("non-finite"):
        return False
    return _apart(run.grad_norm, saved.grad_norm) <= SPIKE_TOLERANCE


def verdict_of(runs: Mapping[str, ReplayRun], saved: SavedStep) -> ReplayVerdict:
    """Compare the runs by name; without a run `float32`, the others are it."""
    same_arithmetic = [runs[name] for name in ("configured", "again", "deterministic")]
    shown = [shows_again(run, saved) for run in same_arithmetic]
    single = runs.get("float32", runs["configured"])
    if all(shown):
        return ReplayVerdict.BATCH if shows_again(single, saved) else ReplayVerdict.LOW_PRECISION
    if any(shown):
        return ReplayVerdict.KERNEL
    if _differ(single, runs["configured"], PRECISION_TOLERANCE):
        return ReplayVerdict.LOW_PRECISION
    if any(_differ(run, runs["configured"], KERNEL_TOLERANCE) for run in same_arithmetic):
        return ReplayVerdict.KERNEL
    in_order = math.isfinite(saved.loss) and math.isfinite(saved.grad_norm)
    return ReplayVerdict.OPTIMIZER_STATE if in_order else ReplayVerdict.NOT_REPRODUCED


def _differ(run: ReplayRun, other: ReplayRun, tolerance: float) -> bool:
    pairs = zip(run.block_norms, other.block_norms, strict=True)
    return run.finite != other.finite or any(_apart(mine, theirs) > tolerance for (_, mine), (_, theirs) in pairs)


def _apart(value: float, other: float) -> float:
    """Relative distance; 0 for two values that are both not finite."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return 0.0 if math.isfinite(value) == math.isfinite(other) else math.inf
    return abs(value - other) / max(abs(value), abs(other), 1e-30)
