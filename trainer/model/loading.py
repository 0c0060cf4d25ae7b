"""A model directory becomes a sharded model: built on the meta device, sharded, then filled tensor by tensor. No rank
ever holds the whole model."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.errors import UserError, boundary
from rollout.published.tensor_files import TensorSpan, tensor_spans, weight_files
from trainer.config.trainer import TrainerConfig
from trainer.model.policy_model import PolicyModel, refuse_a_foreign_head
from trainer.model.ranks import Ranks, reshard, shard_model
from trainer.model.tensor_layout import TensorLayout, TensorSource, modules_of, stored_tensors, transient_buffers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(
    model_dir: Path, config: TrainerConfig, ranks: Ranks, *, frozen: bool = False
) -> tuple[PolicyModel, TensorLayout]:
    """The model of `model_dir` with float32 parameters, sharded over the ranks, without dropout. Collective.

    Args:
        frozen: no parameter takes a gradient (a reference).

    Raises:
        UserError: the directory does not hold what its config says, or the architecture is not supported.
    """
    model = PolicyModel(meta_model(model_dir), config.logprob_chunk_tokens)
    layout = TensorLayout(model.causal_lm)
    rebuild_transient_buffers(model.causal_lm, model.architecture)
    model.eval().requires_grad_(not frozen)
    if config.activation_checkpointing and not frozen:
        model.checkpoint_activations()
    dtype = DTYPES[config.dtype]
    shard_model(model, ranks, dtype)
    _fill(model, layout, model_dir, ranks)
    for _, module in modules_of(model):
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(ranks.device), persistent=name not in transient_buffers(module))
    refuse_a_foreign_head(model, dtype, ranks.device)
    reshard(model)
    return model, layout


def meta_model(model_dir: Path) -> nn.Module:
    """The causal LM of `model_dir` without values, in float32 and with the attention that the trainer computes with.

    Raises:
        UserError: its config is missing, broken, or of an unknown architecture.
    """
    with boundary(UserError, f"cannot build the model of {model_dir}"), torch.device("meta"):
        config: Any = cast(Any, AutoConfig).from_pretrained(model_dir, local_files_only=True)
        return cast(
            nn.Module,
            cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32, attn_implementation="sdpa"),
        )


def rebuild_transient_buffers(model: nn.Module, architecture: str) -> None:
    """Compute on CPU the buffers that no checkpoint holds (rotary frequencies): the meta device gave them no values.

    Raises:
        UserError: the architecture does not say how.
    """
    for path, module in modules_of(model):
        buffers = dict(module.named_buffers(recurse=False))
        empty = {
            name: _without_values(buffers[name])
            for name in transient_buffers(module)
            if name in buffers and buffers[name].is_meta
        }
        for name, buffer in empty.items():
            module.register_buffer(name, buffer, persistent=False)
        if empty:
            cast(Any, model)._init_weights(module)
        for name, buffer in empty.items():
            if _lacks_values(buffer):
                raise UserError(
                    f"{architecture}: buffer {path}.{name} is in no checkpoint and nothing initialises it; use another "
                    "architecture"
                )


def _without_values(buffer: Tensor) -> Tensor:
    """A buffer on CPU that shows whether it was written; a boolean one cannot show it, so it counts as never
    written."""
    mark = float("nan") if buffer.is_floating_point() else buffer.dtype == torch.bool or torch.iinfo(buffer.dtype).min
    return torch.full(buffer.shape, mark, dtype=buffer.dtype)


def _lacks_values(buffer: Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return True
    return bool((buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min).any())


def _fill(model: PolicyModel, layout: TensorLayout, model_dir: Path, ranks: Ranks) -> None:
    files = {span.name: (path, span) for path in weight_files(model_dir) for span in tensor_spans(path)}
    sources, unknown = layout.sources(files)
    refuse_mismatch(model, model_dir, set(sources), unknown)
    with ExitStack() as stack:
        opened = {
            path: cast(Any, stack.enter_context(safe_open(path, framework="pt")))
            for path in {path for path, _ in files.values()}
        }
        handles = {name: (opened[path], span) for name, (path, span) in files.items()}
        state: dict[str, Tensor] = {}
        filled: dict[int, nn.Parameter] = {}
        for name, tensor in list(stored_tensors(model.causal_lm)):
            with boundary(UserError, f"cannot load {name} from {model_dir}"):
                values = _read(name, tensor, sources[name], layout, handles, ranks)
            state[name] = values
            if isinstance(tensor, nn.Parameter):
                filled[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad)
    for name, parameter in model.causal_lm.named_parameters(remove_duplicate=False):
        state[name] = filled[id(parameter)]  # a tied parameter stays one object
    model.causal_lm.load_state_dict(state, strict=True, assign=True)


def _read(
    name: str,
    tensor: Tensor,
    source: TensorSource,
    layout: TensorLayout,
    handles: dict[str, tuple[Any, TensorSpan]],
    ranks: Ranks,
) -> Tensor:
    """This rank's rows of one tensor of the model, float32, as the kind of tensor that it replaces."""
    shape = tuple(tensor.shape)
    if not source.patterns and (stored := handles[source.names[0]][1].shape) != shape:
        raise UserError(
            f"{name} has shape {stored}, expected {shape} by config.json; the config and the weights belong to "
            "different models"
        )
    if not isinstance(tensor, DTensor):
        return layout.assemble(name, source, lambda stored: handles[stored][0].get_tensor(stored)).to(tensor.dtype)
    rows = -(-shape[0] // ranks.world)
    start, end = min(ranks.rank * rows, shape[0]), min((ranks.rank + 1) * rows, shape[0])
    if source.patterns:
        whole = layout.assemble(name, source, lambda stored: handles[stored][0].get_tensor(stored))
        if tuple(whole.shape) != shape:
            raise UserError(f"the parts of {name} make shape {tuple(whole.shape)}, expected {shape} by config.json")
        local = whole[start:end]
    else:
        local = handles[source.names[0]][0].get_slice(source.names[0])[start:end]
    local = local.to(device=ranks.device, dtype=torch.float32, copy=True).contiguous()
    return DTensor.from_local(
        local, ranks.mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def refuse_mismatch(model: PolicyModel, model_dir: Path, found: set[str], unknown: tuple[str, ...]) -> None:
    """Check checkpoint names against the model: none of the model's tensors may be missing, and none unknown to it.

    Args:
        found: tensors of the model that the checkpoint makes.
        unknown: checkpoint names that nothing asked for.

    Raises:
        UserError: they do not fit.
    """
    wanted = {name for name, _ in stored_tensors(model.causal_lm)}
    missing = sorted(wanted - found)
    if missing:
        raise UserError(
            f"{model_dir} lacks {len(missing)} tensors of {model.architecture} (first {missing[0]}); copy or save the "
            "model again"
        )
    ignored = [r"rotary_emb\.inv_freq$", *(cast(Any, model.causal_lm)._keys_to_ignore_on_load_unexpected or ())]
    strange = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
    if strange:
        first = f"{len(strange)} tensors that {model.architecture} does not know (first {strange[0]})"
        raise UserError(
            f"{model_dir} holds {first}; config.json and weights belong to different models: copy the model again"
        )
