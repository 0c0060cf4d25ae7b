"""What Prometheus gets while a loop runs: declared series only, counters from 0, and nothing that could stop the
training."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from support.loop.local_fleet import QuietReporter
from support.servers.scrapes import scrape, series_by_metric, value_of
from support.servers.served_run import BATCH, GROUP, config_of, drive_served

from orchestrator.commands.run import last_state_scraped
from orchestrator.exporters.prometheus import LAST_STATE_S, Exporter, Text, family_of
from orchestrator.exporters.prometheus_targets import Targets
from orchestrator.launch.stop_signals import Stopped
from orchestrator.metrics.catalogue import DECLARED, sizes_of
from orchestrator.metrics.consistency import attributed
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.types import MAX_REWARD_PARTS, MetricType
from orchestrator.run_dir.layout import RunDir
from orchestrator.signals.moments import BoundedParts
from rollout.errors import ConcordError, UserError
from rollout.types.weights import PolicyVersion
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import Attribution, GapCause
from trainer.types.histograms import LOG_RATIO_EDGES, BucketCounts, bucket_counts

STEPS = 5


def test_a_run_serves_declared_series_and_no_more_than_its_sizes_allow(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        _, summary = drive_served(tmp_path, exporter, STEPS)
        samples = scrape(exporter.url)
    assert summary["metrics_url"] == exporter.url
    sizes = sizes_of(config_of(tmp_path, STEPS), blocks=0, heads=0)
    counts = series_by_metric(name for name, _ in samples)
    assert not {name: count for name, count in counts.items() if count > DECLARED[name].max_series(sizes)}
    fixed = [
        m
        for m in DECLARED.values()
        if m.type is not MetricType.GAUGE and all(label.values or label.name == "replica" for label in m.labels)
    ]
    assert {m.name: counts[m.name] for m in fixed} == {m.name: m.max_series(sizes) for m in fixed}, (
        "counters and histograms are there from 0"
    )


def test_counters_and_histograms_say_what_the_run_did(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        _, summary = drive_served(tmp_path, exporter, STEPS)
        samples = scrape(exporter.url)
    assert value_of(samples, "concord_steps_total", outcome="applied") == STEPS
    assert (
        value_of(samples, "concord_trained_groups_total")
        == value_of(samples, "concord_trained")
        == summary["trained"]
        == STEPS * BATCH
    )
    assert value_of(samples, "concord_dispatched_groups_total") == summary["dispatched"]
    assert value_of(samples, "concord_group_pass_rate_ratio_count") == STEPS * BATCH
    assert value_of(samples, "concord_response_length_tokens_count") == STEPS * BATCH * GROUP
    assert value_of(samples, "concord_token_staleness_steps_count") == value_of(samples, "concord_trained_tokens_total")
    assert value_of(samples, "concord_step_duration_seconds_count") == STEPS
    assert value_of(samples, "concord_verdicts_total", verdict="accept") >= STEPS * BATCH * GROUP
    assert value_of(samples, "concord_store_latency_seconds_count", call="acknowledge") == STEPS
    audited = sum(value_of(samples, "concord_audited_log_ratio_nats_bucket", replica=slot, le="+Inf") for slot in "01")
    assert audited >= value_of(samples, "concord_trained_tokens_total")
    assert value_of(samples, "concord_batch_wait_seconds") == 0.0


def test_text_is_that_of_prometheus_client_whatever_was_shown_before():
    """Values that change, stay, come and go; label values in another order; what needs escaping; of each type."""
    distributions = Distributions()
    kept = {"concord_step": {(): 7.0}}
    awkward: dict[tuple[str, ...], float] = {('a "b"\\\n\u2028 c',): float("nan"), ("plain",): float("inf")}
    first: dict[str, dict[tuple[str, ...], float]] = {
        **kept,
        "concord_loss": {(): 0.5},
        "concord_steps_total": {("applied",): 1.0, ("skipped",): 0.0},
    }
    second = {
        **kept,
        "concord_steps_total": {("skipped",): 3.0, ("applied",): 2e17},
        "concord_reward_part_mean": awkward,
    }
    before = Snapshot(numbers=first, distributions=distributions.copy())
    distributions.observe("concord_group_pass_rate_ratio", 0.5)
    distributions.observe("concord_log_ratio_nats", -1e-5, "total")
    after = Snapshot(numbers=second, distributions=distributions.copy())
    text, turns = Text(), (before, after, after, before)
    assert [text.of(snapshot) for snapshot in turns] == [generate_latest(Families(snapshot)) for snapshot in turns]
    assert b"concord_loss 0.5" in text.of(before)
    assert b"concord_loss" not in text.of(after)


class Families:
    """A whole snapshot as prometheus_client asks for it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        for metric in DECLARED.values():
            if self._snapshot.numbers.get(metric.name) or self._snapshot.distributions.get(metric.name):
                yield family_of(metric, self._snapshot)


