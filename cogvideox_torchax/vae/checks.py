"""Checks of the videos and latents that a user gives a VAE, in any order of axes, such as "NCTHW".

A `Direction` is `ENCODE` or `DECODE`. Its `takes` is the name of the VAE's input, "video" or "latents", and
its `channels_key` is the config's field with the input's number of channels.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cogvideox_torchax.vae.directions import ENCODE, Axes, Direction

LARGEST_EXPECTED = 10
"""A limit of absolute values: a noisy video in [-1, 1] stays below it, and one in [0, 255] does not."""

HOW_TO_CONVERT = "convert 0 to 255 to [-1, 1] by cogvideox_torchax.vae.pixels.from_uint8(video, 'float32')"


def check_shape(
    direction: Direction,
    shape: tuple[int, ...],
    axes: Axes,
    config: Mapping[str, Any],
    spatial_compression_ratio: int,
) -> None:
    """Raise `ValueError` unless a model of this config takes an input of this shape.

    `spatial_compression_ratio` is the number of a video's pixels for each latent pixel, along one axis.
    """
    input_name, channels = direction.takes, config[direction.channels_key]
    # The input's pixels for each latent pixel, along one axis: height and width must be multiples of it. For
    # latents it is 1.
    multiple = direction.scale(spatial_compression_ratio)
    if len(shape) != 5:
        raise ValueError(
            f"got {input_name} of rank {len(shape)}, shape {shape}: it takes ({', '.join(axes)})"
        )
    given_channels, height, width = (shape[axes.index(letter)] for letter in "CHW")
    if given_channels != channels:
        raise ValueError(
            f"got {input_name} of {given_channels} channels, shape {shape}: the model takes {channels}"
        )
    if 0 in shape:
        raise ValueError(f"got empty {input_name}, shape {shape}")
    if height % multiple or width % multiple:
        # Each side is rounded down to a multiple.
        fitting_height, fitting_width = (
            max(side // multiple * multiple, multiple) for side in (height, width)
        )
        raise ValueError(
            f"got a {input_name} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}; crop it to {fitting_height} x {fitting_width}"
        )


def check_values(
    direction: Direction,
    largest: float | None,
    find_nonfinite: Callable[[], tuple[int, ...] | None],
    axes: Axes,
    *,
    first_frame: int = 0,
) -> None:
    """Raise `ValueError` for an input with a NaN or Inf; warn of a video far outside [-1, 1].

    `largest` is the input's largest absolute value. It is None for integers and while a program is traced:
    then nothing is checked. `find_nonfinite` returns the index of the first NaN or Inf. `first_frame` is the
    position of the input's first frame in the whole video.
    """
    if largest is None:
        return
    # Beyond the limit, 10, a video is one in [0, 255] that was not converted. Below it, it may be a noisy one
    # in [-1, 1].
    if direction == ENCODE and LARGEST_EXPECTED < largest < math.inf:
        warnings.warn(
            f"the video has values beyond {LARGEST_EXPECTED}, where the model takes [-1, 1]: "
            f"{HOW_TO_CONVERT}",
            stacklevel=2,
        )
    # `largest` is not finite if any value is not. Only then is the input searched, which takes longer.
    index = None if math.isfinite(largest) else find_nonfinite()
    if index is not None:
        position = dict(zip(axes, index, strict=True))  # the index along each axis, by the axis's letter
        raise ValueError(
            f"got NaN or Inf in the {direction.takes}: video {position['N']}, "
            f"frame {position['T'] + first_frame}, channel {position['C']}, row {position['H']}, "
            f"column {position['W']}; find where they come from "
            "(float16 overflows: try bfloat16 or float32)"
        )


def integers_refused(direction: Direction, dtype: object) -> ValueError:
    """Return the error for an input of integers, which must be scaled before they are cast to floats."""
    advice = f"{HOW_TO_CONVERT}; encode_stream takes uint8" if direction == ENCODE else "pass floats"
    return ValueError(f"got {direction.takes} of {dtype}: {advice}")
