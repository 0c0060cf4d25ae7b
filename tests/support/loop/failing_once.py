"""A replica whose first update goes wrong."""

import numpy as np
from numpy.typing import NDArray
from support.loop.engine_wrap import EngineWrap

from rollout.types.protocols import Engine
from rollout.types.weights import ApplyReport, WeightManifest


class FailingOnce:
    """Round an engine: one `apply` of replica `slot` answers wrongly, the first that takes it to `version` or
    beyond."""

    def __init__(self, slot: int, how: str, version: int = 1) -> None:
        self.slot, self.how, self.version, self.done = slot, how, version, False

    def __call__(self, engine: Engine, slot: int) -> Engine:
        return Wrapped(engine, self) if slot == self.slot else engine


class Wrapped(EngineWrap):
    def __init__(self, engine: Engine, plan: FailingOnce) -> None:
        super().__init__(engine)
        self._plan = plan
        self._canary_wrong = False

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        report = await self.engine.apply(manifest)
        if self._plan.done or manifest.policy.version < self._plan.version:
            return report
        self._plan.done = True
        if self._plan.how == "digest":
            return ApplyReport(
                policy=report.policy, digest="0" * 64, pause_s=report.pause_s, interrupted=report.interrupted
            )
        self._canary_wrong = True
        return report

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        truth = await self.engine.score(token_ids)
        if not self._canary_wrong:
            return truth
        return np.full_like(truth, np.nan) if self._plan.how == "nan" else truth + np.float32(0.01)
