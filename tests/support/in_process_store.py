"""A store in this process, as callers hold one."""

from typing import Any

from rollout.store.sqlite.store import SqliteStore
from rollout.types.protocols import Store


def in_process(served: SqliteStore) -> Store:
    """`served` without an actor round it."""

    async def send(name: str, *args: object) -> Any:
        return getattr(served, name)(*args)

    return Store(send)
