"""Imports go one way, and heavy libraries stay in the rooms that own them."""

import subprocess
import sys

import pytest
from contracts.source_tree import ROOMS, ROOT, Module, imports, imports_at_load, room_modules

ENGINE_LIBRARIES = {"vllm", "sglang"}
HEAVY = ("torch", "vllm", "sglang", "ray", "transformers")


def in_engines(module: Module) -> bool:
    return module.path.parts[:2] == ("rollout", "engines")


def test_imports_go_one_way():
    order = {room: place for place, room in enumerate(ROOMS)}
    against = [
        f"{m.at(node)} imports {name}"
        for m in room_modules()
        for node, name in imports(m.tree)
        if order.get(name, -1) > order[m.room]
    ]
    assert not against


def test_only_actors_import_ray():
    assert not [
        m.at(node) for m in room_modules() for node, name in imports(m.tree) if name == "ray" and m.room != "actors"
    ]


def test_only_engine_modules_import_an_inference_engine():
    assert not [
        m.at(node)
        for m in room_modules()
        for node, name in imports(m.tree)
        if name in ENGINE_LIBRARIES and not in_engines(m)
    ]


def test_an_inference_engine_is_imported_in_its_own_sub_room_only():
    """A module that names vllm lies in the sub-room of vllm, so choosing another engine never loads it."""
    found = [
        m.at(node)
        for m in room_modules()
        for node, name in imports_at_load(m)
        if name in ENGINE_LIBRARIES and m.path.parts[2] != name
    ]
    assert not found


def test_torch_is_not_loaded_by_rollout_outside_engines_nor_by_orchestrator():
    bare = [m for m in room_modules() if m.room in ("rollout", "orchestrator") and not in_engines(m)]
    assert not [m.at(node) for m in bare for node, name in imports_at_load(m) if name in ("torch", "transformers")]


def test_product_code_does_not_import_tests_or_benchmarks():
    outside = {"tests", "benchmarks", "contracts", "builders", "pytest", "hypothesis"}
    assert not [m.at(node) for m in room_modules() for node, name in imports(m.tree) if name in outside]


def test_every_module_of_a_room_stands_in_a_package():
    """A folder without __init__.py is not installed, and would be a namespace that others can join."""
    folders = {parent for m in room_modules() for parent in m.path.parents if parent.parts}
    assert {str(folder) for folder in folders} >= set(ROOMS)
    assert not [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()]


@pytest.mark.parametrize(
    "names", ["orchestrator.config", "actors.preflight, actors.config", "trainer.config.trainer, trainer.types.step"]
)
def test_config_and_preflight_load_no_heavy_library(names: str):
    assert loaded_by(f"import {names}") == []


def test_rollout_outside_engines_loads_no_heavy_library():
    names = [
        ".".join(m.path.with_suffix("").parts)
        for m in room_modules()
        if m.room == "rollout" and not in_engines(m) and m.path.stem != "__init__"
    ]
    assert "rollout.config" in names
    assert loaded_by(f"import {', '.join(names)}") == []


def loaded_by(statement: str) -> list[str]:
    """The heavy libraries that a fresh interpreter holds after `statement`."""
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
