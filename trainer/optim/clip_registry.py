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
        case LayerClipConfig():
            return LayerClip(names, config)
        case ZClipConfig():
            return ZClip(names, config)
        case AdaGCConfig():
            return AdaGC(names, config, max_grad_norm)
        case _:
            return NoMemoryClip(names)
