"""The trajectory store in an actor of its own, and the store that everyone else holds."""

from pathlib import Path
from typing import Any

import ray

from actors.calls import call
from actors.places import Place, here
from actors.process import enter_process
from rollout.config import StoreConfig
from rollout.store.registry import build_store
from rollout.types.protocols import Store


@ray.remote
class StoreActor:
    """Serves one store, a call after the other. Not asynchronous: the store never waits, and such an actor
    costs less a call."""

    def __init__(self, run_dir: Path, config: StoreConfig) -> None:
        enter_process("store", run_dir)
        self._store = build_store(run_dir, config)

    def place(self) -> Place:
        return here()

    def call(self, name: str, *args: Any) -> Any:
        """The answer of the store's method `name`."""
        return getattr(self._store, name)(*args)


class RemoteStore(Store):
    """A `Store` over a `StoreActor`."""

    def __init__(self, handle: Any) -> None:
        super().__init__(lambda name, *args: call(handle.call.remote(name, *args), "the store"))
