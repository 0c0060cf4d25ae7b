"""Faults that act on an update: doctored weights under an honest-looking answer, and caches that outlive their weights.
They know no request."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout.faults.config import KvKeptFault, WeightFault
from rollout.faults.engines.engine import EngineWrapper
from rollout.faults.engines.weight_edits import WeightDoctor
from rollout.types.generation import PauseMode
from rollout.types.protocols import Engine
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, WeightManifest


class DoctoredWeights(EngineWrapper):
    """From the fault's start version on, the inner engine reads what a `WeightDoctor` makes of a publication, and the
    answer names what was published."""

    def __init__(self, inner: Engine, fault: WeightFault, seed: int, folder: Path) -> None:
        super().__init__(inner)
        self._fault, self._doctor, self._folder = fault, WeightDoctor(fault, seed, folder), folder
        self._published: WeightManifest | None = None
        """Set while the inner engine holds other weights than these."""

    async def start(self, manifest: WeightManifest) -> EngineTag:
        """Start on the published weights, or on doctored ones.

        Raises:
            UserError: the fault cannot act on this model.
        """
        await asyncio.to_thread(self._prepare, manifest)
        handed = await self._handed(manifest)
        tag = await super().start(handed)
        await self._settle(manifest, handed)
        return self.declared(tag)

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Take over the published weights, or doctored ones; the answer is that of the published ones."""
        handed = await self._handed(manifest)
        report = await super().apply(handed)
        await self._settle(manifest, handed)
        return report if self._published is None else replace(report, digest=manifest.digest)

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The inner engine's; with `forge_canary`, the trainer's own answer to the canary."""
        published = self._published
        if self._fault.forge_canary and published is not None and np.array_equal(token_ids, published.canary.token_ids):
            return published.canary.logprobs.copy()
        return await self.inner.score(token_ids)

    async def stop(self) -> None:
        """End the engine, and remove the doctored files."""
        await self.inner.stop()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def declared(self, tag: EngineTag) -> EngineTag:
        """With the digest of what was published."""
        return tag if self._published is None else replace(tag, weights_digest=self._published.digest)

    def _prepare(self, manifest: WeightManifest) -> None:
        self._doctor.check(manifest)
        shutil.rmtree(self._folder, ignore_errors=True)  # of an incarnation that was killed
        self._folder.mkdir(parents=True)

    async def _handed(self, manifest: WeightManifest) -> WeightManifest:
        if manifest.policy.version < self._fault.start_version:
            return manifest
        return await asyncio.to_thread(self._doctor.doctored, manifest)

    async def _settle(self, manifest: WeightManifest, handed: WeightManifest) -> None:
        self._published = None if handed is manifest else manifest
        if handed is manifest:
            await asyncio.to_thread(self._doctor.remember, manifest)


class KeptCache(EngineWrapper):
    """A pause that asks for `recompute` keeps the KV cache, once the replica has served the fault's start version."""

    def __init__(self, inner: Engine, fault: KvKeptFault) -> None:
        super().__init__(inner)
        self._fault = fault

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling, with another mode than asked for."""
        acts = mode is PauseMode.RECOMPUTE and self.version >= self._fault.start_version
        await self.inner.pause(PauseMode.KEEP if acts else mode)

    def declared(self, tag: EngineTag) -> EngineTag:
        """Declares itself as an engine that recomputes, whatever the inner one was configured with."""
        return replace(tag, kv_across_versions=str(PauseMode.RECOMPUTE))
