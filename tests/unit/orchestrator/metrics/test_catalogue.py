"""The catalogue: names, types, buckets and bounded labels."""

import ast
import re
from dataclasses import replace

import numpy as np
import pytest
from support.paths import ROOT

from orchestrator.config import RunConfig, parse_config
from orchestrator.dispatch.accounts import Accounts
from orchestrator.metrics.catalogue import CATALOGUE, DECLARED, max_series, sizes_of
from orchestrator.metrics.consistency import CAUSES, DRIFTS, REASONS
from orchestrator.metrics.types import NAMED_UNITS, Extent, Label, MetricType, with_unit
from orchestrator.run_dir.record import record_of_rows
from rollout.types.weights import ApplyReport, PolicyVersion
from trainer.consistency.checks.structure import DriftKind
from trainer.types.evidence import GapCause
from trainer.types.histograms import LOG_RATIO_EDGES

ID_LIKE = {"id", "trajectory", "dispatch", "prompt", "step", "epoch", "digest", "token", "version"}


def test_every_name_is_declared_once_under_the_prefix():
    assert len(DECLARED) == len(CATALOGUE)
    assert all(re.fullmatch(r"concord_[a-z0-9]+(_[a-z0-9]+)*", metric.name) for metric in CATALOGUE)


def test_a_name_says_its_unit_and_whether_it_counts():
    """As Prometheus names metrics: base units, a ratio for a share, `_total` for what only rises."""
    for metric in CATALOGUE:
        stem = metric.name.removesuffix("_total")
        assert metric.unit not in NAMED_UNITS or metric.unit in stem.split("_"), metric.name
        assert metric.unit != "ratio" or (stem.endswith("_ratio") and "fraction" not in stem), metric.name
        counts = "since the loop began" in metric.help and metric.unit != "ratio"
        assert metric.type is MetricType.COUNTER or not counts, f"{metric.name} counts, so it is a counter"


@pytest.mark.parametrize(
    ("name", "unit", "exported"),
    [
        ("engine_busy", "ratio", "engine_busy_ratio"),
        ("clip_fraction_low", "ratio", "clip_low_ratio"),
        ("wall_seconds", "seconds", "wall_seconds"),
        ("last_step_timestamp", "seconds", "last_step_timestamp_seconds"),
        ("grad_norm", "norm", "grad_norm"),
        ("skipped_steps", "steps", "skipped_steps"),
    ],
)
def test_the_unit_is_added_where_the_name_does_not_have_it(name: str, unit: str, exported: str):
    assert with_unit(name, unit) == exported


def test_columns_of_files_and_trackers_keep_their_names():
    """Files of runs made before are read by these names."""
    named = {metric.column: metric.name for metric in CATALOGUE}
    assert named["length_cap_fraction"] == "concord_length_cap_ratio"
    assert named["skipped_steps"] == "concord_skipped_steps_total"
    assert named["replica_ess"] == "concord_replica_ess_ratio"
    assert len(named) == len(CATALOGUE)


def test_no_counter_shares_its_family_with_another_metric():
    """The names of OpenMetrics families do not have the `_total`."""
    families = [metric.name.removesuffix("_total") for metric in CATALOGUE]
    assert sorted(families) == sorted(set(families))


def test_every_metric_says_what_it_is_and_where_to_look():
    assert all(
        metric.help.endswith(".") and metric.unit and metric.diagnosis_layer in (1, 2, 3, 4) for metric in CATALOGUE
    )
    assert {metric.diagnosis_layer for metric in CATALOGUE} == {1, 2, 3, 4}


def test_no_label_holds_an_id_and_every_set_of_values_is_bounded():
    labels = [label for metric in CATALOGUE for label in metric.labels]
    assert not {label.name for label in labels} & ID_LIKE
    assert all(bool(label.values) != (label.extent is not None) for label in labels)


