"""The config of a run: every mistake is named with its key and its cure."""

from pathlib import Path

import pytest
from support.paths import ROOT

from orchestrator.config import RunConfig, load_config, parse_config
from orchestrator.launch.plan import resource_plan, totals
from orchestrator.run_dir.layout import refuse_taken_name
from rollout.errors import UserError

QUICKSTART = ROOT / "examples" / "quickstart.toml"


def parse(*overrides: str) -> RunConfig:
    return parse_config({}, "test", overrides)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.stepps=3", "run.stepps: unknown key; the nearest known key is 'steps'"),
        ("enginee.type=vllm", "enginee: unknown key; the nearest known key is 'engine'"),
        (
            "trainer.gradloc.threshold.tau=5",
            "its kind is missing; set trainer.gradloc.threshold.type to one of 'given', 'calibrated'",
        ),
        (
            "trainer.optimizer.clip.alpha=3",
            "set trainer.optimizer.clip.type to one of 'global', 'layerclip', 'zclip', 'adagc'",
        ),
        (
            "faults.plant=[{factor=3.0}]",
            "faults.plant: its kind is missing; set faults.plant.type to one of 'stale_replica', ",
        ),
        (
            "trainer.optimizer.learning_rte=1",
            "trainer.optimizer.learning_rte: unknown key; the nearest known key is 'learning_rate'",
        ),
        ("run.steps=0", "run.steps"),
        ("staleness.max_staleness=-1", "staleness.max_staleness"),
        ("run.group_size=1", "set run.group_size to 2 or more"),
        ("trainer.ranks=3", "trainer.ranks = 3 does not divide"),
        ("episodes.workers=2", "set reward_workers.workers to 2 or more"),
        ("weights.transport=nccl", "set weights.transport = 'disk'"),
        ("run.deterministic=true", "engine.type"),
        ("reward.type=magic", "exact_match"),
        ("run.name=../elsewhere", "run.name"),
        ("trainer.algorithm.clip_low=0.1", "set trainer.algorithm.type"),
    ],
)
def test_a_mistake_is_named_with_its_key(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(override)
    assert said in str(caught.value)


def test_a_correction_that_would_take_an_algorithms_own_ratio_is_refused() -> None:
    with pytest.raises(UserError, match=r'"opsm" or "none", or consistency.mode = "gate" with when_behind = "wait"'):
        parse("trainer.algorithm.type=gspo", "consistency.correction.type=tis")
    gate = parse("trainer.algorithm.type=gspo", "consistency.correction.type=tis", "consistency.mode=gate")
    assert gate.trainer.algorithm.couples_tokens


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("engine.type=torch", "engine.return_routing=true"), "set model.moe = true"),
        (
            ("engine.type=torch", "model.type=tiny", "model.moe=true"),
            "set engine.return_routing = true (torch, or vllm on GPU)",
        ),
        (("model.type=tiny", "model.moe=true"), "got trainer.replay_routing = true with engine.type = 'vllm'"),
        (
            (
                "trainer.type=scripted",
                "engine.type=torch",
                "engine.return_routing=true",
                "model.type=tiny",
                "model.moe=true",
            ),
            'set trainer.type = "fsdp"',
        ),
    ],
)
def test_a_replay_without_routing_to_replay_is_refused_with_the_cure(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse("trainer.replay_routing=true", *overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize("engine", [("engine.type=torch",), ("engine.type=vllm", "engine.num_gpus=1")])
def test_a_replay_of_an_engine_that_returns_routing_is_taken(engine: tuple[str, ...]) -> None:
    config = parse(
        "trainer.replay_routing=true", *engine, "engine.return_routing=true", "model.type=tiny", "model.moe=true"
    )
    assert config.trainer.replay_routing


def test_vllm_returns_routing_only_on_gpu_and_where_it_shares_prefixes() -> None:
    with pytest.raises(UserError, match=r"needs Triton and so a GPU; set engine.num_gpus"):
        parse("engine.type=vllm", "engine.return_routing=true", "model.type=tiny", "model.moe=true")
    with pytest.raises(UserError, match=r'set engine\.kv_across_versions = "recompute"'):
        parse(
            "engine.type=vllm",
            "engine.return_routing=true",
            "model.type=tiny",
            "model.moe=true",
            "engine.num_gpus=1",
            "engine.kv_across_versions=keep",
        )


def test_an_unknown_key_inside_a_chosen_kind_names_that_kinds_keys() -> None:
    with pytest.raises(UserError, match=r"engine\.max_num_seq: unknown key; the nearest known key is 'max_num_seqs'"):
        parse_config({"engine": {"type": "torch", "max_num_seq": 3}}, "test")


@pytest.mark.parametrize("override", ["run", "=3", "run..steps=3", "run.steps.more=3"])
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_config(QUICKSTART, [override])


def test_overrides_take_toml_values_and_bare_words() -> None:
    config = load_config(QUICKSTART, ["engine.type=torch", "run.steps=7", "trainer.optimizer.learning_rate=1e-4"])
    assert (config.engine.type, config.run.steps, config.trainer.optimizer.learning_rate) == ("torch", 7, 1e-4)


def test_a_missing_file_and_broken_toml_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read config"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[run")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_a_config_survives_its_own_json() -> None:
    config = load_config(QUICKSTART)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_plan_counts_every_replica_and_rank() -> None:
    config = parse("engine.type=torch", "engine.replicas=2", "trainer.ranks=2", "trainer.num_gpus=1")
    assert totals(resource_plan(config)) == (5.0, 2.0)  # the consistency service is one of them


def test_capacity_does_not_depend_on_the_number_of_trainer_ranks() -> None:
    assert parse("trainer.ranks=2").max_concurrent_groups == parse("trainer.ranks=1").max_concurrent_groups == 48


def test_a_taken_name_is_refused_before_any_work_is_done_for_it(tmp_path: Path) -> None:
    config = parse(f"run.dir={tmp_path}", "run.name=mine")
    refuse_taken_name(config)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"'mine' exists .*concord resume"):
        refuse_taken_name(config)
