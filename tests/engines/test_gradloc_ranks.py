"""The search over two ranks."""

from pathlib import Path

from gradloc_room import two_ranks_find_what_was_planted
from trainer_room import run_ranks


def test_two_ranks_find_a_culprit_on_each_and_report_alike(tmp_path: Path):
    run_ranks(2, two_ranks_find_what_was_planted, tmp_path)
