"""A reward gives a finite number, or a failure with its reason; whatever else it does."""

import math
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.builders import build_prompt, build_trajectory

from rollout.config import ExactMatchConfig, MathVerifyConfig, PythonRewardConfig
from rollout.errors import RewardError, UserError, place_in
from rollout.rewards.errors import RewardFailure, RewardInvalid, RewardRaised, RewardTimeout, RewardWorkerDied
from rollout.rewards.judging import judge, judge_group
from rollout.rewards.registry import build_reward, needs_answer, needs_text
from rollout.types.dispatch import FailReason
from rollout.types.prompts import Prompt
from rollout.types.protocols import RewardFunction
from rollout.types.trajectory import FinishReason, Reward, Trajectory

SAMPLE = build_trajectory()


def returning(value: object) -> RewardFunction:
    """A reward function of the user's that returns `value`, which need not be a reward."""

    def reward(prompt: Prompt, completion: str, trajectory: Trajectory) -> object:
        return value

    return cast(RewardFunction, reward)


@pytest.mark.parametrize(
    ("completion", "finish_reason", "reward"),
    [
        ("64", FinishReason.STOP, 1.0),
        (" 64\n", FinishReason.STOP, 1.0),
        ("46", FinishReason.STOP, 0.0),
        ("64", FinishReason.LENGTH, 0.0),
        ("", FinishReason.STOP, 0.0),
    ],
)
def test_an_exact_match_equals_the_answer_and_ended_by_itself(
    completion: str, finish_reason: FinishReason, reward: float
):
    exact = build_reward(ExactMatchConfig())
    assert (
        judge(exact, build_prompt(answer="64"), completion, replace(SAMPLE, finish_reason=finish_reason)).total
        == reward
    )


def test_an_exact_match_minds_white_space_when_told_to():
    assert judge(build_reward(ExactMatchConfig(strip=False)), build_prompt(answer="64"), "64 ", SAMPLE).total == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("1/2", "so it is $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("$x^2+1$", "\\boxed{1+x^2}", 1.0),
        ("64", "the answer is 46", 0.0),
        ("64", "no idea", 0.0),
        ("64", "", 0.0),
    ],
)
def test_math_verify_judges_equivalence(answer: str, completion: str, reward: float):
    assert judge(build_reward(MathVerifyConfig()), build_prompt(answer=answer), completion, SAMPLE).total == reward


def test_math_verify_works_outside_the_main_thread():
    rewards: list[Reward] = []
    function = build_reward(MathVerifyConfig())
    thread = threading.Thread(
        target=lambda: rewards.append(judge(function, build_prompt(answer="1/4"), "0.25", SAMPLE))
    )
    thread.start()
    thread.join(timeout=30)
    assert rewards == [Reward(total=1.0)]


@pytest.mark.parametrize("config", [ExactMatchConfig(), MathVerifyConfig()])
def test_a_comparing_reward_without_an_answer_raises_and_says_so_beforehand(
    config: ExactMatchConfig | MathVerifyConfig,
):
    assert needs_answer(config)
    with pytest.raises(RewardRaised, match="prompt p-0 has no answer"):
        judge(build_reward(config), replace(build_prompt(), answer=None), "1", SAMPLE)


def test_math_verify_raises_where_the_answer_itself_holds_no_mathematics():
    with pytest.raises(RewardRaised, match="finds no mathematics in the answer"):
        judge(build_reward(MathVerifyConfig()), build_prompt(answer="$$"), "1", SAMPLE)


