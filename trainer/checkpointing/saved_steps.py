"""The batch of a step that was not applied, or was searched, on disk, so that `concord replay` can run it again.

Torch-free; each folder is complete or absent:

    saved_steps/STEP/step.json    what the step was asked, what it came to, and which weights it started from
    saved_steps/STEP/batch.npz    the encoded groups and their verdicts as the step got them, and the random state

Optimizer state is not kept; weights are not copied: the published ones are kept as long as a saved step names them.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError, boundary
from rollout.published.digests import canonical_json
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.durable import begin_directory, complete_directory, partial_directories
from trainer.config.trainer import SavedStepsConfig
from trainer.types.step import OldLogprobSource, PlantedFault, StepReport, StepRequest

STEP_NAME, BATCH_NAME = "step.json", "batch.npz"
_FORMAT = 2


_AS_THEY_ARE = ("seed", "dtype", "ranks", "weights_digest", "reason", "applied")
_AS_TEXT = ("loss", "grad_norm", "tau")
"""JSON has no number for what is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedStep:
    """Everything that a replay needs but the weights."""

    groups: StoredGroups
    """As the trainer got them, without prompts."""
    request: StepRequest
    random_state: NDArray[np.uint8]
    """Random state of torch on rank 0, before the forward pass."""
    seed: int
    dtype: str
    """Compute dtype of the trainer."""
    ranks: int
    weights: PolicyVersion
    """Those that the step started from."""
    weights_digest: str
    """Digest of their published directory."""
    reason: str
    """Why it was kept."""
    applied: bool
    """Whether weights came of it, if only without the terms that a search took out; those terms are in the batch."""
    loss: float
    grad_norm: float
    """As the whole batch came to."""
    tau: float
    """From which norm of one token's gradient, before its weight, a search called it suspicious; NaN: none, or what is
    not finite."""
    planted: tuple[PlantedFault, ...] = ()


def reason_to_keep(report: StepReport, config: SavedStepsConfig) -> str:
    """Why the batch of a step is to be kept; empty: it is not."""
    search = report.gradloc
    if report.skipped or search is None or search.outcome == "not_searched" or not config.searched:
        return report.skipped
    return f"its gradient was searched ({search.trigger}): {search.outcome}, {search.acted}"


def save_step(parent: Path, saved: SavedStep, keep: int) -> tuple[str, tuple[str, ...]]:
    """Write a step below `parent`, and remove the oldest beyond `keep`: of steps that were applied, or of those that
    were not, as this one was. Where a version was tried again, later tries go before the first one of any: that shows
    how the trouble began, and is what reports name.

    Returns:
        Name of the folder: the version that the step was to produce, with a number behind it where that is taken; and
        the names of those removed.

    Raises:
        UserError: the place cannot be written.
    """
    kept = saved_steps(parent)
    name = _new_name(str(saved.request.policy.version), kept)
    serial = 1 + max((_fields(directory)["serial"] for directory in kept), default=0)
    temporary = begin_directory(parent / name)
    with boundary(UserError, f"cannot write {parent / name} (free space, or choose another run directory)"):
        _write_batch(temporary / BATCH_NAME, saved)
        (temporary / STEP_NAME).write_bytes(_step_bytes(saved, serial))
    complete_directory(temporary, parent / name)
    alike = [directory for directory in kept if _fields(directory)["applied"] == saved.applied]
    oldest = sorted(alike, key=lambda path: not _is_later_try(path))
    removed = oldest[: max(0, len(alike) + 1 - keep)]
    still = f"{parent / name} is written, but older ones below {parent} cannot be removed (let them be removed)"
    with boundary(UserError, still):
        for path in [*removed, *partial_directories(parent)]:
            # Without its description it is no saved step any more, so a crash in the middle leaves nothing that looks
            # like one.
            (path / STEP_NAME).unlink(missing_ok=True)
            shutil.rmtree(path)
    return name, tuple(path.name for path in removed)


def _new_name(version: str, kept: Sequence[Path]) -> str:
    """The version, with a number behind it where it was tried before. No name comes again while a try is kept, so one
    that a report names is never another's."""
    tries = [path.name.partition("-")[2] for path in kept if path.name.partition("-")[0] == version]
    return f"{version}-{1 + max(int(number or 1) for number in tries)}" if tries else version