def test_what_was_never_measured_has_no_sample(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        drive_served(tmp_path, exporter, STEPS)
        names = {name for name, _ in scrape(exporter.url)}
    assert "concord_consistency_gap_ess_ratio" in names
    assert "concord_consistency_routing_coverage_ratio" not in names, "its column says -1"


def test_an_audit_shows_the_size_of_a_replicas_gap_and_where_its_tokens_lie(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        drive_served(tmp_path, exporter, STEPS, shift_nats=0.005)
        samples = scrape(exporter.url)
    assert value_of(samples, "concord_replica_gap_nats", replica="0", statistic="p50") == pytest.approx(0.005, rel=1e-3)
    assert value_of(samples, "concord_replica_gap_limit_nats", replica="0") == 2.0, "of the config"
    assert value_of(samples, "concord_replica_baseline_multiple_ratio", replica="0") == pytest.approx(1.0, rel=1e-2)
    assert value_of(samples, "concord_audited_log_ratio_nats_bucket", replica="0", le="0.001") == 0.0
    assert value_of(samples, "concord_audited_log_ratio_nats_bucket", replica="0", le="0.00995") > 0.0


def test_time_since_the_last_step_goes_on_while_nobody_looks_at_the_loop():
    """By the clock of the process alone: the wall clocks of two machines may differ by minutes. A loop that hangs shows
    nothing new, and its age rises all the same."""
    clock = [100.0]
    shown = {"concord_last_step_age_seconds": {(): 5.0}, "concord_step": {(): 7.0}}
    with Exporter("127.0.0.1", 0, clock=lambda: clock[0]) as exporter:
        exporter.show(Snapshot(numbers=shown, distributions={}))
        assert value_of(scrape(exporter.url), "concord_last_step_age_seconds") == 5.0
        clock[0] += 400.0
        samples = scrape(exporter.url)
    assert value_of(samples, "concord_last_step_age_seconds") == 405.0
    assert value_of(samples, "concord_step") == 7.0


def test_a_run_says_what_its_config_says(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        drive_served(tmp_path, exporter, 1)
        samples = scrape(exporter.url)
    ((labels, value),) = [
        (dict(labels), value) for (name, labels), value in samples.items() if name == "concord_run_info"
    ]
    assert (value, labels["engine"], labels["replicas"], labels["batch_groups"]) == (1.0, "scripted", "2", str(BATCH))
    assert value_of(samples, "concord_start_timestamp_seconds") <= value_of(
        samples, "concord_last_step_timestamp_seconds"
    )
    assert 0.0 <= value_of(samples, "concord_last_step_age_seconds") < 60.0


def test_reward_parts_beyond_the_declared_number_are_summed_up():
    named, bounded = BoundedParts(), MAX_REWARD_PARTS
    many = tuple((f"part{index}", 1.0) for index in range(bounded + 3))
    assert named.means(many[:2]) == {("part0",): 1.0, ("part1",): 1.0}
    means = named.means(many)
    assert len(means) == bounded + 1
    assert means["other",] == 3.0


def test_the_parts_of_an_attribution_and_its_residual_are_all_shown():
    gap = ReplicaGap(
        replica=0,
        newest=PolicyVersion(1, 1),
        engine="torch",
        num_tokens=9,
        mean_abs=0.9,
        mean_abs_limit=0.05,
        max_abs=2.0,
        k3=0.1,
        ess=0.9,
        outside_factor_two=0.1,
        findings=(),
        attribution=Attribution(gap=0.9, parts=((GapCause.WEIGHT_SYNC, 0.7),), residual=0.2),
    )
    assert {cause: nats for cause, nats in attributed(gap).items() if nats} == {"weight_sync": 0.7, "unknown": 0.2}
    assert set(attributed(gap)) == set(GapCause)


def test_a_taken_port_is_reported_with_the_cure():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"Address already in use; set exporter\.port to a free port, or to 0"):
            Exporter("127.0.0.1", taken.getsockname()[1])


def test_a_closed_exporter_leaves_no_thread_and_no_port():
    before = set(threading.enumerate())
    exporter = Exporter("127.0.0.1", 0)
    port = int(exporter.target.rsplit(":", 1)[1])
    exporter.close()
    assert set(threading.enumerate()) <= before
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_trouble_with_signals_is_reported_once_and_the_training_goes_on(tmp_path: Path):
    class Failing(Exporter):
        def show(self, snapshot: Snapshot) -> None:
            if snapshot.numbers.get("concord_step", {}).get((), 0.0) >= 2:  # in a step, which the loop waits for
                raise OSError("no room")

    said: list[str] = []

    class Listening(QuietReporter):
        def say(self, text: str) -> None:
            said.append(text)

    with Failing("127.0.0.1", 0) as exporter:
        run, summary = drive_served(tmp_path, exporter, STEPS, reporter=Listening())
        with pytest.raises(ConnectionRefusedError):  # old values would look like a run that has stalled
            socket.create_connection(("127.0.0.1", int(exporter.target.rsplit(":", 1)[1])), timeout=10.0)
    assert summary["steps"] == STEPS
    assert len([text for text in said if "the training goes on: reducing signals: OSError: no room" in text]) == 1
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["kind"] == "exporter_failed"]) == 1


