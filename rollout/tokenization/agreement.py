"""What a tokenizer declares and does, as digests that two processes compute apart and compare.

Fields say what the files of the model declare; probes say what the installed library makes of them: the same files can
give other ids under another version of it. Chats have no probe, since a template may write the date; the template
itself is a field. It must never know engines, trainers or sampled ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import numpy as np

from rollout.errors import ConcordError, UserError, boundary
from rollout.published.digests import json_digest
from rollout.tokenization.tokenizer import Tokenizer

PROBES: Mapping[str, str] = MappingProxyType(
    {
        "words": "Hello, world! I'm sure they'd say DON'T; the_quick-brownFox jumps.",
        "unicode": "naïve café straße Ærø 中文 日本語 한국어 Ελληνικά русский العربية हिन्दी",
        "combining_marks": "e\u0301 \u00e9 n\u0303 a\u030a\u0323 \u1100\u1161\u11a8 \uac01 \ufb01 \u212b",
        "emoji": (
            "\U0001f642 \U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
            "\u2764\ufe0f"
        ),
        "white_space": "  a   b    c\u00a0d\u2003e\u200bf   ",
        "lines": "a\tb\t\tc\nd\n\n\ne\r\nf\rg\n\t\n",
        "digits": "0 7 42 007 1234567 3.14159 -1,000,000.5e-10 12+34=46 \u0661\u0662 \u00bd",
        "tool_call": (
            '<tool_call>\n{"name": "find", "arguments": {"query": "a \\"b\\"\\n c", "k": [1, 2.5], "tags":'
            " {}}}\n</tool_call>"
        ),
        "special_text": (
            "<s>a</s> <|im_start|>user\nb<|im_end|>\n<|endoftext|><pad><eos><bos><unk>[CLS] [INST] c "
            "[/INST]<think></think>"
        ),
        "blank": " ",
        "empty": "",
    }
)
"""Name of a probe -> its text."""
OWN_SPECIAL_TOKENS = "own_special_tokens"
"""Name of the probe whose text a tokenizer makes itself: its begin and end tokens, written out between letters."""
REFUSED = "refused"
"""Stands in place of a digest where the tokenizer cannot encode the text at all (a vocabulary of characters without an
unknown token)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """One side of the comparison."""

    fingerprint_fields: dict[str, str]
    """Field -> SHA-256, of `Tokenizer.fingerprint_fields`."""
    probes: dict[str, str]
    """Name of a probe -> SHA-256 of the canonical JSON of its ids and of the text that they decode to, or `REFUSED`."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the fields: what `Tokenizer.fingerprint` and an `EngineTag` hold."""
        return json_digest(self.fingerprint_fields)


def identify(tokenizer: Tokenizer) -> TokenizerIdentity:
    """Take the digests of `tokenizer`; a probe that it refuses is noted as such."""
    probes = {name: _probe(tokenizer, text) for name, text in PROBES.items()}
    probes[OWN_SPECIAL_TOKENS] = _probe(tokenizer, None)
    return TokenizerIdentity(fingerprint_fields=tokenizer.fingerprint_fields(), probes=probes)


def differences(expected: TokenizerIdentity, got: TokenizerIdentity) -> tuple[str, ...]:
    """What the two differ in: names of fields, then `probe NAME`; empty where they agree. What only one side has
    counts."""
    fields = _unlike(expected.fingerprint_fields, got.fingerprint_fields)
    return (*fields, *(f"probe {name}" for name in _unlike(expected.probes, got.probes)))


def _unlike(expected: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    return [name for name in {**expected, **got} if expected.get(name) != got.get(name)]


def _probe(tokenizer: Tokenizer, text: str | None) -> str:
    """Digest of one probe; None takes the text of the tokenizer's own special tokens."""
    try:
        with boundary(UserError, "a probe text"):
            ids = tokenizer.encode(_own_special_text(tokenizer) if text is None else text)
            return json_digest([cast(list[int], ids.tolist()), tokenizer.decode(ids, skip_special_tokens=False)])
    except ConcordError:
        return REFUSED


def _own_special_text(tokenizer: Tokenizer) -> str:
    named = tokenizer.eos_ids if tokenizer.bos_id is None else (tokenizer.bos_id, *tokenizer.eos_ids)
    return "a".join(
        ["", *(tokenizer.decode(np.array([i], dtype=np.int32), skip_special_tokens=False) for i in named), ""]
    )
