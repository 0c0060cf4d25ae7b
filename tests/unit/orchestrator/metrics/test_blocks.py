"""Values of blocks: read from a step's report, refused unless declared, and written as parts that are complete or
absent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from support.loop.loop_case import Case

from orchestrator.metrics.blocks import BlockValue, block_values
from orchestrator.run_dir.metrics_writer import BlockRecorder
from rollout.errors import ConcordError
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion
from trainer.step.scripted import ScriptedTrainer
from trainer.types.step import StepReport, StepRequest


def report(**values: Any) -> StepReport:
    measured: dict[str, Any] = dict.fromkeys(
        (
            "loss",
            "grad_norm",
            "learning_rate",
            "policy_entropy",
            "clip_fraction_low",
            "clip_fraction_high",
            "approx_kl",
            "reference_kl",
            "advantage_std",
        ),
        0.0,
    )
    counted: dict[str, Any] = dict.fromkeys(("num_tokens", "num_tokens_forwarded", "num_micro_batches"), 1)
    return StepReport(
        policy=PolicyVersion(1, 3),
        trained_ids=frozenset(),
        mean_abs_logprob_difference=0.0,
        **measured,
        **counted,
        **values,
    )


FULL = report(
    block_norms=(("a", 1.0), ("b", 2.0)),
    block_scales=(("a", 0.5), ("b", 1.0)),
    block_thresholds=(("a", 0.5), ("b", None)),
    probes=(("update_ratio", "a", 0.25),),
    attention_logits=(("b", (3.0, 4.0)),),
)
ROWS = [
    ("a", None, "block_grad_norm", 1.0),
    ("b", None, "block_grad_norm", 2.0),
    ("a", None, "block_clip_scale", 0.5),
    ("b", None, "block_clip_scale", 1.0),
    ("a", None, "block_clip_threshold", 0.5),
    ("a", None, "block_update_ratio", 0.25),
    ("b", 0, "block_max_attention_logit", 3.0),
    ("b", 1, "block_max_attention_logit", 4.0),
]


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    parts = sorted(folder.glob("*"), key=lambda path: int(path.stem.removeprefix("part-")))
    return [tuple(row.values())[1:] for part in parts for row in parquet.read_table(part).to_pylist()]


def test_a_report_gives_one_value_a_block_and_signal_and_none_where_nothing_was_measured():
    assert [(one.block, one.head, one.signal, one.value) for one in block_values(FULL)] == ROWS
    assert block_values(report()) == []


def test_parts_hold_every_value_of_every_step_and_go_on_after_a_resume(tmp_path: Path):
    recorder = BlockRecorder(tmp_path, steps_per_part=2)
    for step in (1, 2, 3):
        recorder.add(PolicyVersion(1, step), block_values(FULL))
    assert rows_of(tmp_path) == [(step, *row) for step in (1, 2) for row in ROWS]
    recorder.flush()
    resumed = BlockRecorder(tmp_path)
    resumed.add(PolicyVersion(2, 4), block_values(FULL))
    resumed.add(PolicyVersion(2, 5), [])
    resumed.flush()
    resumed.flush()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert rows_of(tmp_path) == [(step, *row) for step in (1, 2, 3, 4) for row in ROWS]


@pytest.mark.parametrize(
    ("signal", "head"), [("block_mood", None), ("block_grad_norm", 1), ("block_max_attention_logit", None)]
)
def test_a_value_that_is_not_declared_with_these_labels_is_refused(tmp_path: Path, signal: str, head: int | None):
    with pytest.raises(ConcordError, match=r"see orchestrator/metrics"):
        BlockRecorder(tmp_path).add(PolicyVersion(1, 1), [BlockValue(signal=signal, block="a", value=1.0, head=head)])


class Measuring(ScriptedTrainer):
    """Reports values of blocks, as a trainer with a model does."""

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        done = super().step(groups, request)
        names = ("block_norms", "block_scales", "block_thresholds", "probes", "attention_logits")
        return replace(done, **{name: getattr(FULL, name) for name in names})


def test_a_run_records_the_values_of_every_step_and_the_largest_logit_as_a_column(tmp_path: Path):
    case = Case(tmp_path)
    case.trainer = Measuring(case.config.trainer)
    case.drive()
    assert rows_of(case.run.block_metrics) == [(step, *row) for step in range(1, 9) for row in ROWS]
    assert parquet.read_table(case.run.metrics).to_pydict()["max_attention_logit"] == [4.0] * 8


def test_a_run_without_a_model_has_no_values_of_blocks(tmp_path: Path):
    case = Case(tmp_path)
    case.drive()
    assert list(case.run.block_metrics.iterdir()) == []
    assert parquet.read_table(case.run.metrics).to_pydict()["max_attention_logit"] == [-1.0] * 8
