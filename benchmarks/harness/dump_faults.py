"""Faults planted in dumps for `concord audit`, each with the cause that is right and the words that must name it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory, write_manifest
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest

from .dump_engine import BOS, PAD, Engine, Ids, Rows, Sampled, Sampling, nudged, write_model
from .dump_rows import token_rows

VOCABULARY = {"qwen3": 64, "gpt2": 160}
VERSIONS = 3
"""Published versions besides the model itself."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A model with published versions, and an engine of it."""

    architecture: str
    model: Path
    weights: Path
    other: Path
    """Another model of the same shape."""
    engine: Engine
    rows: int

    @property
    def prompts(self) -> list[Ids]:
        """One a row."""
        return self.engine.prompts(self.rows, VOCABULARY[self.architecture])

    def sampled(self, sampling: Sampling | None = None, prompts: Sequence[Ids] | None = None) -> Sampled:
        """By the engine of the model."""
        return self.engine.sample(self.prompts if prompts is None else prompts, sampling or Sampling())

    def version(self, number: int) -> Path:
        """Its weights."""
        return self.weights / f"e1-v{number}" if number else self.model

    def by_versions(self, *numbers: int, every: int = 0) -> Sampled:
        """Sampled under `numbers` in turn, the next one after `every` tokens."""
        engine = Engine(folders=[self.version(number) for number in numbers], seed=self.engine.seed)
        return engine.sample(self.prompts, Sampling(switch_after=every))


def build_room(folder: Path, architecture: str, seed: int, rows: int) -> Room:
    """Write what is not there yet."""
    model, weights, other = folder / "model", folder / "weights", folder / "other"
    if not other.is_dir():
        write_model(model, architecture, seed)
        for number in range(1, VERSIONS + 1):
            before = model if number == 1 else weights / f"e1-v{number - 1}"
            _publish(nudged(before, weights / f"e1-v{number}", seed + number), number)
        write_model(other, architecture, seed + 100)
    return Room(
        architecture=architecture,
        model=model,
        weights=weights,
        other=other,
        engine=Engine(folders=[model], seed=seed),
        rows=rows,
    )


def _publish(directory: Path, number: int) -> None:
    tensors = digest_directory(directory)
    manifest = WeightManifest(
        policy=PolicyVersion(1, number),
        transport=Transport.DISK,
        location=str(directory),
        tensors=tensors,
        digest=manifest_digest(tensors),
        canary=Canary(token_ids=np.array([3, 4], dtype=np.int32), logprobs=np.array([-1.0], dtype=np.float32)),
        num_bytes=1,
    )
    write_manifest(directory, manifest)


