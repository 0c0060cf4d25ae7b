"""A trainer that trains nothing: for tests and benchmarks of the loop, with the method surface of `PolicyTrainer` and
without torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from rollout.errors import UserError, boundary
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory, write_manifest
from rollout.types.codec import decode
from rollout.types.trajectory import StoredGroups, Trajectory
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest
from trainer.batching.batcher import reward_parts
from trainer.checkpointing.checkpoints import STATE_NAME, TENSORS_NAME, CheckpointState, read_state, state_bytes
from trainer.checkpointing.durable import begin_directory, complete_directory
from trainer.config.trainer import TrainerConfig
from trainer.types.step import StepReport, StepRequest
from trainer.weights.canary import canary_token_ids

_WEIGHTS = "model.safetensors"


class ScriptedTrainer:
    """Takes `config.scripted_step_s` a step, counts tokens honestly, and publishes the same small tensor under every
    version."""

    def __init__(self, config: TrainerConfig, seed: int = 0, vocab_size: int = 32) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._tensor = np.random.default_rng(seed).standard_normal((vocab_size, 4)).astype(np.float32)
        self._published: WeightManifest | None = None

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        """Decode the groups, count what `PolicyTrainer` would train on, and let the step's time pass."""
        started = time.perf_counter()
        decoded_groups = [decode(payload) for payload in groups.payloads]
        trajectories = [trajectory for group in decoded_groups for trajectory in group.trajectories]
        kept = {
            trajectory.trajectory_id: _fresh_tokens(trajectory, request.oldest_version) for trajectory in trajectories
        }
        decoded = time.perf_counter()
        time.sleep(max(0.0, self._config.scripted_step_s - (decoded - started)))
        return StepReport(
            policy=request.policy,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            num_tokens=sum(kept.values()),
            num_tokens_forwarded=sum(trajectory.token_ids.size for trajectory in trajectories),
            num_micro_batches=0,
            trained_ids=frozenset(trajectory_id for trajectory_id, tokens in kept.items() if tokens),
            masked_ids=frozenset(t.trajectory_id for t in trajectories if kept[t.trajectory_id] < t.num_sampled),
            reward_parts=reward_parts(decoded_groups),
            phases_s=(
                ("decode", decoded - started),
                ("pack", 0.0),
                ("forward_backward", time.perf_counter() - decoded),
                ("optimizer", 0.0),
            ),
        )

    def save_step(self, parent: Path, groups: StoredGroups, request: StepRequest, report: StepReport) -> StepReport:
        """It applies every step and searches none, so there is none to keep."""
        return report

    def publish(self, policy: PolicyVersion, directory: Path) -> WeightManifest | None:
        """The first call writes `directory` durably; later ones link its weights under their own name, since nothing
        has changed."""
        if self._published is None:
            self._published = self._write(policy, directory)
            return self._published
        first = Path(self._published.location)
        self._published = replace(self._published, policy=policy, location=str(directory))
        temporary = begin_directory(directory)
        os.link(first / _WEIGHTS, temporary / _WEIGHTS)
        write_manifest(temporary, self._published)
        temporary.rename(directory)
        return self._published

    def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int, place: str
    ) -> WeightManifest:
        """Refused: there is no GPU to send from.

        Raises:
            UserError: always, with the cure.
        """
        raise UserError(
            'got a GPU transport with trainer.type = "scripted", which has no GPU; set weights.transport = "disk"'
        )

    def send(self, manifest: WeightManifest) -> None:
        """Refused, as by `open_transfer`.

        Raises:
            UserError: always, with the cure.
        """
        self.open_transfer(manifest, (), 0, "")

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T - 1] log-probs of the uniform distribution."""
        return np.full(token_ids.size - 1, -np.log(self._vocab_size), dtype=np.float32)

    def save_checkpoint(self, directory: Path, state: CheckpointState) -> None:
        """Write `state` in the form that `trainer.checkpointing.checkpoints` reads; there are no tensors to keep."""
        with boundary(UserError, f"cannot write checkpoint {directory} (free space, or choose another run directory)"):
            temporary = begin_directory(directory)
            (temporary / TENSORS_NAME).mkdir()
            (temporary / TENSORS_NAME / ".metadata").touch()
            (temporary / STATE_NAME).write_bytes(state_bytes(state))
            complete_directory(temporary, directory)

    def load_checkpoint(self, directory: Path) -> CheckpointState:
        """The state that was saved.

        Raises:
            UserError: the checkpoint is incomplete or broken.
        """
        return read_state(directory)

    def close(self) -> None:
        """Nothing to end."""

    def _write(self, policy: PolicyVersion, directory: Path) -> WeightManifest:
        temporary = begin_directory(directory)
        cast(Any, safetensors.numpy).save_file({"scripted.weight": self._tensor}, temporary / _WEIGHTS)
        tensors = digest_directory(temporary)
        ids = canary_token_ids(self._vocab_size, self._vocab_size, None)
        manifest = WeightManifest(
            policy=policy,
            transport=Transport.DISK,
            location=str(directory),
            tensors=tensors,
            digest=manifest_digest(tensors),
            canary=Canary(token_ids=ids, logprobs=self.score(ids)),
            num_bytes=self._tensor.nbytes,
        )
        write_manifest(temporary, manifest)
        complete_directory(temporary, directory)
        return manifest


def _fresh_tokens(trajectory: Trajectory, oldest_version: int) -> int:
    """Sampled tokens that are not older than `oldest_version`."""
    return sum(span.end - span.start for span in trajectory.version_spans if span.policy.version >= oldest_version)
