"""Sizes as a user writes them: HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH, in pixels."""

SMALLEST_TILE = 2
"""Fewest latent pixels of a tile's side: a smaller tile would only overlap the next."""


class SizeError(ValueError):
    """A text that is no size, or a size that a model cannot take; the message names a good one."""


def parse_size(
    text: str, what: str = "a size", *, frames: bool = False, multiple: int = 1, least: int = 1
) -> tuple[int, ...]:
    """Return the numbers of a text such as "480x720" (height and width).

    Args:
        text: text of the user.
        what: name of the sized thing for an error, such as "tiles".
        frames: whether the number of frames comes first, as in "49x480x720".
        multiple: required divisor of height and width.
        least: fewest multiples of `multiple` on a side.

    Raises:
        SizeError: another text, no frames, or sides that do not fit.
    """
    form, example = ("FRAMESxHEIGHTxWIDTH", "49x480x720") if frames else ("HEIGHTxWIDTH", "240x360")
    parts = text.lower().split("x")
    are_positive = all(part.isascii() and part.isdigit() and int(part) for part in parts)
    if not are_positive or len(parts) != len(form.split("x")):
        raise SizeError(f"got {what} of {text!r}: give {form} in pixels, such as {example}")
    numbers = tuple(map(int, parts))
    *_frames, height, width = numbers
    check_sides(what, height, width, multiple=multiple, least=least)
    return numbers


def check_sides(what: str, height: int, width: int, *, multiple: int, least: int = 1) -> None:
    """Raise `SizeError` unless both sides are multiples of `multiple`, and at least `least * multiple`.

    `what` is the name of the thing that has this size, for the message.
    """
    good_height, good_width = (max(round(side / multiple), least) * multiple for side in (height, width))
    if (height, width) != (good_height, good_width):
        raise SizeError(
            f"got {what} of {height} x {width} pixels (height x width): both must be multiples of "
            f"{multiple}, {least * multiple} at least; {good_height}x{good_width} is near"
        )
