"""An engine of another framework, for dumps with planted faults: transformers alone, sampling token by token without a
cache, in float32 or half precision, over prompts that may differ from those of the dump. It imports nothing of
Concord's scoring, so that what it logs is independent of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = 0, 1, 2
Ids = NDArray[np.int64]
Rows = list[dict[str, Any]]
ARCHITECTURES = ("qwen3", "gpt2")
"""Rotary positions, grouped queries, tied, 2 blocks; and learned positions, a head of its own, 3 blocks."""


def write_model(directory: Path, architecture: str, seed: int) -> Path:
    """A small random model with logits that are far from alike, and its tokenizer with pad, begin and end tokens."""
    torch.manual_seed(seed)
    tokens: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "initializer_range": 0.3}
    if architecture == "qwen3":
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            **tokens,
        )
        model: Any = Qwen3ForCausalLM(config)
        scale, size = 1.2, 64
    else:
        gpt2 = GPT2Config(
            vocab_size=160, n_embd=64, n_layer=3, n_head=4, n_positions=256, tie_word_embeddings=False, **tokens
        )
        model = GPT2LMHeadModel(gpt2)
        scale, size = 1.1, 160
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    model.save_pretrained(directory)
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS} | {f"t{i}": i for i in range(3, size)}
    Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>")).save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def nudged(source: Path, directory: Path, seed: int, scale: float = 0.03) -> Path:
    """The weights of `source` after something like an optimizer step."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale * float(parameter.std()))
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the engine really samples."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    dtype: torch.dtype = torch.float32
    log_dtype: torch.dtype = torch.float32
    """What log-softmax is computed in."""
    attends: Callable[[Ids], Ids] = lambda prompt: prompt
    """What the engine reads in place of a prompt."""
    pads_to: Callable[[int], int] | None = None
    """Width that positions of the answer count from, given the length of a prompt."""
    pads_in_front: bool = False
    """Whether positions of the prompt count these pads too."""
    rows_a_batch: int = 0
    """Prompts are padded on the left with tokens that are attended to, to the longest of so many rows; 0: not."""
    switch_after: int = 0
    """Tokens after which the engine's weights change; 0: never."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a run of the engine gave, a row each."""

    prompts: list[Ids]
    answers: list[Ids]
    logprobs: list[NDArray[np.float64]]
    """[n] as sampled from."""
    likeliest: list[NDArray[np.float64]]
    """[n] of the likeliest token in the place."""
    versions: list[NDArray[np.int64]]
    """[n] which of the engine's weights sampled it."""


@dataclass(kw_only=True)
class Engine:
    """Samples with `folders[0]`, and with the ones after it where the weights change."""

    folders: Sequence[Path]
    seed: int = 0
    _models: dict[tuple[Path, torch.dtype], Any] = field(default_factory=dict)

    def model(self, folder: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401
        """Loaded once."""
        key = (folder, dtype)
        if key not in self._models:
            self._models[key] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return self._models[key]

    def prompts(self, count: int, vocabulary: int, begin: bool = True) -> list[Ids]:
        """Prompts of 3 to 12 random tokens, behind a begin token unless there is to be none."""
        rng = np.random.default_rng([self.seed, 1])
        head = [BOS] if begin else []
        return [np.array([*head, *rng.integers(3, vocabulary, size=rng.integers(3, 13))]) for _ in range(count)]

    def sample(self, prompts: Sequence[Ids], sampling: Sampling, new_tokens: int = 24) -> Sampled:
        """Sample an answer to each."""
        generator = torch.Generator().manual_seed(self.seed + 17)
        read = [sampling.attends(prompt) for prompt in prompts]
        if sampling.rows_a_batch:
            read = [prompt for rows in _batches(read, sampling.rows_a_batch) for prompt in _left_padded(rows)]
        count = len(prompts)
        found: dict[str, list[list[float]]] = {key: [[] for _ in range(count)] for key in ("t", "l", "m", "v")}
        alive, weights = set(range(count)), 0
        for step in range(new_tokens):
            if sampling.switch_after and step and step % sampling.switch_after == 0:
                weights = min(weights + 1, len(self.folders) - 1)
            rows = sorted(alive)
            texts = [np.concatenate([read[i], np.array(found["t"][i], dtype=np.int64)]) for i in rows]
            logits = self._logits(self.folders[weights], texts, [read[i].size for i in rows], sampling)
            logprobs = _processed(logits, texts, sampling)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)
            for place, i in enumerate(rows):
                token = int(chosen[place])
                found["t"][i].append(token)
                found["l"][i].append(float(logprobs[place, token]))
                found["m"][i].append(float(logprobs[place].max()))
                found["v"][i].append(weights)
                if token == EOS and step >= 3:
                    alive.discard(i)
            if not alive:
                break
        return Sampled(
            prompts=list(prompts),
            answers=[np.array(row, dtype=np.int64) for row in found["t"]],
            logprobs=[np.array(row) for row in found["l"]],
            likeliest=[np.array(row) for row in found["m"]],
            versions=[np.array(row, dtype=np.int64) for row in found["v"]],
        )

    def _logits(self, folder: Path, texts: Sequence[Ids], prompts: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[rows, V] behind the last token of each text."""
        width = max(text.size for text in texts)
        ids = torch.tensor([[*text, *[PAD] * (width - text.size)] for text in texts])
        more: dict[str, Any] = {}
        if sampling.pads_to is not None:
            position_ids = torch.arange(width).repeat(len(texts), 1)
            for line, prompt in zip(position_ids, prompts, strict=True):
                line[0 if sampling.pads_in_front else prompt :] += max(0, sampling.pads_to(prompt) - prompt)
            more = {"position_ids": position_ids.clamp(max=255), "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode():
            logits = self.model(folder, sampling.dtype)(input_ids=ids, use_cache=False, **more).logits
        return logits[torch.arange(len(texts)), torch.tensor([text.size - 1 for text in texts])]


def _processed(logits: torch.Tensor, texts: Sequence[Ids], sampling: Sampling) -> torch.Tensor:
    """[rows, V] log-probs that tokens are drawn from, in float64 unless in half precision."""
    scaled = logits.double() if sampling.log_dtype == torch.float32 else logits.to(sampling.log_dtype)
    if sampling.repetition_penalty != 1.0:
        for row, text in zip(scaled, texts, strict=True):
            seen = torch.from_numpy(np.unique(text))
            row[seen] = torch.where(
                row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
            )
    scaled = scaled / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True)
        mass = torch.softmax(ordered, dim=-1)
        cut = mass.cumsum(dim=-1) - mass >= sampling.top_p
        scaled = scaled.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf)
    if sampling.min_p:
        mass = torch.softmax(scaled, dim=-1)
        scaled = scaled.masked_fill(mass < sampling.min_p * mass.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.log_softmax(scaled, dim=-1).double()


def _batches(prompts: Sequence[Ids], rows: int) -> list[Sequence[Ids]]:
    return [prompts[first : first + rows] for first in range(0, len(prompts), rows)]


def _left_padded(prompts: Sequence[Ids]) -> list[Ids]:
    width = max(prompt.size for prompt in prompts)
    return [np.concatenate([np.full(width - prompt.size, PAD), prompt]) for prompt in prompts]
