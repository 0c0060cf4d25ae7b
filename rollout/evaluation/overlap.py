"""Do prompts repeat, and are held-out prompts also trained on? Exactly (white space apart), and by runs of 13 words.

A run of words that many held-out prompts share is an instruction that stands before every task; it says nothing of an
overlap. Source of the 13 words: Brown et al., "Language Models are Few-Shot Learners", appendix C.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout.types.prompts import Prompt

NGRAM = 13
COMMON_SHARE = 0.05
"""A run of words in more than this share of the held-out prompts (and in more than two of them) is an instruction."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCheck:
    """What was found. Counts are of prompts."""

    train_prompts: int
    duplicates: int
    """Training prompts that repeat an earlier one."""
    evaluation_prompts: int
    exact: int
    """Held-out prompts that are a training prompt, word for word."""
    by_ngrams: int
    """Held-out prompts that share 13 words in a row with a training prompt."""
    overlapping: int
    """Held-out prompts of which either holds."""
    example: str
    """The beginning of one of them; empty without any."""

    @property
    def overlap(self) -> float:
        """Share of the held-out prompts that are also trained on."""
        return self.overlapping / self.evaluation_prompts if self.evaluation_prompts else 0.0


def check_prompts(train: Iterable[Prompt], held_out: Sequence[Prompt]) -> PromptCheck:
    """Compare one pass of training prompts with itself and with the held-out ones. Memory: 16 bytes a training prompt,
    and the held-out runs of words."""
    exact_of: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(held_out):
        exact_of.setdefault(_digest(_shown(prompt)), []).append(index)
    grams = _telling_grams(held_out)
    seen: set[bytes] = set()
    exact, by_ngrams = set[int](), set[int]()
    count = duplicates = 0
    for prompt in train:
        text = _shown(prompt)
        digest = _digest(text)
        count += 1
        duplicates += digest in seen
        seen.add(digest)
        exact.update(exact_of.get(digest, ()))
        if grams:
            by_ngrams.update(index for gram in _grams(text) for index in grams.get(gram, ()))
    either = sorted(exact | by_ngrams)
    return PromptCheck(
        train_prompts=count,
        duplicates=duplicates,
        evaluation_prompts=len(held_out),
        exact=len(exact),
        by_ngrams=len(by_ngrams),
        overlapping=len(either),
        example=_shown(held_out[either[0]])[:80] if either else "",
    )


def _shown(prompt: Prompt) -> str:
    """The task's own text: a system prompt is the same for all."""
    asked = "\n".join(message.content for message in prompt.messages if message.role != "system")
    return " ".join((asked if prompt.text is None else prompt.text).split())


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    return (tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1))


def _telling_grams(held_out: Sequence[Prompt]) -> dict[tuple[str, ...], list[int]]:
    """Run of words -> held-out prompts that have it, without those that are shared by many."""
    found: dict[tuple[str, ...], list[int]] = {}
    for index, prompt in enumerate(held_out):
        for gram in Counter(_grams(_shown(prompt))):
            found.setdefault(gram, []).append(index)
    most = max(2, COMMON_SHARE * len(held_out))
    return {gram: indices for gram, indices in found.items() if len(indices) <= most}
