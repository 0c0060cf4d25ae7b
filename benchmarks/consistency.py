"""What the consistency service costs.

`gate`: scored tokens a second against a plain forward pass of the same model on the same rows, in one process, in
interleaved pairs. `audit`: CPU seconds a step of trainer and engine with a tenth of the groups audited against none, in
interleaved pairs of runs. `causes`: whether `concord audit` names the right cause of faults that are planted in dumps
of two small models, and stays silent about sound dumps of every layout; what that costs in scored tokens.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness.runs import WORKLOAD, concord_run, parser, report
from harness.tags import bench_tag

from rollout.types.trajectory import FinishReason, Timings, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.scoring.held_versions import HeldVersions

MODEL = WORKLOAD / "model"
BASE = PolicyVersion(1, 0)
TAG = bench_tag("torch")


def trajectories(count: int, length: int) -> list[Trajectory]:
    """Random rows of `length` tokens, all but six of them sampled."""
    rng = np.random.default_rng(0)
    sampled = np.arange(length) >= 6
    one = Trajectory(
        trajectory_id="t",
        dispatch_id="d",
        prompt_id="p",
        environment="arithmetic",
        token_ids=np.zeros(length, dtype=np.int32),
        sampled=sampled,
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        version_spans=(VersionSpan(BASE, 6, length),),
        turns=1,
        tag=TAG,
        finish_reason=FinishReason.LENGTH,
        timings=Timings(started_at_s=0.0, generation_s=0.0),
    )
    return [
        replace(one, trajectory_id=f"t{i}", token_ids=rng.integers(2, 30, size=length, dtype=np.int32))
        for i in range(count)
    ]


def gate(pairs: int) -> dict[str, Any]:
    """Rate of the scorer over that of a plain forward pass with log-softmax, 128 rows of 8 and of 256 new tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.consistency.scoring.protocols import ScoreOptions
    from trainer.consistency.scoring.scorer import Scorer

    torch.set_num_threads(1)
    plain: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa").eval()
    found: dict[str, Any] = {}
    for new_tokens in (8, 256):
        rows = trajectories(128, 6 + new_tokens)
        ids = torch.from_numpy(np.stack([row.token_ids for row in rows])).long()
        per_batch = 16384 // ids.shape[1]
        folder, cpu = Path(tempfile.gettempdir()), torch.device("cpu")
        versions = HeldVersions(MODEL, folder, "float32", 1024, 2, cpu)
        scorer = Scorer(versions, 16384)

        def forward(ids: "torch.Tensor" = ids, per_batch: int = per_batch) -> None:
            with torch.inference_mode():
                for part in ids.split(per_batch):
                    logits = plain(input_ids=part[:, :-1], use_cache=False).logits[:, 5:].float()
                    torch.log_softmax(logits, -1).gather(-1, part[:, 6:, None])

        def score(rows: list[Trajectory] = rows, scorer: Scorer = scorer) -> None:
            scorer.score(rows, ScoreOptions())

        ratios: list[float] = []
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(pairs):
            plain_s, scored_s = timed(forward), timed(score)
            times[0].append(plain_s)
            times[1].append(scored_s)
            ratios.append(plain_s / scored_s)
        found[str(new_tokens)] = {
            "rate_over_plain_forward": statistics.median(ratios),
            "plain_forward_s": statistics.median(times[0]),
            "score_s": statistics.median(times[1]),
            "tokens_per_s": ids.numel() / statistics.median(times[1]),
        }
    return found


def timed(work: Callable[[], None]) -> float:
    """CPU seconds of a call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def audit(pairs: int, steps: int) -> dict[str, Any]:
    """CPU seconds a step of the trainer and of the engine, with and without an audit of a tenth of the groups."""
    growth: list[float] = []
    seconds: dict[str, list[float]] = {"off": [], "audit": []}
    for pair in range(pairs):
        for mode in ("off", "audit") if pair % 2 == 0 else ("audit", "off"):
            run = concord_run(
                {
                    "run.steps": steps,
                    "run.seed": pair,
                    "model.type": "local",
                    "model.path": str(MODEL),
                    "engine.type": "torch",
                    "consistency.mode": mode,
                    "trainer.checkpoint.every_steps": 1000,
                }
            )
            seconds[mode].append(run.kind_cpu_s_per_step(("TrainerActor", "EngineActor"), steps // 2, steps))
        growth.append(seconds["audit"][-1] / seconds["off"][-1] - 1.0)
    spread = statistics.stdev(growth) / len(growth) ** 0.5 if len(growth) > 1 else None
    means = {
        "growth_mean": statistics.fmean(growth),
        "growth_median": statistics.median(growth),
        "standard_error": spread,
    }
    return {"pairs": pairs, **means, "cpu_s_per_step": seconds}


def causes(seed: int) -> dict[str, Any]:
    """Every planted fault and every sound dump of each architecture, 50 rows each."""
    import torch
    from harness.dump_audits import table
    from harness.dump_engine import ARCHITECTURES

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {architecture: table(Path(folder), architecture, seed, 50) for architecture in ARCHITECTURES}


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--pairs", type=int, default=20, help="interleaved pairs of each comparison")
    arguments.add_argument(
        "--steps",
        type=int,
        default=200,
        help="steps of each run of `audit`; its second half counts, when the service has long started",
    )
    arguments.add_argument("--only", choices=("gate", "audit", "causes"), default=None)
    arguments.add_argument("--seed", type=int, default=0, help="of the models and dumps of `causes`")
    chosen = arguments.parse_args()
    parts = {"gate": lambda: gate(chosen.pairs), "audit": lambda: audit(chosen.pairs, chosen.steps)}
    parts |= {"causes": lambda: causes(chosen.seed)}
    report({name: part() for name, part in parts.items() if chosen.only in (None, name)}, chosen)


if __name__ == "__main__":
    main()
