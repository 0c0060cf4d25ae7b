"""Faults in the config: those that cannot act are refused with the cure."""

import pytest

from orchestrator.config import RunConfig, parse_config
from rollout.errors import UserError


def parsed(plant: str, *overrides: str) -> RunConfig:
    return parse_config({}, "test", (f"faults.plant=[{{{plant}}}]", *overrides))


@pytest.mark.parametrize(
    ("plant", "overrides", "said"),
    [
        ('type="bf16_logprobs", replica=1', (), "choose 0 to 0"),
        ('type="raw_logprobs"', (), "set another temperature"),
        ('type="silent_temperature", temperature=1.0', (), "set another temperature"),
        ('type="silent_top_p"', ("sampling.top_p=0.9",), "set a smaller one"),
        ('type="stale_head"', (), "set model.tie_embeddings = false"),
        ('type="routing_perturbed"', (), "set model.moe = true"),
        ('type="missing_routing"', (), "engine.return_routing = true"),
        ('type="corrupt_tensor"', ("engine.type=scripted",), "set engine.type to 'torch' or 'vllm'"),
        (
            'type="kv_kept"',
            ("engine.type=torch", "engine.kv_across_versions=keep"),
            "set engine.kv_across_versions = 'recompute'",
        ),
        ('type="kv_kept"', ("engine.type=scripted",), "no KV cache"),
        ('type="stale_replica", rate=0.5', (), "leave rate out"),
        ('type="bf16_logprobs", rate=0', (), "faults.plant.rate"),
        ('type="tokenizer_swap", frist="a"', (), "the nearest known key is 'first'"),
        ("replica=0", (), "its kind is missing"),
        ('type="grad_spike"', ("trainer.type=scripted", "engine.type=scripted"), "set trainer.type = 'fsdp'"),
        ('type="ratio_spike"', ("consistency.mode=gate",), "set consistency.correction.type"),
        ('type="ratio_spike"', ("trainer.algorithm.type=gspo",), "such as 'grpo'"),
        ('type="nan_token", start_version=0', (), "greater than or equal to 1"),
        ('type="grad_spike", replica=0', (), "unknown key"),
    ],
)
def test_a_fault_that_cannot_act_is_refused_with_the_cure(plant: str, overrides: tuple[str, ...], said: str):
    with pytest.raises(UserError) as caught:
        parsed(plant, *overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("plant", "overrides"),
    [
        ('type="raw_logprobs"', ("sampling.temperature=0.8",)),
        ('type="silent_temperature"', ()),
        ('type="stale_head"', ("model.type=tiny", "model.tie_embeddings=false")),
        ('type="routing_perturbed"', ("model.type=tiny", "model.moe=true")),
        ('type="missing_routing"', ("engine.type=torch", "engine.return_routing=true")),
        ('type="ratio_spike"', ("consistency.mode=gate", "consistency.correction.type=tis")),
        ('type="block_explosion", every_steps=20', ()),
    ],
)
def test_a_fault_that_can_act_survives_its_own_json(plant: str, overrides: tuple[str, ...]):
    config = parsed(plant, *overrides)
    assert len(config.faults.plant) == 1
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
