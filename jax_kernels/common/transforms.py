"""Winograd's minimal filtering: few products for several results of a filter with three taps.

A *tile* is the two or four results (frames) that are computed together. Each result adds and subtracts
products. One factor of a product is a linear combination of the three taps, the other one of the frames that
the tile's results see. Each product is a *component* of the tile. Two results take 4 products and four take
7; direct filtering takes 3 for each result. Frames and products are only added and subtracted, and taps are
multiplied by powers of two alone, so the transforms round little. Six products would suffice for four
results, but their factors would make the rounding error for white noise about three times as large.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

TAPS = 3
"""Number of taps of a filter, and of a 3 x 3 x 3 kernel along each axis."""


class Transform(NamedTuple):
    """The linear combinations for tiles of one length.

    Attributes:
        taps: for each product, what the three taps are multiplied by before they are added: 0, or a power of
            two with a sign. The sum is the taps' factor of the product.
        inputs: function that returns the frames' factor of each product, from the two frames before the tile
            and then the tile's.
        results: function that returns the tile's results from the products.
    """

    taps: tuple[tuple[float, float, float], ...]
    inputs: Callable[[Sequence[Any]], list[Any]]
    results: Callable[[Sequence[Any]], list[Any]]


def _inputs_of_two(frames: Sequence[Any]) -> list[Any]:
    """Return the frames' factor in each of the four products for two results, by Winograd's F(2, 3).

    Frames d2 and d3 are the tile, d0 and d1 the two before it. The last factor is the negative of the
    textbook's d1 - d3; `_two_results` adds its product where the textbook subtracts.
    """
    d0, d1, d2, d3 = frames
    return [d0 - d2, d1 + d2, d2 - d1, d3 - d1]


def _two_results(products: Sequence[Any]) -> list[Any]:
    m0, m1, m2, m3 = products
    return [m0 + (m1 + m2), m3 + (m1 - m2)]


def _inputs_of_four(frames: Sequence[Any]) -> list[Any]:
    """Return the frames' factor in each of the seven products for four results.

    Frames d2 to d5 are the tile, d0 and d1 the two before it. The factors are derived from polynomials: the
    first three from the values at 0, 1 and -1, the next three from the remainder modulo x^2 + 1, the last
    from the point at infinity.
    """
    d0, d1, d2, d3, d4, d5 = frames
    even, odd, even_step, odd_step = d2 + d4, d1 + d3, d4 - d2, d3 - d1
    return [
        d0 - d4,  # for the value at 0
        even + odd,  # at 1
        even - odd,  # at -1
        # For the remainder. Two remainders, constant + linear * x, are multiplied as two complex numbers are:
        # by three products of real numbers in place of four.
        even_step + odd_step,
        odd_step - even_step,
        odd_step,
        d5 - d1,  # for the point at infinity
    ]


def _four_results(products: Sequence[Any]) -> list[Any]:
    m0, m1, m2, m3, m4, m5, m6 = products
    even, odd = m1 + m2, m1 - m2  # m1 and m2 are the products for the points 1 and -1
    constant, linear = m3 + m5, m4 + m5  # coefficients of the remainder modulo x^2 + 1, from its products
    return [m0 + (even + constant), odd + linear, even - constant, m6 + (odd - linear)]


TRANSFORMS = {
    2: Transform(
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)), _inputs_of_two, _two_results
    ),
    4: Transform(
        (
            (1, 0, 0),
            (1 / 4, 1 / 4, 1 / 4),
            (1 / 4, -1 / 4, 1 / 4),
            (1 / 2, 0, -1 / 2),
            (0, 1 / 2, 0),
            (-1 / 2, -1 / 2, 1 / 2),
            (0, 0, 1),
        ),
        _inputs_of_four,
        _four_results,
    ),
}
"""Transforms by the number of a tile's results.

Winograd derives them from a product of polynomials, which its values at the points 0, 1, -1 and infinity
determine; for four results also its remainder modulo x^2 + 1.
"""


def transformed_taps(kernel: Float[Array, "3 ..."], tile: int) -> Float[Array, "components ..."]:
    """Return the taps' factor of each product, computed in float32 and then rounded to the kernel's dtype.

    The first axis of `kernel` is time. `tile` is the number of a tile's results.
    """
    # The three taps are broadcast over the components and added. XLA would compile a matrix product, or one
    # sum for each component, for up to 15 s. The factors are (components, taps, 1, ...).
    factors = jnp.asarray(TRANSFORMS[tile].taps, jnp.float32).reshape(-1, TAPS, *[1] * (kernel.ndim - 1))
    return jnp.asarray(
        sum(factors[:, tap] * kernel[tap].astype(jnp.float32) for tap in range(TAPS)), kernel.dtype
    )


def separate_taps(kernel: Float[Array, "3 ..."], tile: int) -> list[Array]:
    """Return `transformed_taps` of a float32 kernel as a list of arrays, for a CPU."""
    # Of separate arrays, XLA can compute each just before the product that takes it. Each is the sum of the
    # taps times their factors; a tap whose factor is 0 is left out.
    return [
        functools.reduce(jnp.add, (factor * kernel[tap] for tap, factor in enumerate(factors) if factor))
        for factors in TRANSFORMS[tile].taps
    ]


def filtered(
    frames: Float[Array, "N P ..."],
    kernel: Float[Array, "3 ..."],
    tile: int,
    multiply: Callable[[Array, Array], Array],
    transform_taps: Callable[[Array, int], Iterable[Array]] = transformed_taps,
) -> Float[Array, "N P-2 ..."]:
    """Convolve frames along time by Winograd's filtering, and round where `norm_conv3d`'s kernel rounds.

    Transforms are float32; the factors of products are rounded to the dtype of frames and kernel.

    Args:
        frames: P frames: two, and then those of whole tiles.
        kernel: three taps of time, on the first axis.
        tile: results of a tile, 2 or 4.
        multiply: `multiply(frames_factor, taps_factor)` returns the float32 products of one component for
            all tiles; the frames' factor is (N, tiles, ...).
        transform_taps: the function of `kernel` and `tile` that gives the taps' factor of each product.
    """
    transform = TRANSFORMS[tile]
    window = tile + TAPS - 1  # the number of frames that a tile's results see
    last_window = frames.shape[1] - window  # index of the first frame of the last tile's window
    # For each position in the window, the frames of all tiles at that position.
    positions = [frames[:, start : start + last_window + 1 : tile] for start in range(window)]
    inputs = transform.inputs([of_tiles.astype(jnp.float32) for of_tiles in positions])
    products = [
        multiply(frames_factor.astype(frames.dtype), taps_factor)
        for frames_factor, taps_factor in zip(inputs, transform_taps(kernel, tile), strict=True)
    ]
    results = jnp.stack(transform.results(products), axis=2)  # (N, tiles, tile, ...)
    return results.reshape(results.shape[0], -1, *results.shape[3:])
