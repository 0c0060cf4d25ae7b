"""A scorer that needs no model: it answers with the log plus what a test says."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.checks.step import Moved
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.service.auditor import AuditedRun, Auditor
from trainer.consistency.service.prompts import PromptReader
from trainer.model.model_dir import ModelFacts


class ScriptedScorer:
    """Scores every sampled token as logged, plus `shift(trajectory, options)` nats; NaN is a version that is not
    held."""

    def __init__(self, shift: Callable[[Trajectory, ScoreOptions], float] = lambda trajectory, options: 0.0) -> None:
        self._shift = shift
        self.held: dict[str, str] = {"v0": ""}
        self.held_bytes = self.scored_tokens = 0
        self.asked: list[ScoreOptions] = []
        self.movements: dict[str, Moved] = {}
        self.agree: Callable[[Trajectory], RoutingAgreement | None] = lambda trajectory: None
        """How far a trajectory's routing agrees."""

    def score_with_routing(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[list[NDArray[np.float32]], list[RoutingAgreement | None]]:
        return self.score(trajectories, options), [self.agree(trajectory) for trajectory in trajectories]

    def moved(self, before: PolicyVersion, after: PolicyVersion, decayed: float) -> dict[str, Moved]:
        """As the test says."""
        return self.movements

    def score_with_moments(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[list[NDArray[np.float32]], list[RoutingAgreement | None], list[NDArray[np.float32]]]:
        """As surprising as tokens are on average, with variance 1: nothing to find."""
        scores, routings = self.score_with_routing(trajectories, options)
        return scores, routings, [np.stack((each, -each, np.ones_like(each))) for each in scores]

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        self.asked.append(options)
        self.scored_tokens += sum(t.token_ids.size for t in trajectories)
        return [
            np.where(t.sampled, t.rollout_logprobs + np.float32(self._shift(t, options)), np.float32(0)).astype(
                np.float32
            )
            for t in trajectories
        ]


def scripted_auditor(
    config: ConsistencyConfig,
    scorer: ScriptedScorer | None = None,
    vocab_size: int = 32,
    prompts: PromptReader | None = None,
    moe: bool = False,
    routing_expected: bool = False,
    trainer_dtype: str = "float32",
) -> Auditor:
    """An auditor over a scripted scorer."""
    facts = ModelFacts(
        architecture="Scripted",
        vocab_size=vocab_size,
        tokenizer_size=vocab_size,
        max_context=None,
        is_moe=moe,
        tied=False,
        num_parameters=1,
        weight_bytes=4,
    )
    run = AuditedRun(model=facts, prompts=prompts, returns_routing=routing_expected, trainer_dtype=trainer_dtype)
    return Auditor(scorer or ScriptedScorer(), config, run)
