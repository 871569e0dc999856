"""What needs no torch to know of files: their kinds by suffix, and frame rates."""

import re
from fractions import Fraction
from pathlib import Path

SUFFIXES = {"parquet": ".parquet", "webdataset": ".tar"}
"""By format, the suffix of a shard's file."""
LISTS = (".txt", ".jsonl")
"""Suffixes of lists of clips."""

RATE = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10}|/0{0,9}[1-9][0-9]{0,9})?")
"""A frame rate as text. Exponents are not allowed: a short one makes a number that fills memory."""


def is_many(path: str | Path) -> bool:
    """Return whether a path names many clips: a directory, or a list."""
    return Path(path).is_dir() or Path(path).suffix.lower() in LISTS


def frame_rate(text: str) -> Fraction:
    """Return the frames a second that a text such as "29.97" or "30000/1001" names.

    `ValueError` if it is no number above 0, or if its fraction does not fit FFmpeg's 32-bit integers.
    """
    rate = Fraction(text) if RATE.fullmatch(text) else Fraction(0)
    if not 0 < rate.numerator < 2**31 or rate.denominator >= 2**31:
        raise ValueError(f"{text[:40]} is no frame rate: give a number above 0, 8 or 30000/1001")
    return rate
