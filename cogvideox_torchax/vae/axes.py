"""Which axis of a video, of latents or of a cache is what."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """The order of an array's axes.

    Attributes:
        names: their letters: N videos, C channels, T frames, H rows, W columns.
    """

    names: str

    def of(self, letter: str) -> int:
        """Return the axis of a letter."""
        return self.names.index(letter)

    def __str__(self) -> str:
        return f"({', '.join(self.names)})"


NCTHW = Axes("NCTHW")
NTHWC = Axes("NTHWC")
HWNTC = Axes("HWNTC")
