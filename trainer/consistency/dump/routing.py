"""The experts in a dump against those that the model chooses for the same tokens. It asks the scorer for forward passes
and listens to the routers.

It must never know a threshold or a verdict. Only input rows that predict a scored token are compared, each under the
policy that sampled that token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollout.engines.torch.moe_routers import expert_counts, find_routers
from rollout.types.trajectory import RoutingTrace, Trajectory
from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.routing import RoutingAgreement, merge_agreements, routing_agreement
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.model.policy_model import PolicyModel
from trainer.model.routing_capture import RoutingRecorder


def routing_cell(model: PolicyModel) -> tuple[int, int] | None:
    """(blocks with experts, experts a token) of a model; None for a dense one."""
    counts = expert_counts(cast(Any, model.causal_lm).config.get_text_config())
    blocks = len(find_routers(model.causal_lm))
    return None if counts is None or blocks == 0 else (blocks, counts[1])


class RoutingComparison:
    """Compares rows of one dump with one model of experts."""

    def __init__(self, scorer: Rescorer, model: PolicyModel) -> None:
        """Listen to the routers of the scorer's own module."""
        counts = expert_counts(cast(Any, model.causal_lm).config.get_text_config())
        if counts is None:
            raise ValueError(f"{model.architecture} names no experts; compare the routing of a mixture of experts only")
        self._scorer, self._num_experts = scorer, counts[0]
        self._recorder = RoutingRecorder(model.causal_lm, *counts)

    def compare(
        self, trajectories: Sequence[Trajectory], scores: Sequence[NDArray[np.float32]]
    ) -> RoutingAgreement | None:
        """The agreement over all of them; None where none has a trace or a score. One more forward pass for each policy
        of each trajectory.

        Args:
            scores: [T] a trajectory, NaN where it could not be scored: nothing is compared there.
        """
        parts = [
            self._compare_part(trajectory, trajectory.routing, policy, np.isfinite(values))
            for trajectory, values in zip(trajectories, scores, strict=True)
            if trajectory.routing is not None
            for policy in sorted({span.policy for span in trajectory.version_spans})
        ]
        found = [part for part in parts if part is not None]
        return merge_agreements(found) if found else None

    def _compare_part(
        self, trajectory: Trajectory, trace: RoutingTrace, policy: PolicyVersion, known: NDArray[np.bool_]
    ) -> RoutingAgreement | None:
        part = _under(trajectory, policy)
        if not (part.sampled & known).any() or not known[part.sampled].all():
            return None
        with self._recorder.recording():
            self._scorer.score([part], ScoreOptions())
        ours = self._recorder.take()
        rows = ours.experts.shape[0]
        predicting = part.sampled[1 : rows + 1]
        return routing_agreement(
            trace.experts[:rows],
            ours.experts,
            covered=trace.covered[:rows] & predicting,
            predicting=predicting,
            num_experts=self._num_experts,
            gate_gap=ours.gate_gap,
        )


def _under(trajectory: Trajectory, policy: PolicyVersion) -> Trajectory:
    """Only the tokens that `policy` sampled count as sampled; one forward pass scores them."""
    spans = tuple(span for span in trajectory.version_spans if span.policy == policy)
    sampled = np.zeros_like(trajectory.sampled)
    for span in spans:
        sampled[span.start : span.end] = True
    logprobs = np.where(sampled, trajectory.rollout_logprobs, np.float32(0))
    return replace(trajectory, sampled=sampled, rollout_logprobs=logprobs, version_spans=spans, routing=None)
