"""Calls to actors: foreign errors become Concord's, once, here."""

from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.errors import ConcordError, ProcessLostError

T = TypeVar("T")


async def call(ref: "ray.ObjectRef[T]", whom: str) -> T:
    """Await an actor's answer.

    Raises:
        ProcessLostError: the actor is gone; `whom` names it.
        ConcordError: what the actor raised, as it raised it; anything else it raised, wrapped.
    """
    try:
        return await ref
    except RayActorError as cause:
        raise ProcessLostError(f"{whom} is gone: {type(cause).__name__}: {str(cause).splitlines()[0]}") from cause
    except RayTaskError as cause:
        original = cause.cause
        if isinstance(original, ConcordError):
            raise original from cause
        raise ConcordError(f"{whom} raised {type(original).__name__}: {original}\n{cause}") from cause
    except RayError as cause:
        raise ConcordError(f"call to {whom} failed: {type(cause).__name__}: {cause}") from cause


def kill(handle: Any, no_restart: bool = True) -> None:
    """End an actor's process at once; nothing happens for one that is gone."""
    try:
        ray.kill(handle, no_restart=no_restart)
    except (ValueError, RayError):
        return
