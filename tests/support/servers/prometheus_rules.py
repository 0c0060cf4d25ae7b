"""The rules of the repository, read from their files."""

import re
from typing import Any

import yaml
from support.paths import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
NAME = re.compile(r"\b(?:concord_[a-z0-9_]+|concord:[a-z0-9_]+:[a-z0-9_]+)\b")
SELECTOR = re.compile(r"(concord_[a-z0-9_]+)\{([^}]*)\}")


def rules(file: str) -> list[dict[str, Any]]:
    """All rules of `rules/FILE.yml`."""
    document = yaml.safe_load((FOLDER / "rules" / f"{file}.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def rule_tests() -> list[dict[str, Any]]:
    """All tests of the rules."""
    return [
        test for path in sorted((FOLDER / "tests").glob("*.yml")) for test in yaml.safe_load(path.read_text())["tests"]
    ]


def names_in(expression: str) -> set[str]:
    """Metrics and recorded series that an expression asks for."""
    return set(NAME.findall(expression))
