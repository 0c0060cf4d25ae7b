"""What a published directory holds, read from the files' headers alone: refused before anything of the running model is touched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollout.errors import EngineError


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its values."""

    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]


def shapes_of(directory: Path) -> dict[str, Shape]:
    """Every tensor of a directory's safetensors files.

    Raises:
        EngineError: there is none, a file is broken, or a name comes twice.
    """
    shapes: dict[str, Shape] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as reader:
                for name in reader.keys():  # noqa: SIM118 - the reader is no mapping
                    if name in shapes:
                        raise EngineError(f"tensor {name} is in two files of {directory}; publish it once")
                    view = reader.get_slice(name)
                    shapes[name] = Shape(view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{file} cannot be read ({error}); publish the weights again") from error
    if not shapes:
        raise EngineError(f"{directory} holds no *.safetensors file with tensors; expected a complete publication")
    return shapes


def refuse_difference(got: dict[str, Shape], expected: dict[str, Shape], where: str) -> None:
    """Hold tensors against those that the engine started from.

    Raises:
        EngineError: a tensor is missing, unknown, or of another dtype or shape.
    """
    problems: Sequence[str] = [
        *(f"{name} is missing" for name in sorted(expected.keys() - got.keys())),
        *(f"{name} is unknown" for name in sorted(got.keys() - expected.keys())),
        *(f"{name} is {got[name]}, not {expected[name]}" for name in sorted(got.keys() & expected.keys()) if got[name] != expected[name]),
    ]
    if problems:
        some = "; ".join(problems[:4])
        raise EngineError(f"{where} does not hold the model's tensors ({len(problems)} differ): {some}; publish the whole model as it was at the start")
