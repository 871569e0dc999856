"""Checks of a user's inputs to a VAE, where they enter, in either layout."""

from cogvideox_torchax.vae.axes import Axes


def check_shape(
    input_name: str, shape: tuple[int, ...], axes: Axes, *, channels: int, multiple: int = 1
) -> None:
    """Raise `ValueError` unless a video, or latents, have a shape that a model takes.

    Args:
        input_name: "video" or "latents".
        shape: its shape, in the order of `axes`.
        axes: order of the axes.
        channels: channels that the model takes.
        multiple: required divisor of height and width.
    """
    if len(shape) != 5:
        raise ValueError(f"got {input_name} of rank {len(shape)}, shape {shape}: it takes {axes}")
    given_channels, height, width = (shape[axes.index(letter)] for letter in "CHW")
    if given_channels != channels:
        raise ValueError(
            f"got {input_name} of {given_channels} channels, shape {shape}: the model takes {channels}"
        )
    if 0 in shape:
        raise ValueError(f"got empty {input_name}, shape {shape}")
    if height % multiple or width % multiple:
        fitting = [max(side // multiple * multiple, multiple) for side in (height, width)]
        raise ValueError(
            f"got a {input_name} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}; crop it to {fitting[0]} x {fitting[1]}"
        )


def check_finite(
    input_name: str, nonfinite_index: tuple[int, ...] | None, axes: Axes, *, first_frame: int = 0
) -> None:
    """Raise `ValueError` if a search of an input has found a NaN or Inf.

    Args:
        input_name: "video" or "latents".
        nonfinite_index: index of the first NaN or Inf (`runtime.first_nonfinite`), or None.
        axes: order of the input's axes.
        first_frame: position of the input's first frame in the whole video, for the message.
    """
    if nonfinite_index is None:
        return
    index = dict(zip(axes.names, nonfinite_index, strict=True))
    raise ValueError(
        f"got NaN or Inf in the {input_name}: video {index['N']}, frame {index['T'] + first_frame}, "
        f"channel {index['C']}, row {index['H']}, column {index['W']}; find where they come from "
        "(float16 overflows: try bfloat16 or float32)"
    )
