"""A loss that notes what chosen trajectories had in it: their log-probs as the trainer computed them, and their
advantages as it used them. It changes nothing and knows no step."""

from collections.abc import Collection
from typing import Any, cast

import numpy as np
from torch import Tensor

from trainer.gradloc.probe.probe import TokenLoss, WrappedLoss
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource, TrainedTokens


class NotedLoss(WrappedLoss):
    """The loss `inner`, watched. Only the first pass of a trajectory counts: others of the same step run under the same
    weights."""

    def __init__(self, inner: TokenLoss) -> None:
        super().__init__(inner)
        self._wanted: frozenset[str] = frozenset()
        self._noted: dict[str, TrainedTokens] = {}

    def begin(self, trajectory_ids: Collection[str]) -> None:
        """A step begins, and these are to be noted."""
        self._wanted, self._noted = frozenset(trajectory_ids), {}

    def take(self) -> tuple[TrainedTokens, ...]:
        """Those of this rank, in the order of their ids."""
        return tuple(self._noted[each] for each in sorted(self._noted))

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The real loss."""
        rows = [row for row, each in enumerate(tokens.trajectory_ids) if each in self._wanted - self._noted.keys()]
        if not rows:
            return self._inner(model, tokens, temperature, source, only)
        seen: list[Tensor] = []

        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            answer = model(*args, **kwargs)
            seen.append(answer[0].detach())
            return answer

        answer = self._inner(cast(PolicyModel, watched), tokens, temperature, source, only)
        self._note(tokens, seen[0], rows)
        return answer

    def _note(self, tokens: LossTokens, logprobs: Tensor, rows: list[int]) -> None:
        width = tokens.token_ids.shape[1]
        for row in rows:
            mine = tokens.rows == row
            self._noted[tokens.trajectory_ids[row]] = TrainedTokens(
                trajectory_id=tokens.trajectory_ids[row],
                positions=(tokens.positions[mine] - row * width + 1).cpu().numpy(),
                logprobs=logprobs[mine].float().cpu().numpy(),
                advantages=tokens.advantages[mine].float().cpu().numpy().astype(np.float32),
            )
