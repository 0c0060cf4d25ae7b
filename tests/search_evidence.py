"""Evidence of a gradient search, as a step's report carries it."""

import math
from typing import Any

from rollout.weights import PolicyVersion
from trainer.stability.evidence import Acted, Culprit, CulpritType, GradLocEvidence


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
