"""Log-ratios of a micro-batch counted by bucket on its device, as further entries of the sums that ranks add up."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.types.histograms import LOG_RATIO_EDGES, BucketCounts
from trainer.types.step import OldLogprobSource

PARTS = ("total", "engine", "stale")
"""log pi_now - rollout, old - rollout and log pi_now - old; the last two split the first where old log-probs were
recomputed."""
_BUCKETS = len(LOG_RATIO_EDGES) + 1
RATIO_SUMS: tuple[str, ...] = tuple(
    f"log_ratio_{part}_{entry}" for part in PARTS for entry in (*range(_BUCKETS), "sum")
)


def ratio_sums(parts: Sequence[Tensor]) -> Tensor:
    """[len(RATIO_SUMS)] float64 of the [N] log-ratios of `PARTS`, in nats."""
    stacked = torch.stack(tuple(parts))
    rows = torch.arange(len(PARTS), device=stacked.device)[:, None] * _BUCKETS
    places = (torch.bucketize(stacked, stacked.new_tensor(LOG_RATIO_EDGES)) + rows).flatten()
    counts = torch.zeros(len(PARTS) * _BUCKETS, dtype=torch.float64, device=stacked.device)
    counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.float64))  # sums of ones are exact in any order
    return torch.cat((counts.view(len(PARTS), _BUCKETS), stacked.double().sum(dim=1, keepdim=True)), dim=1).flatten()


def log_ratios(sums: Mapping[str, float], source: OldLogprobSource) -> tuple[tuple[str, BucketCounts], ...]:
    """The distribution of each part that is known with old log-probs of this source."""
    known = PARTS if source is OldLogprobSource.RECOMPUTED else ("total",)
    return tuple(
        (
            part,
            BucketCounts(
                tuple(int(sums[f"log_ratio_{part}_{bucket}"]) for bucket in range(_BUCKETS)),
                sums[f"log_ratio_{part}_sum"],
            ),
        )
        for part in known
    )
