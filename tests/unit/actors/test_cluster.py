"""A Ray that does not come up is tried again on clean ground, and then one error says what to look at."""

import pytest

from actors.cluster import START_TRIES, come_up
from rollout.errors import UserError

TIMED_OUT = RuntimeError("The current node timed out during startup. This could happen because some raylet ...\nmore")


class Ray:
    """Fails to start `fails` times with `error`; keeps the order of what was done."""

    def __init__(self, fails: int, error: Exception = TIMED_OUT) -> None:
        self._fails, self._error = fails, error
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")
        if self.done.count("start") <= self._fails:
            raise self._error

    def clean(self) -> None:
        self.done.append("clean")


def test_a_start_that_fails_is_cleaned_up_and_tried_again():
    ray = Ray(fails=START_TRIES - 1)
    come_up(ray.start, ray.clean)
    assert ray.done == ["start", "clean"] * (START_TRIES - 1) + ["start"]


def test_a_ray_that_never_comes_up_is_one_error_with_the_state_of_the_machine():
    ray = Ray(fails=START_TRIES)
    with pytest.raises(UserError) as caught:
        come_up(ray.start, ray.clean)
    assert ray.done == ["start", "clean"] * START_TRIES
    text = str(caught.value)
    assert "current node timed out during startup" in text and f"{START_TRIES} times" in text
    for hint in ("load average", "GiB of memory", "session_latest/logs", "cluster.address"):
        assert hint in text
    assert "\n" not in text


def test_arguments_that_ray_refuses_are_not_tried_again():
    ray = Ray(fails=1, error=ValueError("object_store_memory must be greater than 78 MB"))
    with pytest.raises(UserError, match="greater than 78 MB"):
        come_up(ray.start, ray.clean)
    assert ray.done == ["start", "clean"]


def test_an_interrupt_while_ray_starts_ends_it_at_once():
    class Interrupted(Ray):
        def start(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        come_up(Interrupted(fails=0).start, Ray(fails=0).clean)
