"""Checkpoints as the driver sees them: what they are called, which is the newest, what they say. Torch-free; tensors
are `sharded_state`'s."""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rollout.errors import UserError
from rollout.published.digests import canonical_json
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.durable import partial_directories

STATE_NAME = "state.json"
TENSORS_NAME = "tensors"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Everything of a checkpoint but model, optimizer and random state."""

    policy: PolicyVersion
    """The policy whose weights it holds."""
    seed: int
    weights_digest: str
    """Digest of that policy's published weights, empty if they were not published."""


def state_bytes(state: CheckpointState) -> bytes:
    """The JSON of `state`."""
    return canonical_json(
        {
            "format": _FORMAT,
            "policy": state.policy.key,
            "seed": state.seed,
            "weights_digest": state.weights_digest,
            "store_position": {},  # always empty; it stands so that every checkpoint of this format has the same keys
        }
    )


def read_state(directory: Path) -> CheckpointState:
    """The state of one checkpoint.

    Raises:
        UserError: it is missing, incomplete or broken.
    """
    path = directory / STATE_NAME
    cure = "resume from another checkpoint, or start the run again"
    try:
        fields = cast(dict[str, object], json.loads(path.read_bytes()))
        if fields["format"] != _FORMAT:
            raise UserError(
                f"checkpoint {directory} has format {fields['format']}, this version of Concord reads {_FORMAT}; {cure}"
            )
        state = CheckpointState(
            policy=PolicyVersion.parse(str(fields["policy"])),
            seed=int(cast(int, fields["seed"])),
            weights_digest=str(fields["weights_digest"]),
        )
    except OSError as error:
        raise UserError(
            f"checkpoint {directory} is incomplete: cannot read {STATE_NAME} ({error.strerror}); {cure}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint {directory} is broken: {STATE_NAME} does not hold what it should ({error}); {cure}"
        ) from error
    if not (directory / TENSORS_NAME / ".metadata").is_file():
        raise UserError(f"checkpoint {directory} is incomplete: its tensors are missing; {cure}")
    return state


def all_checkpoints(parent: Path) -> list[Path]:
    """Completed checkpoints below `parent`, oldest first, by their names: what they hold is read only by who resumes
    from one.

    A directory whose name is not a policy's is somebody's own, and none of them.
    """
    try:
        found = [path.parent for path in parent.glob(f"e*-v*/{STATE_NAME}")]
    except (FileNotFoundError, NotADirectoryError):  # somebody moved the folder away while it was read: there are none
        return []
    policies: dict[PolicyVersion, Path] = {}
    for path in found:
        with suppress(ValueError):
            policies[PolicyVersion.parse(path.name)] = path
    return [policies[policy] for policy in sorted(policies)]


def latest_checkpoint(parent: Path) -> Path | None:
    """The newest completed checkpoint below `parent`, None if there is none."""
    found = all_checkpoints(parent)
    return found[-1] if found else None


def prune_checkpoints(parent: Path, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints, and what crashes left half-written; returns what was removed.

    Only the trainer that writes there may call this, between its own saves.
    """
    removed = all_checkpoints(parent)[:-keep_last] + partial_directories(parent)
    for path in removed:
        # Without its state it is no checkpoint any more, so a crash in the middle leaves nothing that looks like one.
        (path / STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)
    return removed
