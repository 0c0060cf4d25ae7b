"""Dumps without a fault, of every layout."""

import numpy as np
import torch

from .dump_engine import EOS, Sampling
from .dump_faults import VOCABULARY, Planted, Room, tagged
from .dump_rows import completion_rows, next_token_rows, token_rows


def healthy(room: Room) -> list[tuple[str, Planted]]:
    """Dumps without a fault: (name, rows and options)."""
    plain = room.sampled()
    padded = completion_rows(plain)
    longest = max(answer.size for answer in plain.answers)
    for row in padded:
        behind = longest - len(row["completion_ids"])
        row["completion_mask"] = [1] * len(row["completion_ids"]) + [0] * behind
        row["completion_ids"] = [*row["completion_ids"], *[EOS] * behind]
        row["completion_logprobs"] = [*row["completion_logprobs"], *[None] * behind]
    tools = token_rows(plain)
    for row in tools:
        first = row["mask"].index(1)
        row["mask"][first + 2 : first + 4] = [0, 0]
    versions = room.by_versions(1, 2, 3, every=6)
    by_version = tagged(token_rows(versions), [np.array([1, 2, 3])[own] for own in versions.versions])
    bf16 = room.sampled(Sampling(dtype=torch.bfloat16))
    half = {"dtype": "bfloat16", "engine_dtype": "bfloat16"}
    no_begin = room.sampled(prompts=room.engine.prompts(room.rows, VOCABULARY[room.architecture], begin=False))
    return [
        ("tokens", (token_rows(plain), {})),
        ("completion", (completion_rows(plain), {"layout": "completion"})),
        ("completion, padded behind the end", (padded, {"layout": "completion"})),
        ("next_token", (next_token_rows(plain, 0), {"layout": "next_token"})),
        ("next_token, a spare entry", (next_token_rows(plain, 1), {"layout": "next_token"})),
        ("tool answers outside the mask", (tools, {})),
        ("versions within rows", (by_version, {"weights": room.weights})),
        ("temperature 0.7", (token_rows(room.sampled(Sampling(temperature=0.7)), temperature=0.7), {})),
        ("top_p 0.9", (token_rows(room.sampled(Sampling(top_p=0.9)), top_p=0.9), {})),
        ("top_k 10", (token_rows(room.sampled(Sampling(top_k=10)), top_k=10), {})),
        ("an engine in bf16, declared", (token_rows(bf16), half)),
        ("no begin token", (token_rows(no_begin), {})),
    ]
