"""The fixed workload of `benchmarks/workload` through the real loop: one trainer rank, real engines, the recipe of its
README.

Short answers (at most 8 new tokens) and forced long ones (256), engines `torch` and `vllm`, eta 0 and 2 (and 1 for the
short torch case): seconds and CPU seconds a step, samples a second, time until the 10-step mean reward is 0.9. Beside
them a plain training step on the same model, since machines differ.
"""

import statistics
import time
from typing import Any

from harness.runs import WORKLOAD, concord_run, parser, report

FIRST = 5
"""Steps up to here are left out: pipelines fill, kernels compile."""


def case(engine: str, new_tokens: int, forced: bool, eta: int, steps: int) -> dict[str, Any]:
    """One run."""
    run = concord_run(
        {
            "run.steps": steps,
            "run.batch_groups": 16,
            "run.group_size": 8,
            "model.type": "local",
            "model.path": str(WORKLOAD / "model"),
            "environment.type": "jsonl",
            "environment.path": str(WORKLOAD / "prompts.jsonl"),
            "environment.shuffle": False,
            "sampling.max_new_tokens": new_tokens,
            "sampling.ignore_eos": forced,
            "engine.type": engine,
            "reward.type": "python",
            "reward.function": "bench_rewards:fixed_work",
            "staleness.max_staleness": eta,
            "trainer.checkpoint.every_steps": 1000,
        }
    )
    times = [row["step_seconds"] for row in run.rows[FIRST:]]
    step_s = statistics.fmean(times)
    cpu_s = run.cpu_s_per_step(FIRST, steps)
    moving = [row for row in run.rows if row["reward_moving_10"] >= 0.9 and row["step"] >= 10]
    kept = (
        "mixed_version_trajectories",
        "mean_token_staleness",
        "rejected",
        "engine_busy",
        "trainer_busy",
        "update_pause_ms",
        "peak_rss_mb",
    )
    return {
        "engine": engine,
        "new_tokens": new_tokens,
        "forced": forced,
        "eta": eta,
        "steps": steps,
        "step_s": step_s,
        "step_s_median": statistics.median(times),
        "cpu_s_per_step": cpu_s,
        "step_over_half_the_cpu": step_s / (cpu_s / 2),
        "samples_per_s": 128 / step_s,
        "seconds_to_0.9": moving[0]["wall_seconds"] if moving else None,
        "mixed_share": run.summary["mixed_version_trajectories"] / (128 * steps),
        "tree_peak_rss_mb": run.peak_rss_mb,
        **{key: run.summary[key] for key in kept},
    }


def plain_step(new_tokens: int, repeats: int = 7) -> dict[str, float]:
    """CPU and wall seconds of one training step written out with transformers alone, on one thread: the measure of this
    machine's speed.

    128 rows, forward, log-softmax over the new tokens, backward, clip, fused AdamW; no engine, no padding, random ids.
    The fastest of `repeats`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        WORKLOAD / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator, best = torch.Generator().manual_seed(0), (float("inf"), float("inf"))
    for _ in range(repeats):
        ids = torch.randint(0, model.config.vocab_size, (128, 6 + new_tokens), generator=generator)
        wall, cpu = time.perf_counter(), time.process_time()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, 5:].float()
        (-torch.log_softmax(logits, -1).gather(-1, ids[:, 6:, None]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        best = min(best, (time.process_time() - cpu, time.perf_counter() - wall))
    return {"cpu_s": best[0], "wall_s": best[1]}


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--steps", type=int, default=100, help="steps of the short cases")
    arguments.add_argument("--long-steps", type=int, default=25, help="steps of the 256-token cases")
    arguments.add_argument("--only", default="", help="run only cases whose name starts so, such as vllm-256-2")
    chosen = arguments.parse_args()
    cases: dict[str, Any] = {}
    for engine in ("torch", "vllm"):
        for tokens, forced, steps in ((8, False, chosen.steps), (256, True, chosen.long_steps)):
            for eta in (0, 1, 2) if (engine, tokens) == ("torch", 8) else (0, 2):
                name = f"{engine}-{tokens}-{eta}"
                if name.startswith(chosen.only):
                    cases[name] = case(engine, tokens, forced, eta, steps)
    report({"plain_training_step": {str(tokens): plain_step(tokens) for tokens in (8, 256)}, "cases": cases}, chosen)


if __name__ == "__main__":
    main()
