"""Architecture and tokenizer of the tiny character model. It knows no training."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trainer.config.trainer import TinyModelConfig

PAD_ID = 0
EOS_ID = 1
CHARACTERS = "0123456789+-=*abcdefghijklmnop"
VOCABULARY = {"<pad>": PAD_ID, "<eos>": EOS_ID} | {character: i + 2 for i, character in enumerate(CHARACTERS)}


def tiny_architecture(config: TinyModelConfig) -> PreTrainedModel:
    """A Qwen3 (0.3 M parameters) or Qwen3-MoE with four experts of which two are used; weights from torch's
    generator."""
    shape: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if config.moe:
        experts: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no chat template."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
