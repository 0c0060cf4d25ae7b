"""QK-Clip: after a step, the query and key weights of heads whose attention logits have grown too large are scaled
down. It knows no optimizer.

Source: Kimi Team, *Kimi K2: Open Agentic Intelligence*, 2025 (gamma = min(1, tau / S_max) per head; here multi-head and
grouped-query attention).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations import sdpa_attention

from rollout.errors import ConcordError, UserError
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import local_tensor
from trainer.model.tensor_layout import modules_of

_NAME = "concord_recorded_sdpa"
_CURE = "set trainer.optimizer.qk_clip.enabled = false"
_QK_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "qk_norm")
_CHUNK_TOKENS = 256


class QkClip:
    """Scales down heads whose largest attention logit, seen in recorded forward passes, is above `max_logit`.

    The next pass has smaller logits; no logit is clamped. With as many key as query heads, W_q and W_k of a head take
    sqrt(gamma) each; under grouped queries keys are shared, and W_q alone takes gamma.
    """

    def __init__(self, model: PolicyModel, max_logit: float = 100.0) -> None:
        """Find the attention of every block.

        Args:
            max_logit: what the largest logit of a head is brought down to.

        Raises:
            UserError: the model normalizes queries or keys, or has no separate projections of the two.
        """
        if not max_logit > 0:
            raise UserError(f"got max_logit = {max_logit:g}, expected a logit above 0; set it to 100")
        self._model, self._max_logit = model, max_logit
        self._attentions = _attentions(model)
        self._largest: dict[str, Tensor] = {}

    @contextmanager
    def recording(self, lengths: Sequence[int] | None = None) -> Generator[None, None, None]:
        """Forward passes inside also record the largest logit of every head: q.k x scale over all causal pairs of real
        tokens, exactly.

        The cost is one more product q k^T of each recorded block, B x heads x T^2 x head_dim multiply-adds (about half
        of the attention proper, without its projections), and B x heads x (256 x T + T x head_dim) floats at once;
        nothing is added to backward, unless activations are computed again, which records twice.

        Args:
            lengths: [B] tokens of each right-padded row; None where all are real.
        """
        config = self._model.text_config
        before = config._attn_implementation
        if before not in ("sdpa", _NAME):
            raise ConcordError(
                f"got attention {before!r}, expected 'sdpa'; load the model as `trainer.model.loading` does"
            )
        paths = {id(module): path for path, module in self._attentions.items()}

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            **settings: Any,  # noqa: ANN401
        ) -> tuple[Tensor, None]:
            path = paths[id(module)]
            seen = largest_logits(query.detach(), key.detach(), float(settings["scaling"]), lengths)
            known = self._largest.get(path)
            self._largest[path] = seen if known is None else torch.maximum(known, seen)
            return cast(Any, sdpa_attention).sdpa_attention_forward(module, query, key, value, mask, **settings)

        cast(Any, AttentionInterface).register(_NAME, attend)
        cast(Any, AttentionMaskInterface).register(_NAME, cast(Any, masking_utils).sdpa_mask)
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def forget(self) -> None:
        """Drop what was recorded: its step was not applied."""
        self._largest = {}

    def apply(self) -> Mapping[str, tuple[float, ...]]:
        """Scale the weights by what was recorded since the last call, and forget it. Collective when the model is
        sharded.

        Returns:
            Block -> [heads] largest logit before the scaling, over all ranks.

        Raises:
            ConcordError: nothing was recorded.
        """
        if self._largest.keys() != self._attentions.keys():
            raise ConcordError("got no attention logits; run a forward pass inside `recording` first")
        logits = torch.stack([self._largest[path] for path in self._attentions])
        if dist.is_initialized() and dist.get_world_size() > 1:
            cast(Any, dist).all_reduce(logits, op=dist.ReduceOp.MAX)
        self._largest = {}
        for module, row in zip(self._attentions.values(), logits, strict=True):
            gammas = head_scales(row, self._max_logit)
            if bool((gammas < 1).any()):
                _scale_heads(module, gammas)
        return {
            path: tuple(cast(list[float], cast(Any, row).tolist()))
            for path, row in zip(self._attentions, logits, strict=True)
        }


def head_scales(largest: Tensor, max_logit: float) -> Tensor:
    """gamma [heads] by which the logits of each head shall shrink: min(1, max_logit / largest)."""
    return torch.where(largest > max_logit, max_logit / largest, torch.ones_like(largest))


def largest_logits(query: Tensor, key: Tensor, scaling: float, lengths: Sequence[int] | None = None) -> Tensor:
    """[heads] float32: the largest q.k x scaling of each head over rows and causal pairs of real tokens.

    Args:
        query: [B, heads, T, head_dim], with positions applied.
        key: [B, key heads, T, head_dim]; each serves heads / key heads consecutive heads.
        lengths: [B] tokens of each right-padded row; None where all are real.
    """
    rows, heads, tokens, width = query.shape
    shared = key.shape[1]
    keys = key.float().transpose(-1, -2)
    asked = query.float().reshape(rows, shared, heads // shared, tokens, width)
    places = torch.arange(tokens, device=query.device)
    ends = torch.full((rows,), tokens) if lengths is None else torch.tensor(lengths)
    padding = (places >= ends.to(query.device)[:, None])[:, None, None]
    largest = torch.full((shared, heads // shared), -torch.inf, device=query.device)
    for start in range(0, tokens, _CHUNK_TOKENS):
        end = min(start + _CHUNK_TOKENS, tokens)
        # The queries that share keys stand below each other: no key is copied.
        together = asked[..., start:end, :].flatten(2, 3) @ keys[..., :end]
        logits = cast(Tensor, cast(Any, together).unflatten(2, (-1, end - start)))
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).triu(1)
        logits[..., start:].masked_fill_(future, -torch.inf)
        # A key before a real query is real itself.
        of_queries = logits.amax(dim=-1).masked_fill(padding[..., start:end], -torch.inf)
        largest = torch.maximum(largest, of_queries.amax(dim=(0, 3)))
    return largest.flatten() * scaling


def _attentions(model: PolicyModel) -> dict[str, nn.Module]:
    """The attention of each block, by the block's path."""
    found: dict[str, nn.Module] = {}
    for block_path, block in model.named_blocks().items():
        inner = {
            name: module
            for name, module in modules_of(block)
            if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        }
        if len(inner) != 1:
            raise UserError(
                f"{model.architecture}: {block_path} has {len(inner)} modules with q_proj and k_proj, expected 1; "
                f"{_CURE}"
            )
        module = next(iter(inner.values()))
        norm = next((norm for norm in _QK_NORMS if getattr(module, norm, None) is not None), "")
        if norm:
            raise UserError(
                f"{model.architecture} has QK-norm ({norm}): it undoes every scaling of query and key weights, so "
                f"QK-Clip is void; {_CURE}"
            )
        found[block_path] = module
    return found


