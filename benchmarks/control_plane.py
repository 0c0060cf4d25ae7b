"""Trajectories a second through everything but the work itself: no-cost engine and trainer, durable store, real Ray.

`whole_loop`: admission, episode workers, engine actor, reward worker, store, gate, trainer actor, commit records.
`store`: put, lease and acknowledge of the store through its actor alone, batches of 64 trajectories in groups of 8.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.runs import concord_run, model_with_context, parser, report
from harness.tags import bench_tag

from actors.roles.store_actor import RemoteStore
from rollout.types.dispatch import Dispatch, StepCommit
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

GROUPS, SIZE = 64, 8


def whole_loop(new_tokens: int, steps: int, durability: str) -> dict[str, Any]:
    """Trajectories a second from the median of three stretches of the run, the first fifth left out."""
    model = model_with_context(Path(tempfile.mkdtemp(prefix="concord-bench-model-")), new_tokens + 8)
    run = concord_run(
        {
            "run.steps": steps,
            "run.batch_groups": GROUPS,
            "run.group_size": SIZE,
            "model.type": "local",
            "model.path": str(model),
            "sampling.max_new_tokens": new_tokens,
            "engine.type": "scripted",
            "reward.type": "python",
            "reward.function": "bench_rewards:nothing",
            "trainer.type": "scripted",
            "consistency.mode": "off",
            "trainer.checkpoint.every_steps": 20,
            "store.durability": durability,
            "staleness.max_staleness": 2,
        }
    )
    times = [row["step_seconds"] for row in run.rows[steps // 5 :]]
    third = len(times) // 3
    rates = [GROUPS * SIZE * third / sum(times[i * third : (i + 1) * third]) for i in range(3)]
    return {
        "tokens": new_tokens,
        "durability": durability,
        "trajectories_per_s": statistics.median(rates),
        "stretches": rates,
        "summary": run.summary,
    }


async def store_cycle(tokens: int, rounds: int) -> dict[str, Any]:
    """put + lease + acknowledge through the actor; payloads have int32 ids and float32 log-probs."""
    from actors.roles.store_actor import StoreActor
    from rollout.config import SqliteStoreConfig
    from rollout.types.codec import encode
    from rollout.types.prompts import Prompt, PromptCursor

    with tempfile.TemporaryDirectory() as folder:
        store = RemoteStore(StoreActor.remote(Path(folder), SqliteStoreConfig()))
        epoch = (await store.recover(None)).trainer_epoch
        groups_a_batch = 64 // SIZE
        dispatches = [
            Dispatch(
                dispatch_id=f"d{i:08d}",
                prompt=Prompt(prompt_id=str(i), pass_index=0, text="x"),
                group_size=SIZE,
                attempt=1,
                policy=PolicyVersion(1, 0),
                replica=0,
                created_at_s=0.0,
            )
            for i in range(rounds * groups_a_batch)
        ]
        await store.dispatch(epoch, dispatches, PromptCursor())
        encoded = [encode(group_of(d.dispatch_id, tokens, i)) for i, d in enumerate(dispatches)]
        batches = [encoded[i : i + groups_a_batch] for i in range(0, len(encoded), groups_a_batch)]
        begun = time.perf_counter()
        await _pipeline(store, epoch, batches)
        elapsed = time.perf_counter() - begun
        await store.close()
    return {
        "tokens": tokens,
        "trajectories_per_s": rounds * 64 / elapsed,
        "bytes_per_trajectory": encoded[0].header.num_bytes / SIZE,
    }


async def _pipeline(store: RemoteStore, epoch: int, batches: list[list[EncodedGroup]]) -> None:
    """Three clients at once, as in a run: one puts, one leases what was put, one acknowledges what was leased; each in
    order."""
    put: asyncio.Queue[tuple[str, ...]] = asyncio.Queue(2)
    leased: asyncio.Queue[tuple[str, ...]] = asyncio.Queue(2)

    async def producer() -> None:
        for batch in batches:
            await put.put(await store.put(batch))

    async def trainer() -> None:
        for _ in batches:
            ids = await put.get()
            lease = await store.lease(epoch, ids)
            if sum(payload.size > 0 for payload in lease.payloads) != len(ids):
                raise RuntimeError("a lease came back short")
            await leased.put(ids)

    async def committer() -> None:
        for step in range(1, len(batches) + 1):
            ids = await leased.get()
            await store.acknowledge(
                StepCommit(
                    policy=PolicyVersion(epoch, step),
                    dispatch_ids=ids,
                    trajectories_trained=64,
                    trajectories_masked=0,
                    trajectories_dropped=0,
                )
            )

    async with asyncio.TaskGroup() as group:
        for stage in (producer, trainer, committer):
            group.create_task(stage())


def group_of(dispatch_id: str, tokens: int, seed: int) -> TrajectoryGroup:
    """A group whose ids need four bytes."""
    rng = np.random.default_rng(seed)
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{dispatch_id}-{i}",
            dispatch_id=dispatch_id,
            prompt_id=str(seed),
            environment="bench",
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            sampled=np.ones(tokens, dtype=np.bool_),
            rollout_logprobs=-rng.random(tokens, dtype=np.float32),
            version_spans=(VersionSpan(PolicyVersion(1, 0), 0, tokens),),
            turns=1,
            tag=bench_tag(),
            finish_reason=FinishReason.LENGTH,
            timings=Timings(started_at_s=0.0, generation_s=0.0),
        )
        for i in range(SIZE)
    )
    return TrajectoryGroup(
        dispatch_id=dispatch_id,
        prompt_id=str(seed),
        pass_index=0,
        environment="bench",
        trajectories=trajectories,
        rewards=(Reward(total=0.0),) * SIZE,
    )


def stores() -> list[dict[str, Any]]:
    """Medians of three for both lengths."""
    from actors.cluster import cluster
    from actors.config import ClusterConfig

    results: list[dict[str, Any]] = []
    with cluster(ClusterConfig(), 2, 0):
        for tokens, rounds in ((512, 120), (8192, 20)):
            tries = [asyncio.run(store_cycle(tokens, rounds)) for _ in range(3)]
            results.append(
                sorted(tries, key=lambda one: one["trajectories_per_s"])[1]
                | {"tries": [one["trajectories_per_s"] for one in tries]}
            )
    return results


def main() -> None:
    chosen = parser(str(__doc__)).parse_args()
    loops = [whole_loop(512, 150, "process"), whole_loop(8192, 60, "process"), whole_loop(512, 60, "machine")]
    report({"store": stores(), "whole_loop": loops}, chosen)


if __name__ == "__main__":
    main()
