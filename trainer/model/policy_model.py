"""A Hugging Face causal LM as the trainer sees it: token rows in, log-probs of chosen positions out. It knows no loss
and no rank."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from transformers import Cache

from rollout.errors import UserError
from trainer.model.logprobs import chunked_logprobs
from trainer.model.routing_replay import same_replay_again
from trainer.model.tensor_layout import modules_of
from trainer.types.support import Support

_HEAD_TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}

_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PolicyModel(nn.Module):
    """The backbone runs to hidden states, then only the asked positions go through the head, in chunks.

    All parameters are used inside `forward`, so a sharded root gathers them there.
    """

    def __init__(self, causal_lm: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens

    @property
    def architecture(self) -> str:
        return type(self.causal_lm).__name__

    def forward(
        self, token_ids: Tensor, positions: Tensor, targets: Tensor, temperature: float, support: Support | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy, [N] each, of `targets` [N] predicted from flat `positions` [N] of `token_ids` [B, T],
        over the support of each target.

        Rows are right-padded without a mask: attention is causal, so real tokens see only real tokens.
        """
        chosen = self.chosen_states(token_ids, positions)
        return chunked_logprobs(chosen, self.head_weight(), targets, temperature, self.chunk_tokens, support)

    def chosen_states(
        self, token_ids: Tensor, positions: Tensor, cache: Cache | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """[N, H] states behind the final norm at flat `positions` [N] of `token_ids` [B, T]; a cache is read and
        extended. `position_ids` [B, T]: where tokens stand for the model, None counts them from 0. Of a sharded model,
        only inside `forward`."""
        hidden = self._hidden(token_ids, cache, position_ids)
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)

    def head_weight(self) -> Tensor:
        """[V, H] of the head. Of a sharded model it is whole only inside `forward`."""
        return cast(nn.Linear, cast(Any, self.causal_lm).get_output_embeddings()).weight

    @property
    def text_config(self) -> Any:  # noqa: ANN401
        """The config of the wrapped model, or of its text part where it has several."""
        return cast(Any, self.causal_lm).config.get_text_config()

    def head_gap(self, token_ids: Tensor) -> Tensor:
        """Largest |difference| in nats between this module's logits and the model's own, over `token_ids` [1, T] and
        the vocabulary."""
        own = cast(Any, self.causal_lm)(input_ids=token_ids, use_cache=False).logits.float()
        ours = nn.functional.linear(self._hidden(token_ids), self.head_weight()).float()
        return (torch.log_softmax(own, dim=-1) - torch.log_softmax(ours, dim=-1)).abs().max()

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, in order.

        Raises:
            UserError: the architecture does not say what its blocks are.
        """
        return list(self.named_blocks().values())

    def named_blocks(self) -> dict[str, nn.Module]:
        """The transformer blocks, in order, by their path in the wrapped model.

        Raises:
            UserError: the architecture does not say what its blocks are.
        """
        names = set(cast(list[str] | None, getattr(self.causal_lm, "_no_split_modules", None)) or [])
        # A sharded block is of a class of its own, which derives from the block's.
        found = {
            path: module
            for path, module in modules_of(self.causal_lm)
            if any(kind.__name__ in names for kind in type(module).__mro__)
        }
        if not found:
            raise UserError(
                f"{self.architecture} names no transformer blocks (_no_split_modules), so it can be neither sharded nor"
                " clipped by block; use another architecture"
            )
        return found

    def checkpoint_activations(self) -> None:
        """Keep only the inputs of each block for backward, and compute the rest again."""
        for block in self.blocks():
            _checkpoint_block(block)

    def _hidden(self, token_ids: Tensor, cache: Cache | None = None, position_ids: Tensor | None = None) -> Tensor:
        backbone = cast(Any, self.causal_lm).base_model
        kept: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        if position_ids is not None:
            # Without a mask the library takes a jump in the positions for the begin of another sequence.
            kept |= {"position_ids": position_ids, "attention_mask": torch.ones_like(token_ids)}
        return backbone(input_ids=token_ids, use_cache=cache is not None, **kept).last_hidden_state


def refuse_a_foreign_head(model: PolicyModel, dtype: torch.dtype, device: torch.device) -> None:
    """Compare this path's logits with the model's own on a few tokens; a collective call when the model is sharded.

    Raises:
        UserError: they differ: the architecture does more to its logits than one matrix product.
    """
    head = cast(Any, model.causal_lm).get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        what = "no output head" if head is None else "a head with a bias"
        raise UserError(
            f"{model.architecture} has {what}; this trainer supports heads that are one matrix product: use another "
            "architecture"
        )
    text = model.text_config
    scaled = [name for name in _LOGIT_SETTINGS if getattr(text, name, None) not in (None, 1.0)]
    if scaled:
        # Numbers alone would not show it while a fresh model's logits are small.
        raise UserError(
            f"{model.architecture} changes its logits ({scaled[0]} in config.json), which this trainer does not: use "
            "another architecture"
        )
    vocab_size = int(text.vocab_size)
    token_ids = (torch.arange(1, 9, device=device) * 7919 % vocab_size).unsqueeze(0)
    with torch.no_grad():
        gap = float(model.head_gap(token_ids))
    if not gap <= _HEAD_TOLERANCE_NATS[dtype]:
        raise UserError(
            f"{model.architecture}: the model's own log-probs differ from hidden states x head by {gap:.3g} nats (at "
            f"most {_HEAD_TOLERANCE_NATS[dtype]:g} expected); logit scaling or softcapping is not supported: use an "
            "architecture without it"
        )


def _checkpoint_block(block: nn.Module) -> None:
    forward = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return cast(Any, checkpoint).checkpoint(
            forward, *args, use_reentrant=False, context_fn=same_replay_again, **kwargs
        )

    block.forward = recomputed
