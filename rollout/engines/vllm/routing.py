"""What vLLM returns about a mixture of experts, as a routing trace. It knows no request and no engine process.

vLLM answers with one row an input and one column a *layer*, those without experts included; a trace has one column a
block with experts.
"""

import re
from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace

_EXPERTS = re.compile(r"\blayers\.(\d+)\..*\bexperts\b")


def expert_layers(names: Iterable[str]) -> tuple[int, ...]:
    """Indices of the layers that hold experts, from a model's tensor names; shared experts alone do not count."""
    return tuple(sorted({int(found[1]) for name in names if (found := _EXPERTS.search(name))}))


def trace_of(routed: NDArray[np.integer] | None, rows: int, layers: tuple[int, ...]) -> RoutingTrace | None:
    """The trace of a finished sample.

    Args:
        routed: [inputs, layers, top_k] as vLLM answered; None where it did not.
        rows: inputs that predict something, prompt included: tokens - 1.
        layers: as `expert_layers`; those beyond the answer (draft heads) have no column in it.

    Returns:
        None without an answer or without experts. An answer of another number of rows cannot be laid beside the tokens:
        then no row is covered.
    """
    if routed is None:
        return None
    columns = [layer for layer in layers if layer < routed.shape[1]]
    if not columns:
        return None
    narrow = routed.dtype == np.uint8
    experts = np.zeros((rows, len(columns), routed.shape[2]), dtype=np.uint8 if narrow else np.uint16)
    fits = routed.shape[0] == rows
    if fits:
        experts[:] = routed[:, columns]
    return RoutingTrace(experts=cast("NDArray[np.uint8] | NDArray[np.uint16]", experts), covered=np.full(rows, fits))
