"""From a trainer's config section to one of its ranks. Imports torch only when the section asks for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict, Unpack

from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion, WeightManifest
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.config.trainer import TrainerConfig, WeightsConfig
from trainer.loss.loss_settings import LossSettings
from trainer.types.step import StepReport, StepRequest


class TrainerRank(Protocol):
    """One rank. Every method but `save_step`, `open_transfer` and `close` is collective."""

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        """One optimizer step on encoded groups."""
        ...

    def save_step(self, parent: Path, groups: StoredGroups, request: StepRequest, report: StepReport) -> StepReport:
        """Keep the batch of the last step below `parent`, if it is one to keep; the report with the folder's name. On
        rank 0 only; not collective."""
        ...

    def publish(self, policy: PolicyVersion, directory: Path) -> WeightManifest | None:
        """Write the weights as `policy`; rank 0 answers with the manifest."""
        ...

    def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int, place: str
    ) -> WeightManifest:
        """The manifest by which engines receive what was just published, without the disk. On rank 0 only; not
        collective."""
        ...

    def send(self, manifest: WeightManifest) -> None:
        """Send the weights to the engines that apply `manifest`."""
        ...

    def save_checkpoint(self, directory: Path, state: CheckpointState) -> None:
        """Write everything that a resume needs."""
        ...

    def load_checkpoint(self, directory: Path) -> CheckpointState:
        """Go back to a checkpoint."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        ...


class TrainerOrder(TypedDict):
    """What one rank is built from."""

    model_dir: Path
    config: TrainerConfig
    weights: WeightsConfig
    total_steps: int
    """Where the learning-rate schedule ends."""
    seed: int
    rank: int
    init_method: str
    """Rendezvous of the ranks, `tcp://127.0.0.1:PORT` or `file://PATH` (PATH must not exist)."""
    settings: NotRequired[LossSettings]
    """Importance weights of the loss, and faults planted into its gradient; neither, where it is left out."""


def build_trainer(**order: Unpack[TrainerOrder]) -> TrainerRank:
    """Rank `rank` of `config.ranks`, with the model of `model_dir` as version 0.

    Raises:
        UserError: the model directory or the placement cannot work.
    """
    if order["config"].type == "scripted":
        from trainer.step.scripted import ScriptedTrainer

        return ScriptedTrainer(order["config"], order["seed"])
    from trainer.step.assembly import policy_trainer

    return policy_trainer(**order)
