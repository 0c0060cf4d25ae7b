"""The error types that cross rooms. Each message says what was got, what was expected and the cure."""

import re
import site
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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


_HERE = Path(__file__).resolve().parents[1]
_ROOMS = tuple(f"{_HERE / room}/" for room in ("rollout", "trainer", "actors", "orchestrator"))
_LIBRARIES = (
    *(f"{path}/" for path in (*site.getsitepackages(), site.getusersitepackages())),
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
)
_PLACE = re.compile(r"\(at ([^()]+:\d+ in [^()]+)\)")


def place_of(error: BaseException) -> str:
    """`FILE:LINE in FUNCTION` where an exception comes from: the innermost frame of the user's own code; without one,
    the innermost that is not Concord's; empty where it has no traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    foreign = [frame for frame in frames if not frame.filename.startswith(_ROOMS)]
    own = [frame for frame in foreign if not frame.filename.startswith(_LIBRARIES)]
    found = own or foreign or frames
    return f"{found[-1].filename}:{found[-1].lineno} in {found[-1].name.strip('<>')}" if found else ""


def place_in(text: str) -> str:
    """The innermost place that a message of `boundary` names; empty where it names none."""
    found = _PLACE.findall(text)
    return found[-1] if found else ""


@contextmanager
def boundary(error: type[ConcordError], context: str, *, placed: bool = False) -> Generator[None]:
    """Classify whatever escapes foreign code as `error`; the only place where a blanket except is allowed.

    Args:
        error: the type that callers of this boundary handle.
        context: what was being done, put before the original message.
        placed: the message ends with where the exception comes from, as `place_in` reads it: for code of the user's,
            whose traceback nobody sees in another process.

    Raises:
        error: from any `Exception` that is not already a `ConcordError`.
    """
    try:
        yield
    except ConcordError:
        raise
    except Exception as cause:
        where = f" (at {place})" if placed and (place := place_of(cause)) else ""
        raise error(f"{context}: {type(cause).__name__}: {cause}{where}") from cause
