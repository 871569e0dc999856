"""Upright frames: a phone stores a portrait on its side, with a matrix that rotates it."""

import struct
from typing import NamedTuple, Self

import numpy as np


class Orientation(NamedTuple):
    """The changes that set a frame's pixels upright, in their order.

    Attributes:
        swapped: rows and columns change places.
        upward, leftward: rows, and columns, come in the opposite order.
    """

    swapped: bool = False
    upward: bool = False
    leftward: bool = False

    @classmethod
    def parse(cls, matrix: bytes | None) -> Self:
        """Return the orientation of a display matrix of ISO/IEC 14496-12: nine integers, row by row.

        A pixel at (x, y) is shown at x' = a x + c y and y' = b x + d y. None is an upright frame.
        """
        if matrix is None:
            return cls()
        a, b, _, c, d, *_ = struct.unpack("=9i", matrix)
        swapped = abs(b) > abs(a)
        return cls(swapped, (b if swapped else d) < 0, (c if swapped else a) < 0)

    def sides(self, sides: tuple[int, int]) -> tuple[int, int]:
        """Return the stored height and width for upright ones, or the upright ones for stored ones."""
        return (sides[1], sides[0]) if self.swapped else sides

    def pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Return pixels (H, W, 3), upright."""
        if not any(self):
            return pixels
        pixels = pixels.swapaxes(0, 1) if self.swapped else pixels
        return np.ascontiguousarray(pixels[:: -1 if self.upward else 1, :: -1 if self.leftward else 1])
