"""The doctor reads only what the catalogue declares and what the run records."""

import ast
import re

from contracts.source_tree import ROOT, Module, modules

from orchestrator.loop.live_doctor import OF_INTEREST
from orchestrator.metrics.catalogue import BLOCK_CATALOGUE, COLUMNS
from rollout.types.dispatch import FailReason, RejectReason


def rules() -> list[Module]:
    return [m for m in modules("orchestrator") if m.path.parts[1] == "doctor"]


def first_arguments(method: str) -> set[str]:
    """String literals given first to calls of `.method(...)` in the doctor's modules."""
    calls = [
        node
        for m in rules()
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    first = [
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == method and call.args
    ]
    return {one.value for one in first if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def words_of(call: str) -> set[str]:
    """String literals in the second argument of `call(Cause.X, (...), ...)`."""
    text = "\n".join(m.text for m in rules())
    return {
        word
        for group in re.findall(call + r"\(Cause\.\w+, \(([^)]*)\)", text)
        for word in re.findall(r'"(\w+)"', group)
    }


def test_every_column_that_a_rule_reads_is_declared():
    columns = first_arguments("column")
    assert {"reward_mean", "policy_entropy"} <= columns
    assert not columns - set(COLUMNS)


def test_every_block_signal_that_a_rule_reads_is_declared():
    signals = first_arguments("of_blocks")
    assert signals and not signals - {metric.column for metric in BLOCK_CATALOGUE}


def test_every_reason_that_a_rule_counts_exists():
    text = "\n".join(m.text for m in rules())
    assert set(re.findall(r'"rejected:(\w+)"', text)) <= {str(reason) for reason in RejectReason}
    counted = words_of("failures")
    assert "engine" in counted
    assert counted <= {str(reason) for reason in FailReason}


def test_every_event_that_a_rule_reads_is_recorded_and_kept_in_the_loop():
    recorded = {
        kind
        for path in (ROOT / "orchestrator").rglob("*.py")
        for kind in re.findall(r'record_event\(\s*"(\w+)"', path.read_text())
    }
    read = first_arguments("of_kind") | words_of("of_events")
    assert "replica_failed" in read
    assert not read - recorded
    assert not read - OF_INTEREST
