"""Faults that act where a prompt becomes tokens. The ids in the trajectory are those that the engine saw: only the text
tells. They know no engine."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.faults.config import FaultsConfig, FaultSection, PromptFault, TemplateSpaceFault, TokenizerSwapFault
from rollout.faults.draws import selected
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Message, Prompt


class TokenizerWrapper:
    """Implements `rollout.tokenization.tokenizer.Tokenizer` over another one; faults override how text becomes ids."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens after which a sample stops."""
        return self.inner.eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self.inner.bos_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.inner.vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self.inner.has_chat_template

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] ids of raw text."""
        return self.inner.encode(text)

    def decode(self, ids: NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.inner.decode(ids, skip_special_tokens)

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P] ids of a conversation."""
        return self.inner.render_chat(messages)

    def fingerprint(self) -> str:
        """The inner tokenizer's: the fault does not say so."""
        return self.inner.fingerprint()

    def fingerprint_fields(self) -> dict[str, str]:
        """The inner tokenizer's."""
        return self.inner.fingerprint_fields()

    def chat_template_digest(self) -> str:
        """The inner tokenizer's."""
        return self.inner.chat_template_digest()


class SwappedTokens(TokenizerWrapper):
    """Two ids are exchanged."""

    def __init__(self, inner: Tokenizer, fault: TokenizerSwapFault) -> None:
        """Find the two ids.

        Raises:
            UserError: the texts of the fault are not two tokens.
        """
        super().__init__(inner)
        ends = [inner.encode(text)[-1:] for text in (fault.first, fault.second)]
        if not all(end.size for end in ends) or ends[0][0] == ends[1][0]:
            raise UserError(
                f"fault tokenizer_swap: got first = {fault.first!r} and second = {fault.second!r}; expected texts of "
                "two different tokens"
            )
        self._first, self._second = int(ends[0][0]), int(ends[1][0])

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] ids, two of them exchanged."""
        return self._swapped(self.inner.encode(text))

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P] ids, two of them exchanged."""
        return self._swapped(self.inner.render_chat(messages))

    def _swapped(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        swapped = ids.copy()
        swapped[ids == self._first], swapped[ids == self._second] = self._second, self._first
        return swapped


class SpacedTemplate(TokenizerWrapper):
    """A space at the end of the text."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] ids of the text and a space."""
        return self.inner.encode(f"{text} ")

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P] ids of a conversation whose last message has a space more."""
        *before, last = messages
        return self.inner.render_chat((*before, replace(last, content=f"{last.content} ")))


class DoubledBos(TokenizerWrapper):
    """The first token twice."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P + 1] ids."""
        return _doubled(self.inner.encode(text))

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P + 1] ids."""
        return _doubled(self.inner.render_chat(messages))


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
        return plant_tokenizer(
            self._tokenizer, [fault for fault in self._faults if self._acts(fault, fault.type, dispatch)]
        )

    def _acts(self, fault: FaultSection, kind: str, dispatch: Dispatch) -> bool:
        served = fault.replica == dispatch.replica and dispatch.policy.version >= fault.start_version
        return served and selected(fault, kind, self._seed, dispatch.dispatch_id)


def plant_tokenizer(tokenizer: Tokenizer, faults: Iterable[PromptFault]) -> Tokenizer:
    """A tokenizer with these faults, one round the other in their order; without any, `tokenizer` itself.

    Raises:
        UserError: a fault cannot act on this tokenizer.
    """
    for fault in faults:
        if isinstance(fault, TokenizerSwapFault):
            tokenizer = SwappedTokens(tokenizer, fault)
        elif isinstance(fault, TemplateSpaceFault):
            tokenizer = SpacedTemplate(tokenizer)
        else:
            tokenizer = DoubledBos(tokenizer)
    return tokenizer


def _doubled(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([ids[:1], ids])


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.prompt_id, prompt.pass_index
