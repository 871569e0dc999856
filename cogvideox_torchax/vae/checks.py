"""What a user passes to a VAE, checked where it enters, in either layout."""

from cogvideox_torchax.vae.axes import Axes


def check_shape(what: str, shape: tuple[int, ...], axes: Axes, *, channels: int, multiple: int = 1) -> None:
    """Raises `ValueError` unless a video, or latents, are what a model takes.

    Args:
        what: "video" or "latents".
        shape: theirs, in the order of `axes`.
        axes: of which layout.
        channels: of the model.
        multiple: that height and width have to be of.
    """
    if len(shape) != 5:
        raise ValueError(f"got {what} of rank {len(shape)}, shape {shape}: it takes {axes}")
    given, height, width = (shape[axes.of(letter)] for letter in "CHW")
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
    """Raises `ValueError` where a NaN or Inf has been found.

    Args:
        what: "video" or "latents".
        found: the index of the first one, or None.
        axes: of which layout.
        first_frame: the number of the first frame that was looked at.
    """
    if found is None:
        return
    at = {letter: found[axes.of(letter)] for letter in axes.names}
    raise ValueError(
        f"got NaN or Inf in the {what}: video {at['N']}, frame {at['T'] + first_frame}, channel {at['C']}, "
        f"row {at['H']}, column {at['W']}; find where they come from (float16 overflows: try bfloat16 or "
        "float32)"
    )
