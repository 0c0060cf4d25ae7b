"""From the config of a clip to the clip."""

from collections.abc import Sequence

from trainer.config.trainer import AdaGCConfig, ClipConfig, LayerClipConfig, ZClipConfig
from trainer.optim.adagc import AdaGC
from trainer.optim.clipping import Clip, NoMemoryClip
from trainer.optim.layerclip import LayerClip
from trainer.optim.zclip import ZClip


def build_clip(config: ClipConfig, names: Sequence[str], max_grad_norm: float) -> Clip:
    """The clip of `config` over blocks `names`.

    Args:
        max_grad_norm: global norm to which the optimizer clips afterwards.
    """
    match config:
        case LayerClipConfig(mode=mode, alpha=alpha, beta=beta, eps=eps, warmup_steps=warmup_steps):
            return LayerClip(names, mode=mode, alpha=alpha, beta=beta, eps=eps, warmup_steps=warmup_steps)
        case ZClipConfig(alpha=alpha, beta=beta, eps=eps, warmup_steps=warmup_steps):
            return ZClip(names, alpha=alpha, beta=beta, eps=eps, warmup_steps=warmup_steps)
        case AdaGCConfig(lam=lam, beta=beta, warmup_steps=warmup_steps):
            return AdaGC(names, lam=lam, beta=beta, warmup_steps=warmup_steps, warmup_max_norm=max_grad_norm)
        case _:
            return NoMemoryClip(names)
