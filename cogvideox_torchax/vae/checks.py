"""Checks of a user's inputs to a VAE, where they enter, in either layout."""

from collections.abc import Mapping
from typing import Any

from cogvideox_torchax.vae.axes import Axes
from cogvideox_torchax.vae.directions import Direction


def check_shape(
    direction: Direction,
    shape: tuple[int, ...],
    axes: Axes,
    config: Mapping[str, Any],
    spatial_compression_ratio: int,
) -> None:
    """Raise `ValueError` unless the input of a direction has a shape that a model takes.

    Args:
        direction: `ENCODE` for a video, `DECODE` for latents.
        shape: the input's shape, in the order of `axes`.
        axes: order of the axes, such as "NCTHW".
        config: the model's config, which has the numbers of channels.
        spatial_compression_ratio: the model's pixels for each latent pixel, along one axis.
    """
    # `direction.channels` is the config's field with the number of input channels.
    input_name, channels = direction.takes, config[direction.channels]
    multiple = direction.scale(spatial_compression_ratio)  # must divide height and width; 1 for latents
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
        fitting_height, fitting_width = (
            max(side // multiple * multiple, multiple) for side in (height, width)
        )
        raise ValueError(
            f"got a {input_name} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}; crop it to {fitting_height} x {fitting_width}"
        )


def check_finite(
    direction: Direction, nonfinite_index: tuple[int, ...] | None, axes: Axes, *, first_frame: int = 0
) -> None:
    """Raise `ValueError` if a search of an input has found a NaN or Inf.

    Args:
        direction: `ENCODE` for a video, `DECODE` for latents.
        nonfinite_index: index of the first NaN or Inf (`runtime.first_nonfinite`), or None.
        axes: order of the input's axes.
        first_frame: position of the input's first frame in the whole video, for the message.
    """
    if nonfinite_index is None:
        return
    index = dict(zip(axes, nonfinite_index, strict=True))
    raise ValueError(
        f"got NaN or Inf in the {direction.takes}: video {index['N']}, frame {index['T'] + first_frame}, "
        f"channel {index['C']}, row {index['H']}, column {index['W']}; find where they come from "
        "(float16 overflows: try bfloat16 or float32)"
    )
