"""Choose how an op runs: for which platform, with Pallas kernels or not, over how many devices.

An op's public function checks its arguments and calls its body through `dispatch`. The body is named
`OP_on`: the op on a target. It is traced once for each platform that has an implementation (form) of its own,
and the program keeps the trace of the platform that it is lowered for. A `Target` tells the body which
platform it is traced for. An op that is the same on every platform is compiled by `jitted`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import jax
from jax.lax import platform_dependent
from jax.sharding import PartitionSpec

from jax_kernels.common.columns import WHOLE, Split
from jax_kernels.common.tiles import pallas_mode

Function = TypeVar("Function", bound=Callable[..., Any])
"""A function of any signature."""


def jitted(*static_argnames: str) -> Callable[[Function], Function]:
    """Return a decorator that applies `jax.jit`; the arguments of the given names are static.

    The cast keeps the function's signature for type checkers: the result of `jax.jit` hides it.
    """
    decorator = functools.partial(jax.jit, static_argnames=static_argnames)
    return cast(Callable[[Function], Function], decorator)


@dataclass(frozen=True)
class Target:
    """The platform that an op's body is traced for.

    Attributes:
        platform: "tpu" or "cuda" if the op has a form of its own for it, else "default".
        pallas: whether Pallas kernels, and cuDNN's, may be used.
        split: the sharding of columns.
    """

    platform: str = "default"
    pallas: bool = True
    split: Split = WHOLE

    @property
    def on_tpu(self) -> bool:
        """True if the platform is a TPU."""
        return self.platform == "tpu"

    @property
    def uses_pallas(self) -> bool:
        """True if a Pallas kernel may do the work."""
        return self.on_tpu and self.pallas


def dispatch(
    body: Callable[..., Any],
    *operands: Any,
    platforms: tuple[str, ...] = ("tpu",),
    split: Split = WHOLE,
    **options: Any,
) -> Any:
    """Call `body(target, *operands, **options)` as a compiled function, with a `Target` for each platform.

    Options are static, and so are `split` and `pallas_mode` (which Pallas kernels run): each combination
    of their values is another program.

    Args:
        body: function of a `Target`, then operands by position and options by name.
        operands: arrays, or trees of arrays.
        platforms: names of the platforms that the body has its own implementation for.
        split: the sharding of columns.
        options: further arguments of the body.
    """
    compiled = _compiled(body, platforms)
    # The mode may turn off the kernels of some ops only: it is read by the op's name.
    return compiled(*operands, split=split, pallas=pallas_mode(compiled.__name__), **options)


@functools.cache
def _compiled(body: Callable[..., Any], platforms: tuple[str, ...]) -> Callable[..., Any]:
    """Return the compiled function that `dispatch` calls for a body and its platforms.

    The function has the op's name: the body's name without "_on". Programs show this name, and the
    environment variable `tiles.SWITCH`, which turns Pallas kernels off, may list it.
    """

    def traced(*operands: Any, split: Split, pallas: str, **options: Any) -> Any:
        """Trace `body` for each platform, into a branch of the program; `pallas` is from `pallas_mode`."""
        # New partials for each trace: JAX would reuse an earlier trace of the same function at equal shapes.
        branches = {
            platform: functools.partial(body, Target(platform, pallas != "off", split), **options)
            for platform in (*platforms, "default")
        }
        return platform_dependent(*operands, **branches)

    traced.__name__ = body.__name__.removesuffix("_on")
    option_names = [p.name for p in inspect.signature(body).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return jax.jit(traced, static_argnames=("split", "pallas", *option_names))


def map_shards(
    target: Target,
    function: Callable[..., Any],
    activations: tuple[Any, ...],
    weights: tuple[Any, ...] = (),
    statistics: tuple[Any, ...] = (),
) -> Any:
    """Call `function(target, *activations, *weights, *statistics)` on each device's local columns.

    Without a split over devices it is called once, for all columns.

    Args:
        target: the target; the one that `function` gets on a device has `split.in_shard` set.
        function: returns activations, or a tuple of them.
        activations: arrays N T H W C, sharded by the target's `split`, or None.
        weights: arrays that are the same on every device, or None.
        statistics: arrays N ..., sharded by video alone: they cover all columns of a video.
    """
    split = target.split
    if not split.columns or split.in_shard:
        return function(target, *activations, *weights, *statistics)
    shard_target = replace(target, split=replace(split, in_shard=True))

    def call_on_shard(*groups: tuple[Any, ...]) -> Any:
        """Call `function` with a device's shards of activations, weights and statistics (the groups)."""
        return function(shard_target, *(array for group in groups for array in group))

    # `split.videos` and `split.columns` name mesh axes.
    activation_spec = PartitionSpec(split.videos, None, None, split.columns)
    return jax.shard_map(
        call_on_shard,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(activation_spec, PartitionSpec(), PartitionSpec(split.videos)),
        out_specs=activation_spec,
        check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
    )(activations, weights, statistics)


def with_derivatives_of(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `kernel` and has the derivatives of `plain`.

    JAX cannot differentiate a Pallas kernel. `plain` and `kernel` compute the same results from equal arrays.
    """
    derived = jax.custom_jvp(kernel)
    # The rule returns the kernel's result and the plain function's tangent, the second result of `jvp`.
    derived.defjvp(lambda primals, tangents: (derived(*primals), jax.jvp(plain, primals, tangents)[1]))
    return derived
