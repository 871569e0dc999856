"""What a command's terminal shows: how long JAX compiles, and no warnings of other packages."""

import importlib
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable

from cogvideox_torchax.upstream import COMPILING_EVENTS, TRACING_EVENTS

LONG = 0.3
"""Seconds of tracing and lowering together, from which on a program is announced before it compiles."""


class CompileClock:
    """A clock of the seconds that JAX traces, lowers and compiles; spans that overlap count once.

    Args:
        announce: called with a message before a large program is compiled, once for each name.

    Attributes:
        started: time when the clock was made, of `time.perf_counter`.
        spans: (event, start, stop) of JAX's work.
    """

    def __init__(self, announce: Callable[[str], None] = lambda line: None) -> None:
        import jax.monitoring

        self.started = time.perf_counter()
        self.spans: list[tuple[str, float, float]] = []
        self._announce = announce
        self._announced = set[str]()  # names of the programs that were announced
        self._tracing_seconds = dict[str, float]()  # by the name of a program
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Record a span of JAX's work, and announce a program whose tracing and lowering took long."""
        now = time.perf_counter()  # JAX calls this at the end of each event
        self.spans.append((event, now - duration_secs, now))
        # A program's events come in this order: tracing, lowering, compiling. Compiling takes the longest, so
        # the program is announced when it is lowered. Some events call it "jit(NAME)".
        name = str(kwargs.get("fun_name")).removeprefix("jit(").removesuffix(")")
        tracing, lowering = TRACING_EVENTS  # JAX's names of the two events
        if event == tracing:
            self._tracing_seconds[name] = duration_secs
        is_long = duration_secs + self._tracing_seconds.get(name, 0.0) >= LONG
        if event == lowering and is_long and name not in self._announced:
            self._announced.add(name)
            self._announce(
                f"compiling {name}, unless the compile cache has it: minutes on a TPU, once for a size"
            )

    @property
    def seconds(self) -> float:
        """Seconds of tracing and compiling together, since the clock was made."""
        return covered_seconds(self.spans, (*TRACING_EVENTS, *COMPILING_EVENTS))

    @property
    def elapsed(self) -> float:
        """Wall seconds since the clock was made."""
        return time.perf_counter() - self.started


def covered_seconds(spans: list[tuple[str, float, float]], events: tuple[str, ...]) -> float:
    """Return the seconds that spans (event, start, stop) of some events cover; overlaps count once."""
    total, end = 0.0, float("-inf")  # `end` is the latest stop of the spans counted so far
    for _, start, stop in sorted((span for span in spans if span[0] in events), key=lambda span: span[1]):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def quiet_libraries(*, bars: bool = True) -> None:
    """Keep other packages' warnings off a user's terminal; `bars` is whether progress bars stay on it."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "jax", "torchax", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("diffusers", "transformers"):
        # The package sets its level by this variable when it is imported.
        os.environ.setdefault(f"{name.upper()}_VERBOSITY", "error")
        if not bars and importlib.util.find_spec(name):
            importlib.import_module(f"{name}.utils.logging").disable_progress_bar()
    if not bars:
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
