"""What vLLM's own metrics cost (`engine.serve_metrics`): CPU seconds of a step's generation with them over those
without, in interleaved pairs.

Two engines on the fixed workload's model, in this process and their cores; each answers the quickstart's batch (16
prompts, 8 samples of 8 tokens) in turn.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from harness.runs import WORKLOAD, parser, report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.vllm_room import VllmRoom, ask, build_manifest

from rollout.config import VllmConfig
from rollout.types.weights import PolicyVersion

PROMPTS, SAMPLES, TOKENS = 16, 8, 8
START_S = 600.0
"""For one engine, on a busy machine."""
WARM_UP = 5
"""Batches of each engine that are not counted."""


def batch_cpu_s(room: VllmRoom, number: int) -> float:
    """CPU seconds of this process and of the engine's core while it answers one batch."""
    core = psutil.Process(room.core_pid)

    async def answer() -> None:
        requests = [
            ask(f"{number}-{prompt}", [3 + prompt % 10, 12, 5, 14], SAMPLES, TOKENS) for prompt in range(PROMPTS)
        ]
        await asyncio.gather(*(room.gather(request) for request in requests))

    begun = time.process_time() + sum(core.cpu_times()[:2])
    room.run(answer())
    return time.process_time() + sum(core.cpu_times()[:2]) - begun


def compare(pairs: int) -> dict[str, Any]:
    """Growth of the CPU seconds of a batch, and of ten batches, whose clock is finer."""
    manifest = build_manifest(WORKLOAD / "model", PolicyVersion(1, 0))
    rooms = {served: VllmRoom(manifest, VllmConfig(serve_metrics=served), START_S) for served in (False, True)}
    try:
        for number in range(WARM_UP):
            for room in rooms.values():
                batch_cpu_s(room, number)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(pairs):
            for served in (False, True) if pair % 2 == 0 else (True, False):
                seconds[served].append(sum(batch_cpu_s(rooms[served], 10 * pair + number) for number in range(10)) / 10)
    finally:
        for room in rooms.values():
            room.close()
    growth = [one / other - 1.0 for one, other in zip(seconds[True], seconds[False], strict=True)]
    return {
        "pairs": pairs,
        "batch_cpu_s": statistics.median(seconds[False]),
        "growth_mean": statistics.fmean(growth),
        "growth_median": statistics.median(growth),
        "standard_error": statistics.stdev(growth) / pairs**0.5 if pairs > 1 else None,
    }


def main() -> None:
    """Print one JSON."""
    made = parser(__doc__ or "")
    made.add_argument("--pairs", type=int, default=30, help="pairs of ten batches each")
    chosen = made.parse_args()
    report({"serve_metrics": compare(chosen.pairs)}, chosen)


if __name__ == "__main__":
    main()
