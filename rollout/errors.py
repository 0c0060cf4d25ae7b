"""The error types that cross rooms. Each message says what was got, what was expected and the cure."""

from collections.abc import Generator
from contextlib import contextmanager


class ConcordError(Exception):
    """Base of every error that Concord raises on purpose."""


class UserError(ConcordError):
    """Something the user gave (config, file, model, prompt) cannot work; the message holds the cure."""


class EngineError(ConcordError):
    """An engine replica failed while serving a request; the replica may be dead."""


class RewardError(ConcordError):
    """A reward function raised, returned a non-number, or did not answer in time."""


class EnvironmentFailure(ConcordError):
    """An environment raised while an episode ran."""


class StoreError(ConcordError):
    """The trajectory store refused a transition or could not make it durable."""


class StoreVersionError(StoreError):
    """Another version of Concord made the store."""


class FencedError(StoreError):
    """A call came from a trainer epoch that is no longer the current one."""


class DeadlineError(ConcordError):
    """A wait passed its deadline; the message names what was waited for."""


class ProcessLostError(ConcordError):
    """The process that served a call is gone."""


class WeightSyncError(ConcordError):
    """Weights that an engine received are not the weights that were published."""


class TokenizerMismatchError(ConcordError):
    """A replica tokenizes otherwise than the trainer; the message names the fields and probes."""


class RegistrationError(ConcordError):
    """A replica declares other numerics or log-probs than the config asks for; the message names the fields of its
    tag."""


def first_error(errors: ExceptionGroup[ConcordError]) -> ConcordError:
    """The first error of a group, however deep."""
    for error in errors.exceptions:
        return first_error(error) if isinstance(error, ExceptionGroup) else error
    raise AssertionError("an exception group holds at least one exception")


@contextmanager
def boundary(error: type[ConcordError], context: str) -> Generator[None]:
    """Classify whatever escapes foreign code as `error`; the only place where a blanket except is allowed.

    Args:
        error: the type that callers of this boundary handle.
        context: what was being done, put before the original message.

    Raises:
        error: from any `Exception` that is not already a `ConcordError`.
    """
    try:
        yield
    except ConcordError:
        raise
    except Exception as cause:
        raise error(f"{context}: {type(cause).__name__}: {cause}") from cause
