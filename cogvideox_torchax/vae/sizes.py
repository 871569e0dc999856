"""Sizes that a user writes as HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH, in pixels."""

SMALLEST_TILE = 2
"""The fewest latent pixels of a tile's side, as a smaller tile would only overlap the next one."""


class SizeError(ValueError):
    """The error for a text that is no size, or a size that a model cannot take; it names a good one."""


def parse_size(
    text: str, what: str = "a size", *, frames: bool = False, multiple: int = 1, least: int = 1
) -> tuple[int, ...]:
    """Return the numbers of a text such as "480x720" (height and width).

    With `frames`, the number of frames comes first, as in "49x480x720". Height and width must be multiples of
    `multiple`, and at least `least * multiple`. `what` is what an error calls the thing of this size, such as
    "tiles".

    Raises:
        SizeError: the text has another form, a number is zero, or a side does not fit.
    """
    form, example = ("FRAMESxHEIGHTxWIDTH", "49x480x720") if frames else ("HEIGHTxWIDTH", "240x360")
    parts = text.strip().lower().split("x")
    # `isdigit` alone is true for digits such as "²", which `int` refuses.
    are_positive = all(part.isascii() and part.isdigit() and int(part) for part in parts)
    if not are_positive or len(parts) != len(form.split("x")):
        raise SizeError(f"got {what} of {text!r}: give {form} in pixels, such as {example}")
    numbers = tuple(map(int, parts))
    *_frames, height, width = numbers
    check_sides(what, height, width, multiple=multiple, least=least)
    return numbers


def check_sides(what: str, height: int, width: int, *, multiple: int, least: int = 1) -> None:
    """Raise `SizeError` unless both sides are multiples of `multiple`, and at least `least * multiple`."""
    # The nearest size that would do, with which the error helps. A size that does is its own nearest.
    good_height, good_width = (max(round(side / multiple), least) * multiple for side in (height, width))
    if (height, width) != (good_height, good_width):
        raise SizeError(
            f"got {what} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}, {least * multiple} at least; {good_height}x{good_width} is near"
        )
