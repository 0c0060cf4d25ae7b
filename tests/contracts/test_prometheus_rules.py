"""Rules ask for declared names only, say what to do, and are tested one by one."""

import re

import pytest
from contracts.source_tree import ROOT
from support.servers.prometheus_rules import SELECTOR, names_in, rule_tests, rules
from support.servers.scrapes import metric_of

from orchestrator.metrics.types import MetricType

ALERTS = {rule["alert"]: rule for rule in rules("alerts")}
RECORDED = {rule["record"]: rule for rule in rules("recording")}
EXPRESSIONS = {name: rule["expr"] for name, rule in (ALERTS | RECORDED).items()}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_rule_asks_for_declared_or_recorded_names_only(name: str):
    asked = names_in(EXPRESSIONS[name])
    assert asked or 'up{job="concord"}' in EXPRESSIONS[name]
    assert not {one for one in asked if one not in RECORDED and metric_of(one) is None}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_rule_selects_by_declared_labels_and_values_only(name: str):
    for sample, selectors in SELECTOR.findall(EXPRESSIONS[name]):
        metric = metric_of(sample)
        assert metric is not None
        values = {label.name: label.values for label in metric.labels}
        if metric.type is MetricType.HISTOGRAM:
            values["le"] = (*map(str, metric.buckets), "+Inf")
        for label, value in re.findall(r'(\w+)="([^"]*)"', selectors):
            assert value in values[label], (sample, label, value)


MULTIPLES = ("concord_replica_baseline_multiple_ratio", "concord_replica_slowness_ratio")
"""Ratios that are no shares."""
STEP = re.compile(r"(?P<first>-?[\d.]+(?:e-?\d+)?)(?:(?P<change>[+-][\d.]+))?(?:x(?P<times>\d+))?$")
INPUTS = [(test["name"], each["series"], each["values"]) for test in rule_tests() for each in test["input_series"]]


def values_of(text: str) -> list[float]:
    """The values that promtool makes of its short notation, but for those that are missing."""
    found: list[float] = []
    for part in text.split():
        if part not in ("stale", "_"):
            step = STEP.match(part)
            assert step is not None, part
            change, times = float(step["change"] or 0.0), int(step["times"] or 0)
            found += [float(step["first"]) + change * place for place in range(times + 1)]
    return found


def impossible(series: str, text: str) -> str:
    """Why no run could ever show this; empty where one could."""
    name, _, rest = series.partition("{")
    metric, values = metric_of(name), values_of(text)
    if metric is None:
        return "" if name in RECORDED or name in ("up", "ALERTS") else "not declared"
    for label, value in re.findall(r'(\w+)="([^"]*)"', rest):
        declared = next((each.values for each in metric.labels if each.name == label), ())
        if declared and value not in declared:
            return f"{label} is never {value}"
    if metric.unit == "ratio" and metric.type is MetricType.GAUGE and metric.name not in MULTIPLES and max(values) > 1:
        return "a share above 1"
    if metric.unit == "bool" and set(values) - {0.0, 1.0}:
        return "neither yes nor no"
    if metric.type is MetricType.COUNTER and values != sorted(values):
        return "a counter that falls"
    signed = metric.unit in ("reward", "loss") or "timestamp" in name  # promtool's clock begins at 0
    return "below 0" if min(values) < 0 and not signed else ""


def test_rules_are_tested_with_values_that_a_run_can_produce():
    """An alert that fires in its test only is worse than none."""
    assert not [(test, series, why) for test, series, text in INPUTS if (why := impossible(series, text))]


@pytest.mark.parametrize(
    ("series", "text"),
    [
        ('concord_clip_low_ratio{run="r"}', "0.2 1.4x3"),
        ('concord_replica_up{replica="0"}', "0.5x3"),
        ('concord_steps_total{outcome="skipped"}', "0+1x3 2"),
        ('concord_steps_total{outcome="lost"}', "0x3"),
        ("concord_never_heard_of", "1"),
        ("concord_step_seconds", "-1x3"),
    ],
)
def test_a_value_that_no_run_can_produce_is_found(series: str, text: str):
    assert impossible(series, text)


def test_every_alert_but_the_one_for_that_is_silent_while_its_run_does_not_answer():
    """Averages and increases reach back: without this they go on for minutes after a run has ended."""
    ends = [name for name, rule in ALERTS.items() if rule["expr"].endswith(") and on (instance, job, run) up == 1")]
    assert set(ALERTS) - set(ends) == {"ConcordRunUnreachable"}


def carries_its_layer(expression: str) -> bool:
    """Whether the series themselves say which layer they are of."""
    return all(
        (metric := metric_of(one)) is not None and "diagnosis_layer" in metric.label_names
        for one in names_in(expression)
    )


def test_every_alert_says_how_bad_it_is_where_it_belongs_and_what_to_do():
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["labels"].get("diagnosis_layer") in ("1", "2", "3", "4") or carries_its_layer(rule["expr"]), name
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["annotations"]["runbook_url"] == f"docs/user/runbook.md#{name.lower()}", name


def test_an_alert_belongs_to_the_layer_of_what_it_asks_for_first():
    """One of a lower layer may look at others to rule them out; none poses as a finding of another layer."""
    for name, rule in ALERTS.items():
        layers = {metric.diagnosis_layer for one in names_in(rule["expr"]) if (metric := metric_of(one)) is not None}
        assert not layers or carries_its_layer(rule["expr"]) or int(rule["labels"]["diagnosis_layer"]) in layers, name


def test_the_runbook_has_one_section_an_alert_and_no_other():
    sections = re.split(r"^### (\w+)$", (ROOT / "docs" / "user" / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(texts) == list(ALERTS), "in the order of the rules"
    assert not [
        name
        for name, text in texts.items()
        if not all(word in text for word in ("**Means:**", "**Check first:**", "**Do not**"))
    ]


def test_every_metric_that_the_runbook_names_is_declared():
    text = (ROOT / "docs" / "user" / "runbook.md").read_text()
    assert not {one for one in names_in(text) if one not in RECORDED and metric_of(one) is None}


def test_every_alert_is_tested_to_fire_and_to_keep_quiet():
    asked = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in rule_tests()
        for case in test.get("alert_rule_test", ())
    ]
    assert set(asked) == {(name, fires) for name in ALERTS for fires in (False, True)}


def test_every_recorded_series_is_tested():
    asked = {
        one
        for test in rule_tests()
        for case in test.get("promql_expr_test", ())
        for one in re.findall(r"concord:\w+:\w+", case["expr"])
    }
    assert asked == set(RECORDED)
