"""Choose how an op runs: for which platform, with Pallas kernels or not, over how many devices.

An *op* is an operation of this package, such as a convolution or a norm. Its public function checks the
arguments, and calls the op's body through `dispatch`. The body, named `OP_on`, takes a `Target`, which tells
it the platform that it is traced for. JAX traces the body once for each platform for which it has code of its
own and once for all others. The program keeps the trace of the platform that it is lowered for. An op that is
the same on every platform is compiled by `jitted` instead.
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
        platform: "tpu" or "cuda" if the op has code of its own for that platform, else "default".
        pallas: whether Pallas kernels, and the kernels of cuDNN, may be used.
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
    """Return `body(target, *operands, **options)`, computed by a compiled function.

    The target has the platform that the function is lowered for. Operands are arrays, trees of arrays, or
    None. Options are static, and so are `split` and the result of `pallas_mode`, which says whether Pallas
    kernels run: each combination of their values is another program. `platforms` are those for which the body
    has code of its own.
    """
    compiled = _compiled(body, platforms)
    # The mode may turn off the kernels of some ops only, so it is asked with the op's name.
    return compiled(*operands, split=split, mode=pallas_mode(compiled.__name__), **options)


@functools.cache
def _compiled(body: Callable[..., Any], platforms: tuple[str, ...]) -> Callable[..., Any]:
    """Return the compiled function that `dispatch` calls, named as the body without "_on".

    Programs show this name, and the environment variable that turns Pallas kernels off (`tiles.SWITCH`) may
    list it.
    """

    def traced(*operands: Any, split: Split, mode: str, **options: Any) -> Any:
        # `mode` is what `pallas_mode` returned. Only "off" turns the op's Pallas kernels off; other modes
        # choose among kernels. It is static, so the body is traced again when it changes.
        # The partials are new in each trace. JAX keeps a branch's trace by its function object: for an old
        # one it would reuse the old trace, although a setting that the body reads may have changed since.
        branches = {
            platform: functools.partial(body, Target(platform, mode != "off", split), **options)
            for platform in (*platforms, "default")
        }
        # JAX takes the branch of the platform that the program is lowered for, or "default".
        return platform_dependent(*operands, **branches)

    traced.__name__ = body.__name__.removesuffix("_on")
    # The options of a body are its keyword-only parameters.
    option_names = [p.name for p in inspect.signature(body).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return jax.jit(traced, static_argnames=("split", "mode", *option_names))


def map_shards(
    target: Target,
    function: Callable[..., Any],
    activations: tuple[Any, ...],
    weights: tuple[Any, ...] = (),
    statistics: tuple[Any, ...] = (),
) -> Any:
    """Call `function(target, *activations, *weights, *statistics)` once on each device, for its shard.

    Without a split over devices it is called once, for all columns. Inside a shard, too, it is called once.

    Args:
        target: the target; the one that `function` gets on a device has `split.in_shard` set.
        function: its results are activations, or a tuple of them, sharded as the arguments are.
        activations: arrays N T H W C, sharded by the target's `split`, or None.
        weights: arrays that are the same on every device, or None.
        statistics: arrays N ..., sharded by video alone, because they cover all columns of a video.
    """
    split = target.split
    if not split.columns or split.in_shard:
        return function(target, *activations, *weights, *statistics)
    on_shard = functools.partial(function, replace(target, split=replace(split, in_shard=True)))
    activation_spec = PartitionSpec(split.videos, None, None, split.columns)
    # Each of the three `in_specs` is that of all arrays of its tuple.
    return jax.shard_map(
        lambda activations, weights, statistics: on_shard(*activations, *weights, *statistics),
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=(activation_spec, PartitionSpec(), PartitionSpec(split.videos)),
        out_specs=activation_spec,
        check_vma=False,  # a Pallas kernel does not say over which mesh axes its results vary
    )(activations, weights, statistics)


def with_derivatives_of(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `kernel` with the derivatives of `plain`, which computes the same."""
    # JAX cannot differentiate a Pallas kernel.
    differentiable = jax.custom_jvp(kernel)
    # The rule returns the kernel's result and the plain function's tangent, the second result of `jvp`. It
    # calls `differentiable` in place of `kernel`, so that JAX can differentiate the rule once more.
    differentiable.defjvp(
        lambda primals, tangents: (differentiable(*primals), jax.jvp(plain, primals, tangents)[1])
    )
    return differentiable


def on_platform(plain: Callable[..., Any], **forms: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes its platform's form of `forms`, and elsewhere `plain`.

    Its derivatives are those of `plain` on every platform. Platforms have JAX's names: `cpu`, `cuda`.
    """
    return with_derivatives_of(plain, functools.partial(platform_dependent, **forms, default=plain))


def kernel_or_plain(
    target: Target, kernel: Callable[..., Any], plain: Callable[..., Any], *, is_supported: bool
) -> Callable[..., Any]:
    """Return `kernel`, with the derivatives of `plain`, where a Pallas kernel may run; elsewhere `plain`.

    `is_supported` says whether the kernel supports the arrays of this call.
    """
    return with_derivatives_of(plain, kernel) if target.uses_pallas and is_supported else plain
