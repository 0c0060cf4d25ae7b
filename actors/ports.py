"""What the loop drives: the ports behind which the actors live. The loop knows ids, headers, manifests and reports,
never tokens.

`actors.ray_fleet` implements them over Ray; tests implement them in process over the same stores, engines and trainers.
No Ray here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.episodes.worker import Outcome
from rollout.evaluation.evaluator import EvaluationReport
from rollout.tokenization.agreement import TokenizerIdentity
from rollout.types.dispatch import Dispatch
from rollout.types.generation import PauseMode
from rollout.types.protocols import EngineLoad, Store
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest
from trainer.consistency.service.report import AuditContext, AuditReport, StepAudit, StepToAudit
from trainer.types.step import StepReport, StepRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """A replica's answer after it loaded its first weights."""

    tag: EngineTag
    canary_logprobs: NDArray[np.float32]
    tokenizer: TokenizerIdentity
    """Its tokenizer, whose ids it is sent; read anew by every incarnation."""
    metrics_address: str = ""
    """host:port at which the engine serves metrics of its own; empty where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """A replica's answer after it took over new weights and went on."""

    report: ApplyReport
    canary_logprobs: NDArray[np.float32]


class EnginePort(Protocol):
    """One incarnation of a replica. Every method raises ProcessLostError when its process is gone."""

    async def start(self, manifest: WeightManifest) -> Started:
        """Load the weights of `manifest`, and score its canary."""
        ...

    async def update(self, manifest: WeightManifest, mode: PauseMode) -> Updated:
        """Pause, apply, resume, then score the canary before ordinary work."""
        ...

    async def healthy(self) -> bool:
        """Whether it can still serve."""
        ...

    async def load(self) -> EngineLoad:
        """What it is doing."""
        ...

    async def kill(self) -> None:
        """End it and all its processes; never raises for one that is already gone."""
        ...


class WorkerPort(Protocol):
    """One incarnation of an episode worker."""

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        """From now on, dispatches for `slot` go to this engine."""
        ...

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        """Start an episode for each dispatch."""
        ...

    async def collect(self) -> tuple[Outcome, ...]:
        """Wait until dispatches have come back, and take all that have (empty after a second without any)."""
        ...

    async def kill(self) -> None:
        """End it; never raises for one that is already gone."""
        ...


class TrainerPort(Protocol):
    """All trainer ranks."""

    async def step(self, trainer_epoch: int, dispatch_ids: Sequence[str], request: StepRequest) -> StepReport:
        """Lease the groups from the store and train on them."""
        ...

    async def publish(self, policy: PolicyVersion) -> WeightManifest:
        """Write the present weights as `policy`."""
        ...

    async def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int
    ) -> WeightManifest:
        """The manifest by which engines receive what was just published as `manifest` from the trainer's GPUs.

        Args:
            members: (slot, incarnation) of every replica that will apply it.
            workers: GPUs of one replica.
        """
        ...

    async def send(self, manifest: WeightManifest) -> None:
        """Send the weights under a manifest of `open_transfer`; with nccl the replicas must be applying it meanwhile,
        with ipc only afterwards."""
        ...

    async def save(self, policy: PolicyVersion, directory: Path) -> None:
        """Write a checkpoint, complete or absent."""
        ...

    async def load(self, directory: Path) -> PolicyVersion:
        """Go back to a checkpoint; answers with the policy that it holds."""
        ...

    async def kill(self) -> None:
        """End it; never raises for one that is already gone."""
        ...


class AuditorPort(Protocol):
    """One incarnation of a service actor. Raises ProcessLostError when its process is gone."""

    async def audit(self, dispatch_ids: Sequence[str], context: AuditContext, kind: str) -> AuditReport:
        """Score stored groups and keep the evidence with them as annotations of `kind`. Groups that have ended
        meanwhile are left out of the answer."""
        ...

    async def audit_step(self, dispatch_ids: Sequence[str], step: StepToAudit) -> StepAudit | None:
        """What an applied step did to trajectories of these groups; None where its weights are gone."""
        ...

    async def kill(self) -> None:
        """End it; never raises for one that is already gone."""
        ...


class EvaluatorPort(Protocol):
    """One incarnation of the evaluation actor. Raises ProcessLostError when its process is gone."""

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        """From now on, evaluations on `slot` go to this engine."""
        ...

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        """Score what replica `slot` serves on the held-out prompts; see `rollout.evaluation.evaluator`."""
        ...

    async def kill(self) -> None:
        """End it; never raises for one that is already gone."""
        ...


class Fleet(Protocol):
    """All actors of a run."""

    @property
    def store(self) -> Store:
        """The trajectory store."""
        ...

    @property
    def trainer(self) -> TrainerPort:
        """The trainer."""
        ...

    async def new_engine(self, slot: int) -> EnginePort:
        """A new incarnation of a replica, not yet started."""
        ...

    async def new_worker(self, index: int) -> WorkerPort:
        """A new incarnation of an episode worker, ready for work."""
        ...

    async def new_auditor(self, index: int) -> AuditorPort:
        """A new incarnation of a consistency service actor, ready for work."""
        ...

    async def new_evaluator(self) -> EvaluatorPort:
        """A new incarnation of the evaluation actor, ready for work."""
        ...

    async def processes(self) -> Mapping[str, int]:
        """Process id by actor name, of the actors on this machine."""
        ...

    async def dump_stacks(self) -> str:
        """Stacks of all actors, for people; why there are none of one that does not answer."""
        ...

    async def close(self) -> None:
        """End every actor and process."""
        ...
