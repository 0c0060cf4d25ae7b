"""Supervised warm start of the tiny model on two-digit sums, a share of which is wrong.

From noisy sums a model learns the task and doubt at once: its best guess is mostly right, its samples often are not,
and that gap is what reinforcement learning closes. Here the labels are what noisy sums are *on average*, a right digit
mixed with all digits, so the model sees the doubt without the noise and needs about half the steps.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollout.errors import UserError
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.model import EOS_ID, PAD_ID, VOCABULARY, tiny_architecture, tiny_tokenizer
from trainer.tiny.optimizer import OrthogonalMomentum

_PROMPT_TOKENS = 6
_ANSWER_TOKENS = 4
_PLUS, _EQUALS, _ZERO = VOCABULARY["+"], VOCABULARY["="], VOCABULARY["0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Constants of the warm start."""

    batch: int = 128
    matrix_rate: float = 0.035
    other_rate: float = 5e-3
    """AdamW's, for embeddings, norms and routers."""
    wrong_share: float = 0.8
    """Share of wrong sums at target accuracy 0; it falls to none at 1."""
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    held_out: int = 500
    """Sums that are never trained on; accuracies are measured on them."""
    check_steps: int = 10
    max_steps: int = 1500


RECIPE = Recipe()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What a warm start reached."""

    steps: int
    sampled_accuracy: float
    greedy_accuracy: float

    def as_dict(self) -> dict[str, float]:
        """For a file beside the model."""
        return asdict(self)


def warm_start(
    model: PreTrainedModel, target: float, seed: int, progress: Callable[[str], None], recipe: Recipe = RECIPE
) -> WarmStart:
    """Train `model` in place until a sample at temperature 1 is right with probability `target`, on sums that it never
    saw.

    Raises:
        UserError: the target was not reached.
    """
    run = _Run(model, target, seed, recipe)
    while run.num_steps < recipe.max_steps:
        for _ in range(recipe.check_steps):
            run.train()
        reached = run.measure()
        progress(
            f"warm start: step {reached.steps}, sampled accuracy {reached.sampled_accuracy:.2f}, greedy "
            f"{reached.greedy_accuracy:.2f}"
        )
        if reached.sampled_accuracy >= target:
            return reached
    raise UserError(
        f"the warm start did not reach target_accuracy {target} in {recipe.max_steps} steps; choose a lower one or "
        "another seed"
    )


class _Run:
    """A model in training."""

    def __init__(self, model: PreTrainedModel, target: float, seed: int, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._doubt = torch.tensor(doubts(recipe.wrong_share * (1 - target)))
        self._rng = np.random.default_rng(seed)
        pairs = self._rng.permutation(100 * 100)
        self._held_out, self._pairs = pairs[: recipe.held_out], pairs[recipe.held_out :]
        matrices = [parameter for name, parameter in model.named_parameters() if _is_hidden_matrix(name, parameter)]
        chosen = {id(parameter) for parameter in matrices}
        self._matrices = OrthogonalMomentum(matrices)
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self._others = torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.num_steps = 0

    def train(self) -> None:
        """One step on a fresh batch."""
        self.num_steps += 1
        rate = min(1.0, self.num_steps / self._recipe.warmup_steps)
        pairs = self._rng.choice(self._pairs, self._recipe.batch)
        loss = self._loss(encode(pairs, _sums(pairs)))
        self._model.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.max_grad_norm)
        for group in self._others.param_groups:
            group["lr"] = self._recipe.other_rate * rate
        self._others.step()  # pyright: ignore[reportUnknownMemberType]
        self._matrices.step(self._recipe.matrix_rate * rate)

    def _loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy over answer tokens: digits against mixed labels, the end token against itself."""
        answer = ids[:, _PROMPT_TOKENS:]
        logprobs = torch.log_softmax(self._answer_logits(ids), dim=-1)
        right = logprobs.gather(2, answer.unsqueeze(2)).squeeze(2)
        mixed = (1 - self._doubt) * right + self._doubt * logprobs[:, :, _ZERO : _ZERO + 10].mean(dim=2)
        return -torch.where(answer == EOS_ID, right, mixed)[answer != PAD_ID].mean()

    @torch.no_grad()
    def measure(self) -> WarmStart:
        """Accuracies on the held-out sums: the sampled one exactly, as the mean probability of the right answer and its
        end."""
        ids = encode(self._held_out, _sums(self._held_out))
        answer = ids[:, _PROMPT_TOKENS:]
        logprobs = torch.log_softmax(self._answer_logits(ids), dim=-1)
        padding = answer == PAD_ID
        right = logprobs.gather(2, answer.unsqueeze(2)).squeeze(2).masked_fill(padding, 0.0)
        greedy = ((logprobs.argmax(-1) == answer) | padding).all(dim=1)
        return WarmStart(
            steps=self.num_steps,
            sampled_accuracy=right.sum(1).exp().mean().item(),
            greedy_accuracy=greedy.float().mean().item(),
        )

    def _answer_logits(self, ids: Tensor) -> Tensor:
        """[B, T] ids -> [B, answer, V]: only positions that predict the answer reach the head."""
        return self._model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=_ANSWER_TOKENS).logits


def doubts(wrong_share: float) -> list[float]:
    """Probability that the sum shown is a wrong one, before each place of the answer, when all places before were
    right.

    A wrong sum has the right digit in one of ten cases, so every right digit makes a wrong sum less likely.
    """
    shares = [wrong_share]
    for _ in range(_ANSWER_TOKENS - 1):
        shares.append(shares[-1] / 10 / (1 - 0.9 * shares[-1]))
    return shares


def encode(pairs: NDArray[np.int64], sums: NDArray[np.int64]) -> Tensor:
    """[B] pairs (100 a + b) with the sums to show -> [B, 10] ids of `ab+cd=`, the sum's digits in reverse, the end,
    padding."""
    first, second = pairs // 100, pairs % 100
    ids = np.full((pairs.size, _PROMPT_TOKENS + _ANSWER_TOKENS), PAD_ID, dtype=np.int64)
    for column, digit in ((0, first // 10), (1, first % 10), (3, second // 10), (4, second % 10)):
        ids[:, column] = digit + _ZERO
    ids[:, 2], ids[:, 5] = _PLUS, _EQUALS
    length = 1 + (sums >= 10) + (sums >= 100)
    for place in range(3):
        ids[:, _PROMPT_TOKENS + place] = np.where(place < length, sums // 10**place % 10 + _ZERO, PAD_ID)
    ids[np.arange(pairs.size), _PROMPT_TOKENS + length] = EOS_ID
    return torch.as_tensor(ids)


def _sums(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    return pairs // 100 + pairs % 100


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight"))


def build_model(directory: Path, config: TinyModelConfig, progress: Callable[[str], None]) -> dict[str, float]:
    """Build, warm-start and save the model and its tokenizer; answers with what the warm start reached (empty without
    one)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the result does not depend on the machine's number of cores
    try:
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            torch.manual_seed(config.seed)  # pyright: ignore[reportUnknownMemberType]
            model = tiny_architecture(config)
            reached = (
                warm_start(model, config.target_accuracy, config.seed, progress).as_dict()
                if config.target_accuracy
                else {}
            )
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()
    model.save_pretrained(directory)  # pyright: ignore[reportUnknownMemberType]
    tiny_tokenizer().save_pretrained(directory)  # pyright: ignore[reportUnknownMemberType]
    return reached
