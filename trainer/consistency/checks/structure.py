"""Whether the columns of a trajectory fit together, and in which way two readings of one text differ. Numpy only.

Owns the checks that need no model: lengths, ids, mask, version spans, begin token, log-probs, drift. They read raw
columns, so that logs of other frameworks can be checked too. It must never know an engine, weights or a tokenizer, and
it repairs nothing: other tokens cannot be weighted away, and no text is tokenized again.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rollout.types.logprob_range import LEAST_NATS, ROUNDING_NATS
from rollout.types.trajectory import Trajectory
from trainer.types.evidence import Check, CheckFinding

Ids: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
Nats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]


class DriftKind(StrEnum):
    """How two readings of one text differ, the gravest first."""

    SPECIAL_TOKEN_COUNT = "special_token_count"
    """One has more special tokens: a message, an end token or a tool call came or went."""
    SPECIAL_TOKEN_TYPE = "special_token_type"
    """As many special tokens, but not the same ones in the same order."""
    NON_ASSISTANT_TEXT = "non_assistant_text"
    """What the policy was given differs, such as a newline after an end token."""
    ASSISTANT_TEXT = "assistant_text"
    """Only what the policy wrote differs: it was tokenized again, or rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """One trajectory as somebody logged it; nothing about it is certain yet."""

    token_ids: Ids
    """[T]"""
    sampled: NDArray[np.bool_]
    """[T] True where the policy is said to have chosen the token."""
    logprobs: Nats | None
    """[T] nats; what stands where nothing was sampled is ignored. None: not logged."""
    spans: tuple[tuple[int, int], ...] | None
    """[start, end) of the tokens that an engine sampled under one version each, in order. None: not logged."""


def check_structure(columns: Columns, vocab_size: int, bos_id: int | None = None) -> tuple[CheckFinding, ...]:
    """Findings about one trajectory; none where all is well. Columns of unequal length end the check: the rest reads
    them side by side.

    Args:
        columns: [T] each.
        vocab_size: rows of the model's embedding.
        bos_id: the token that begins a text, if there is one.
    """
    return tuple(_check_lengths(columns)) or (
        *_check_ids(columns, vocab_size, bos_id),
        *_check_mask(columns),
        *_check_spans(columns),
        *_check_logprobs(columns),
    )


def check_trajectory(trajectory: Trajectory, vocab_size: int, bos_id: int | None = None) -> tuple[CheckFinding, ...]:
    """`check_structure` of one of Concord's own trajectories."""
    spans = tuple((span.start, span.end) for span in trajectory.version_spans)
    columns = Columns(
        token_ids=trajectory.token_ids, sampled=trajectory.sampled, logprobs=trajectory.rollout_logprobs, spans=spans
    )
    return check_structure(columns, vocab_size, bos_id)


def doubled_bos(token_ids: Ids, bos_id: int | None) -> bool:
    """Whether the text begins twice: a template wrote the begin token and the tokenizer put another in front.
    token_ids: [T]. Source: vector V18."""
    return bos_id is not None and token_ids.size > 1 and bool((token_ids[:2] == bos_id).all())


def classify_drift(
    expected_ids: Ids, got_ids: Ids, special_ids: Collection[int], assistant: NDArray[np.bool_]
) -> DriftKind | None:
    """How `got_ids` [U] differ from `expected_ids` [T]; None where they are equal. Of several kinds the gravest.

    Args:
        expected_ids: what was sampled or sent.
        got_ids: what somebody else made of it: another tokenizer, or its text tokenized again.
        special_ids: tokens that structure a text and are no text themselves.
        assistant: [T] True where the policy wrote `expected_ids`.

    Raises:
        ValueError: mask and expected ids differ in length.
    """
    if assistant.shape != expected_ids.shape:
        raise ValueError(f"got a mask of {assistant.shape} for ids of {expected_ids.shape}; expected one entry a token")
    if np.array_equal(expected_ids, got_ids):
        return None
    special = np.array(sorted(special_ids), dtype=np.int64)
    marks, got_marks = np.flatnonzero(np.isin(expected_ids, special)), np.flatnonzero(np.isin(got_ids, special))
    if marks.size != got_marks.size:
        return DriftKind.SPECIAL_TOKEN_COUNT
    if (expected_ids[marks] != got_ids[got_marks]).any():
        return DriftKind.SPECIAL_TOKEN_TYPE
    pairs = zip(_stretches(marks, expected_ids.size), _stretches(got_marks, got_ids.size), strict=True)
    by_assistant = [
        _assistant_changed(expected_ids, got_ids[slice(*got)], assistant, stretch)
        for stretch, got in pairs
        if not np.array_equal(expected_ids[slice(*stretch)], got_ids[slice(*got)])
    ]
    return DriftKind.ASSISTANT_TEXT if all(by_assistant) else DriftKind.NON_ASSISTANT_TEXT


def check_same_ids(
    expected_ids: Ids, got_ids: Ids, special_ids: Collection[int], assistant: NDArray[np.bool_]
) -> tuple[CheckFinding, ...]:
    """A finding where what one side sent is not what the other holds; its code names the drift. Arguments as in
    `classify_drift`."""
    kind = classify_drift(expected_ids, got_ids, special_ids, assistant)
    if kind is None:
        return ()
    position = _shared(expected_ids, got_ids)
    detail = (
        f"got {got_ids.size} ids that first differ at {position} from the {expected_ids.size} expected ({kind}); "
        "expected the very same ids"
    )
    return (CheckFinding.failure(Check.TOKENIZER, f"drift_{kind}", detail, (position,)),)


