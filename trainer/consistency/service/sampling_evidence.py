"""The samples of one engine against the distribution that it declares. Numpy only; it knows no replica."""

from collections.abc import Sequence

import numpy as np

from trainer.consistency.attribution.scored import Scored
from trainer.consistency.checks.sampling import SamplingSums, added, repeat_sums, token_sums


def sampling_of(scored: Sequence[Scored]) -> SamplingSums:
    """Sums over the tokens whose moments are known, without trajectories whose tokens are known to be others."""
    sound = [
        (each.trajectory, each.moments, each.trajectory.sampled & np.isfinite(each.moments).all(axis=0))
        for each in scored
        if each.moments is not None and not any(finding.breaks_tokens for finding in each.findings)
    ]
    groups: dict[str, list[tuple[bytes, float]]] = {}
    for one, moments, mask in sound:
        if np.count_nonzero(mask) == one.num_sampled - bool(one.sampled[0]):
            groups.setdefault(one.dispatch_id, []).append(
                (one.token_ids.tobytes(), float(moments[0][mask].sum(dtype=np.float64)))
            )
    of_tokens = [token_sums(*moments[:, mask]) for _, moments, mask in sound]
    return added([*of_tokens, *(repeat_sums(samples) for samples in groups.values())])
