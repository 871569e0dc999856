"""The orders of axes of videos, latents and caches, with a letter for each axis."""

Axes = str
"""An order of the axes N (videos), C (channels), T (frames), H (rows) and W (columns), such as "NCTHW"."""

NCTHW: Axes = "NCTHW"
NTHWC: Axes = "NTHWC"
HWNTC: Axes = "HWNTC"
