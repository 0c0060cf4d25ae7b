"""Calls to actors, and the base of their ports: foreign errors become Concord's, once, here."""

from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.errors import ConcordError, ProcessLostError

T = TypeVar("T")


async def call(ref: "ray.ObjectRef[T]", whom: str) -> T:
    """Await an actor's answer.

    Raises:
        ProcessLostError: the actor is gone; `whom` names it.
        ConcordError: what its constructor raised, when that is why it is gone; what the actor raised, as it raised it;
            anything else it raised, wrapped.
    """
    try:
        return await ref
    except RayActorError as cause:
        if cause.actor_init_failed:
            raise creation_error(str(cause), whom) from cause
        raise ProcessLostError(f"{whom} is gone: {type(cause).__name__}: {str(cause).splitlines()[0]}") from cause
    except RayTaskError as cause:
        original = cause.cause
        if isinstance(original, ConcordError):
            raise original from cause
        raise ConcordError(f"{whom} raised {type(original).__name__}: {original}\n{cause}") from cause
    except RayError as cause:
        raise ConcordError(f"call to {whom} failed: {type(cause).__name__}: {cause}") from cause


def creation_error(text: str, whom: str) -> ConcordError:
    """What the constructor of an actor raised. Ray keeps its traceback only (`text`), so it is made again from the
    traceback's last part."""
    types = {f"{error.__module__}.{error.__qualname__}": error for error in _error_types(ConcordError)}
    lines = text.splitlines()
    for index in reversed(range(len(lines))):
        name, colon, message = lines[index].partition(": ")
        if colon and name in types:
            return types[name]("\n".join([message, *lines[index + 1 :]]))
    return ConcordError(f"{whom} did not start: {lines[-1]}\n{text}")


def _error_types(error: type[ConcordError]) -> list[type[ConcordError]]:
    return [error, *(deeper for kind in error.__subclasses__() for deeper in _error_types(kind))]


class RayPort:
    """The driver's end of one incarnation of an actor; a subclass adds its calls."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name = handle, name

    async def ready(self) -> None:
        """The actor answers.

        Raises:
            ConcordError: what its constructor failed with.
        """
        await call(self.handle.place.remote(), self.name)

    async def kill(self) -> None:
        kill(self.handle)


def kill(handle: Any, no_restart: bool = True) -> None:
    """End an actor's process at once; nothing happens for one that is gone."""
    try:
        ray.kill(handle, no_restart=no_restart)
    except (ValueError, RayError):
        return