def test_a_disk_that_refuses_the_targets_takes_no_metrics_away(tmp_path: Path):
    class InTheWay(QuietReporter):
        def say(self, text: str) -> None:
            if text.startswith("metrics at"):
                targets.mkdir(parents=True)

        def step(self, row: Mapping[str, float], steps: int) -> None:
            if row["step"] == 2:
                targets.rmdir()

    targets = tmp_path / ".prometheus" / "run.json"
    with Exporter("127.0.0.1", 0) as exporter:
        run, _ = drive_served(tmp_path, exporter, STEPS, reporter=InTheWay())
        assert exporter.snapshot.numbers["concord_step"] == {(): STEPS}
    assert run.prometheus_targets == targets
    assert json.loads(targets.read_text())[0]["targets"] == [exporter.target]
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [event["what"] for event in events if event["kind"] == "side_file_failed"] == [
        "where Prometheus finds the run"
    ]


def test_prometheus_finds_the_run_in_its_folder(tmp_path: Path):
    with Exporter("127.0.0.1", 0) as exporter:
        run, _ = drive_served(tmp_path, exporter, STEPS)
    assert json.loads(run.prometheus_targets.read_text()) == [
        {"targets": [exporter.target], "labels": {"job": "concord", "run": "run"}}
    ]


def test_engines_with_metrics_of_their_own_are_listed_by_slot(tmp_path: Path):
    run = RunDir(tmp_path / "name")
    run.path.mkdir()
    targets = Targets(run.prometheus_targets, "name", "127.0.0.1:1")
    targets.show({1: "127.0.0.1:3", 0: "127.0.0.1:2"})
    engines = json.loads(run.prometheus_targets.read_text())[1:]
    assert [(entry["targets"], entry["labels"]["job"], entry["labels"]["replica"]) for entry in engines] == [
        (["127.0.0.1:2"], "concord-engine", "0"),
        (["127.0.0.1:3"], "concord-engine", "1"),
    ]


