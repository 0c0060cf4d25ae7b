"""Real training of the tiny model in one process, for the doctor's rehearsal: groups are sampled by a copy of the
trainer's weights that lags behind, judged, trained on by a real `PolicyTrainer`, and reduced to the rows of a run by
the real catalogue. What is planted is a `Fault`: wrappers round the seams at which a real one enters.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import numpy as np
import torch
from harness.tags import bench_tag
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from little.trace import Trace
from little.trainer import Gradients, little_trainer, local_values
from orchestrator.dispatch.accounts import step_facts
from orchestrator.metrics.blocks import block_values
from orchestrator.metrics.catalogue import COLUMNS, ROW_METRICS
from orchestrator.metrics.state import Ended
from orchestrator.metrics.types import UNMEASURED
from orchestrator.observers import StepPhases
from orchestrator.run_dir.record import RunEvent
from rollout.types.codec import encode
from rollout.types.trajectory import (
    FinishReason,
    GroupHeader,
    Reward,
    StoredGroups,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    header_of,
)
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import TrainerConfig
from trainer.step.policy_trainer import PolicyTrainer
from trainer.tiny.model import EOS_ID
from trainer.tiny.training import encode as encoded_sums
from trainer.types.step import StepReport, StepRequest

PROMPT_TOKENS = 6
EVALUATED = 48
"""Held-out prompts of an evaluation, one sample each."""
Rewards = NDArray[np.float64]
"""[groups, samples]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What the engine made of one batch of prompts."""

    pairs: NDArray[np.int64]
    """[groups] the sums that were asked, 100 a + b."""
    answers: list[list[list[int]]]
    """[groups][samples] sampled tokens."""
    logprobs: list[list[list[float]]]
    """The same, nats."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A little run."""

    steps: int = 40
    batch_groups: int = 6
    group_size: int = 6
    lag: int = 1
    """Steps by which the sampling weights lie behind."""
    max_new_tokens: int = 12
    prompts: int = 4000
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluation_every: int = 4
    moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, at the seams of the run; each does nothing by default."""

    reward: Callable[["Little", Samples, Rewards], Rewards] = lambda run, samples, rewards: rewards
    """Right answers (1 or 0) -> the reward."""
    given: Callable[["Little", Rewards], Rewards] = lambda run, rewards: rewards
    """The reward, as headers have it -> what advantages are made of."""
    prompts: Callable[["Little", NDArray[np.int64]], NDArray[np.int64]] = lambda run, pairs: pairs
    gradients: Gradients | None = None
    engine: Callable[["Little", dict[str, Any]], dict[str, Any]] = lambda run, sampling: sampling
    """Changes temperature, max_new_tokens or shared (one draw for all samples of a group)."""
    weights: Callable[["Little", int], int] = lambda run, version: version
    """The version that the engine samples with, of the one that it should."""


class Little:
    """One run under way."""

    def __init__(self, setting: Setting, fault: Fault, seed: int, model_dir: Path) -> None:
        self.setting, self.fault, self.seed = setting, fault, seed
        self.random = np.random.default_rng([seed, 7])
        torch.manual_seed(seed)
        pairs = np.random.default_rng(seed).permutation(100 * 100)
        self.train_pairs, self.held_out = pairs[: setting.prompts], pairs[-EVALUATED:]
        self.model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(model_dir, dtype=torch.float32).eval()
        self.config = TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3}, **setting.trainer})
        self.step = 0
        self.versions: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=setting.lag + 2)
        self.trace = Trace()
        self._prompts: deque[str] = deque(maxlen=64)
        self._rewards: deque[float] = deque(maxlen=10)
        self._at = 0

    def train(self, model_dir: Path) -> Trace:
        """Train to the end, or to ten skipped steps in a row."""
        folder = Path(mkdtemp(prefix="little-"))
        built = little_trainer(
            model_dir, self.config, self.setting.steps, self.seed, folder / "ranks", self.fault.gradients
        )
        skipped = 0
        with closing(built) as trainer:
            self._keep(trainer, 0)
            self.evaluate(0)
            while self.step < self.setting.steps and skipped < 10:
                skipped = 0 if self._step(trainer) else skipped + 1
        return self.trace

    def _keep(self, trainer: PolicyTrainer, version: int) -> None:
        self.versions.append((version, {name: value.clone() for name, value in local_values(trainer).items()}))

    def _load(self, version: int) -> int:
        """Sample with this version, or the oldest that is left."""
        kept = dict(self.versions)
        found = version if version in kept else min(kept)
        self.model.load_state_dict(kept[found], strict=False)
        return found

    def _step(self, trainer: PolicyTrainer) -> bool:
        number = self.step + 1
        version = max(0, self.step - self.setting.lag)
        self._load(self.fault.weights(self, version))
        samples = self.sample(self._asked(), version, self.setting.group_size, training=True)
        rewards = self.fault.reward(self, samples, right(samples))
        given = self.fault.given(self, rewards)
        groups = [self._group(samples, rewards, index) for index in range(len(samples.pairs))]
        encoded = [encode(self._group(samples, given, index)) for index in range(len(samples.pairs))]
        stored = StoredGroups(
            dispatch_ids=tuple(group.dispatch_id for group in groups),
            payloads=tuple(each.payload for each in encoded),
            verdicts=(b"",) * len(groups),
        )
        request = StepRequest(policy=PolicyVersion(1, number), oldest_version=0)
        report = trainer.step(stored, request)
        if report.skipped:
            self.trace.events.append(
                RunEvent(kind="step_skipped", step=self.step, fields={"reason": report.skipped, "step": number})
            )
            return False
        self.step = number
        self._keep(trainer, number)
        headers = [header_of(group, each.header.num_bytes) for group, each in zip(groups, encoded, strict=True)]
        self._row(headers, report, request)
        if self.setting.evaluation_every and number % self.setting.evaluation_every == 0:
            self.evaluate(number)
        return True

    def _asked(self) -> NDArray[np.int64]:
        count = self.setting.batch_groups
        places = np.arange(self._at, self._at + count) % self.train_pairs.size
        self._at += count
        return self.fault.prompts(self, self.train_pairs[places])

    @torch.inference_mode()
    def sample(self, pairs: NDArray[np.int64], version: int, count: int, *, training: bool) -> Samples:
        """`count` answers to each sum under the loaded weights."""
        sampling = {"temperature": 1.0, "max_new_tokens": self.setting.max_new_tokens, "shared": False}
        sampling = self.fault.engine(self, sampling) if training else sampling
        ids = encoded_sums(pairs, pairs // 100 + pairs % 100)[:, :PROMPT_TOKENS].repeat_interleave(count, 0)
        open_rows = torch.ones(len(ids), dtype=torch.bool)
        drawn: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        lengths = torch.zeros(len(ids), dtype=torch.int64)
        for _ in range(int(sampling["max_new_tokens"])):
            logits = (
                self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1] / sampling["temperature"]
            )
            logprobs = torch.log_softmax(logits.float(), -1)
            noise = torch.tensor(self.random.gumbel(size=tuple(logprobs.shape)), dtype=torch.float32)
            if sampling["shared"]:
                noise = noise[::count].repeat_interleave(count, 0)
            token = (logprobs + noise).argmax(-1)
            drawn.append(token)
            probs.append(logprobs.gather(1, token[:, None]).squeeze(1))
            lengths += open_rows
            open_rows &= token != EOS_ID
            ids = torch.cat((ids, token[:, None]), 1)
            if not open_rows.any():
                break
        tokens, logs, ends = torch.stack(drawn, 1).tolist(), torch.stack(probs, 1).tolist(), lengths.tolist()
        answers = [row[:end] for row, end in zip(tokens, ends, strict=True)]
        chosen = [row[:end] for row, end in zip(logs, ends, strict=True)]
        rows = range(0, len(answers), count)
        return Samples(
            pairs=pairs,
            answers=[answers[row : row + count] for row in rows],
            logprobs=[chosen[row : row + count] for row in rows],
            version=version,
        )

    def evaluate(self, version: int) -> None:
        """Score `version` on the held-out sums."""
        if not self.setting.evaluation_every:
            return
        self._load(version)
        samples = self.sample(self.held_out, version, 1, training=False)
        score = float(right(samples).mean())
        error = float(np.sqrt(max(score * (1 - score), 0.0) / EVALUATED))
        fields = {"score": score, "stderr": error, "version": version, "fingerprint": "a", **SAMPLED}
        self.trace.events.append(RunEvent(kind="evaluation", step=version, fields=fields))

    def _group(self, samples: Samples, rewards: Rewards, index: int) -> TrajectoryGroup:
        pair = int(samples.pairs[index])
        name, dispatch = f"{pair // 100:02d}+{pair % 100:02d}", f"d{self.step:05d}-{index}"
        prompt = encoded_sums(np.array([pair]), np.array([0]))[0, :PROMPT_TOKENS].tolist()
        policy = PolicyVersion(1, samples.version)
        trajectories: list[Trajectory] = []
        for place, (answer, logs) in enumerate(zip(samples.answers[index], samples.logprobs[index], strict=True)):
            tokens = np.array(prompt + answer, dtype=np.int32)
            trajectories.append(
                Trajectory(
                    trajectory_id=f"{dispatch}/{place}",
                    dispatch_id=dispatch,
                    prompt_id=name,
                    environment="arithmetic",
                    token_ids=tokens,
                    sampled=np.arange(tokens.size) >= PROMPT_TOKENS,
                    rollout_logprobs=np.array([0.0] * PROMPT_TOKENS + logs, dtype=np.float32),
                    version_spans=(VersionSpan(policy, PROMPT_TOKENS, tokens.size),),
                    turns=1,
                    tag=TAG,
                    finish_reason=FinishReason.STOP if answer[-1] == EOS_ID else FinishReason.LENGTH,
                    timings=Timings(started_at_s=0.0, generation_s=0.1),
                )
            )
        return TrajectoryGroup(
            dispatch_id=dispatch,
            prompt_id=name,
            pass_index=0,
            environment="arithmetic",
            trajectories=tuple(trajectories),
            rewards=tuple(Reward(total=float(reward)) for reward in rewards[index]),
            reward_s=0.01,
        )

    def _row(self, headers: list[GroupHeader], report: StepReport, request: StepRequest) -> None:
        facts = step_facts(headers, report, request, self.setting.max_new_tokens)
        self._prompts.extend(header.prompt_id for header in headers)
        self._rewards.append(facts.reward_mean)
        ended = Ended(
            report=report,
            facts=facts,
            phases=StepPhases(wait_s=0.1, train_s=0.8, publish_s=0.1),
            seconds=1.0,
            reward_moving_10=float(np.mean(self._rewards)),
            mean_reward={"dispatched": facts.reward_mean, "finished": facts.reward_mean},
            mean_length={"dispatched": facts.length_mean, "finished": facts.length_mean},
            prompts=tuple(self._prompts),
            reward_parts={},
        )
        row = dict.fromkeys(COLUMNS, 0.0)
        row |= {metric.column: float(metric.at_step(ended)[()]) for metric in ROW_METRICS if metric.at_step is not None}
        row |= {
            "dispatched": float(self.setting.batch_groups * (self.step + 2)),
            "replica_slowness": UNMEASURED,
            "slowest_replica": UNMEASURED,
            "wall_seconds": float(self.step),
        }
        self.trace.rows.append(row)
        self.trace.tallies.append({})
        for one in block_values(report):
            if one.head is None:
                self.trace.blocks.setdefault((one.signal, one.block), {})[self.step] = one.value


def right(samples: Samples) -> Rewards:
    """[groups, samples] 1 where the answer is the sum's digits in reverse, and the end."""
    sums = samples.pairs // 100 + samples.pairs % 100
    wanted = encoded_sums(samples.pairs, sums)[:, PROMPT_TOKENS:].tolist()
    whole = [row[: row.index(EOS_ID) + 1] for row in wanted]
    return np.array(
        [[float(answer == truth) for answer in answers] for answers, truth in zip(samples.answers, whole, strict=True)]
    )


SAMPLED = {
    "part_environment": "arithmetic",
    "part_sampling": '{"ignore_eos":false,"max_new_tokens":12,"samples":1,"temperature":1.0,"top_k":0,"top_p":1.0}',
}
"""What events of evaluations say of theirs: sampled like training, on prompts held out of the same source."""
TAG = bench_tag("torch", "b" * 64, "a" * 64)
