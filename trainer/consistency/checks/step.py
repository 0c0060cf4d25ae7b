"""What a step did, against what it should have done by the rewards and the declared optimizer. Numpy only; nothing here
is taken from the trainer but what it reports.

Source: advantages of GRPO (arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783) and RLOO (arXiv 2402.14740).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config.trainer import AlgorithmSection, GroupRelativeSection, OptimizerConfig, RlooConfig

ADVANTAGE_TOLERANCE = 1e-3
"""Relative to the largest of the group."""
EVIDENCE_PER_STEP = 1.0
"""Mean of `drive` below 0 that a step against its rewards is tested for."""


def advantages_of(rewards: Sequence[float], config: AlgorithmSection) -> NDArray[np.float64] | None:
    """[G] advantages by the rewards of a whole group and the declared algorithm; None where more decides: which
    siblings are trained (`baseline = "trained"`), or an algorithm that is not known here."""
    if config.baseline != "group" or not isinstance(config, GroupRelativeSection | RlooConfig):
        return None
    given = [float(reward) for reward in rewards]
    if max(given) == min(given):
        return np.zeros(len(given))
    if isinstance(config, RlooConfig):
        return np.array([own - (math.fsum(given) - own) / (len(given) - 1) for own in given])
    mean = math.fsum(given) / len(given)
    deviations = [own - mean for own in given]
    if not config.normalize_std:
        return np.array(deviations)
    spread = math.sqrt(math.fsum(each * each for each in deviations) / (len(given) - 1))
    return np.array([each / (spread + config.std_epsilon) for each in deviations])


def drive(pushes: Sequence[float]) -> float:
    """How strongly a step moved trajectories by their advantages: the sum of `pushes` (advantage x what all log-probs
    of one rose by) over the root of their squares. Of a step that knows nothing of the advantages: mean 0, variance
    1."""
    root = math.sqrt(math.fsum(each * each for each in pushes))
    return math.fsum(pushes) / root if root > 0.0 else 0.0


def evidence_against(driven: float) -> float:
    """Nats of evidence that steps go against their rewards. For a step that is symmetric about 0, or above, exp of it
    has a mean of at most 1, however its sizes are distributed.

    Source: de la Pena 1999, A general class of exponential inequalities, for self-normalised sums.
    """
    return -EVIDENCE_PER_STEP * driven - 0.5 * EVIDENCE_PER_STEP**2


def largest_update(config: OptimizerConfig, step: int) -> float | None:
    """Most learning rates that AdamW can move a parameter by in optimizer step `step` (from 1), weight decay aside;
    None for other optimizers.

    |m| / sqrt(v) is at most (1 - b1) / sqrt(1 - b2) times the root of the sum of (b1^2 / b2)^i over the steps so far,
    by Cauchy and Schwarz, and both moments are corrected for their start: 1 in the first step.
    """
    b1, b2 = config.beta1, config.beta2
    if config.type != "adamw" or config.qk_clip.enabled or b1**2 >= b2:
        return None
    decay = b1**2 / b2
    moments = math.sqrt((1.0 - decay**step) / (1.0 - decay) / (1.0 - b2)) * (1.0 - b1)
    return moments * math.sqrt(1.0 - b2**step) / (1.0 - b1**step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """How far parameters moved in one step."""

    num_parameters: int
    square: float
    """Sum of the squared differences."""
    most: float
    """Largest |difference|, less what weight decay may be of it."""


def moved_together(parts: Sequence[Moved]) -> Moved:
    """All of them as one."""
    return Moved(
        num_parameters=sum(part.num_parameters for part in parts),
        square=math.fsum(part.square for part in parts),
        most=max(part.most for part in parts),
    )
