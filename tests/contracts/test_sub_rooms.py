"""The sub-rooms of each room stand in an order: each may import those before it, so arrows run one way and no circle
can form."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from contracts.source_tree import ROOT, Module, repository_files, room_modules

FILES_IN_A_FOLDER = 15

ORDER = {
    "rollout": (
        "config errors tasks types transport published rewards store tokenization engines environments episodes "
        "evaluation faults"
    ),
    "rollout.engines": "serving sampling scripted torch vllm registry",
    "trainer": (
        "config types algorithms batching model tiny loss optim consistency checkpointing gradloc weights planted step "
        "replay"
    ),
    "trainer.consistency": "checks scoring attribution service dump",
    "actors": "config preflight ports spec cluster calls stacks places process roles ray_fleet",
    "orchestrator": (
        "config deadlines observers metrics run_dir replicas weight_sync dispatch audit doctor exporters report loop "
        "signals launch commands"
    ),
}
"""Room -> its sub-rooms, lowest first."""


def dotted(path: Path) -> str:
    """The module's name as an import writes it."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def part_of(room: str, module: str) -> str:
    """The sub-room of `room` in which `module` lies; empty where it lies elsewhere."""
    return module.removeprefix(f"{room}.").partition(".")[0] if module.startswith(f"{room}.") else ""


def arrows(room: str) -> Iterator[tuple[str, str, str]]:
    """(place, from, to) for every import from one sub-room of `room` to another."""
    for module in room_modules():
        here = part_of(room, dotted(module.path))
        for node, target in targets(module) if here else ():
            there = part_of(room, target)
            if there and there != here:
                yield module.at(node), here, there


def targets(module: Module) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Every module or name that `module` imports, with its full dotted name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


@pytest.mark.parametrize("room", ORDER)
def test_a_sub_room_imports_only_those_before_it(room: str):
    floor = {name: place for place, name in enumerate(ORDER[room].split())}
    found = list(arrows(room))
    assert found
    assert not [f"{place}: {here} imports {there}" for place, here, there in found if floor[there] > floor[here]]


@pytest.mark.parametrize("room", ORDER)
def test_the_order_names_every_sub_room_and_no_other(room: str):
    there = {part_of(room, dotted(module.path)) for module in room_modules()} - {""}
    assert there == set(ORDER[room].split())


def test_no_folder_is_a_heap():
    sizes: dict[Path, int] = {}
    for path in repository_files():
        if path.suffix == ".py" and (ROOT / path).stat().st_size:
            sizes[path.parent] = sizes.get(path.parent, 0) + 1
    assert not {str(folder): size for folder, size in sizes.items() if size > FILES_IN_A_FOLDER}
