"""The store alone, in one process: seconds and trajectories/s of a full cycle dispatch, put, lease, acknowledge,
settle. JSON out.

python benchmarks/store_inprocess.py [--durability machine] [--directory DIR]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness.tags import bench_tag

from rollout.store.sqlite.schema import Durability
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import decode, encode
from rollout.types.dispatch import Dispatch, StepCommit
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.trajectory import (
    EncodedGroup,
    FinishReason,
    Reward,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from rollout.types.weights import PolicyVersion

GROUP_SIZE = 8
GROUPS_A_BATCH = 8
BASE = PolicyVersion(1, 0)
TAG = bench_tag(tokenizer_fingerprint="f" * 64, weights_digest="d" * 64)


def dispatch(number: int) -> Dispatch:
    prompt = Prompt(prompt_id=f"p{number}", pass_index=0, text="12+34=")
    return Dispatch(
        dispatch_id=f"d{number:08d}",
        prompt=prompt,
        group_size=GROUP_SIZE,
        attempt=1,
        policy=BASE,
        replica=0,
        created_at_s=0.0,
    )


def group(number: int, num_tokens: int, vocab_size: int = 150_000) -> TrajectoryGroup:
    """`GROUP_SIZE` trajectories of `num_tokens`, all sampled but the first."""
    rng = np.random.default_rng(number)
    sampled = np.arange(num_tokens) > 0
    name = f"d{number:08d}"

    def trajectory(index: int) -> Trajectory:
        return Trajectory(
            trajectory_id=f"{name}/{index}",
            dispatch_id=name,
            prompt_id=f"p{number}",
            environment="arithmetic",
            token_ids=rng.integers(vocab_size, size=num_tokens, dtype=np.int32),
            sampled=sampled,
            rollout_logprobs=np.where(sampled, -rng.random(num_tokens), 0).astype(np.float32),
            version_spans=(VersionSpan(BASE, 1, num_tokens),),
            turns=1,
            tag=TAG,
            finish_reason=FinishReason.STOP,
            timings=Timings(started_at_s=0.0, generation_s=1.0),
        )

    rewards = tuple(Reward(total=float(index % 2)) for index in range(GROUP_SIZE))
    trajectories = tuple(trajectory(index) for index in range(GROUP_SIZE))
    return TrajectoryGroup(
        dispatch_id=name,
        prompt_id=f"p{number}",
        pass_index=0,
        environment="arithmetic",
        trajectories=trajectories,
        rewards=rewards,
    )


def cycle(run_dir: Path, durability: Durability, batches: list[list[EncodedGroup]]) -> dict[str, float]:
    """Seconds by phase over all batches."""
    store = SqliteStore(run_dir, durability)
    epoch = (store.recover(None)).trainer_epoch
    seconds: dict[str, float] = dict.fromkeys(("dispatch", "put", "lease", "acknowledge", "settle"), 0.0)
    for step, batch in enumerate(batches, start=1):
        first = (step - 1) * GROUPS_A_BATCH
        ids = [encoded.header.dispatch_id for encoded in batch]
        policy = PolicyVersion(epoch, step)
        commit = StepCommit(
            policy=policy,
            dispatch_ids=tuple(ids),
            trajectories_trained=64,
            trajectories_masked=0,
            trajectories_dropped=0,
        )
        marks = [time.perf_counter()]
        store.dispatch(epoch, [dispatch(first + i) for i in range(len(batch))], PromptCursor(index=first + len(batch)))
        marks.append(time.perf_counter())
        store.put(batch)
        marks.append(time.perf_counter())
        store.lease(epoch, ids)
        marks.append(time.perf_counter())
        store.acknowledge(commit)
        marks.append(time.perf_counter())
        store.settle(policy)
        marks.append(time.perf_counter())
        for name, begin, end in zip(seconds, marks, marks[1:], strict=False):
            seconds[name] += end - begin
    store.close()
    return seconds


def codec_us(num_tokens: int, repeats: int) -> dict[str, float]:
    """Best-of-`repeats` CPU microseconds of one group's encode and decode."""
    plain = group(0, num_tokens)
    payload = encode(plain).payload

    def best(call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(repeats):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
        return round(1e6 * min(times), 1)

    return {"encode_us": best(lambda: encode(plain)), "decode_us": best(lambda: decode(payload))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--durability", choices=("process", "machine"), default="process")
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "durability": arguments.durability,
        "group_size": GROUP_SIZE,
        "groups_a_batch": GROUPS_A_BATCH,
    }
    for num_tokens, num_batches in ((512, 400), (8192, 60)):
        numbers = range(num_batches * GROUPS_A_BATCH)
        batches = [
            [encode(group(n, num_tokens)) for n in numbers[i : i + GROUPS_A_BATCH]]
            for i in range(0, len(numbers), GROUPS_A_BATCH)
        ]
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            begin = time.process_time()
            seconds = cycle(Path(directory), arguments.durability, batches)
            cpu_s = time.process_time() - begin
        trajectories = num_batches * GROUPS_A_BATCH * GROUP_SIZE
        store_s = seconds["put"] + seconds["lease"] + seconds["acknowledge"]
        report[f"{num_tokens}_tokens"] = {
            "put_lease_acknowledge_per_s": round(trajectories / store_s),
            "all_per_s": round(trajectories / sum(seconds.values())),
            "megabytes_per_s": round(sum(e.payload.size for batch in batches for e in batch) / store_s / 1e6),
            "cpu_s": round(cpu_s, 3),
            "ms_per_batch": {name: round(1e3 * value / num_batches, 3) for name, value in seconds.items()},
            **codec_us(num_tokens, 300),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
