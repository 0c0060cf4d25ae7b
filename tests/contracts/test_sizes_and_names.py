"""Modules, functions and signatures stay small; names say what a thing is. No exemptions."""

import ast
import re

from contracts.source_tree import Function, definitions, functions, modules, room_modules

MODULE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8
VAGUE = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "mixin", "mixins"}


def num_parameters(function: Function) -> int:
    """Parameters that a caller sees: self and cls apart."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return (
        len([name for name in names if name not in ("self", "cls")])
        + (given.vararg is not None)
        + (given.kwarg is not None)
    )


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_modules_stay_under_the_cap():
    tall = {
        str(m.path): len(m.text.splitlines())
        for m in modules("rollout", "trainer", "actors", "orchestrator", "tests", "benchmarks", "deploy")
    }
    assert not {path: lines for path, lines in tall.items() if lines > MODULE_LINES}


def test_functions_stay_under_the_cap():
    lengths = [
        (m.at(node), node.name, (node.end_lineno or 0) - node.lineno + 1)
        for m in room_modules()
        for node in functions(m)
    ]
    assert not [found for found in lengths if found[2] > FUNCTION_LINES]


def test_signatures_stay_under_the_cap():
    counts = [(m.at(node), node.name, num_parameters(node)) for m in room_modules() for node in functions(m)]
    assert not [found for found in counts if found[2] > PARAMETERS]


def test_no_name_is_vague():
    named = [(str(m.path), part) for m in room_modules() for part in m.path.with_suffix("").parts]
    named += [(m.at(node), node.name) for m in room_modules() for node in definitions(m)]
    assert not [found for found in named if words(found[1]) & VAGUE]


def test_the_word_splitter_and_the_parameter_count_see_what_they_should():
    assert words("HTTPEngineManager") == {"http", "engine", "manager"}
    assert words("path_utils") == {"path", "utils"}
    method = ast.parse("def f(self, a, /, b, *c, d, **e): ...").body[0]
    assert isinstance(method, ast.FunctionDef)
    assert num_parameters(method) == 5
