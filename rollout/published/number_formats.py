"""Number formats that numpy does not have: bfloat16 and fp8 e4m3, and tensors of safetensors files as float32. It knows
no tensor's meaning."""

import numpy as np
from numpy.typing import NDArray

_E4M3_LARGEST = 448.0
_E4M3_LEAST_EXPONENT = -6
_E4M3_MANTISSA_BITS = 3
_STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

FLOATS = frozenset(_STORED)
"""safetensors names of the dtypes that `decoded` and `encoded` know."""


def rounded_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest bfloat16 of each value, ties to even, as float32; any shape."""
    return (_bf16_bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., rows, columns] values on the fp8 e4m3 grid (4 exponent bits, 3 mantissa bits), each matrix scaled so that
    its largest magnitude is 448."""
    largest = np.abs(values).max(axis=(-2, -1), keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(_E4M3_LARGEST), np.float32(1)).astype(np.float32)
    scaled = (values / scale).astype(np.float64)
    _, exponents = np.frexp(scaled)
    steps = np.ldexp(1.0, np.maximum(exponents - 1, _E4M3_LEAST_EXPONENT) - _E4M3_MANTISSA_BITS)
    return (np.rint(scaled / steps) * steps).astype(np.float32) * scale


def decoded(raw: bytes, dtype: str) -> NDArray[np.float32]:
    """[n] elements of a tensor, from its little-endian bytes; `dtype` is one of FLOATS."""
    stored = np.frombuffer(raw, dtype=_STORED[dtype])
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


def encoded(values: NDArray[np.float32], dtype: str) -> bytes:
    """The inverse of `decoded`, rounding to nearest."""
    return (_bf16_bits(values) if dtype == "BF16" else values).astype(_STORED[dtype]).tobytes()


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32 after rounding. A quiet NaN stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest >> np.uint32(16)).astype(np.uint16)