def test_buckets_of_ratios_are_symmetric_in_log_space():
    assert tuple(-edge for edge in reversed(LOG_RATIO_EDGES)) == LOG_RATIO_EDGES
    assert {m.name for m in CATALOGUE if m.buckets == LOG_RATIO_EDGES} == {
        "concord_log_ratio_nats",
        "concord_audited_log_ratio_nats",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "concord_x_total"}, "`_total` ends the names of counters"),
        ({"buckets": (1.0, 2.0)}, "a histogram, and nothing else, has some"),
        ({"type": MetricType.HISTOGRAM, "buckets": (2.0, 1.0), "in_rows": False}, "each above the one before"),
        ({"labels": (Label(name="kind", values=("a", "b")),)}, "cannot be a column"),
    ],
)
def test_a_declaration_that_prometheus_would_not_take_is_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(DECLARED["concord_loss"], **change)


def test_causes_and_drifts_are_those_of_the_service():
    assert (tuple(GapCause), tuple(DriftKind)) == (CAUSES, DRIFTS)


def codes_of_findings() -> set[str]:
    """String literals that the service's modules hand to whatever makes a finding that may fail."""
    paths = [path for path in (ROOT / "trainer" / "consistency").rglob("*.py") if path.parent.name != "dump"]
    calls = [node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [
        call
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("_fail", "_finding", "CheckFinding")
    ]
    given = [
        value
        for call in made
        for value in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "code"))
    ]
    constants = {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return {text for text in constants if re.fullmatch(r"[a-z_0-9]+", text)}


def test_every_code_of_a_finding_that_fails_is_a_declared_reason():
    """One that is not declared would be counted as `other` only."""
    codes = codes_of_findings()
    assert {"doubled_bos", "gap_tail", "unknown_version"} <= codes
    assert codes - set(REASONS) == {"gap_drift"}, "a warning"


def test_the_most_series_of_a_run_follow_from_its_sizes():
    one = sizes_of(RunConfig(), blocks=4, heads=2)
    two = sizes_of(parse_config({"engine": {"type": "vllm", "replicas": 2}}, "test"), blocks=4, heads=2)
    per_replica = sum(
        m.max_series(two) - m.max_series(one)
        for m in CATALOGUE
        if any(label.extent is Extent.REPLICAS for label in m.labels)
    )
    assert max_series(two) - max_series(one) == per_replica + 1  # and the memory of one more actor
    assert DECLARED["concord_log_ratio_nats"].max_series(one) == 3 * (len(LOG_RATIO_EDGES) + 1)


def test_the_longest_pause_is_that_of_the_slowest_replica_of_the_last_update():
    accounts = Accounts(8)
    for version, pauses_s in enumerate(([9.0, 1.0], [1.0, 3.0, 2.0]), start=1):
        policy = PolicyVersion(1, version)
        reports = [ApplyReport(policy=policy, digest="d", pause_s=pause_s, interrupted=0) for pause_s in pauses_s]
        accounts.version_committed(policy, reports)
    assert (accounts.longest_pause_s, list(accounts.pauses)) == (3.0, [9.0, 1.0, 1.0, 3.0, 2.0])


def test_a_score_of_minus_one_is_a_score_once_a_version_was_scored():
    before, after = (
        {"eval_score": -1.0, "eval_stderr": 0.0, "eval_version": version, "consistency_gap_mean": -1.0}
        for version in (-1.0, 0.0)
    )
    assert [DECLARED[f"concord_{name}"].measured(before) for name in ("eval_score", "eval_stderr", "eval_version")] == [
        False,
        False,
        False,
    ]
    assert [DECLARED[f"concord_{name}"].measured(after) for name in ("eval_score", "eval_stderr", "eval_version")] == [
        True,
        True,
        True,
    ]
    assert not DECLARED["concord_consistency_gap_mean_nats"].measured(after)
    scores = record_of_rows([{"step": 1.0, **before}, {"step": 2.0, **after}]).columns["eval_score"]
    assert np.isnan(scores[0])
    assert scores[1] == -1.0
