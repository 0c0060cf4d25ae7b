"""What the contracts read: the repository's files, the rooms' modules and their syntax trees."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("rollout", "trainer", "actors", "orchestrator")
"""In the order of imports: each may import those before it."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A Python file with its syntax tree."""

    path: Path
    """Relative to the repository."""
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.parts[0]

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        """`path:line`, as a finding names its place."""
        return f"{self.path}:{node.lineno}"


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that git tracks or would add, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    return tuple(sorted(Path(name) for name in set(listing.split("\0")) if name and (ROOT / name).is_file()))


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """The Python files below these top-level folders."""
    paths = [path for path in repository_files() if path.suffix == ".py" and path.parts[0] in folders]
    texts = {path: (ROOT / path).read_text() for path in paths}
    return tuple(Module(path=path, text=text, tree=ast.parse(text, str(path))) for path, text in texts.items())


def room_modules() -> tuple[Module, ...]:
    """The modules of the four rooms."""
    return modules(*ROOMS)


def imported_names(node: ast.AST) -> tuple[str, ...]:
    """Dotted names that an import statement asks for; none for other nodes and for relative imports."""
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return (node.module,)
    return ()


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every absolute import below `tree`, wherever it stands, with its top-level name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_names(node):
                yield node, name.partition(".")[0]


def imports_at_load(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Imports that run when the module is imported: outside functions and outside `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [module.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_names(node):
                yield node, name.partition(".")[0]
        pending.extend(ast.iter_child_nodes(node))


def definitions(module: Module) -> Iterator[Definition]:
    """Every class and function of a module, nested ones included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def functions(module: Module) -> Iterator[Function]:
    """Every function and method of a module, nested ones included."""
    for node in definitions(module):
        if not isinstance(node, ast.ClassDef):
            yield node
