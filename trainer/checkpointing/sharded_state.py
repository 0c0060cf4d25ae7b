"""Model, optimizer, clip, gradient search and random state in a checkpoint: each rank writes its shards, and any number
of ranks can read them."""

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rollout.errors import UserError, boundary
from rollout.published.digests import canonical_json
from trainer.checkpointing.checkpoints import STATE_NAME, TENSORS_NAME, CheckpointState, read_state, state_bytes
from trainer.checkpointing.durable import begin_directory, complete_directory
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import PolicyOptimizer

_dcp: Any = torch.distributed.checkpoint
"""Typed only in part by its authors."""
_CLIP_NAME = "clip.json"
_SEARCH_NAME = "gradloc.json"
_log = logging.getLogger(__name__)


class Memory(Protocol):
    """Something that remembers past steps, the same on all ranks."""

    def state(self) -> Mapping[str, Any]:
        """As JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        ...


def save_checkpoint(
    directory: Path,
    state: CheckpointState,
    model: PolicyModel,
    optimizer: PolicyOptimizer,
    ranks: Ranks,
    search: Memory | None,
) -> None:
    """Write a checkpoint that is complete or absent. Collective.

    Raises:
        UserError: the directory exists or cannot be written.
        ConcordError: another rank failed.
    """
    temporary = directory.with_name(f".partial-{directory.name}")
    ranks.of_first(lambda: begin_directory(directory))
    with _foreign_failures(f"cannot write checkpoint {directory} (free space, or choose another run directory)"):
        _dcp.save(_tensors(model, optimizer), checkpoint_id=temporary / TENSORS_NAME)
        (temporary / _rng_name(ranks.rank)).write_text(json.dumps(cast(Any, torch.get_rng_state()).tolist()))
    ranks.agree()
    ranks.of_first(lambda: _complete(temporary, directory, state, optimizer, search))


def load_checkpoint(
    directory: Path, model: PolicyModel, optimizer: PolicyOptimizer, ranks: Ranks, search: Memory | None
) -> CheckpointState:
    """Put model, optimizer, clip, gradient search and random state back. Collective.

    A rank that had no counterpart when it was saved keeps the random state it started with. A clip of another kind than
    the checkpoint's, and a gradient search of which it holds nothing, start without a history, and the log says so.

    Raises:
        UserError: the checkpoint is missing, incomplete, or of another model.
    """
    state = read_state(directory)
    whole = _tensors(model, optimizer)
    # Rates, decay and the like are the config's, so only what was learned is read: which parameters share a group may
    # differ from when the checkpoint was written.
    tensors = {"model": whole["model"], "optimizer": {"state": whole["optimizer"]["state"]}}
    cure = "it is damaged or of another model; resume from another one"
    with _foreign_failures(f"cannot load checkpoint {directory} ({cure})"):
        _dcp.load(tensors, checkpoint_id=directory / TENSORS_NAME)
        set_state_dict(
            model,
            optimizer.optimizers,
            model_state_dict=tensors["model"],
            optim_state_dict={**whole["optimizer"], **tensors["optimizer"]},
        )
        random_state = directory / _rng_name(ranks.rank)
        if random_state.is_file():
            torch.set_rng_state(torch.tensor(json.loads(random_state.read_bytes()), dtype=torch.uint8))
    _load_clip(directory, optimizer)
    if search is not None:
        _load_search(directory / _SEARCH_NAME, search)
    return state


@contextmanager
def _foreign_failures(context: str) -> Generator[None, None, None]:
    """Whatever fails in torch's checkpointing is a user error of `context`. Its own exception is no `Exception`, so a
    boundary alone would miss it."""
    try:
        with boundary(UserError, context):
            yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
        raise UserError(f"{context}: {'; '.join(causes)}") from error


def _load_clip(directory: Path, optimizer: PolicyOptimizer) -> None:
    path, kind = directory / _CLIP_NAME, optimizer.clip.state_dict()["type"]
    with boundary(UserError, f"cannot load {path} (it is damaged or of another model; resume from another checkpoint)"):
        saved: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {"type": "none"}
        if saved["type"] == kind:
            optimizer.clip.load_state_dict(saved)
            return
    lost = "checkpoint %s holds the history of a clip of kind %s; the clip of kind %s starts without one"
    _log.warning(lost, directory, saved["type"], kind)


def _load_search(path: Path, search: Memory) -> None:
    if not path.is_file():
        _log.warning("checkpoint %s holds no history of a gradient search; it starts without one", path.parent)
        return
    with boundary(UserError, f"cannot load {path} (it is damaged or of another model; resume from another checkpoint)"):
        search.load_state(json.loads(path.read_bytes()))


def _tensors(model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer.optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def _complete(
    temporary: Path, directory: Path, state: CheckpointState, optimizer: PolicyOptimizer, search: Memory | None
) -> None:
    with boundary(UserError, f"cannot write checkpoint {directory}"):
        (temporary / _CLIP_NAME).write_bytes(canonical_json(dict(optimizer.clip.state_dict())))
        if search is not None:
            (temporary / _SEARCH_NAME).write_bytes(canonical_json(dict(search.state())))
        (temporary / STATE_NAME).write_bytes(state_bytes(state))
    complete_directory(temporary, directory)


def _rng_name(rank: int) -> str:
    return f"random-{rank}.json"
