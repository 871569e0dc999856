"""diffusers' caches by a word, as the command line takes them: `first-block:0.1`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cogvideox_torchax.files import reports

CHOICES = {
    "first-block": "first-block:THRESHOLD (0.05)",
    "pab": "pab:N (2), attention of one in N steps",
    "magcache": "magcache:RATIOS.json, a list that magcache:calibrate prints",
    "taylorseer": "taylorseer:N (5), one in N steps",
    "fastercache": "fastercache:N (5), the half without a prompt of one in N steps",
}
"""Each cache, with what may follow after a colon and what it is without."""


def config_of(choice: str, *, steps: int, guided: bool, timestep: Callable[[], Any] = lambda: 0) -> Any:
    """Return diffusers' config of a cache.

    Args:
        choice: one of `CHOICES`, such as "first-block:0.1".
        steps: number of denoising steps.
        guided: whether steps run on both halves of classifier-free guidance.
        timestep: returns the timestep of the present step.

    Raises:
        ValueError: no such cache, a value that it does not take, or FasterCache without guidance.
    """
    name, _, value = choice.partition(":")
    makers: dict[str, Callable[[], Any]] = {
        "first-block": lambda: _first_block(float(value or 0.05)),
        "pab": lambda: _broadcast(int(value or 2), timestep),
        "magcache": lambda: _mag(value, steps),
        "taylorseer": lambda: _taylor(int(value or 5)),
        "fastercache": lambda: _faster(int(value or 5), timestep),
    }
    if name not in makers:
        raise ValueError(f"got --cache {choice}: it takes {'; '.join(CHOICES.values())}")
    if name == "fastercache" and not guided:
        raise ValueError("got --cache fastercache without guidance, half of which it skips: take another")
    try:
        return makers[name]()
    except (ValueError, OSError) as error:
        raise ValueError(f"got --cache {choice} ({error}): it takes {CHOICES[name]}") from error


def _first_block(threshold: float) -> Any:
    """Return the config of FirstBlockCache for a threshold of the first block's relative change."""
    from diffusers.hooks.first_block_cache import FirstBlockCacheConfig

    if not 0 <= threshold < float("inf"):
        raise ValueError("no threshold")
    return FirstBlockCacheConfig(threshold=threshold)


def _every(number: int) -> int:
    """Return an interval of steps, checked: one computed step in `number`."""
    if number < 2:
        raise ValueError("nothing would be skipped")
    return number


def _broadcast(every: int, timestep: Callable[[], Any]) -> Any:
    """Return the config of PyramidAttentionBroadcast with attention computed once in `every` steps."""
    from diffusers.hooks.pyramid_attention_broadcast import PyramidAttentionBroadcastConfig

    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=_every(every), current_timestep_callback=timestep
    )


def _mag(ratios: str, steps: int) -> Any:
    """Return the config of MagCache with the ratios of a JSON file, or one that measures them."""
    from diffusers.hooks.mag_cache import MagCacheConfig

    if ratios == "calibrate":
        return MagCacheConfig(calibrate=True, num_inference_steps=steps)
    if not ratios:
        raise ValueError("its ratios are each model's own")
    values = reports.parse(Path(ratios).read_bytes())
    if not (isinstance(values, list) and values and all(isinstance(each, int | float) for each in values)):
        raise ValueError("no list of numbers")
    return MagCacheConfig(num_inference_steps=steps, mag_ratios=[float(each) for each in values])


def _taylor(interval: int) -> Any:
    """Return the config of TaylorSeer with one computed step in `interval`."""
    from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig

    # Without lite mode it would keep results of every layer, more than a chip holds.
    return TaylorSeerCacheConfig(cache_interval=_every(interval), use_lite_mode=True)


def _faster(every: int, timestep: Callable[[], Any]) -> Any:
    """Return the config of FasterCache with the half without a prompt computed once in `every` steps."""
    from diffusers.hooks.faster_cache import FasterCacheConfig

    return FasterCacheConfig(
        unconditional_batch_skip_range=_every(every),
        attention_weight_callback=lambda _: 0.3,  # as diffusers' documents have it for CogVideoX
        tensor_format="BFCHW",
        current_timestep_callback=timestep,
    )