def _scale_heads(module: nn.Module, gammas: Tensor) -> None:
    """Scale the rows of each head in W_q, and in W_k where every head has its own keys."""
    projections: tuple[Any, Any] = cast(Any, module).q_proj, cast(Any, module).k_proj
    own_keys = projections[0].weight.shape[0] == projections[1].weight.shape[0]
    for projection in projections if own_keys else projections[:1]:
        scales = gammas.sqrt() if own_keys else gammas
        for parameter in (projection.weight, projection.bias):
            if parameter is not None:
                _scale_rows(parameter, scales.repeat_interleave(parameter.shape[0] // scales.numel()))


def _scale_rows(parameter: Tensor, scales: Tensor) -> None:
    shaped = scales.to(parameter.dtype).reshape(-1, *[1] * (parameter.ndim - 1))
    if isinstance(parameter, DTensor):
        if any(placement.is_shard() and not placement.is_shard(0) for placement in parameter.placements):
            raise ConcordError(
                f"got a projection sharded as {parameter.placements}, expected rows; shard it along its first dimension"
            )
        shaped = local_tensor(
            distribute_tensor(shaped, parameter.device_mesh, parameter.placements, src_data_rank=None)
        )
    with torch.no_grad():
        local_tensor(parameter).mul_(shaped)
