"""Checkpoints of a run: save, make the steps final in the store, and keep only what is still needed."""

import shutil
from collections.abc import Callable
from pathlib import Path

from actors.ports import TrainerPort
from orchestrator.run_dir.layout import RunDir, prune_weights
from orchestrator.run_dir.side_files import SideFileError
from rollout.errors import UserError, boundary
from rollout.types.protocols import Store
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import all_checkpoints, prune_checkpoints
from trainer.checkpointing.durable import complete_directory
from trainer.checkpointing.saved_steps import weights_in_use


class RunCheckpoints:
    """Implements `orchestrator.loop.training.Checkpoints`."""

    def __init__(
        self,
        *,
        run: RunDir,
        trainer: TrainerPort,
        store: Store,
        keep_last: int,
        max_staleness: int,
        in_use: Callable[[], set[PolicyVersion]],
    ) -> None:
        """`in_use` answers with the policies that live groups, replicas or waiting publications refer to."""
        self._run = run
        self._trainer = trainer
        self._store = store
        self._keep_last = keep_last
        self._max_staleness = max_staleness
        self._in_use = in_use

    async def save(self, policy: PolicyVersion) -> None:
        """Write the checkpoint of `policy`; its steps are final once it is complete."""
        await self._trainer.save(policy, self._run.checkpoint_of(policy))
        await self._store.settle(policy)
        with boundary(
            UserError,
            f"{policy.key} is checkpointed, but older files of {self._run.path} cannot be removed (let them be, then "
            "resume)",
        ):
            prune_checkpoints(self._run.checkpoints, self._keep_last)

    def prune(self, newest: PolicyVersion) -> None:
        """Keep weights that something refers to: the last eta + 2 versions, those that a checkpoint's groups may hold,
        version 0, what is in use, and what a saved step started from. To be called after every step, and after its
        checkpoint.

        Raises:
            SideFileError: a saved step cannot be read, so what it started from is not known: all weights are kept.
            OSError: some cannot be removed.
        """
        window = self._max_staleness + 2
        recent = {newest.version - age for age in range(window)}
        for checkpoint in all_checkpoints(self._run.checkpoints):
            recent |= {PolicyVersion.parse(checkpoint.name).version - age for age in range(self._max_staleness + 1)}
        on_disk = [PolicyVersion.parse(path.name) for path in self._run.weights.glob("e*-v*")]
        prune_weights(
            self._run,
            {policy for policy in on_disk if policy.version in recent} | self._in_use() | self._in_saved_steps(),
        )

    def _in_saved_steps(self) -> set[PolicyVersion]:
        folder = self._run.saved_steps
        try:
            with boundary(UserError, f"a step.json below {folder} is broken (remove its folder)"):
                return weights_in_use(folder)
        except UserError as error:
            raise SideFileError(f"all weights are kept while a saved step cannot be read: {error}") from error


def export_model(weights: Path, target: Path) -> None:
    """A copy of published weights as the run's final model, complete or absent."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(weights, temporary)
    shutil.rmtree(target, ignore_errors=True)
    complete_directory(temporary, target)
