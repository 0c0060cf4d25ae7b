"""A new metric is one declaration: row, file, export, tracker and document follow from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

DECLARATION = '''
    dummy_updates = column("updates", lambda now: now.weight_updates + 1000)
    """What a test declares."""
    dummy_queues = gauge("groups", lambda now: single(now.queues["ready"] + 2000))
    """What a test declares besides."""
'''
RUN = """
import sys
from pathlib import Path

from pyarrow import parquet
from support.servers.scrapes import scrape, value_of
from support.servers.served_run import drive_served

from orchestrator.exporters.prometheus import Exporter
from orchestrator.exporters.tracker_tags import TrackedSignals, meaning_of
from orchestrator.run_dir.reader import RunReader

with Exporter("127.0.0.1", 0) as exporter:
    run, _ = drive_served(Path(sys.argv[1]), exporter, 2)
    samples = scrape(exporter.url)
    (points,) = TrackedSignals().of_step(exporter.snapshot)
assert value_of(samples, "concord_dummy_updates") >= 1000.0
assert value_of(samples, "concord_dummy_queues") >= 2000.0
assert parquet.read_table(run.metrics / "part-0.parquet")["dummy_updates"][-1].as_py() >= 1000.0
assert RunReader(run.path).read()[0].column("dummy_updates")[-1] >= 1000.0
assert points.numbers["4 training system/dummy_updates"] >= 1000.0
assert meaning_of("4 training system/dummy_queues") == "What a test declares besides. Unit: groups."
"""


def test_a_metric_that_is_declared_is_in_rows_files_exports_and_trackers(tmp_path: Path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "orchestrator", tree / "orchestrator", ignore=shutil.ignore_patterns("__pycache__"))
    system = tree / "orchestrator" / "metrics" / "system.py"
    system.write_text(system.read_text() + DECLARATION)
    paths = os.pathsep.join(map(str, (tree, ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
