"""A Hugging Face causal LM as the torch engine sees it: hidden states with our caches, the head, and a self-check.

Attention goes through one function of ours, so that a decode step needs no copied KV heads and no rebuilt mask. Models
whose attention does more than causal softmax are refused, and the self-check compares with the library's own forward
pass.
"""

import threading
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rollout.engines.torch.cohort_cache import PrefillCache, RowCache
from rollout.errors import EngineError, UserError, boundary

_ATTENTION = "concord"
_TOLERANCE_NATS = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}


_BUILDING = threading.Lock()
"""transformers switches initialisation off for the whole process: two engines that start together must not restore each
other's switch."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Causal attention: [B, Hq, Q, D] queries over [B, H, K, D] keys, Q = K in a prefill and Q = 1 in decoding."""
    _refuse_variants(key.shape[2], options)
    batch, heads, length, dim = query.shape
    if length == 1:
        # The query heads that share a KV head become its query positions: no copy of keys and values.
        grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
        mixed = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return mixed.reshape(batch, 1, heads, value.shape[3]), None
    mixed = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1]
    )
    return mixed.transpose(1, 2).contiguous(), None


def _refuse_variants(num_keys: int, options: dict[str, object]) -> None:
    window = options.get("sliding_window")
    if isinstance(window, int) and num_keys > window:
        raise EngineError(
            f"the torch engine attends to all tokens, but this model slides a window of {window} over {num_keys}; "
            f"set engine.max_model_len to {window} or use the vllm engine"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise EngineError(
                f"this model's attention uses {name}, which the torch engine does not know; use the vllm engine"
            )


AttentionInterface.register(_ATTENTION, _attention)


class DecodeModel:
    """A causal LM with uninitialised weights until `WeightLoader` has filled them."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Build the architecture that `directory/config.json` names.

        Raises:
            UserError: the directory holds no config of a causal LM that can be built.
        """
        if not (directory / "config.json").is_file():
            raise UserError(
                f"got model directory {directory}; expected a Hugging Face directory with config.json and "
                "*.safetensors: check the path"
            )
        with boundary(
            UserError, f"model directory {directory} does not describe a causal LM that transformers can build"
        ):
            self.config = AutoConfig.from_pretrained(directory)
            with _BUILDING, no_init_weights():
                self.module: PreTrainedModel = AutoModelForCausalLM.from_config(
                    self.config, dtype=dtype, attn_implementation=_ATTENTION
                )
        self.module.tie_weights()
        nn.Module.to(self.module, device)
        self.module.eval().requires_grad_(requires_grad=False)
        self.dtype, self.device = dtype, device
        self._base: nn.Module = self.module.base_model
        self._head = cast(nn.Module, self.module.get_output_embeddings())

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return cast(nn.Embedding, self.module.get_input_embeddings()).weight.shape[0]

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence that the model was made for; None when its config names none."""
        return self.config.max_position_embeddings if hasattr(self.config, "max_position_embeddings") else None

    def prefill(self, token_ids: Tensor) -> tuple[Tensor, PrefillCache]:
        """[B, P] right-padded ids -> [B, P, hidden] and the keys and values. Padding is harmless: real tokens only look
        left."""
        cache = PrefillCache()
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).unsqueeze(0)
        return self._hidden(token_ids, positions, cache, None), cache

    def decode(self, token_ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """[B, 1] ids at [B, 1] positions -> [B, 1, hidden]; `cache` has been aimed at these positions."""
        return self._hidden(token_ids, positions, cache, cache.mask(self.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., V] float32."""
        return self._head(hidden).float()

    def _hidden(
        self, token_ids: Tensor, positions: Tensor, cache: PrefillCache | RowCache, mask: Tensor | None
    ) -> Tensor:
        return self._base(
            input_ids=token_ids, position_ids=positions, past_key_values=cache, attention_mask=mask, use_cache=True
        ).last_hidden_state

    @torch.inference_mode()
    def check(self) -> None:
        """Compare a prefill and two decode steps of two rows with the library's own forward pass.

        Raises:
            UserError: they differ: this architecture needs more than the torch engine does.
        """
        ids = (torch.arange(12, device=self.device).view(2, 6) * 7 + 3) % self.vocab_size
        ours = self._stepwise(ids)
        self.module.set_attn_implementation("sdpa")
        with boundary(UserError, "the model's own forward pass failed"):
            theirs = self.module(input_ids=ids, use_cache=False).logits.float()
        self.module.set_attn_implementation(_ATTENTION)
        gap = (torch.log_softmax(ours, -1) - torch.log_softmax(theirs, -1)).abs().max().item()
        if not gap <= _TOLERANCE_NATS[self.dtype]:
            raise UserError(
                f"the torch engine's log-probs of {type(self.module).__name__} differ from the library's by {gap:.2g} "
                f"nats (tolerance {_TOLERANCE_NATS[self.dtype]}); the architecture does more than the torch engine "
                "knows, or its weights are not finite: use the vllm engine"
            )

    def _stepwise(self, ids: Tensor) -> Tensor:
        """[2, 6] ids -> [2, 6, V] logits; the rows switch to decoding at different lengths."""
        cache = RowCache()
        parts: list[list[Tensor]] = [[], []]
        for row, length in enumerate((4, 3)):
            hidden, prefill = self.prefill(ids[row : row + 1, :length])
            cache.place(prefill, [0], row)
            parts[row].append(hidden[0])
        for step in range(3):
            at = [min(4 + step, 5), 3 + step]
            tokens = torch.stack([ids[row, position] for row, position in enumerate(at)]).unsqueeze(1)
            hidden = self.decode(tokens, cache.aim(at, self.device), cache)
            for row in range(2):
                if row or step < 2:
                    parts[row].append(hidden[row])
        return self.logits(torch.stack([torch.cat(part) for part in parts]))