def _check_lengths(columns: Columns) -> Iterator[CheckFinding]:
    shapes = {"token_ids": columns.token_ids.shape, "sampled": columns.sampled.shape}
    if columns.logprobs is not None:
        shapes["logprobs"] = columns.logprobs.shape
    if columns.token_ids.ndim != 1 or len(set(shapes.values())) != 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        yield _fail("lengths_differ", f"got {got}; expected one entry a token in each")


def _check_ids(columns: Columns, vocab_size: int, bos_id: int | None) -> Iterator[CheckFinding]:
    if outside := _where((columns.token_ids < 0) | (columns.token_ids >= vocab_size)):
        detail = (
            f"got {len(outside)} such ids (first: {columns.token_ids[outside[0]]}); expected 0 <= id < {vocab_size}"
        )
        yield _fail("id_outside_vocabulary", detail, outside)
    if doubled_bos(columns.token_ids, bos_id) and not columns.sampled[1]:
        detail = f"got token {bos_id} at 0 and 1; expected one begin token: template and tokenizer both write it"
        yield _fail("doubled_bos", detail, (1,))


def _check_mask(columns: Columns) -> Iterator[CheckFinding]:
    if not columns.sampled.any():
        yield _fail("nothing_sampled", "got no sampled token; expected at least one")
    elif columns.sampled[0]:
        detail = (
            "got a first token that counts as sampled, which nothing predicts; expected a given one: the mask is "
            "shifted, or the prompt is gone"
        )
        yield _fail("first_token_sampled", detail, (0,))


def _check_spans(columns: Columns) -> Iterator[CheckFinding]:
    """The mask holds exactly what engines say that they sampled."""
    if columns.spans is None:
        detail = "got no version spans; expected to know which tokens an engine sampled, and under which version"
        yield CheckFinding.open_question("spans_missing", detail)
        return
    covered, position = np.zeros(columns.token_ids.size, dtype=np.bool_), 0
    for start, end in columns.spans:
        if not position <= start < end <= covered.size:
            detail = (
                f"got a span [{start}, {end}) after position {position} of {covered.size}; expected spans in order, not"
                " empty, without overlap"
            )
            yield _fail("spans_broken", detail)
            return
        covered[start:end] = True
        position = end
    if loose := _where(columns.sampled & ~covered):
        detail = f"got {len(loose)} tokens in the mask that no engine sampled; expected none"
        yield _fail("sampled_without_version", detail, loose)
    if given := _where(covered & ~columns.sampled):
        detail = f"got {len(given)} tokens that an engine sampled and the mask leaves out; expected none"
        yield _fail("version_without_mask", detail, given)


def _check_logprobs(columns: Columns) -> Iterator[CheckFinding]:
    """Log-probs of sampled tokens. All 0 is how frameworks log nothing, and looks like a policy that is certain of
    every token."""
    if columns.logprobs is None:
        detail = "got no rollout log-probs; expected one a sampled token: nothing can be compared without them"
        yield CheckFinding.open_question("logprobs_missing", detail)
        return
    if not columns.sampled.any():
        return
    if positions := _where(columns.sampled & ~np.isfinite(columns.logprobs)):
        detail = f"got {len(positions)} log-probs that are NaN or infinite; expected numbers"
        yield _fail("logprob_not_finite", detail, positions)
    above = columns.sampled & np.isfinite(columns.logprobs) & (columns.logprobs > ROUNDING_NATS)
    if positions := _where(above):
        highest = float(columns.logprobs[above].max())
        detail = f"got {len(positions)} log-probs above 0 (up to {highest:.3g} nats); expected none"
        yield _fail("logprob_positive", detail, positions)
    below = columns.sampled & np.isfinite(columns.logprobs) & (columns.logprobs < LEAST_NATS)
    if positions := _where(below):
        lowest = float(columns.logprobs[below].min())
        detail = (
            f"got {len(positions)} log-probs below {LEAST_NATS:g} nats (down to {lowest:.6g}), which no sampled token "
            "has; expected those of the tokens, and no stand-in"
        )
        yield _fail("logprob_impossible", detail, positions)
    if not columns.logprobs[columns.sampled].any():
        detail = "got log-probs that are all 0, as where none were logged; expected those of the sampled tokens"
        yield CheckFinding.open_question("logprobs_all_zero", detail)


def _assistant_changed(expected_ids: Ids, got: Ids, assistant: NDArray[np.bool_], stretch: tuple[int, int]) -> bool:
    """Whether only the policy's words differ in a stretch [start, end) without special tokens, for which the other side
    has `got`."""
    start, end = stretch
    mine = expected_ids[start:end]
    head = _shared(mine, got)
    tail = _shared(mine[head:][::-1], got[head:][::-1])
    changed = assistant[start + head : end - tail]
    if changed.size:
        return bool(changed.all())
    put_in_at = start + head
    if put_in_at < end:
        return bool(assistant[put_in_at])
    if start < end:
        return bool(assistant[end - 1])
    return end < assistant.size and bool(
        assistant[end]
    )  # an empty stretch belongs to who wrote the special token that closes it


def _stretches(marks: NDArray[np.intp], size: int) -> list[tuple[int, int]]:
    """[start, end) of what lies between special tokens at `marks`; empty ones included."""
    at = cast(list[int], marks.tolist())
    return list(zip([0, *(mark + 1 for mark in at)], [*at, size], strict=True))


def _shared(left: Ids, right: Ids) -> int:
    """Tokens that both begin with."""
    length = min(left.size, right.size)
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if differ.size else length


def _where(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(cast(list[int], np.flatnonzero(mask).tolist()))


_fail = partial(CheckFinding.failure, Check.STRUCTURE)
