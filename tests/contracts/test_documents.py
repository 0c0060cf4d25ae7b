"""Every public thing says what it is, every example parses, and no file names a place that only one machine has."""

import ast
import re
from pathlib import Path

import pytest
from contracts.source_tree import ROOT, Definition, repository_files, room_modules

EXAMPLES = [path for path in repository_files() if path.parts[0] == "examples" and path.suffix == ".toml"]
REGISTRIES = tuple(f"{name}.org" for name in ("pypi", "pythonhosted", "npmjs", "download.pytorch", "anaconda"))
MACHINE_PATHS = re.compile(
    r"(?<![\w.$)}/-])/(work|root|opt/(wheels|pypi))(?=[/\s\"'`,;)]|$)|\.\./shared\b", re.MULTILINE
)
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".json", ".cfg", ".txt", ".html", ".css", ".js"}


def public(nodes: list[ast.stmt]) -> list[Definition]:
    return [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases)


def text_files() -> list[tuple[Path, str]]:
    return [
        (path, (ROOT / path).read_text())
        for path in repository_files()
        if path.suffix in TEXT_SUFFIXES and path.parts[0] != ".git"
    ]


def test_every_module_says_what_it_owns():
    assert not [str(m.path) for m in room_modules() if m.text.strip() and not ast.get_docstring(m.tree)]


def test_every_public_class_and_function_has_a_docstring():
    assert not [
        f"{m.at(node)} {node.name}"
        for m in room_modules()
        for node in public(m.tree.body)
        if not ast.get_docstring(node)
    ]


def test_every_method_of_a_seam_has_a_docstring():
    seams = [
        (m, node)
        for m in room_modules()
        for node in ast.walk(m.tree)
        if isinstance(node, ast.ClassDef) and is_protocol(node)
    ]
    assert seams
    assert not [
        f"{m.at(method)} {node.name}.{method.name}"
        for m, node in seams
        for method in public(node.body)
        if not ast.get_docstring(method)
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_every_example_parses_as_a_config(path: Path):
    from orchestrator.config import load_config

    load_config(ROOT / path, ())


def test_there_is_an_example():
    assert EXAMPLES


@pytest.mark.parametrize("host", REGISTRIES)
def test_no_file_names_a_package_registry(host: str):
    """Where packages come from is the user's pip configuration."""
    assert not [str(path) for path, text in text_files() if host in text]


def test_no_file_names_a_path_of_one_machine():
    found = {
        str(path): match.group()
        for path, text in text_files()
        if path != Path(__file__).relative_to(ROOT) and (match := MACHINE_PATHS.search(text))
    }
    assert not found


@pytest.mark.parametrize("text", ["cd /work/main", 'open("/root/x")', "see ../shared/cases"])
def test_a_path_of_one_machine_is_recognised(text: str):
    assert MACHINE_PATHS.search(text)


@pytest.mark.parametrize(
    "text", ["https://example.com/work/1", "WORKDIR $APP/work", "runs/work/a", "the network/root", "image/root.png"]
)
def test_other_paths_are_left_alone(text: str):
    assert not MACHINE_PATHS.search(text)
