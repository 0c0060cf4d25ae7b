"""Evidence of a gradient search, as a step's report carries it, and a trainer whose steps carry it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support.loop.loop_case import Case

from rollout.types.codec import decode
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion
from trainer.batching.quarantine import groups_with_quarantines, quarantined
from trainer.step.scripted import ScriptedTrainer
from trainer.types.evidence import audited_groups
from trainer.types.gradloc import Acted, Culprit, CulpritType, GradLocEvidence
from trainer.types.step import StepReport, StepRequest


def build_culprit(**changes: Any) -> Culprit:
    """Token 7 of a trajectory, with its neighbours."""
    fields: dict[str, Any] = {
        "token_id": 7,
        "position": 5,
        "trajectory_id": "d00000001-0",
        "dispatch_id": "d00000001",
        "policy": PolicyVersion(1, 2),
        "replica": 1,
        "context_token_ids": (3, 4, 7, 5),
        "context_start": 3,
        "type": CulpritType.TOKEN_MISMATCH,
        "norm": 12.5,
        "block_norms": (("embeddings", 3.0), ("model.layers.0", 12.0)),
        "block_ratios": (("embeddings", 1.5), ("model.layers.0", 40.0)),
        "logprob": -2.0,
        "rollout_logprob": -12.0,
        "old_logprob": -2.5,
        "d_engine": 9.5,
        "d_stale": 0.5,
        "omega": math.exp(10.0),
        "sequence_ratio": 1.25,
        "advantage": -1.5,
        "entropy": 2.25,
    }
    return Culprit(**{**fields, **changes})


def build_search(**changes: Any) -> GradLocEvidence:
    """A located search under `observe`."""
    fields: dict[str, Any] = {
        "outcome": "located",
        "trigger": "threshold",
        "action": "observe",
        "acted": Acted.NOTHING,
        "loss": 0.25,
        "grad_norm": 13.0,
        "threshold": 2.0,
        "tau": 40.0,
        "explained": 0.97,
        "culprits": (build_culprit(),),
        "passes": 9,
        "tokens_forwarded": 320,
        "seconds": 0.5,
    }
    return GradLocEvidence(**{**fields, **changes})


class Searching(ScriptedTrainer):
    """Steps of `chosen` tries were searched; `search` says what came out, given the first trajectory of the batch."""

    def __init__(
        self, case: Case, chosen: Callable[[int], bool], search: Callable[[Any], GradLocEvidence], skipped: str = ""
    ) -> None:
        super().__init__(case.config.trainer)
        self._chosen, self._search, self._skipped, self._tries = chosen, search, skipped, 0

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        self._tries += 1
        report = super().step(groups, request)
        if not self._chosen(self._tries):
            return report
        audited = audited_groups(groups)
        search = self._search(decode(groups.payloads[0]))
        out = (
            {culprit.trajectory_id for culprit in search.culprits} if search.acted is Acted.QUARANTINED else set[str]()
        )
        now = quarantined(audited, search)
        report = replace(report, quarantined=now, quarantined_groups=groups_with_quarantines(audited, now))
        return replace(report, gradloc=search, trained_ids=report.trained_ids - out, skipped=self._skipped)
