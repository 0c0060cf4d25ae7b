"""The four layers of diagnosis: their names and their colours, the same in documents, reports and dashboards."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiagnosisLayer:
    """One layer. A finding of a lower number outranks one of a higher number, which it may have caused."""

    number: int
    name: str
    colour: str
    """Everything about this layer is drawn in it. The colour-blind can tell the four apart."""


LAYERS: Mapping[int, DiagnosisLayer] = {
    layer.number: layer
    for layer in (
        DiagnosisLayer(1, "data and reward", "#0072B2"),
        DiagnosisLayer(2, "policy change", "#9A4BB0"),
        DiagnosisLayer(3, "numerical updates", "#C76A00"),
        DiagnosisLayer(4, "training system", "#00806A"),
    )
}
