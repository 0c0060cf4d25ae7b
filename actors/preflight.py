"""Proves that `rollout`, `trainer`, `actors` and `orchestrator` are Concord's own, in the driver and in every actor.

Owns the one check that common words as package names make necessary. It knows no Ray, and imports no other room before
it knows that the room is the right one: an intruder may stand in for any of them.
"""

import importlib.util
from pathlib import Path

PACKAGES = ("rollout", "trainer", "actors", "orchestrator")


def check_packages() -> Path:
    """The folder under which all four packages resolve: the one that holds this very file.

    Raises:
        UserError: one of them resolves elsewhere, in several places, or nowhere; the message names the path and the
            cure.
    """
    root = _root()
    if intruders := _intruders(root):
        raise _user_error_type(root, intruders)(_message(root, intruders))
    return root


def complaint() -> str:
    """The message that `check_packages` would raise; empty when all is well."""
    root = _root()
    intruders = _intruders(root)
    return _message(root, intruders) if intruders else ""


def _root() -> Path:
    return Path(__file__).resolve().parents[1]


def _intruders(root: Path) -> dict[str, tuple[Path, ...]]:
    return {name: places for name in PACKAGES if (places := _places(name)) != (root / name,)}


def _places(name: str) -> tuple[Path, ...]:
    """The folders that `import name` would read; one for a regular package, and several, one or none for a namespace
    package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return ()
    if spec.submodule_search_locations is None:  # a single file `name.py`
        return (Path(spec.origin or name).resolve(),)
    return tuple(dict.fromkeys(Path(place).resolve() for place in spec.submodule_search_locations))


def _message(root: Path, intruders: dict[str, tuple[Path, ...]]) -> str:
    lines = [
        f"Concord's four packages must come from one folder, {root}, but another package has the same name as one of "
        "them:"
    ]
    for name, places in intruders.items():
        lines.append(f"  {name}: got {', '.join(map(str, places)) or 'nothing'}; expected {root / name}")
    folders = sorted({str(place.parent) for places in intruders.values() for place in places if place.parent != root})
    if folders:
        lines.append(
            f"Take {', '.join(folders)} off PYTHONPATH, start Concord from another working directory, or uninstall or "
            "rename the package there."
        )
    else:
        lines.append("Install Concord again (`make setup`): a package of it is missing.")
    return "\n".join(lines)


def _user_error_type(root: Path, intruders: dict[str, tuple[Path, ...]]) -> type[Exception]:
    """`rollout.errors.UserError`, read from its file when `rollout` itself is the intruder."""
    if "rollout" not in intruders:
        from rollout.errors import UserError

        return UserError
    spec = importlib.util.spec_from_file_location("rollout.errors", root / "rollout" / "errors.py")
    if spec is None or spec.loader is None:
        return ImportError
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UserError
