"""A replica that tokenizes, computes or logs otherwise than the run expects gets no work, at the first start and after
a restart."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.builders import build_tag
from support.loop.engine_wrap import EngineWrap
from support.loop.local_fleet import (
    EngineWrapper,
    LocalEnginePort,
    LocalFleet,
    LocalWorkerPort,
    QuietReporter,
    inputs_of,
)
from support.paths import MODEL

from actors.ports import Started
from orchestrator.config import RunConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.replicas.registration import Expectation, check_registration, semantics_fit
from orchestrator.run_dir.layout import create_run_dir
from rollout.config import SamplingConfig, ScriptedConfig
from rollout.errors import RegistrationError, TokenizerMismatchError, WeightSyncError
from rollout.store.sqlite.reader import open_reader
from rollout.tokenization.agreement import TokenizerIdentity
from rollout.types.protocols import Engine
from rollout.types.trajectory import EngineTag, LogprobSemantics
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest
from trainer.config.trainer import WeightsConfig
from trainer.step.scripted import ScriptedTrainer

DEADLINE_S = 30.0
TOKENIZER = TokenizerIdentity(
    fingerprint_fields={"vocab": "a" * 64, "chat_template": "b" * 64}, probes={"digits": "c" * 64}
)
MANIFEST = WeightManifest(
    policy=PolicyVersion(1, 0),
    transport=Transport.DISK,
    location="weights",
    tensors=(),
    digest="d" * 64,
    canary=Canary(token_ids=np.zeros(3, dtype=np.int32), logprobs=np.full(2, -1.0, dtype=np.float32)),
    num_bytes=0,
)


def expectation(**sampling: Any) -> Expectation:
    return Expectation(
        tokenizer=TOKENIZER, engine=ScriptedConfig(), sampling=SamplingConfig(**sampling), weights=WeightsConfig()
    )


def check(
    expected: Expectation | None = None, *, tokenizer: TokenizerIdentity = TOKENIZER, gap_nats: float = 0.0, **tag: Any
) -> float:
    """Register a replica that differs from what is expected by what is given."""
    started = Started(
        tag=replace(build_tag(weights_digest=MANIFEST.digest), **tag),
        canary_logprobs=MANIFEST.canary.logprobs + np.float32(gap_nats),
        tokenizer=tokenizer,
    )
    return check_registration("engine replica 3", MANIFEST, expected or expectation(), started)


def test_a_replica_that_agrees_is_registered_with_its_gap_on_the_canary() -> None:
    assert check() == 0.0
    assert check(gap_nats=0.01) == pytest.approx(0.01, rel=1e-5)


def test_a_tokenizer_that_differs_is_refused_with_its_fields_and_probes_and_the_cure() -> None:
    other = TokenizerIdentity(fingerprint_fields={"vocab": "a" * 64, "chat_template": "e" * 64}, probes={})
    with pytest.raises(TokenizerMismatchError) as refused:
        check(tokenizer=other)
    message = str(refused.value)
    assert "engine replica 3" in message and "chat_template: got eeeeeeeeeeee, expected bbbbbbbbbbbb" in message
    assert "probe digits: got nothing, expected cccccccccccc" in message
    assert "vocab" not in message and "Give it the files" in message


@pytest.mark.parametrize(
    ("field", "got", "expected"),
    [
        ("weights_dtype", "bfloat16", r"'float32' \(engine\.dtype\)"),
        ("kv_dtype", "fp8", r"'float32' \(engine\.dtype\)"),
        ("quantization", "fp8", "'none'"),
        ("kv_across_versions", "keep", r"'recompute' \(engine\.kv_across_versions\)"),
        ("temperature", 0.7, r"1\.0 \(sampling\.temperature\)"),
        ("top_p", 0.9, r"1\.0 \(sampling\.top_p\)"),
        ("top_k", 20, r"0 \(sampling\.top_k\)"),
    ],
)
def test_a_declaration_that_the_config_does_not_ask_for_is_refused_by_its_name(
    field: str, got: Any, expected: str
) -> None:
    with pytest.raises(
        RegistrationError, match=rf"engine replica 3 declares .*{field}: got {got!r}, expected {expected}.*no work"
    ):
        check(**{field: got})


def test_every_field_that_differs_is_named_at_once() -> None:
    with pytest.raises(RegistrationError, match=r"weights_dtype.*kv_across_versions"):
        check(weights_dtype="float16", kv_across_versions="keep")


@pytest.mark.parametrize(
    ("semantics", "sampling", "fits"),
    [
        (LogprobSemantics.PROCESSED, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, True),
        (LogprobSemantics.RAW, {}, True),
        (LogprobSemantics.RAW, {"temperature": 0.7}, False),
        (LogprobSemantics.RAW, {"top_p": 0.9}, False),
        (LogprobSemantics.TEMPERATURE, {"temperature": 0.7}, True),
        (LogprobSemantics.TEMPERATURE, {"top_k": 5}, False),
        (LogprobSemantics.TEMPERATURE, {"top_p": 0.9}, False),
    ],
)
def test_log_probs_must_belong_to_the_distribution_that_was_sampled_from(
    semantics: LogprobSemantics, sampling: dict[str, Any], fits: bool
) -> None:
    assert semantics_fit(semantics, SamplingConfig(**sampling)) is fits
    if fits:
        check(expectation(**sampling), logprob_semantics=semantics, lists_supports=True, **sampling)
        return
    with pytest.raises(RegistrationError, match=f"logprob_semantics: got '{semantics}', expected 'processed'"):
        check(expectation(**sampling), logprob_semantics=semantics, **sampling)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}])
def test_an_engine_that_cannot_say_what_a_draw_kept_gets_no_truncated_work(sampling: dict[str, Any]) -> None:
    check(expectation(**sampling), lists_supports=True, **sampling)
    with pytest.raises(
        RegistrationError, match=r"lists_supports: got False.*sampling\.top_p = 1 and sampling\.top_k = 0"
    ):
        check(expectation(**sampling), **sampling)


def test_other_weights_and_another_model_are_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"digest ffffffffffff, the trainer published dddddddddddd as e1-v0"):
        check(weights_digest="f" * 64)
    with pytest.raises(WeightSyncError, match=r"0\.1 nats a token.*canary_ceiling_nats = 0\.05"):
        check(gap_nats=0.1)
    with pytest.raises(WeightSyncError, match="inf nats"):
        check(gap_nats=float("nan"))


# --- the whole loop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def other_template(tmp_path: Path) -> Path:
    """The model with another chat template."""
    copy = tmp_path / "other"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile)
    copy.chmod(0o755)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    return copy


class Declares(EngineWrap):
    """An engine whose tag says something else."""

    def __init__(self, engine: Engine, **tag: Any) -> None:
        super().__init__(engine)
        self._tag = tag

    async def start(self, manifest: WeightManifest) -> EngineTag:
        return replace(await self.engine.start(manifest), **self._tag)


class Case:
    """One run of scripted engines; replica 0 dies after step 2."""

    def __init__(self, tmp_path: Path, *overrides: str, wrap: EngineWrapper | None = None) -> None:
        document: dict[str, object] = {
            "run": {"dir": str(tmp_path), "name": "run", "steps": 12, "batch_groups": 3, "group_size": 2},
            "engine": {"type": "scripted"},
            "trainer": {"type": "scripted"},
            "consistency": {"mode": "off"},
            "deadlines": {"health_interval_s": 0.02},
        }
        self.config: RunConfig = parse_config(document, "test", overrides)
        self.run = create_run_dir(self.config, "run")
        self.reporter = QuietReporter()
        self.workers: dict[int, LocalWorkerPort] = {}
        """Episode workers that the run asked for."""
        self._wrap = wrap

    def drive(self, fleet_type: Callable[..., LocalFleet] = LocalFleet) -> dict[str, Any]:
        async def main() -> dict[str, Any]:
            fleet = fleet_type(self.config, self.run.path, MODEL, ScriptedTrainer(self.config.trainer), self._wrap)
            reached = asyncio.Event()
            self.reporter.on_step = lambda step: reached.set() if step == 2 else None

            async def kill_one() -> None:
                await reached.wait()
                await fleet.engines[0].kill()

            beside = asyncio.create_task(kill_one())
            try:
                async with asyncio.timeout(DEADLINE_S):
                    return await drive(self.config, self.run, inputs_of(self.config, MODEL), fleet, self.reporter)
            finally:
                beside.cancel()
                self.workers = dict(fleet.workers)
                await fleet.close()

        return asyncio.run(main())

    def refused_starts(self) -> list[str]:
        """Why incarnations did not start, in order."""
        events = [json.loads(line) for line in (self.run.path / "events.jsonl").read_text().splitlines()]
        return [json.dumps(event) for event in events if event["kind"] == "replica_start_failed"]


def assert_no_work(case: Case) -> None:
    """No version was committed, no episode worker was asked for, nothing was dispatched."""
    assert case.workers == {} and case.reporter.rows == []
    reader = open_reader(case.run.path)
    try:
        assert reader.commits() == () and reader.dispatch_record("d00000000") is None
    finally:
        reader.close()


def test_a_run_does_not_begin_with_a_replica_of_another_chat_template(tmp_path: Path, other_template: Path) -> None:
    class OneOther(LocalFleet):
        async def new_engine(self, slot: int) -> LocalEnginePort:
            self.engine_tokenizer_dir = other_template if slot == 1 else MODEL
            return await super().new_engine(slot)

    case = Case(tmp_path, "engine.replicas=2")
    with pytest.raises(TokenizerMismatchError, match=r"engine replica 1 tokenizes otherwise.*chat_template: got"):
        case.drive(OneOther)
    assert_no_work(case)


@pytest.mark.parametrize(
    ("tag", "overrides", "said"),
    [
        ({"weights_dtype": "bfloat16"}, (), "weights_dtype: got 'bfloat16', expected 'float32'"),
        ({"kv_across_versions": "keep"}, (), "kv_across_versions: got 'keep', expected 'recompute'"),
        (
            {"logprob_semantics": LogprobSemantics.RAW},
            ("sampling.temperature=0.7",),
            "logprob_semantics: got 'raw', expected 'processed'",
        ),
    ],
)
def test_a_run_does_not_begin_with_a_replica_of_other_numerics(
    tmp_path: Path, tag: dict[str, Any], overrides: tuple[str, ...], said: str
) -> None:
    case = Case(
        tmp_path,
        "engine.replicas=2",
        *overrides,
        wrap=lambda engine, slot: Declares(engine, **tag) if slot == 1 else engine,
    )
    with pytest.raises(RegistrationError, match=f"engine replica 1 declares .*{said}"):
        case.drive()
    assert_no_work(case)


def test_an_incarnation_that_comes_back_with_another_tokenizer_is_retired_and_the_next_one_serves(
    tmp_path: Path, other_template: Path
) -> None:
    class SecondOther(LocalFleet):
        starts = 0

        async def new_engine(self, slot: int) -> LocalEnginePort:
            self.starts += slot == 0
            self.engine_tokenizer_dir = other_template if (slot, self.starts) == (0, 2) else MODEL
            return await super().new_engine(slot)

    case = Case(tmp_path)
    summary = case.drive(SecondOther)
    assert summary["version"] == 12 and summary["replica_restarts"] == 1
    assert len(case.refused_starts()) == 1 and "chat_template: got" in case.refused_starts()[0]
    reader = open_reader(case.run.path)
    groups = [reader.read_group(i) for commit in reader.commits() for i in commit.dispatch_ids]
    reader.close()
    assert {t.tag.chat_template_digest for group in groups if group for t in group.trajectories} == {""}


def test_a_run_whose_replica_keeps_coming_back_with_another_tokenizer_ends_with_the_field(
    tmp_path: Path, other_template: Path
) -> None:
    class LaterOther(LocalFleet):
        async def new_engine(self, slot: int) -> LocalEnginePort:
            self.engine_tokenizer_dir = other_template if slot in self.engines else MODEL
            return await super().new_engine(slot)

    case = Case(tmp_path)
    with pytest.raises(TokenizerMismatchError, match=r"engine replica 0 .*chat_template: got"):
        case.drive(LaterOther)
    assert len(case.refused_starts()) == 3