@pytest.mark.parametrize(
    ("value", "total"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (Reward(total=3.0, parts=(("style", 1.0),)), 3.0),
    ],
)
def test_a_reward_is_a_number_or_a_reward(value: object, total: float):
    judged = judge(returning(value), build_prompt(), "", SAMPLE)
    assert type(judged) is Reward
    assert (type(judged.total), judged.total) == (float, total)
    assert judged.parts == (value.parts if isinstance(value, Reward) else ())


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "1.0", None, [1.0], np.array([1.0]), 1j, Reward(total=1.0, parts=(("style", math.nan),))],
)
def test_what_is_no_finite_number_is_an_invalid_reward(value: object):
    with pytest.raises(
        RewardInvalid, match=r"the reward of d-0/0.* is .*; expected a finite number or a Reward"
    ) as caught:
        judge(returning(value), build_prompt(), "", SAMPLE)
    assert caught.value.reason is FailReason.REWARD_INVALID


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), RewardError("boom"), UserError("boom")])
def test_a_raising_reward_is_data_with_its_own_words(error: Exception):
    def raising(prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        raise error

    with pytest.raises(RewardRaised, match="boom") as caught:
        judge(raising, build_prompt(), "", SAMPLE)
    assert caught.value.reason is FailReason.REWARD_RAISED


def test_a_group_is_judged_in_order():
    def length(prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        return Reward(total=float(len(completion)))

    trajectories = [build_trajectory(index=index) for index in range(3)]
    assert [reward.total for reward in judge_group(length, build_prompt(), ["aaa", "", "a"], trajectories)] == [
        3.0,
        0.0,
        1.0,
    ]


def test_a_reward_that_raises_is_reported_with_the_line_of_the_users_code_that_called_what_failed(tmp_path: Path):
    """The exception comes out of the standard library; what can be mended is the line of the user's that led there."""
    (tmp_path / "graded_by_json.py").write_text(
        "import json\n\ndef reward(prompt, completion, trajectory):\n    return json.loads(completion)['score']\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        function = build_reward(PythonRewardConfig(function="graded_by_json:reward"))
    finally:
        sys.path.remove(str(tmp_path))
    with pytest.raises(RewardRaised) as caught:
        judge(function, build_prompt(), "no JSON", SAMPLE)
    assert place_in(str(caught.value)) == f"{tmp_path}/graded_by_json.py:4 in reward"


@pytest.mark.parametrize("error", [RewardRaised, RewardInvalid, RewardTimeout, RewardWorkerDied])
def test_a_reward_failure_keeps_message_and_reason_between_processes(error: type[RewardFailure]):
    copy = pickle.loads(pickle.dumps(error("words")))
    assert (type(copy), str(copy), copy.reason) == (error, "words", error.reason)


def test_every_reward_failure_has_a_reason_of_its_own():
    assert len({error.reason for error in (RewardRaised, RewardInvalid, RewardTimeout, RewardWorkerDied)}) == 4


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder on the import path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [
        name for name, module in sys.modules.items() if str(tmp_path) in (getattr(module, "__file__", None) or "")
    ]:
        del sys.modules[name]


def test_a_function_of_the_users_own_is_imported_by_name(importable: Path):
    (importable / "my_rewards.py").write_text(
        "def half(prompt, completion, trajectory):\n    return len(completion) / 2\nhalf.needs_text = False\n"
    )
    function = build_reward(PythonRewardConfig(function="my_rewards:half"))
    assert judge(function, build_prompt(), "abc", SAMPLE).total == 1.5
    assert not needs_text(function)
    assert needs_text(returning(1.0))
    assert not needs_answer(PythonRewardConfig(function="my_rewards:half"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards", "expected package.module:function"),
        (":half", "expected package.module:function"),
        (
            "no_such_module_here:half",
            r"cannot import 'no_such_module_here' .*must be importable in the reward workers.*ModuleNotFoundError",
        ),
        ("my_broken:half", r"cannot import 'my_broken' .*ZeroDivisionError"),
        ("my_rewards:whole", r"but my_rewards has no such attribute; its callables are: half"),
        ("my_rewards:CONSTANT", r"but my_rewards is of type int"),
    ],
)
def test_a_function_that_cannot_be_had_is_a_user_error_with_the_cure(importable: Path, name: str, message: str):
    (importable / "my_rewards.py").write_text(
        "CONSTANT = 1\ndef half(prompt, completion, trajectory):\n    return 0.5\n"
    )
    (importable / "my_broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=message):
        build_reward(PythonRewardConfig(function=name))
