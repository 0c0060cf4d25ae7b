"""The documents say what the code says: generated parts are fresh, and what a page names exists."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contracts.source_tree import ROOT, repository_files

SCRIPT = ROOT / "docs" / "generate_configuration.py"
PAGES = [
    path
    for path in repository_files()
    if path == Path("README.md") or (path.parts[0] == "docs" and path.suffix == ".md")
]
ROOM_PATH = re.compile(
    r"`((?:rollout|trainer|actors|orchestrator|tests|docs|examples|benchmarks|deploy)/[\w./-]+\.(?:py|toml|sh|md))`"
)
RECORDED = re.compile(r'record_event\(\s*"(\w+)"')


def check(docs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--check", "--docs", str(docs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


def code_of(page: Path) -> str:
    """Everything in backticks or code blocks."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text_of(page), re.DOTALL))


def summary_keys() -> set[str]:
    """Keys of the dictionary that `Signals.summary` returns, outermost level."""
    tree = ast.parse((ROOT / "orchestrator" / "signals" / "rows.py").read_text())
    method = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "summary")
    returned = next(node.value for node in ast.walk(method) if isinstance(node, ast.Return))
    assert isinstance(returned, ast.Dict)
    return {key.value for key in returned.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_generated_pages_are_fresh():
    done = check(ROOT / "docs" / "user")
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_not_fresh_is_found(tmp_path: Path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "user", docs)
    page = docs / "configuration.md"
    page.write_text(page.read_text().replace("max_staleness", "max_age"))
    done = check(docs)
    assert (done.returncode, "configuration.md is not fresh" in done.stderr) == (1, True)


def test_every_key_of_the_summary_is_described():
    keys = summary_keys()
    assert {"steps", "peak_rss_mb"} <= keys
    assert not sorted(key for key in keys if f"`{key}`" not in text_of(Path("docs/user/run_directory.md")))


def test_every_event_of_a_run_is_described():
    kinds = {kind for path in (ROOT / "orchestrator").rglob("*.py") for kind in RECORDED.findall(path.read_text())}
    assert "replica_failed" in kinds
    assert not sorted(kind for kind in kinds if f"`{kind}`" not in text_of(Path("docs/user/run_directory.md")))


def test_there_are_pages():
    assert Path("README.md") in PAGES and Path("docs/user/configuration.md") in PAGES


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_make_target_of_a_page_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not sorted(set(re.findall(r"\bmake ([a-z-]+)", code_of(page))) - targets)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_of_a_page_exists(page: Path):
    from orchestrator.commands.main import app

    commands = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups if group.name}
    assert "resume" in commands
    assert not sorted(set(re.findall(r"\bconcord ([a-z]+)", code_of(page))) - commands)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_that_a_page_names_exists(page: Path):
    links = [(ROOT / page).parent / target for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(page))]
    named = [ROOT / name for name in ROOM_PATH.findall(text_of(page))]
    assert not [str(path) for path in (*links, *named) if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_test_that_a_page_names_exists(page: Path):
    defined = {
        name
        for path in repository_files()
        if path.parts[0] == "tests"
        for name in re.findall(r"^def (test_\w+)", _text(path), re.MULTILINE)
    }
    assert not sorted(set(re.findall(r"`(test_\w+)`", text_of(page))) - defined)


def _text(path: Path) -> str:
    return (ROOT / path).read_text() if path.suffix == ".py" else ""
