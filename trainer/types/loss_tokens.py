"""The tokens of one micro-batch that have a term in the loss, and which sequence each belongs to. Torch is named for
the type checker only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.types.support import Support

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The N loss tokens of one micro-batch of B rows, flat, on one device.

    A row is a whole sequence: no sequence is split over micro-batches, so what is taken over the tokens of a row does
    not depend on how the batch is packed or over how many ranks it is dealt out.
    """

    token_ids: "Tensor"
    """[B, T - 1] what the model reads: the last column predicts nothing."""
    positions: "Tensor"
    """[N] flat positions in `token_ids` that predict the targets."""
    targets: "Tensor"
    """[N]"""
    old_logprobs: "Tensor"
    """[N] nats, of the policy that the loss compares with."""
    rollout_logprobs: "Tensor"
    """[N] nats, as the engine logged them."""
    advantages: "Tensor"
    """[N] of each token; alike in a row where the algorithm gives one for each trajectory."""
    weights: "Tensor"
    """[N] what each term is multiplied by in the sum: the fixed denominators of the whole step."""
    rows: "Tensor"
    """[N] int64 in [0, B): the row of each token."""
    trajectory_ids: tuple[str, ...] = ()
    """[B] whose tokens each row holds."""
    support: Support | None = None
    """[N] what was in reach when each token was drawn: its log-probs, its entropy and the reference's are of the
    distribution over it. None: the whole vocabulary."""

    def row_means(self, values: "Tensor") -> "Tensor":
        """[N] each token's mean of `values` [N] over the loss tokens of its row."""
        return row_means(values, self.rows, self.token_ids.shape[0])


def row_sums(values: "Tensor", rows: "Tensor", num_rows: int) -> "Tensor":
    """[N] each token's sum of `values` [N] over its row, added up in float64."""
    wide = values.double()
    return wide.new_zeros(num_rows).index_add_(0, rows, wide)[rows].to(values.dtype)


def row_means(values: "Tensor", rows: "Tensor", num_rows: int) -> "Tensor":
    """[N] each token's mean of `values` [N] over its row, taken in float64."""
    wide = values.double()
    counts = row_sums(wide.new_ones(wide.shape), rows, num_rows)
    return (row_sums(wide, rows, num_rows) / counts).to(values.dtype)