def test_runs_of_one_folder_are_listed_together_but_for_those_that_were_deleted(tmp_path: Path):
    runs = [RunDir(tmp_path / name) for name in ("first", "second", "deleted")]
    for place, run in enumerate(runs):
        run.path.mkdir()
        Targets(run.prometheus_targets, run.path.name, f"127.0.0.1:{place + 1}").show({})
    runs[2].path.rmdir()
    Targets(runs[0].prometheus_targets, "first", "127.0.0.1:9").show({})
    files = sorted((tmp_path / ".prometheus").glob("*.json"))
    assert [json.loads(file.read_text())[0]["targets"] for file in files] == [["127.0.0.1:9"], ["127.0.0.1:2"]]


def test_the_last_state_is_served_until_two_scrapes_have_taken_it():
    with Exporter("127.0.0.1", 0) as exporter, ThreadPoolExecutor(1) as pool:
        assert not exporter.let_last_state_be_scraped(60.0), "nobody scrapes, so nobody is waited for"
        scrape(exporter.url)
        waits = pool.submit(exporter.let_last_state_be_scraped, 60.0)
        while not waits.done():
            scrape(exporter.url)
        assert waits.result()
        assert not exporter.let_last_state_be_scraped(0.05), "who has scraped before may be gone"


def test_an_error_ends_a_command_after_its_last_state_was_scraped_and_a_stop_at_once():
    """Nobody scrapes the stopped one again, and it ends all the same."""
    ended = threading.Event()

    def scraped_meanwhile() -> int:
        times = 0
        while not ended.is_set():
            scrape(exporter.url)
            times += 1
        return times

    with Exporter("127.0.0.1", 0) as exporter, ThreadPoolExecutor(1) as pool:
        scrape(exporter.url)
        begun = time.monotonic()
        for kind in (Stopped, KeyboardInterrupt):
            with pytest.raises(kind), last_state_scraped(exporter):
                raise kind("by hand")
        assert time.monotonic() - begun < LAST_STATE_S / 2
        scrapes = pool.submit(scraped_meanwhile)
        with pytest.raises(UserError), last_state_scraped(exporter):
            raise UserError("planted by the test")
        ended.set()
        assert scrapes.result() >= 2


def test_a_run_that_an_error_ends_shows_the_state_in_which_it_ended(tmp_path: Path):
    class Breaks(QuietReporter):
        def step(self, row: Mapping[str, float], steps: int) -> None:
            if row["step"] == 3:
                raise ConcordError("planted by the test")

    with Exporter("127.0.0.1", 0) as exporter:
        with pytest.raises(ConcordError, match="planted"):
            drive_served(tmp_path, exporter, STEPS, reporter=Breaks())
        assert value_of(scrape(exporter.url), "concord_step") == 3.0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"concord_unheard_of": {(): 1.0}}, "concord_unheard_of, which is not declared"),
        ({"concord_log_ratio_nats": {("total",): 1.0}}, "which is not declared as such"),
        ({"concord_steps_total": {("lost",): 1.0}}, "label values ('lost',)"),
        ({"concord_loss": {("d00000001",): 1.0}}, "label values ('d00000001',)"),
    ],
)
def test_a_value_that_is_not_declared_is_refused(numbers: dict[str, dict[tuple[str, ...], float]], message: str):
    with pytest.raises(ConcordError) as refused:
        Snapshot(numbers=numbers, distributions={})
    assert message in str(refused.value)


def test_bucket_counts_are_those_of_single_observations():
    values = np.concatenate([np.random.default_rng(0).normal(0, 0.5, 1000), LOG_RATIO_EDGES])
    one_by_one, reduced = Distributions(), Distributions()
    one_by_one.observe_all("concord_log_ratio_nats", values.tolist(), "total")
    reduced.add("concord_log_ratio_nats", bucket_counts(values, LOG_RATIO_EDGES), "total")
    expected, got = (each.copy()["concord_log_ratio_nats"][("total",)] for each in (one_by_one, reduced))
    assert got.counts == expected.counts
    assert got.total == pytest.approx(expected.total, rel=1e-12)


def test_what_is_not_finite_is_in_no_bucket():
    assert bucket_counts(np.array([np.nan, np.inf, -np.inf, 0.5]), (0.0, 1.0)) == BucketCounts((0, 1, 0), 0.5)