Planted = tuple[Rows, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One dump with something wrong."""

    name: str
    plant: Callable[[Room], Planted]
    """Rows, and options of the audit."""
    cause: str
    """The right first cause; `rows`: the rows are named, and no cause; `none`: nothing is named."""
    words: str = ""
    """What the reading of the first part, or the detail of a finding, must hold."""


def _log(change: Callable[[NDArray[np.float64]], NDArray[np.float64]], share: int = 1) -> Callable[[Room], Planted]:
    """Every `share`-th row of a sound dump has a changed log."""

    def plant(room: Room) -> Planted:
        sampled = room.sampled()
        return token_rows(
            sampled, [change(row) if i % share == share - 1 else row for i, row in enumerate(sampled.logprobs)]
        ), {}

    return plant


def _shift(places: int, share: int) -> Callable[[Room], Planted]:
    def plant(room: Room) -> Planted:
        rows = token_rows(room.sampled())
        for row in rows[share - 1 :: share]:
            row["logprobs"] = np.roll(row["logprobs"], places).tolist()
        return rows, {}

    return plant


def _sampled(sampling: Sampling, **declared: float) -> Callable[[Room], Planted]:
    """Sampled otherwise than the columns say."""
    return lambda room: (token_rows(room.sampled(sampling), None, **declared), {})


def tagged(rows: Rows, versions: Sequence[NDArray[np.int64]]) -> Rows:
    """The rows with a version a token."""
    for row, own in zip(rows, versions, strict=True):
        row["version"] = [None] * (len(row["mask"]) - own.size) + own.tolist()
    return rows


def _finish_tag(*numbers: int, every: int) -> Callable[[Room], Planted]:
    """Rows are tagged whole with the version at their end."""

    def plant(room: Room) -> Planted:
        sampled = room.by_versions(*numbers, every=every)
        real = [np.array(numbers)[own] for own in sampled.versions]
        rows = tagged(token_rows(sampled), [np.full(own.size, own[-1]) for own in real])
        return rows, {"weights": room.weights}

    return plant


def _labelled(real: int, label: int) -> Callable[[Room], Planted]:
    def plant(room: Room) -> Planted:
        sampled = room.by_versions(real)
        rows = tagged(token_rows(sampled), [np.full(log.size, label) for log in sampled.logprobs])
        return rows, {"weights": room.weights}

    return plant


def _front(tokens: Callable[[int], list[int]]) -> Callable[[Room], Planted]:
    """The dump has tokens in front that the engine did not read, by the length of the prompt."""

    def plant(room: Room) -> Planted:
        sampled = room.sampled()
        prompts = [np.array([*tokens(prompt.size), *prompt], dtype=np.int64) for prompt in sampled.prompts]
        return token_rows(replace(sampled, prompts=prompts)), {}

    return plant


def _wrong_row(room: Room) -> Planted:
    sampled = room.sampled()
    logs, rng = list(sampled.logprobs), np.random.default_rng(room.engine.seed)
    logs[7] = rng.permutation(logs[7]) - rng.exponential(size=logs[7].size)
    return token_rows(sampled, logs), {}


def _swapped(room: Room) -> Planted:
    """Answers were sorted by length and their log-probs by something else: the rows of each length are in another
    order."""
    sampled = room.sampled()
    logs = list(sampled.logprobs)
    for size in {log.size for log in logs}:
        alike = [i for i, log in enumerate(logs) if log.size == size]
        for i, j in zip(alike, alike[1:] + alike[:1], strict=True):
            logs[i] = sampled.logprobs[j]
    return token_rows(sampled, logs), {}


def _filled(room: Room) -> Planted:
    """Answers are padded to one length, inside the mask, with log-prob 0."""
    sampled = room.sampled()
    longest = max(answer.size for answer in sampled.answers) + 2
    rows = token_rows(sampled)
    for row, answer in zip(rows, sampled.answers, strict=True):
        more = longest - answer.size
        row["token_ids"] += [PAD] * more
        row["mask"] += [1] * more
        row["logprobs"] += [0.0] * more
    return rows, {}


def _other_model(room: Room) -> Planted:
    return token_rows(Engine(folders=[room.other], seed=room.engine.seed).sample(room.prompts, Sampling())), {}


def _noise(room: Room) -> Planted:
    rng = np.random.default_rng(3)
    sampled = room.sampled()
    return token_rows(
        sampled, [np.minimum(0.0, row + 0.1 * rng.standard_normal(row.size)) for row in sampled.logprobs]
    ), {}


def _mean(row: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.full(row.size, row.mean())


SYSTEM = np.array([9, 11, 5, 7])
ASKED: tuple[Fault, ...] = (
    Fault(name="shifted by one, all rows", plant=_shift(-1, 1), cause="tokenizer", words="one place early"),
    Fault(name="shifted by one, 1 row in 2", plant=_shift(1, 2), cause="tokenizer", words="one place late"),
    Fault(name="shifted by one, 1 row in 10", plant=_shift(-1, 10), cause="tokenizer", words="one place early"),
    Fault(name="shifted by one, 1 row in 50", plant=_shift(-1, 50), cause="tokenizer", words="one place early"),
    Fault(name="bf16 arithmetic", plant=_sampled(Sampling(dtype=torch.bfloat16)), cause="precision", words="bfloat16"),
    Fault(
        name="bf16 arithmetic and log-softmax",
        plant=_sampled(Sampling(dtype=torch.bfloat16, log_dtype=torch.bfloat16)),
        cause="precision",
        words="bfloat16",
    ),
    Fault(name="fp16 arithmetic", plant=_sampled(Sampling(dtype=torch.float16)), cause="precision", words="float16"),
    Fault(
        name="temperature 0.7, not declared",
        plant=_sampled(Sampling(temperature=0.7)),
        cause="logprob_semantics",
        words="temperature 0.7,",
    ),
    Fault(
        name="temperature 1.35, not declared",
        plant=_sampled(Sampling(temperature=1.35)),
        cause="logprob_semantics",
        words="temperature 1.35,",
    ),
    Fault(
        name="temperature 0.93, declared 0.6",
        plant=_sampled(Sampling(temperature=0.93), temperature=0.6),
        cause="logprob_semantics",
        words="temperature 0.93,",
    ),
    Fault(
        name="raw log-probs at temperature 0.8",
        plant=_sampled(Sampling(), temperature=0.8),
        cause="logprob_semantics",
        words="temperature 1",
    ),
    Fault(
        name="top_p 0.85, not declared",
        plant=_sampled(Sampling(top_p=0.85)),
        cause="logprob_semantics",
        words="top_p 0.85",
    ),
    Fault(
        name="top_p 0.6, declared 0.9",
        plant=_sampled(Sampling(top_p=0.6), top_p=0.9),
        cause="logprob_semantics",
        words="top_p 0.6",
    ),
    Fault(name="top_k 5, not declared", plant=_sampled(Sampling(top_k=5)), cause="logprob_semantics", words="top_k 5"),
    Fault(
        name="top_k 23, not declared", plant=_sampled(Sampling(top_k=23)), cause="logprob_semantics", words="top_k 23"
    ),
    Fault(
        name="tagged with the version at the finish",
        plant=_finish_tag(1, 2, every=7),
        cause="version_tag",
        words="at their end",
    ),
    Fault(
        name="the same over three versions",
        plant=_finish_tag(1, 2, 3, every=5),
        cause="version_tag",
        words="at their end",
    ),
    Fault(name="log-probs of the next policy", plant=_labelled(2, 1), cause="version_tag", words="+1"),
    Fault(name="weights that never arrived", plant=_labelled(0, 3), cause="version_tag", words=""),
    Fault(
        name="leading pads in the dump",
        plant=_front(lambda size: [PAD] * (16 - size)),
        cause="tokenizer",
        words="begin with pads",
    ),
    Fault(
        name="begin token doubled in the engine only",
        plant=_sampled(Sampling(attends=lambda prompt: np.concatenate([[BOS], prompt]))),
        cause="tokenizer",
        words="begin token (1) more",
    ),
    Fault(
        name="begin token missing in the engine",
        plant=_sampled(Sampling(attends=lambda prompt: prompt[1:])),
        cause="tokenizer",
        words="did not read the begin token",
    ),
    Fault(
        name="pads attended, batches of 8",
        plant=_sampled(Sampling(rows_a_batch=8)),
        cause="tokenizer",
        words="attended to pads (0) in front of the prompts, to the longest of each 8 rows",
    ),
    Fault(
        name="pads attended, one batch",
        plant=_sampled(Sampling(rows_a_batch=64)),
        cause="tokenizer",
        words="attended to pads (0) in front of the prompts",
    ),
    Fault(
        name="positions of answers count pads",
        plant=_sampled(Sampling(pads_to=lambda size: -(-size // 16) * 16)),
        cause="tokenizer",
        words="positions count pads between",
    ),
    Fault(
        name="logarithms to base 2", plant=_log(lambda row: row / np.log(2)), cause="logprob_semantics", words="base 2"
    ),
    Fault(
        name="logarithms to base 10",
        plant=_log(lambda row: row / np.log(10)),
        cause="logprob_semantics",
        words="base 10",
    ),
    Fault(name="1 wrong row in 50", plant=_wrong_row, cause="rows", words="rows 7)"),
    Fault(
        name="divided by the length", plant=_log(lambda row: row / row.size), cause="logprob_semantics", words="divided"
    ),
    Fault(name="the mean of the row", plant=_log(_mean), cause="logprob_semantics", words="the mean of its row"),
    Fault(name="running sums", plant=_log(np.cumsum), cause="logprob_semantics", words="running sums"),
    Fault(
        name="log-probs of the likeliest token",
        plant=lambda room: (token_rows(s := room.sampled(), s.likeliest), {}),
        cause="logprob_semantics",
        words="likeliest token",
    ),
    Fault(name="log-probs of other rows", plant=_swapped, cause="tokenizer", words="ordered otherwise"),
    Fault(name="padding inside the mask", plant=_filled, cause="tokenizer", words="hold 0"),
)
UNASKED: tuple[Fault, ...] = (
    Fault(name="another model", plant=_other_model, cause="none"),
    Fault(name="noise of 0.1 nats", plant=_noise, cause="none"),
    Fault(name="a repetition penalty", plant=_sampled(Sampling(repetition_penalty=1.3)), cause="none"),
    Fault(name="min_p 0.1", plant=_sampled(Sampling(min_p=0.1)), cause="none"),
    Fault(
        name="a system prompt in the engine only",
        plant=_sampled(Sampling(attends=lambda prompt: np.concatenate([prompt[:1], SYSTEM, prompt[1:]]))),
        cause="none",
    ),
    Fault(
        name="a prompt cut to its last tokens",
        plant=_sampled(Sampling(attends=lambda prompt: prompt[-3:])),
        cause="none",
    ),
    Fault(name="temperature 0.7 with top_p 0.9", plant=_sampled(Sampling(temperature=0.7, top_p=0.9)), cause="none"),
    Fault(name="other ids: one more each", plant=lambda room: (_next_ids(room), {}), cause="none"),
)
"""Causes that nothing asks about: they must stay without a name, or with the right one."""


def _next_ids(room: Room) -> Rows:
    rows = token_rows(room.sampled())
    vocabulary = VOCABULARY[room.architecture]
    for row in rows:
        row["token_ids"] = [3 + (token - 2) % (vocabulary - 3) for token in row["token_ids"]]
    return rows
