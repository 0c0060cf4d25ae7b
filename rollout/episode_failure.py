"""How an episode ends without a group: every error on its way is given one `FailReason`, once."""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.dispatch import FailReason
from rollout.errors import ConcordError, boundary
from rollout.rewards.errors import RewardFailure


class EpisodeFailure(ConcordError):
    """The dispatch produced no group. The caller makes it the dispatch's end."""

    def __init__(self, reason: FailReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@contextmanager
def failing_as(reason: FailReason, error: type[ConcordError], context: str) -> Iterator[None]:
    """Whatever escapes is an `EpisodeFailure` with `reason`; one that already has its reason keeps it.

    Raises:
        EpisodeFailure: from any `Exception`.
    """
    try:
        with boundary(error, context):
            yield
    except EpisodeFailure:
        raise
    except RewardFailure as cause:
        raise EpisodeFailure(cause.reason, str(cause)) from cause
    except ConcordError as cause:
        raise EpisodeFailure(reason, str(cause)) from cause
