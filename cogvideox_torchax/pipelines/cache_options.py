"""diffusers' caches by name and value, as the command line takes them: `first-block:0.1`."""

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.files import reports

CHOICES = {
    "first-block": "first-block:THRESHOLD (0.05)",
    "pab": "pab:N (2), attention of one in N steps",
    "magcache": "magcache:RATIOS.json, a list that magcache:calibrate prints",
    "taylorseer": "taylorseer:N (5), one in N steps",
    "fastercache": "fastercache:N (5), the batch without a prompt in one of N steps",
}
"""Each cache, and the value that may follow after a colon, its default in parentheses."""


def config_of(choice: str, *, steps: int, guided: bool, timestep: Callable[[], Any] = lambda: 0) -> Any:
    """Return diffusers' config of a cache.

    Args:
        choice: one of `CHOICES`, such as "first-block:0.1".
        steps: number of denoising steps.
        guided: whether steps run with classifier-free guidance.
        timestep: diffusers' cache calls it in each step for the step's timestep. The default serves only to
            check a choice.

    Raises:
        ValueError: no such cache, a value that it does not take, or FasterCache without guidance.
    """
    name, _, value = choice.partition(":")
    if name not in CHOICES:
        raise ValueError(f"got --cache {choice}: it takes {'; '.join(CHOICES.values())}")
    if name == "fastercache" and not guided:
        raise ValueError(
            "got --cache fastercache without guidance: it only skips the pass without a prompt; take another"
        )
    try:
        return _config(name, value, steps, timestep)
    except (ValueError, OSError) as error:
        raise ValueError(f"got --cache {choice} ({error}): it takes {CHOICES[name]}") from error


def with_contents(choice: str) -> str:
    """Return a choice with a hash in place of the name of a file."""
    name, _, value = choice.partition(":")
    return (
        f"{name}:{hashlib.sha256(Path(value).read_bytes()).hexdigest()}" if Path(value).is_file() else choice
    )


def _config(name: str, value: str, steps: int, timestep: Callable[[], Any]) -> Any:
    """Return diffusers' config of the cache `name`, a key of `CHOICES`.

    `value` is the text after the name's colon: a threshold, a number of steps, or for MagCache "calibrate" or
    the path of a file of ratios. "" stands for the default in `CHOICES`; MagCache has none, and refuses it.
    An error's message is only a reason, such as "no threshold"; `config_of` makes a whole message of it.
    """
    # Imported here, as the command line starts without diffusers, whose import takes seconds.
    hooks: Any = importlib.import_module("diffusers.hooks")
    if name == "first-block":
        threshold = float(value or 0.05)
        if not 0 <= threshold < float("inf"):
            raise ValueError("no threshold")
        return hooks.FirstBlockCacheConfig(threshold=threshold)
    if name == "magcache":
        if value == "calibrate":
            return hooks.MagCacheConfig(calibrate=True, num_inference_steps=steps)
        return hooks.MagCacheConfig(num_inference_steps=steps, mag_ratios=_ratios(value))
    # The cache computes the layers that it may skip in one of `every` steps.
    every = int(value or (2 if name == "pab" else 5))
    if every < 2:
        raise ValueError("nothing would be skipped")
    if name == "pab":
        return hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=every, current_timestep_callback=timestep
        )
    if name == "taylorseer":
        # Without lite mode it would keep the results of all layers, which a chip's memory does not hold. With
        # it, only the transformer's last result is kept.
        return hooks.TaylorSeerCacheConfig(cache_interval=every, use_lite_mode=True)
    return hooks.FasterCacheConfig(
        unconditional_batch_skip_range=every,
        # The weight of attention's extrapolation, in all modules: the value of diffusers' example.
        attention_weight_callback=lambda _module: 0.3,
        tensor_format="BFCHW",  # the axes of CogVideoX's latents: (N, T, C, H, W) in diffusers' letters
        current_timestep_callback=timestep,
    )


def _ratios(path: str) -> list[float]:
    """Return MagCache's ratios, a list of numbers in a JSON file.

    Raises:
        ValueError: the path is "", or the file holds anything else; `config_of` completes its message.
    """
    if not path:
        raise ValueError("its ratios are each model's own")  # so there is no default
    values = reports.parse(Path(path).read_bytes())
    if not (isinstance(values, list) and values and all(isinstance(each, int | float) for each in values)):
        raise ValueError("no list of numbers")
    return [float(each) for each in values]
