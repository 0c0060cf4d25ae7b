"""Independent evaluation: what is held out, what overlaps, what a fingerprint covers, and what a score is made of."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import BASE, build_tag
from support.episode_fakes import EOS, TOKENIZER, ToldEngine, chunk, stopping
from support.loop.local_fleet import inputs_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from rollout.config import ArithmeticConfig, EvaluationConfig, ExactMatchConfig, JsonlConfig, SamplingConfig
from rollout.environments.registry import build_source
from rollout.errors import ConcordError, UserError
from rollout.evaluation.evaluator import EvaluationReport, build_evaluator
from rollout.evaluation.overlap import check_prompts
from rollout.evaluation.prompts import held_out_prompts
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.prompts import Message, Prompt, PromptCursor
from rollout.types.trajectory import FinishReason
from rollout.types.weights import PolicyVersion

NEXT = PolicyVersion(BASE.trainer_epoch, BASE.version + 1)


def evaluation(**keys: object) -> EvaluationConfig:
    return EvaluationConfig.model_validate({"every_steps": 5, "prompts": 8, **keys})


def prompt(text: str, number: int = 0) -> Prompt:
    return Prompt(prompt_id=str(number), pass_index=0, text=text, answer="1")


# --- what is held out
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_sums_that_are_held_out_are_never_trained_on_and_always_the_same(seed: int):
    config = ArithmeticConfig(prompts=6400)
    source = build_source(config, seed)
    trained = {each.text for each in source.draw(PromptCursor(), source.size)[0]}
    held_out = held_out_prompts(config, evaluation(prompts=100), seed)
    assert len({each.text for each in held_out}) == 100
    assert not trained & {each.text for each in held_out}
    assert held_out == held_out_prompts(config, evaluation(prompts=100), seed)


def test_holding_out_changes_nothing_of_what_is_trained_on():
    config = ArithmeticConfig(prompts=50)
    assert build_source(config, 1).draw(PromptCursor(), 50) == build_source(config, 1).draw(PromptCursor(), 50)
    assert {p.text for p in held_out_prompts(config, evaluation(prompts=10), 1)} <= {
        p.text for p in build_source(ArithmeticConfig(prompts=60), 1).draw(PromptCursor(), 60)[0]
    }


def test_too_few_sums_to_hold_some_out_are_refused():
    with pytest.raises(
        UserError, match=r"environment.prompts = 95 and evaluation.prompts = 8, but operands of 1 digits make 100 sums"
    ):
        held_out_prompts(ArithmeticConfig(digits=1, prompts=95), evaluation(), 0)


def test_without_evaluation_nothing_is_held_out():
    assert held_out_prompts(ArithmeticConfig(), evaluation(every_steps=0), 0) == ()


def test_a_file_of_its_own_is_held_out_from_a_prompt_file(tmp_path: Path):
    for name, tasks in (("train", ["a", "b"]), ("eval", ["c", "d", "e"])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": task, "answer": "1"}) + "\n" for task in tasks)
        )
    config = JsonlConfig(path=tmp_path / "train.jsonl")
    held_out = held_out_prompts(config, evaluation(path=str(tmp_path / "eval.jsonl")), 0)
    assert sorted(str(each.text) for each in held_out) == ["c", "d", "e"]
    assert len(held_out_prompts(config, evaluation(path=str(tmp_path / "eval.jsonl"), prompts=2), 0)) == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.every_steps=5", "environment.type=jsonl", "environment.path=x.jsonl"], "no evaluation.path"),
        (["evaluation.every_steps=5", "evaluation.path=x.jsonl"], "holds prompts out by itself"),
        (
            ["evaluation.every_steps=5", "run.deterministic=true", "engine.type=torch", "staleness.order=dispatch"],
            "evaluation.every_steps with run.deterministic = true",
        ),
        (["evaluation.every_step=5"], "the nearest known key is 'every_steps'"),
    ],
)
def test_mistakes_in_the_config_are_named(overrides: Sequence[str], said: str):
    with pytest.raises(UserError) as caught:
        parse_config({}, "test", overrides)
    assert said in str(caught.value)


# --- duplicates and overlap
# --------------------------------------------------------------------------------------------

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "twelve",
    "small",
    "birds",
    "sing",
    "in",
    "the",
    "old",
    "tree",
]


def test_equal_prompts_overlap_whatever_their_white_space():
    found = check_prompts([prompt("12  + 34 =\n"), prompt("1 + 1 =")], [prompt("12 + 34 ="), prompt("5 + 5 =")])
    assert (found.exact, found.by_ngrams, found.overlapping, found.overlap, found.example) == (
        1,
        0,
        1,
        0.5,
        "12 + 34 =",
    )


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not():
    thirteen, twelve = " ".join(WORDS[2:15]), " ".join(WORDS[2:14])
    held_out = [prompt(" ".join(WORDS)), prompt("something else")]
    assert check_prompts([prompt(f"Say: {thirteen}!")], held_out).by_ngrams == 1
    assert check_prompts([prompt(f"Say: {twelve}!")], held_out).overlapping == 0


def test_an_instruction_before_every_task_is_no_overlap():
    instruction = " ".join(WORDS)
    held_out = [prompt(f"{instruction} Task {number}?") for number in range(10)]
    assert (
        check_prompts([prompt(f"{instruction} Another {number}?") for number in range(10)], held_out).overlapping == 0
    )


def test_a_system_prompt_is_not_part_of_the_task():
    def chat(task: str) -> Prompt:
        return Prompt(
            prompt_id=task,
            pass_index=0,
            messages=(Message(role="system", content=" ".join(WORDS)), Message(role="user", content=task)),
        )

    assert check_prompts([chat("a")], [chat("b")]).overlapping == 0
    assert check_prompts([chat("a")], [chat("a")]).overlapping == 1


def test_repeats_within_the_training_prompts_are_counted():
    found = check_prompts([prompt("a"), prompt("b"), prompt("a", 2), prompt(" a ", 3)], [])
    assert (found.train_prompts, found.duplicates, found.overlap) == (4, 2, 0.0)


def jsonl_run(tmp_path: Path, *overrides: str) -> RunConfig:
    for name, tasks in (("train", ["a", "b"]), ("eval", ["b", "c"])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": task, "answer": "1"}) + "\n" for task in tasks)
        )
    files = [f'environment={{type="jsonl", path="{tmp_path}/train.jsonl"}}', f'evaluation.path="{tmp_path}/eval.jsonl"']
    return parse_config({}, "test", [*files, "evaluation.every_steps=5", *overrides])


def test_a_run_whose_held_out_prompts_are_trained_on_does_not_start(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"1 of 2 held-out prompts are also training prompts \(1 exactly.*'b'.*raise evaluation.max_overlap",
    ):
        inputs_of(jsonl_run(tmp_path), MODEL)


def test_an_overlap_that_is_allowed_is_told_all_the_same(tmp_path: Path):
    found = inputs_of(jsonl_run(tmp_path, "evaluation.max_overlap=0.5"), MODEL).prompts
    assert found is not None
    assert (found.exact, found.overlapping) == (1, 1)


# --- scores
# ------------------------------------------------------------------------------------------------------------


def evaluate(answer: object, *, tokenizer: object = TOKENIZER, **keys: object) -> tuple[EvaluationReport, ToldEngine]:
    evaluator = build_evaluator(
        config=evaluation(**keys),
        environment=ArithmeticConfig(digits=1, prompts=20),
        reward=ExactMatchConfig(),
        sampling=SamplingConfig(max_new_tokens=6),
        seed=0,
        max_context=64,
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
    )
    engine = ToldEngine(answer)  # pyright: ignore[reportArgumentType]
    evaluator.connect(0, engine, build_tag())
    return asyncio.run(evaluator.evaluate(0, BASE, "e1-v0-1")), engine


def right_for(texts: set[str]) -> object:
    """Right answers for some prompts, by their text, wrong ones for the rest."""
    answers = {
        TOKENIZER.encode(str(p.text)).tobytes(): p
        for p in held_out_prompts(ArithmeticConfig(digits=1, prompts=20), evaluation(), 0)
    }

    def answer(request: GenerationRequest) -> list[TokenChunk]:
        asked = answers[request.prompt_ids.tobytes()]
        text = str(asked.answer) if asked.text in texts else "999"
        return [
            chunk(request, i, (*TOKENIZER.encode(text).tolist(), EOS), finish=FinishReason.STOP)
            for i in range(request.num_samples)
        ]

    return answer


def test_the_score_is_the_mean_over_held_out_prompts_with_its_standard_error():
    texts = [str(p.text) for p in held_out_prompts(ArithmeticConfig(digits=1, prompts=20), evaluation(), 0)]
    report, engine = evaluate(right_for(set(texts[:6])))
    assert (report.score, report.prompts, report.failed, report.policies) == (0.75, 8, 0, (BASE,))
    assert report.stderr == pytest.approx((0.75 * 0.25 / 7) ** 0.5)
    assert {request.sampling.top_k for request in engine.requests} == {1}, "greedy by default"


def test_tokens_of_two_versions_make_the_score_a_mixture():
    def answer(request: GenerationRequest) -> list[TokenChunk]:
        return [chunk(request, 0, (3,), BASE), chunk(request, 0, (EOS,), NEXT, FinishReason.STOP)]

    assert evaluate(answer)[0].policies == (BASE, NEXT)


def test_prompts_that_fail_are_counted_and_the_rest_is_scored():
    def answer(request: GenerationRequest) -> list[TokenChunk]:
        finish = FinishReason.ABORT if request.request_id.startswith("evaluation-e1-v0-1-0:") else FinishReason.STOP
        return [chunk(request, 0, (3, EOS), finish=finish)]

    report, _ = evaluate(answer)
    assert (report.prompts, report.failed) == (7, 1)
    assert "aborted" in report.failure


def test_without_a_finished_prompt_there_is_no_score():
    report, _ = evaluate(lambda request: [chunk(request, 0, (3, EOS), finish=FinishReason.ABORT)])
    assert (report.score, report.stderr, report.prompts, report.policies) == (None, None, 0, ())


def test_a_replica_that_was_never_connected_is_an_error():
    evaluator = build_evaluator(
        config=evaluation(),
        environment=ArithmeticConfig(),
        reward=ExactMatchConfig(),
        sampling=SamplingConfig(),
        seed=0,
        max_context=64,
        tokenizer=TOKENIZER,
    )
    with pytest.raises(ConcordError, match="knows no engine replica 3"):
        asyncio.run(evaluator.evaluate(3, BASE, "x"))


def differing(**keys: object) -> set[str]:
    """Parts of the configuration that differ from the standard one's."""
    one, other = evaluate(stopping(5))[0], evaluate(stopping(5), **keys)[0]
    parts = {name for (name, a), (_, b) in zip(one.parts, other.parts, strict=True) if a != b}
    assert (one.fingerprint == other.fingerprint) == (not parts)
    return parts


def test_the_fingerprint_covers_sampling_and_prompts_and_nothing_that_does_not_matter():
    assert differing() == set()
    assert differing(temperature=0.7) == {"sampling"}
    assert differing(samples=2) == {"sampling"}
    assert differing(prompts=7) == {"prompts", "prompt_ids"}
    assert differing(every_steps=1, max_overlap=0.5) == set()


def test_an_engine_that_is_another_changes_the_fingerprint():
    evaluator = build_evaluator(
        config=evaluation(),
        environment=ArithmeticConfig(digits=1, prompts=20),
        reward=ExactMatchConfig(),
        sampling=SamplingConfig(max_new_tokens=6),
        seed=0,
        max_context=64,
        tokenizer=TOKENIZER,
    )
    found: list[str] = []
    for tag in (build_tag(), replace(build_tag(), replica=1), replace(build_tag(), engine_version="another")):
        evaluator.connect(0, ToldEngine(stopping(5)), tag)
        found.append(asyncio.run(evaluator.evaluate(0, BASE, "x")).fingerprint)
    assert found[0] == found[1] != found[2]