def _is_later_try(directory: Path) -> bool:
    """Whether a saved step is another try at a version that was tried before."""
    return "-" in directory.name


def saved_steps(parent: Path) -> list[Path]:
    """The saved steps below `parent`, oldest first."""
    found = [path.parent for path in parent.glob(f"*/{STEP_NAME}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda path: int(_fields(path)["serial"]))


def weights_in_use(parent: Path) -> set[PolicyVersion]:
    """Policies whose published weights the saved steps below `parent` start from."""
    return {PolicyVersion.parse(_fields(path)["weights"]) for path in saved_steps(parent)}


def read_step(directory: Path) -> SavedStep:
    """One saved step.

    Raises:
        UserError: there is none of this name, or it is broken; the message names those that are there.
    """
    if not (directory / STEP_NAME).is_file():
        there = ", ".join(path.name for path in saved_steps(directory.parent)) or "no step"
        raise UserError(
            f"got step {directory.name!r}, but {directory.parent} holds {there}; a step is kept when it is not applied "
            "(event step_skipped names its folder), and with trainer.saved_steps.searched = true when its gradient is "
            "searched (event gradloc)"
        )
    fields = _fields(directory)
    with boundary(UserError, f"saved step {directory} is broken; remove it, or copy the run directory again"):
        request = StepRequest(
            policy=PolicyVersion.parse(fields["policy"]),
            oldest_version=fields["oldest_version"],
            old_logprobs=OldLogprobSource(fields["old_logprobs"]),
        )
        with np.load(directory / BATCH_NAME) as arrays:
            numbers = range(len(fields["dispatch_ids"]))
            groups = StoredGroups(
                dispatch_ids=tuple(fields["dispatch_ids"]),
                payloads=tuple(arrays[f"payload-{number}"] for number in numbers),
                verdicts=tuple(arrays[f"verdict-{number}"].tobytes() for number in numbers),
            )
            random_state = arrays["random_state"]
        plain: dict[str, Any] = {name: fields[name] for name in _AS_THEY_ARE}
        plain |= {name: float(fields[name]) for name in _AS_TEXT}
        return SavedStep(
            groups=groups,
            request=request,
            random_state=random_state,
            weights=PolicyVersion.parse(fields["weights"]),
            **plain,
            planted=tuple(PlantedFault(**planted) for planted in fields["planted"]),
        )


def _step_bytes(saved: SavedStep, serial: int) -> bytes:
    return canonical_json(
        {
            "format": _FORMAT,
            "serial": serial,
            "policy": saved.request.policy.key,
            "oldest_version": saved.request.oldest_version,
            "old_logprobs": str(saved.request.old_logprobs),
            "dispatch_ids": list(saved.groups.dispatch_ids),
            "weights": saved.weights.key,
            **{name: getattr(saved, name) for name in _AS_THEY_ARE},
            **{name: repr(getattr(saved, name)) for name in _AS_TEXT},
            "planted": [asdict(planted) for planted in saved.planted],
        }
    )


def _write_batch(path: Path, saved: SavedStep) -> None:
    arrays: dict[str, NDArray[np.uint8]] = {"random_state": saved.random_state}
    for number, (payload, verdict) in enumerate(zip(saved.groups.payloads, saved.groups.verdicts, strict=True)):
        arrays[f"payload-{number}"] = payload
        arrays[f"verdict-{number}"] = np.frombuffer(verdict, dtype=np.uint8)
    cast(Any, np.savez)(path, **arrays)


def _fields(directory: Path) -> dict[str, Any]:
    cure = "remove the folder, or copy the run directory again"
    with boundary(UserError, f"cannot read {directory / STEP_NAME} ({cure})"):
        fields = cast(dict[str, Any], json.loads((directory / STEP_NAME).read_bytes()))
        if fields["format"] != _FORMAT:
            raise UserError(
                f"saved step {directory} has format {fields['format']}, this version reads {_FORMAT}; use the one that "
                "wrote it, or remove it"
            )
        return fields
