"""The consistency service in actors of its own, and their port for the driver. Groups come from the store and evidence
goes back to it past the driver."""

from collections.abc import Sequence
from typing import Any

import ray

from actors.calls import RayPort, call
from actors.places import Place, here
from actors.process import enter_process
from actors.spec import FleetSpec
from rollout.types.trajectory import Annotation, StoredGroups
from trainer.consistency.service.report import AuditContext, AuditReport, StepAudit, StepToAudit


@ray.remote
class ConsistencyActor:
    """Serves one `Auditor`, a batch after the other."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        enter_process(f"consistency-{index}", spec.run_dir)
        from trainer.consistency.service.build import build_auditor

        self._auditor = build_auditor(
            model_dir=spec.model_dir,
            weights_dir=spec.run_dir / "weights",
            config=spec.consistency,
            trainer=spec.trainer,
            environment=spec.environment,
            engine=spec.engine,
            max_staleness=spec.max_staleness,
            deterministic=spec.deterministic,
            total_steps=spec.total_steps,
        )

    def place(self) -> Place:
        return here()

    def audit(
        self, groups: StoredGroups, context: AuditContext, kind: str
    ) -> tuple[AuditReport, tuple[Annotation, ...]]:
        """Two answers: the report for the driver, the evidence for the store."""
        return self._auditor.audit(groups, context, kind)

    def audit_step(self, groups: StoredGroups, step: StepToAudit) -> StepAudit | None:
        return self._auditor.audit_step(groups, step)


class RayAuditor(RayPort):
    """Implements `actors.ports.AuditorPort` for one incarnation."""

    def __init__(self, handle: Any, store: Any, index: int) -> None:
        super().__init__(handle, f"consistency service {index}")
        self._store = store

    async def audit(self, dispatch_ids: Sequence[str], context: AuditContext, kind: str) -> AuditReport:
        groups = self._store.call.remote("fetch", dispatch_ids)
        report, annotations = self.handle.audit.options(num_returns=2).remote(groups, context, kind)
        answer: AuditReport = await call(report, self.name)
        await call(self._store.call.remote("annotate", annotations), "the store")
        return answer

    async def audit_step(self, dispatch_ids: Sequence[str], step: StepToAudit) -> StepAudit | None:
        groups = self._store.call.remote("fetch", dispatch_ids)
        answer: StepAudit | None = await call(self.handle.audit_step.remote(groups, step), self.name)
        return answer
