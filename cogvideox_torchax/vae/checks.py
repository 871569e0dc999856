"""Checks of a user's inputs to a VAE, where they enter, in either layout."""

from cogvideox_torchax.vae.axes import Axes


def check_shape(what: str, shape: tuple[int, ...], axes: Axes, *, channels: int, multiple: int = 1) -> None:
    """Raise `ValueError` unless a video, or latents, have a shape that a model takes.

    Args:
        what: "video" or "latents".
        shape: their shape, in the order of `axes`.
        axes: the layout.
        channels: channels that the model takes.
        multiple: required divisor of height and width.
    """
    if len(shape) != 5:
        raise ValueError(f"got {what} of rank {len(shape)}, shape {shape}: it takes {axes}")
    given, height, width = (shape[axes.index(letter)] for letter in "CHW")
    if given != channels:
        raise ValueError(f"got {what} of {given} channels, shape {shape}: the model takes {channels}")
    if 0 in shape:
        raise ValueError(f"got empty {what}, shape {shape}")
    if height % multiple or width % multiple:
        fitting = [max(side // multiple * multiple, multiple) for side in (height, width)]
        raise ValueError(
            f"got a {what} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}; crop it to {fitting[0]} x {fitting[1]}"
        )


def check_finite(what: str, found: tuple[int, ...] | None, axes: Axes, *, first_frame: int = 0) -> None:
    """Raise `ValueError` if a NaN or Inf has been found.

    Args:
        what: "video" or "latents".
        found: index of the first non-finite value, or None.
        axes: the layout.
        first_frame: number of the first frame that was checked.
    """
    if found is None:
        return
    at = {letter: found[axes.index(letter)] for letter in axes.names}
    raise ValueError(
        f"got NaN or Inf in the {what}: video {at['N']}, frame {at['T'] + first_frame}, channel {at['C']}, "
        f"row {at['H']}, column {at['W']}; find where they come from (float16 overflows: try bfloat16 or "
        "float32)"
    )
