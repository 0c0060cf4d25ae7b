"""How an episode ends without a group: every error on its way is given one `FailReason`, once."""

from collections.abc import Generator
from contextlib import contextmanager

from rollout.errors import ConcordError, boundary
from rollout.rewards.errors import RewardFailure
from rollout.types.dispatch import FailReason


class EpisodeFailure(ConcordError):
    """The dispatch produced no group. The caller makes it the dispatch's end."""

    def __init__(self, reason: FailReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@contextmanager
def failing_as(reason: FailReason, error: type[ConcordError], context: str) -> Generator[None]:
    """Whatever escapes is an `EpisodeFailure`: a reward's failure under its own reason, one that is already classified
    as it is, all else under `reason`.

    Args:
        error: the type of what is not yet a `ConcordError`, in the chain of causes.
        context: what was being done; the detail starts with it.

    Raises:
        EpisodeFailure: from any `Exception`.
    """
    try:
        with boundary(error, context, placed=reason is not FailReason.ENGINE):
            yield
    except EpisodeFailure:
        raise
    except ConcordError as cause:
        text = str(cause)
        detail = text if text.startswith(context) else f"{context}: {text}"
        raise EpisodeFailure(cause.reason if isinstance(cause, RewardFailure) else reason, detail) from cause
