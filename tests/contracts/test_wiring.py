"""Objects get what they need in their constructor: nobody assigns an attribute of an object of another class."""

import ast
from collections.abc import Iterator

from contracts.source_tree import Module, functions, room_modules

AUTOGRAD = {"forward", "backward", "setup_context"}
"""Methods in which torch's own `ctx` is filled."""


def declared(module: Module) -> Iterator[str]:
    """Attributes that the classes of a module have: fields, and what their methods set on `self`. Those of a frozen
    class cannot be assigned anyway."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and not is_frozen(node):
            yield from (
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
            yield from (target.attr for target in targets(node) if owner(target) == "self")


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether it is a frozen dataclass."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every attribute that is assigned below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            pending = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
            while pending:
                target = pending.pop()
                if isinstance(target, ast.Tuple | ast.List):
                    pending += target.elts
                elif isinstance(target, ast.Attribute):
                    yield target


def owner(target: ast.Attribute) -> str:
    """The name of what the attribute belongs to; empty where that is no plain name."""
    return target.value.id if isinstance(target.value, ast.Name) else ""


def assigned_from_outside(module: Module, ours: frozenset[str]) -> Iterator[ast.Attribute]:
    """Assignments to an attribute that some class of the house has, of anything but `self` or `cls`."""
    contexts = {
        target
        for function in functions(module)
        if function.name in AUTOGRAD
        for target in targets(function)
        if owner(target) == "ctx"
    }
    for target in targets(module.tree):
        if target.attr in ours and owner(target) not in ("self", "cls") and target not in contexts:
            yield target


def test_no_attribute_of_another_object_is_assigned():
    ours = frozenset(name for module in room_modules() for name in declared(module))
    assert "incarnation" in ours
    assert not [
        f"{module.at(target)} {ast.unparse(target)}"
        for module in room_modules()
        for target in assigned_from_outside(module, ours)
    ]


def test_an_assignment_from_outside_is_found():
    source = """
class Part:
    def __init__(self):
        self.other, self.listener = Other(), None
        self.other.listener = self

class Layer(Function):
    def forward(ctx, x):
        ctx.listener = x

part.listener, x = print, 1
part.foreign = 1
"""
    tree = ast.parse(source)
    module = Module(path=room_modules()[0].path, text=source, tree=tree)
    found = assigned_from_outside(module, frozenset(declared(module)))
    assert sorted(ast.unparse(target) for target in found) == ["part.listener", "self.other.listener"]
