"""diffusers' `from_pretrained` while torchax is on, which torchax itself does not take."""

import functools
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from cogvideox_torchax.runtime import without_torchax


def load_without_torchax() -> None:
    """Called once: diffusers' `from_pretrained`, of models and of pipelines, then runs where torchax is off.

    While it is on, torchax can neither read a safetensors file (`torch.asarray` of a storage) nor build a
    module on `torch.device("meta")`: a script that begins with `torchax.enable_globally()` could load
    nothing. With torchax off nothing changes.
    """
    for kind in (DiffusionPipeline, ModelMixin):
        load = vars(kind)["from_pretrained"].__func__
        kind.from_pretrained = classmethod(_outside(load))  # pyright: ignore[reportAttributeAccessIssue]


def _outside(load: Any) -> Any:
    @functools.wraps(load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        return without_torchax(load, cls, *args, **kwargs)

    return from_pretrained
