"""The seam between the checks, which ask what-if questions, and the scorer, which holds models. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory
from trainer.consistency.checks.routing import RoutingAgreement


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Under which circumstances tokens are scored. The default is pi_beh: the trainer's numerics, each token at the
    version of its span, as it was sampled."""

    version_offset: int = 0
    """Added to the version of every span: -1 asks whether the weights were one step older than the log says."""
    temperature: float | None = None
    """None takes the tag's; 1 is raw."""
    truncate: bool = True
    """Whether the tag's top_p and top_k take part in the distribution; False is after temperature only."""
    top_p: float | None = None
    """A nucleus that the tag does not declare; None takes the tag's."""
    top_k: int | None = None
    """A number of likeliest tokens that the tag does not declare, 0 for all; None takes the tag's."""
    token: Literal["sampled", "likeliest"] = "sampled"
    """Whose log-prob: `likeliest` is the best of the vocabulary at each position."""
    dtype: Literal["trainer", "float32", "bfloat16", "float16"] = "trainer"
    """Compute dtype of the forward pass."""
    round_logits: bool = False
    """Whether logits are rounded to the compute dtype, as where an engine's head computes in it."""
    weights_dtype: Literal["as_published", "float8_e4m3"] = "as_published"
    """`float8_e4m3`: matrices rounded to the fp8 grid, one scale a tensor."""
    replay_routing: bool = False
    """Take the experts of the trajectory's routing trace where it is covered."""
    keep_kv: bool = False
    """At a version boundary, later tokens attend to the keys and values that the older weights wrote."""
    jumps: tuple[tuple[int, int], ...] = ()
    """(first input, number) a trajectory: positions that its inputs from there on are further behind, as where they
    count pads that nothing attends to. Empty: none jumps."""


class Rescorer(Protocol):
    """Scores trajectories under given circumstances."""

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        """[T] nats each, 0 where not sampled, NaN where it cannot be known (a version that is not held). Never held:
        [tokens, vocabulary] beyond one chunk.

        Raises:
            UserError: the model cannot do what is asked (routing replay of a dense model).
        """
        ...


class RoutingRescorer(Rescorer, Protocol):
    """A rescorer that also compares experts."""

    def score_with_routing(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[list[NDArray[np.float32]], list[RoutingAgreement | None]]:
        """`score`, and the agreement of each trajectory's routing over its scored tokens; None where there is none to
        compare."""
        ...


class MomentRescorer(RoutingRescorer, Protocol):
    """A rescorer that also says how the declared distribution of each token looks."""

    def score_with_moments(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[list[NDArray[np.float32]], list[RoutingAgreement | None], list[NDArray[np.float32]]]:
        """`score_with_routing`, and [3, T] a trajectory under the distribution that its tag declares, cut by this
        model's own logits whatever the engine says it kept: log-prob and entropy (nats) and variance of log p (squared
        nats). NaN where a token has no score."""
        ...
