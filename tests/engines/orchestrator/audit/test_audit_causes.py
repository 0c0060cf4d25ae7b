"""Causes of a gap that users make, in dumps that another library's engine sampled from a small model: each is asked and
named with its value. The whole list, for two models, is `benchmarks/consistency.py --only causes`."""

import pytest

from benchmarks.harness.dump_audits import judge, silent
from benchmarks.harness.dump_faults import ASKED, UNASKED, Fault, Room, build_room
from benchmarks.harness.dump_healthy import healthy

ROWS = 20
"""Faults of one row in 50 or one in 10 are those of the benchmark alone."""
HERE = (
    "shifted by one, 1 row in 10",
    "bf16 arithmetic",
    "fp16 arithmetic",
    "temperature 0.7, not declared",
    "top_p 0.6, declared 0.9",
    "top_k 5, not declared",
    "the same over three versions",
    "log-probs of the next policy",
    "leading pads in the dump",
    "begin token doubled in the engine only",
    "pads attended, batches of 8",
    "positions of answers count pads",
    "1 wrong row in 50",
    "log-probs of the likeliest token",
)
"""Each cause once, where arithmetic is real; those that are pure numbers have unit tests."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return build_room(tmp_path_factory.mktemp("causes"), "qwen3", 5, ROWS)


@pytest.mark.parametrize("fault", [fault for fault in ASKED if fault.name in HERE], ids=lambda fault: fault.name)
def test_a_cause_is_named_with_its_value(room: Room, fault: Fault):
    outcome = judge(room, fault)
    assert (outcome.named, outcome.right) == (fault.cause, True), outcome.words


def test_what_nothing_asks_about_gets_no_name(room: Room):
    assert [fault.name for fault in UNASKED[:2] if judge(room, fault).wrong] == []


def test_sound_dumps_of_every_layout_are_silent(room: Room):
    assert [name for name, planted in healthy(room) if not silent(room, planted)] == []
