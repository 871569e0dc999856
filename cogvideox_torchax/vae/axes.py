"""The axes of videos, latents and caches, by letter."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """The order of an array's axes.

    Attributes:
        names: their letters: N videos, C channels, T frames, H rows, W columns.
    """

    names: str

    def index(self, letter: str) -> int:
        """Return the axis of a letter."""
        return self.names.index(letter)

    def ordered(self, shape_NCTHW: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape (N, C, T, H, W) in this order."""
        return tuple(shape_NCTHW["NCTHW".index(letter)] for letter in self.names)

    def __str__(self) -> str:
        return f"({', '.join(self.names)})"


NCTHW = Axes("NCTHW")
NTHWC = Axes("NTHWC")
HWNTC = Axes("HWNTC")
