"""Prompts, headers and dispatches as the text and rows that the tables keep. Both directions stand together; nothing
here touches a file."""

import json
from dataclasses import fields
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any

from rollout.types.codec import compact_json
from rollout.types.dispatch import Dispatch, LedgerEntry
from rollout.types.prompts import Message, Prompt
from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader
from rollout.types.weights import PolicyVersion

LEDGER = "SELECT epoch, version, digest FROM ledger WHERE lineage ORDER BY version, epoch"
"""The committed versions of the lineage, in order."""
_PROMPT = tuple(field.name for field in fields(Prompt))
_HEADER = ("dispatch_id", "prompt_id", "pass_index", "replica", "generation_s", "reward_s", "num_bytes")
_header_values = attrgetter(*_HEADER)
DISPATCH_COLUMNS = "dispatch_id, prompt, group_size, attempt, epoch, version, replica, created_at_s"


quoted = encode_basestring
"""A string as JSON."""


def prompt_text(prompt: Prompt) -> str:
    """The text that `prompt_of` reads."""
    messages = [(message.role, message.content) for message in prompt.messages]
    return compact_json({name: messages if name == "messages" else getattr(prompt, name) for name in _PROMPT})


def prompt_of(text: str) -> Prompt:
    """The prompt that `prompt_text` wrote."""
    stored: dict[str, Any] = json.loads(text)
    stored["messages"] = tuple(Message(role=role, content=content) for role, content in stored["messages"])
    stored["metadata"] = tuple((name, value) for name, value in stored["metadata"])
    return Prompt(**stored)


def header_text(header: GroupHeader) -> str:
    """The text that `header_of_text` reads: lists, since one is written for every group."""
    rows = [
        (
            t.trajectory_id,
            t.num_tokens,
            t.num_sampled,
            [(policy.trainer_epoch, policy.version, count) for policy, count in t.tokens_by_policy],
            float(t.reward),
            t.finish_reason,
        )
        for t in header.trajectories
    ]
    return compact_json((*_header_values(header), rows))


def header_of_text(text: str) -> GroupHeader:
    """The header that `header_text` wrote."""
    *values, rows = json.loads(text)
    stored: dict[str, Any] = dict(zip(_HEADER, values, strict=True))
    trajectories = tuple(
        TrajectoryHeader(
            trajectory_id=trajectory_id,
            num_tokens=num_tokens,
            num_sampled=num_sampled,
            tokens_by_policy=tuple((PolicyVersion(epoch, version), count) for epoch, version, count in tokens),
            reward=reward,
            finish_reason=FinishReason(finish),
        )
        for trajectory_id, num_tokens, num_sampled, tokens, reward, finish in rows
    )
    return GroupHeader(**stored, trajectories=trajectories)


def ledger_entry(epoch: int, version: int, digest: str) -> LedgerEntry:
    """The entry of a row of `LEDGER`."""
    return LedgerEntry(policy=PolicyVersion(epoch, version), digest=digest)


def dispatch_columns(dispatch: Dispatch) -> tuple[object, ...]:
    """The values of `DISPATCH_COLUMNS`."""
    policy = dispatch.policy
    place = (policy.trainer_epoch, policy.version, dispatch.replica, dispatch.created_at_s)
    return (dispatch.dispatch_id, prompt_text(dispatch.prompt), dispatch.group_size, dispatch.attempt, *place)


def dispatch_of(row: tuple[Any, ...]) -> Dispatch:
    """The dispatch of a row of `DISPATCH_COLUMNS`."""
    dispatch_id, prompt, group_size, attempt, epoch, version, replica, created_at_s = row
    return Dispatch(
        dispatch_id=dispatch_id,
        prompt=prompt_of(prompt),
        group_size=group_size,
        attempt=attempt,
        policy=PolicyVersion(epoch, version),
        replica=replica,
        created_at_s=created_at_s,
    )
