"""Prompts, headers and dispatches as the text and rows that the tables keep. Both directions stand together; nothing
here touches a file."""

import json
from json.encoder import encode_basestring
from typing import Any

from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Message, Prompt
from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader
from rollout.types.weights import PolicyVersion

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
DISPATCH_COLUMNS = "dispatch_id, prompt, group_size, attempt, epoch, version, replica, created_at_s"


quoted = encode_basestring
"""A string as JSON."""


def compact_json(value: object) -> str:
    """JSON without spaces, keys in the order given."""
    return _ENCODER.encode(value)


def prompt_text(prompt: Prompt) -> str:
    """The text that `prompt_of` reads."""
    return compact_json(
        {
            "prompt_id": prompt.prompt_id,
            "pass_index": prompt.pass_index,
            "text": prompt.text,
            "messages": [(message.role, message.content) for message in prompt.messages],
            "answer": prompt.answer,
            "metadata": prompt.metadata,
        }
    )


def prompt_of(text: str) -> Prompt:
    """The prompt that `prompt_text` wrote."""
    fields: dict[str, Any] = json.loads(text)
    return Prompt(
        prompt_id=fields["prompt_id"],
        pass_index=fields["pass_index"],
        text=fields["text"],
        messages=tuple(Message(role=role, content=content) for role, content in fields["messages"]),
        answer=fields["answer"],
        metadata=tuple((name, value) for name, value in fields["metadata"]),
    )


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
    return compact_json(
        (
            header.dispatch_id,
            header.prompt_id,
            header.pass_index,
            header.replica,
            header.generation_s,
            header.reward_s,
            header.num_bytes,
            rows,
        )
    )


def header_of_text(text: str) -> GroupHeader:
    """The header that `header_text` wrote."""
    dispatch_id, prompt_id, pass_index, replica, generation_s, reward_s, num_bytes, rows = json.loads(text)
    return GroupHeader(
        dispatch_id=dispatch_id,
        prompt_id=prompt_id,
        pass_index=pass_index,
        replica=replica,
        trajectories=tuple(
            TrajectoryHeader(
                trajectory_id=trajectory_id,
                num_tokens=num_tokens,
                num_sampled=num_sampled,
                tokens_by_policy=tuple((PolicyVersion(epoch, version), count) for epoch, version, count in tokens),
                reward=reward,
                finish_reason=FinishReason(finish_reason),
            )
            for trajectory_id, num_tokens, num_sampled, tokens, reward, finish_reason in rows
        ),
        generation_s=generation_s,
        reward_s=reward_s,
        num_bytes=num_bytes,
    )


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
