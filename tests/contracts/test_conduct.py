"""What code must not do: swallow errors, print, read switches from the environment, sleep in tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

from contracts.source_tree import Module, modules, room_modules

ENVIRONMENT_USERS = {
    "actors/cluster.py": "Ray takes its consent to usage reports and its patience from there only",
    "rollout/engines/vllm/launch.py": "vLLM takes what its child process needs from there only",
    "trainer/tiny/tiny.py": "the freedesktop rule for where a user's caches lie",
}
"""Module -> why it must touch the process environment. A setting of ours belongs into the config."""

TASK_OWNER = "rollout/tasks.py"
"""Where tasks that no `TaskGroup` owns are made, and what ends them is passed on."""

TASK_GROUP_TYPES = ("asyncio.TaskGroup", "asyncio.TaskGroup | None")

SPEAKS_TO_PEOPLE = ("orchestrator/commands/", "orchestrator/launch/console.py")
"""Where the house may print."""


def called_name(call: ast.Call) -> str:
    """`a.b.c` for a call of a plain dotted name, else the source of what is called."""
    return ast.unparse(call.func)


def calls(module: Module) -> Iterator[ast.Call]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node


def blanket_handlers(module: Module) -> Iterator[ast.ExceptHandler]:
    """Handlers that catch everything, outside `rollout.errors.boundary`.

    `except BaseException` that undoes something and ends with a bare `raise` catches nothing: it is a `finally` for
    failures.
    """
    allowed: set[ast.AST] = set()
    if str(module.path) == "rollout/errors.py":
        boundary = [node for node in module.tree.body if isinstance(node, ast.FunctionDef) and node.name == "boundary"]
        allowed = {inner for node in boundary for inner in ast.walk(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node not in allowed:
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(kind) if kind else "" for kind in caught}
            undoes = names == {"BaseException"} and isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if names & {"", "Exception", "BaseException"} and not undoes:
                yield node


def test_a_blanket_except_stands_only_in_boundary():
    assert not [m.at(node) for m in room_modules() for node in blanket_handlers(m)]


def task_groups(module: Module) -> set[str]:
    """What is a `TaskGroup` in this module: bound by `async with`, or annotated as one."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncWith):
            found |= {
                ast.unparse(item.optional_vars)
                for item in node.items
                if item.optional_vars is not None and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
            }
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in TASK_GROUP_TYPES:
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) in TASK_GROUP_TYPES:
            found.add(node.arg)
    return found


def unowned_tasks(module: Module) -> Iterator[ast.Call]:
    """Calls that make a task whose failure nobody is sure to see: it is owned neither by a `TaskGroup` nor by
    `rollout.tasks`."""
    owners = {f"{group}.create_task" for group in task_groups(module)}
    for call in calls(module):
        makes_task = called_name(call).rpartition(".")[2] in ("create_task", "ensure_future")
        if makes_task and called_name(call) not in owners:
            yield call


def test_every_task_has_an_owner():
    """A task that fails with nobody to await it fails unseen, and whoever waits for its work waits for ever."""
    assert not [m.at(call) for m in room_modules() if str(m.path) != TASK_OWNER for call in unowned_tasks(m)]


def test_a_task_without_an_owner_is_found():
    source = """
async def work(later: asyncio.TaskGroup):
    async with asyncio.TaskGroup() as group:
        group.create_task(one())
        later.create_task(two())
    loop.create_task(three())
    create_task(four())
    kept = asyncio.ensure_future(five())
"""
    module = Module(path=Path("rollout/example.py"), text=source, tree=ast.parse(source))
    assert [call.lineno for call in unowned_tasks(module)] == [6, 7, 8]


def test_only_the_command_line_prints():
    silent = [m for m in room_modules() if not str(m.path).startswith(SPEAKS_TO_PEOPLE)]
    assert not [m.at(call) for m in silent for call in calls(m) if called_name(call) == "print"]


def test_no_switch_is_read_from_the_environment():
    found = [
        (m, node)
        for m in room_modules()
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Attribute | ast.Name) and is_environment(node)
    ]
    assert not [m.at(node) for m, node in found if str(m.path) not in ENVIRONMENT_USERS]
    assert {str(m.path) for m, _ in found} == set(ENVIRONMENT_USERS), "an entry of the list above is no longer needed"


def is_environment(node: ast.Attribute | ast.Name) -> bool:
    return ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "environ", "getenv")


def test_no_test_sleeps():
    """Sleep is no synchronisation. `asyncio.sleep(0)` only yields to the loop."""
    sleeps = [
        (m, call)
        for m in modules("tests")
        for call in calls(m)
        if called_name(call) in ("time.sleep", "sleep", "asyncio.sleep", "anyio.sleep")
    ]
    assert not [
        m.at(call)
        for m, call in sleeps
        if not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)
    ]


def test_no_test_patches():
    """Fakes stand at the seams. `monkeypatch` may set the environment and the working directory, nothing else."""
    allowed = ("monkeypatch.setenv", "monkeypatch.delenv", "monkeypatch.chdir", "monkeypatch.syspath_prepend")
    patching = [
        (m, called_name(call))
        for m in modules("tests")
        for call in calls(m)
        if called_name(call).startswith(("monkeypatch.", "mock.", "patch"))
    ]
    assert not [(str(m.path), name) for m, name in patching if name not in allowed]
