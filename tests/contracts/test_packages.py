"""What is imported is asked for: no package is there only because another one happens to bring it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from contracts.source_tree import ROOMS, ROOT, imported_names, modules


def normal(name: str) -> str:
    """The name of a distribution as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """Distributions that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return {normal(found[0]) for one in asked if (found := re.match(r"[\w.-]+", one))}


def test_every_imported_package_is_declared():
    places = {
        name.partition(".")[0]: module.at(node)
        for module in modules(*ROOMS, "tests", "benchmarks", "deploy", "docs", "examples")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_names(node)
    }
    brought = packages_distributions()  # no distribution brings the standard library, or a module of a test
    foreign = {
        name: {normal(one) for one in brought[name]}
        for name in places
        if name in brought and name not in (*sys.stdlib_module_names, *ROOMS)
    }
    assert len(foreign) > 20
    wanted = declared()
    assert not {places[name]: sorted(brings) for name, brings in foreign.items() if not brings & wanted}
