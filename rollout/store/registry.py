"""From the store's config section to the store that an actor serves."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout.config import SqliteStoreConfig, StoreConfig
from rollout.store.sqlite.store import SqliteStore

_STORES: Mapping[type[object], Callable[[Path, Any], object]] = {
    SqliteStoreConfig: lambda run_dir, config: SqliteStore(run_dir, config.durability)
}
"""Section -> its store for a run directory."""


def build_store(run_dir: Path, config: StoreConfig) -> object:
    """A store of its own for `run_dir`. It has the methods of `rollout.types.protocols.Store`, synchronous: one process
    serves them, a call after the other."""
    return _STORES[type(config)](run_dir, config)
