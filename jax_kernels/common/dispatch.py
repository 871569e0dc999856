"""Choose how an op runs: for which platform, with Pallas kernels or not, over how many devices.

An op's public function checks its arguments and calls its body through `dispatch`. The body, named `OP_on`,
takes a `Target`, which tells it the platform that it is traced for. JAX traces the body once for each
platform that has a form of its own, and the program keeps the trace of the platform that it is lowered for.
`jitted` compiles an op that is the same on every platform.
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
    """Return a decorator: `jax.jit` with static arguments, but with the signature for type checkers."""
    return cast(Callable[[Function], Function], functools.partial(jax.jit, static_argnames=static_argnames))


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
        return self.platform == "tpu"

    @property
    def uses_pallas(self) -> bool:
        return self.on_tpu and self.pallas


def dispatch(
    body: Callable[..., Any],
    *operands: Any,
    platforms: tuple[str, ...] = ("tpu",),
    split: Split = WHOLE,
    **options: Any,
) -> Any:
    """Call `body(target, *operands, **options)` as a compiled function, with a `Target` for each platform.

    Operands are arrays, or trees of arrays. Options are static, and so are `split` and `pallas_mode` (which
    Pallas kernels run): each combination of their values is another program. `platforms` lists those that the
    body has a form of its own for.
    """
    compiled = _compiled(body, platforms)
    # The mode may turn off the kernels of some ops only: it is read by the op's name.
    return compiled(*operands, split=split, pallas=pallas_mode(compiled.__name__), **options)


@functools.cache
def _compiled(body: Callable[..., Any], platforms: tuple[str, ...]) -> Callable[..., Any]:
    """Return the compiled function that `dispatch` calls, named as the body without "_on".

    Programs show this name, and the environment variable `tiles.SWITCH`, which turns Pallas kernels off, may
    list it.
    """

    def traced(*operands: Any, split: Split, pallas: str, **options: Any) -> Any:
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
    """Call `function(target, *activations, *weights, *statistics)` once on each device, for its shard.

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
        return function(shard_target, *(array for group in groups for array in group))

    activation_spec = PartitionSpec(split.videos, None, None, split.columns)
    return jax.shard_map(
        call_on_shard,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(activation_spec, PartitionSpec(), PartitionSpec(split.videos)),
        out_specs=activation_spec,
        check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
    )(activations, weights, statistics)


def with_derivatives_of(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `kernel` and has the derivatives of `plain`, its equal.

    JAX cannot differentiate a Pallas kernel.
    """
    derived = jax.custom_jvp(kernel)
    # The rule returns the kernel's result and the plain function's tangent, the second result of `jvp`.
    derived.defjvp(lambda primals, tangents: (derived(*primals), jax.jvp(plain, primals, tangents)[1]))
    return derived


def kernel_or_plain(
    target: Target, kernel: Callable[..., Any], plain: Callable[..., Any], *, is_supported: bool
) -> Callable[..., Any]:
    """Return `kernel` with the derivatives of `plain` where a Pallas kernel may run, else `plain`.

    `is_supported` is whether the kernel supports the arrays of this call.
    """
    return with_derivatives_of(plain, kernel) if target.uses_pallas and is_supported else plain
