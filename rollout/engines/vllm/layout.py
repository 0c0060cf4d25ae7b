"""What a published directory holds, read from the files' headers alone: refused before anything of the running model is
touched."""

from pathlib import Path

from rollout.errors import EngineError, boundary
from rollout.published.tensor_files import tensor_spans, weight_files

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape)."""


def layout_of(directory: Path) -> Layout:
    """Every tensor of a directory's safetensors files, without its values.

    Raises:
        EngineError: there is none, a file is broken, or a name comes twice.
    """
    layout: Layout = {}
    with boundary(EngineError, f"weights in {directory}"):
        for span in [span for file in weight_files(directory) for span in tensor_spans(file)]:
            if span.name in layout:
                raise EngineError(f"tensor {span.name} is in two files of {directory}; publish it once")
            layout[span.name] = (span.dtype, span.shape)
    return layout


def refuse_difference(got: Layout, expected: Layout, where: str) -> None:
    """Compare tensors with those that the engine started from.

    Raises:
        EngineError: a tensor is missing, unknown, or of another dtype or shape.
    """
    problems = [
        *(f"{name} is missing" for name in sorted(expected.keys() - got.keys())),
        *(f"{name} is unknown" for name in sorted(got.keys() - expected.keys())),
        *(
            f"{name} is {got[name]}, not {expected[name]}"
            for name in sorted(got.keys() & expected.keys())
            if got[name] != expected[name]
        ),
    ]
    if problems:
        some = "; ".join(problems[:4])
        raise EngineError(
            f"{where} does not hold the model's tensors ({len(problems)} differ): {some}; publish the whole model as it"
            " was at the start"
        )
