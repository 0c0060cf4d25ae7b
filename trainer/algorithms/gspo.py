"""GSPO: the importance ratio of a whole sequence, clipped as one."""

from torch import Tensor

from trainer.algorithms.grpo import Grpo
from trainer.types.loss_tokens import LossTokens


class Gspo(Grpo):
    """GRPO's advantages; every token has the ratio of its sequence, s = exp(mean over its loss tokens of log pi_now -
    log pi_old), and all tokens of a sequence are clipped or none.

    Source: GSPO (arXiv 2507.18071, eq. 5 to 7), in the form of eq. 13 and 14: a token's ratio has the value s, and its
    gradient is s times that of the token's own log-prob. With one advantage for a sequence and `sequence_mean`, value
    and gradient are those of eq. 5; advantages may also differ from token to token.
    """

    name = "gspo"
    statistics = (*Grpo.statistics, "sequence_ratio_mean", "sequence_log_ratio_abs_mean")

    def log_ratio(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] log s of each token's sequence, with the graph of the token's own log-prob."""
        now = logprobs.detach()
        return tokens.row_means(now - tokens.old_logprobs) + (logprobs - now)

    def measure(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, ...]:
        """Besides what is clipped, s and |log s| of each token's sequence."""
        log_ratio = self.log_ratio(logprobs, tokens)
        return *super().measure(logprobs, tokens), log_ratio.double().exp(), log_ratio.abs()
