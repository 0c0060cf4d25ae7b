"""Frozen dataclasses that cross processes many thousand times a second: pickled as a tuple of their fields, in C.

The library's own way asks for the fields of every object anew. What arrives was checked when it was made, and is not
checked again.
"""

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, cast

T = TypeVar("T")


def wired(cls: type[T]) -> type[T]:
    """Class decorator, above `@dataclass(slots=True)`."""
    names = tuple(field.name for field in fields(cast(Any, cls)))
    if len(names) < 2:
        raise TypeError(
            f"{cls.__name__} has the fields {names}; a wired class has at least two (attrgetter answers with a tuple "
            "only then)"
        )
    values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)

    def reduce(made: T) -> tuple[Any, ...]:
        return rebuilt, (cls, names, values(made))

    cast(Any, cls).__reduce__ = reduce
    return cls


def rebuilt(cls: type[T], names: tuple[str, ...], values: tuple[Any, ...]) -> T:
    """A frozen object from its fields, without the checks of construction: it passed them when it was first made."""
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
