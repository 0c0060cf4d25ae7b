"""What observing adds to a step: the same deterministic run in this process with and without it, in interleaved pairs, so that nothing else differs.

The fleet is that of the tests: real store, episode workers, engine and trainer in one process, whose CPU seconds are all there is.
"""

import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from local_fleet import QuietReporter  # noqa: E402
from local_run import drive_to_its_end  # noqa: E402

from orchestrator.config import RunConfig, parse_config  # noqa: E402
from orchestrator.exporter import Exporter  # noqa: E402

MODEL = ROOT / "benchmarks" / "workload" / "model"
WARM_UP = 2
"""Steps of each run that are not counted."""
SCRAPER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep(float(sys.argv[2]))
"""
SCRAPE_EVERY_S = 1.0
"""Five times as often as deploy/prometheus/prometheus.yml has it."""


def observed_pairs(pairs: int, steps: int) -> dict[str, Any]:
    """CPU seconds a step of a run that a scraper follows over those of the same run without an exporter, less 1."""
    growth: list[float] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    run_cpu_s_per_step(steps, 0, observed=True)  # what the first run of a process pays once
    for pair in range(pairs):
        for observed in (False, True) if pair % 2 == 0 else (True, False):
            seconds[observed].append(run_cpu_s_per_step(steps, pair, observed=observed))
        growth.append(seconds[True][-1] / seconds[False][-1] - 1.0)
    return {
        "pairs": pairs,
        "steps": steps - WARM_UP,
        "step_cpu_s": statistics.median(seconds[False]),
        "growth_mean": statistics.fmean(growth),
        "growth_median": statistics.median(growth),
        "standard_error": statistics.stdev(growth) / pairs**0.5 if pairs > 1 else None,
    }


def run_cpu_s_per_step(steps: int, seed: int, *, observed: bool) -> float:
    """Of this process, from the end of the warm-up to the end of the run's last step."""
    folder = Path(tempfile.mkdtemp(prefix="concord-observed-"))
    reporter, at = QuietReporter(), dict[int, float]()

    def on_step(step: int) -> None:
        at[step] = time.process_time()

    reporter.on_step = on_step
    try:
        with scraped() if observed else contextlib.nullcontext() as exporter:
            drive_to_its_end(config_of(folder, steps, seed), reporter=reporter, exporter=exporter)
    finally:
        shutil.rmtree(folder)
    return (at[steps] - at[WARM_UP]) / (steps - WARM_UP)


@contextlib.contextmanager
def scraped() -> Generator[Exporter]:
    """An exporter that another process reads again and again."""
    with Exporter("127.0.0.1", 0) as exporter:
        scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, exporter.url, str(SCRAPE_EVERY_S)])
        try:
            yield exporter
        finally:
            scraper.kill()
            scraper.wait()


def config_of(folder: Path, steps: int, seed: int) -> RunConfig:
    """The quickstart's batches on the torch engine, to be repeated bit for bit."""
    document: dict[str, object] = {
        "run": {"dir": str(folder), "name": "run", "steps": steps, "batch_groups": 16, "group_size": 8, "seed": seed, "deterministic": True},
        "model": {"type": "local", "path": str(MODEL)},
        "sampling": {"max_new_tokens": 8},
        "engine": {"type": "torch"},
        "staleness": {"max_staleness": 2, "order": "dispatch"},
        "trainer": {"checkpoint": {"every_steps": 1000}},
    }
    return parse_config(document, "benchmark")
