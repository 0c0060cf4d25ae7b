"""What Concord adds to vLLM's worker, inside the engine's own process: load published weights, answer with the digest
of the bytes that arrived, and end with the process that owns the engine. It knows no request and no scheduler.

vLLM mixes this class into its worker (`worker_extension_cls`); its methods are called by name through `collective_rpc`.
"""

import hashlib
import os
import select
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from rollout.engines.vllm.transfer import TORCH_NAMES, Rendezvous, Tensors, open_receiver, receive_into, update_info
from rollout.errors import EngineError
from rollout.published.digests import manifest_digest
from rollout.published.tensor_files import weight_files
from rollout.types.weights import TensorEntry, Transport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

_DTYPES = {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items()}


class ConcordWorkerExtension:
    """See the module. All arguments and answers are plain values: they cross processes."""

    concord_receiver: "tuple[Rendezvous, WeightTransferEngine[Any, Any]] | None" = None
    """The receiver that is open, kept between updates."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_runner: Any
        device: torch.device

    def concord_end_with(self, owner_pid: int) -> str:
        """End this process (and the engine core that it belongs to) when the owner has died, however it died."""
        threading.Thread(target=_end_with, args=(owner_pid, os.getppid()), name="concord-owner", daemon=True).start()
        return ""

    def concord_touch_cache(self) -> str:
        """Make the whole KV cache resident. On CPU its pages would come one by one as blocks are first used: memory
        that seems to grow for hours, and an out-of-memory that comes as late.
        """
        if self.device.type == "cpu":
            for cache in self.model_runner.kv_caches:
                cache.zero_()
        return ""

    def concord_load(self, directory: str) -> str:
        """Load a published directory (in Hugging Face layout) into the running model; the digest of the bytes that were
        read."""
        entries: list[TensorEntry] = []
        with self._loading() as model:
            loaded = model.load_weights(_noting(_tensors(Path(directory)), entries))
        self._settle(loaded)
        return manifest_digest(entries)

    def concord_receive(self, location: str, tensors: list[tuple[str, str, list[int]]], first_rank: int) -> str:
        """Load weights that the trainer sends now (nccl) or has exported (ipc); the digest of the bytes that arrived.

        Args:
            tensors: (name, dtype, shape) in the order of the manifest.
            first_rank: rank of this replica's first worker among the receivers of all replicas, from 0.
        """
        rendezvous = Rendezvous.parse(location)
        receiver = self._receiver_for(rendezvous, first_rank)
        entries: list[TensorEntry] = []
        loaded: set[str] = set()

        with self._loading() as model:

            def take(weights: Tensors) -> None:
                loaded.update(model.load_weights(_noting(weights, entries)) or ())

            receive_into(receiver, update_info(rendezvous, tensors), take)
        self._settle(loaded)
        return manifest_digest(entries)

    def _receiver_for(self, rendezvous: Rendezvous, first_rank: int) -> "WeightTransferEngine[Any, Any]":
        """The receiver for `rendezvous`; opened anew only when the rendezvous changes."""
        kept = self.concord_receiver
        if kept is not None and (rendezvous.transport is Transport.IPC or kept[0] == rendezvous):
            return kept[1]
        if kept is not None:
            kept[1].shutdown()
        receiver = open_receiver(self, rendezvous, first_rank)
        self.concord_receiver = (rendezvous, receiver)
        return receiver

    @contextmanager
    def _loading(self) -> Generator[Any]:
        """vLLM's layer-wise reload: layers are filled in checkpoint format and processed as at the first load."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        on_cpu = self.device.type == "cpu"
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if on_cpu:
                _forget_expert_kernels(model)
            initialize_layerwise_reload(model)
            yield model
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if on_cpu:
                _repack_retained(model)

    def _settle(self, loaded: set[str] | None) -> None:
        model = self.model_runner.get_model()
        missing = sorted({name for name, _ in model.named_parameters()} - (loaded or set()))
        if loaded is not None and missing and self.vllm_config.model_config.quantization is None:
            raise EngineError(
                f"{len(missing)} parameters of the running model got no weights: {', '.join(missing[:4])}; the engine "
                "must be restarted"
            )
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have experts packed as at the first load.

    With a kernel in place vLLM takes expert weights over as they come, without the packing that its CPU kernel reads
    them by: the weights are then all there, and every log-prob is wrong. Without one it builds kernel and packing anew.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _repack_retained(model: torch.nn.Module) -> None:
    """Pack again what keeps a packed copy *beside* its weight: the embedding and the head.

    The reload processes only layers that received weights of their own. A tied head receives none, so without this its
    packed copy would go on being the old head, while `lm_head.weight` and every file digest say otherwise.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and method is not None and isinstance(weight, torch.Tensor) and weight.numel():
            method.process_weights_after_loading(layer)


def _end_with(owner_pid: int, parent_pid: int) -> None:
    with suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(owner_pid), select.POLLIN)
        poll.poll()
    if parent_pid != owner_pid and os.getppid() == parent_pid:
        os.kill(parent_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - the reader is no mapping
                yield name, reader.get_tensor(name)


def _noting(
    weights: Iterable[tuple[str, torch.Tensor]], entries: list[TensorEntry]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        entries.append(_entry(name, tensor))
        yield name, tensor


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return TensorEntry(
        name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape), sha256=hashlib.sha256(raw.data).hexdigest()
    )
