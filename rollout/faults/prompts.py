"""Faults that act where a prompt becomes tokens. The ids in the trajectory are those that the engine saw: only the text
tells. They know no engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.faults.config import FaultsConfig, PromptFault, TokenizerSwapFault
from rollout.faults.draws import selected
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Message, Prompt

Ids = NDArray[np.int32]


class ChangedTokenizer:
    """Implements `rollout.tokenization.tokenizer.Tokenizer` over another one: text, conversations or ids are changed on
    their way, and no digest says so."""

    def __init__(
        self,
        inner: Tokenizer,
        *,
        text: Callable[[str], str] = lambda text: text,
        chat: Callable[[Sequence[Message]], Sequence[Message]] = lambda messages: messages,
        ids: Callable[[Ids], Ids] = lambda ids: ids,
    ) -> None:
        self.inner, self._text, self._chat, self._ids = inner, text, chat, ids

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.inner.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self.inner.bos_id

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self.inner.has_chat_template

    def encode(self, text: str) -> Ids:
        return self._ids(self.inner.encode(self._text(text)))

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        return self.inner.decode(ids, skip_special_tokens)

    def render_chat(self, messages: Sequence[Message]) -> Ids:
        return self._ids(self.inner.render_chat(self._chat(messages)))

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def fingerprint_fields(self) -> dict[str, str]:
        return self.inner.fingerprint_fields()

    def chat_template_digest(self) -> str:
        return self.inner.chat_template_digest()


def _swap(tokenizer: Tokenizer, fault: TokenizerSwapFault) -> Callable[[Ids], Ids]:
    """Two ids are exchanged."""
    ends = [tokenizer.encode(text)[-1:] for text in (fault.first, fault.second)]
    if not all(end.size for end in ends) or ends[0][0] == ends[1][0]:
        raise UserError(
            f"fault tokenizer_swap: got first = {fault.first!r} and second = {fault.second!r}; expected texts of two "
            "different tokens"
        )
    first, second = (int(end[0]) for end in ends)
    return lambda ids: np.where(ids == first, second, np.where(ids == second, first, ids)).astype(np.int32)


def _spaced(messages: Sequence[Message]) -> Sequence[Message]:
    *before, last = messages
    return (*before, replace(last, content=f"{last.content} "))


_CHANGES: Mapping[str, Callable[[Tokenizer, Any], Tokenizer]] = {
    "tokenizer_swap": lambda inner, fault: ChangedTokenizer(inner, ids=_swap(inner, fault)),
    "template_space": lambda inner, _: ChangedTokenizer(inner, text=lambda text: f"{text} ", chat=_spaced),
    "double_bos": lambda inner, _: ChangedTokenizer(inner, ids=lambda ids: np.concatenate([ids[:1], ids])),
}
"""Kind -> how it changes a tokenizer."""


class PlantedPrompts:
    """Which tokenizer encodes the prompt of a dispatch: replica, version and id of the dispatch decide, as for faults
    of an engine."""

    def __init__(self, tokenizer: Tokenizer, faults: FaultsConfig) -> None:
        self._tokenizer, self._seed = tokenizer, faults.seed
        self._faults = [fault for fault in faults.plant if isinstance(fault, PromptFault)]
        plant_tokenizer(tokenizer, self._faults)  # refuses now what could only fail later
        self._noted: dict[tuple[str, int], Dispatch] = {}

    def note(self, dispatches: Iterable[Dispatch]) -> None:
        """These dispatches are about to run here; a prompt runs once at a time in one pass."""
        if self._faults:
            self._noted.update({_key(dispatch.prompt): dispatch for dispatch in dispatches})

    def tokenizer_for(self, prompt: Prompt) -> Tokenizer:
        """The tokenizer of a prompt whose dispatch was noted; it is forgotten then."""
        dispatch = self._noted.pop(_key(prompt), None)
        if dispatch is None:
            return self._tokenizer
        return plant_tokenizer(self._tokenizer, [fault for fault in self._faults if self._acts(fault, dispatch)])

    def _acts(self, fault: PromptFault, dispatch: Dispatch) -> bool:
        served = fault.replica == dispatch.replica and dispatch.policy.version >= fault.start_version
        return served and selected(fault, self._seed, dispatch.dispatch_id)


def plant_tokenizer(tokenizer: Tokenizer, faults: Iterable[PromptFault]) -> Tokenizer:
    """A tokenizer with these faults, one round the other in their order; without any, `tokenizer` itself.

    Raises:
        UserError: a fault cannot act on this tokenizer.
    """
    for fault in faults:
        tokenizer = _CHANGES[fault.type](tokenizer, fault)
    return tokenizer


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.prompt_id, prompt.pass_index
