"""Keys and values of the rows of a cohort: preallocated, written at each row's own position. It knows no request."""

import torch
from torch import Tensor

_LENGTH_STEP = 64


class PrefillCache:
    """Stands in for a cache during a prefill: keeps what each block computed, for `RowCache.place`."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep [B, H, P, D] keys and values of block `layer_idx` and attend to just these."""
        if layer_idx != len(self.blocks):
            raise ValueError(
                f"block {layer_idx} wrote its keys after {len(self.blocks)} blocks; expected them in order"
            )
        self.blocks.append((key, value))
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing precedes a prefill."""
        return 0


class RowCache:
    """One preallocated pair of tensors a block, [rows, heads, positions, dim]; rows 0..live-1 are in use."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, Tensor]] = []
        self._rows, self._length = 0, 0
        self._live, self._width = 0, 0
        self._index: Tensor | None = None
        self._positions: Tensor | None = None
        self._common: int | None = None

    def place(self, prefill: PrefillCache, source: list[int], first_row: int) -> None:
        """Copy prefilled keys and values into rows `first_row`..: row `first_row + i` takes prefill row `source[i]`."""
        width = prefill.blocks[0][0].shape[2]
        self._fit(first_row + len(source), width, prefill.blocks)
        whole = source == list(range(prefill.blocks[0][0].shape[0]))
        index = torch.tensor(source, device=prefill.blocks[0][0].device)
        for (keys, values), (new_keys, new_values) in zip(self._blocks, prefill.blocks, strict=True):
            keys[first_row : first_row + len(source), :, :width] = new_keys if whole else new_keys[index]
            values[first_row : first_row + len(source), :, :width] = new_values if whole else new_values[index]

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Copy the first `width` positions of rows `source` over rows `target`."""
        for block in self._blocks:
            for tensor in block:
                tensor[target, :, :width] = tensor[source, :, :width]

    def aim(self, positions: list[int], device: torch.device) -> Tensor:
        """Set where the next decode step writes: row i at `positions[i]`. Answers with the positions, [B, 1]."""
        self._live, self._width = len(positions), max(positions) + 1
        self._common = positions[0] if min(positions) + 1 == self._width else None
        self._positions = torch.tensor(positions, device=device)
        if self._index is None or self._index.shape[0] != self._live:
            self._index = torch.arange(self._live, device=device)
        self._fit(self._rows, self._width, self._blocks)
        return self._positions.unsqueeze(1)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, 1, W] additive mask of the next decode step; None when all rows see all W positions."""
        if self._common is not None or self._positions is None:
            return None
        seen = torch.arange(self._width, device=self._positions.device) <= self._positions.unsqueeze(1)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[
            :, None, None, :
        ]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write [B, H, 1, D] keys and values at the aimed positions; attend to [B, H, W, D]."""
        keys, values = self._blocks[layer_idx]
        if self._common is not None:
            keys[: self._live, :, self._common] = key[:, :, 0]
            values[: self._live, :, self._common] = value[:, :, 0]
        else:
            keys[self._index, :, self._positions] = key[:, :, 0]
            values[self._index, :, self._positions] = value[:, :, 0]
        return keys[: self._live, :, : self._width], values[: self._live, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the current one in the longest row."""
        return self._width - 1

    def _fit(self, rows: int, length: int, like: list[tuple[Tensor, Tensor]]) -> None:
        """Make room for rows and positions, in tensors `like` these, and keep what is there."""
        old_rows, old_length = self._rows, self._length
        if rows <= old_rows and length <= old_length:
            return
        self._rows = max(rows, 2 * old_rows) if rows > old_rows else old_rows
        self._length = _rounded(max(length, old_length * 3 // 2)) if length > old_length else old_length
        grown = [(self._empty(keys), self._empty(values)) for keys, values in like]
        if self._blocks:
            for (keys, values), (old_keys, old_values) in zip(grown, self._blocks, strict=True):
                keys[:old_rows, :, :old_length] = old_keys
                values[:old_rows, :, :old_length] = old_values
        self._blocks = grown

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not whatever memory holds: a masked position still multiplies its value by 0, and 0 x NaN is NaN.
        return torch.zeros(
            (self._rows, like.shape[1], self._length, like.shape[3]), dtype=like.dtype, device=like.device
        )


def _rounded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP
