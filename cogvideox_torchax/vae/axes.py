"""The orders of axes of videos, latents and caches, with a letter for each axis."""

Axes = str
"""An order of the axes N (videos), C (channels), T (frames), H (rows) and W (columns), such as "NCTHW"."""

NCTHW: Axes = "NCTHW"
NTHWC: Axes = "NTHWC"
HWNTC: Axes = "HWNTC"


def ordered(shape_NCTHW: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """Return a shape (N, C, T, H, W) in another order of axes."""
    return tuple(shape_NCTHW[NCTHW.index(letter)] for letter in axes)
