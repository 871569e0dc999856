"""Winograd's minimal filtering: few products for several results of a filter with three taps.

A tile is the two or four results (frames) that are computed together. They are linear combinations of
products (components) of two factors: a combination of the taps, and one of the frames under them. Two results
take 4 products and four take 7, where direct filtering takes 3 for each. The combinations only add and
subtract, but for powers of two with the taps, so they round little. Six products would do for four results,
but with factors that make three times the error of white noise.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

TAPS = 3
"""Taps of a filter, and of the kernel along each axis."""


class Transform(NamedTuple):
    """A transform of tiles to factors of products, and of products to results.

    Attributes:
        taps: for each product, the factors of the three taps, powers of two.
        inputs: function that returns the other factor of each product, from the tile's frames and the two
            before them.
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

    Frames d2 to d5 are the tile, d0 and d1 the two before it. The first three factors are of the points 0, 1
    and -1, the next three of the polynomial x^2 + 1, the last of infinity.
    """
    d0, d1, d2, d3, d4, d5 = frames
    even, odd, even_step, odd_step = d2 + d4, d1 + d3, d4 - d2, d3 - d1
    return [
        d0 - d4,
        even + odd,
        even - odd,
        even_step + odd_step,
        odd_step - even_step,
        odd_step,
        d5 - d1,
    ]


def _four_results(products: Sequence[Any]) -> list[Any]:
    m0, m1, m2, m3, m4, m5, m6 = products
    # The even and the odd part of the products at 1 and -1; the coefficients of 1 and x modulo x^2 + 1.
    even, odd, constant, linear = m1 + m2, m1 - m2, m3 + m5, m4 + m5
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

Their products are of polynomials at the points 0, 1, -1 and infinity; for four results also modulo x^2 + 1.
"""


def transformed_taps(kernel: Float[Array, "3 ..."], tile: int) -> Float[Array, "components ..."]:
    """Return the taps' factor of each product of a tile, rounded to the kernel's dtype once."""
    # Broadcast and added: XLA compiles a product of matrices, or the components one by one, for up to 15 s.
    factors = jnp.asarray(TRANSFORMS[tile].taps, jnp.float32).reshape(-1, TAPS, *[1] * (kernel.ndim - 1))
    return jnp.asarray(
        sum(factors[:, tap] * kernel[tap].astype(jnp.float32) for tap in range(TAPS)), kernel.dtype
    )


def separate_taps(kernel: Float[Array, "3 ..."], tile: int) -> list[Array]:
    """Return `transformed_taps` of a float32 kernel as separate arrays, which suit a CPU."""
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
    """Convolve frames along time by Winograd's filtering, rounded as the TPU's kernel does.

    Transforms are float32; the factors of products are rounded to the dtype of frames and kernel.

    Args:
        frames: P frames: those of whole tiles, and the two before them.
        kernel: three taps of time.
        tile: results of a tile, 2 or 4.
        multiply: `multiply(frames_factor, taps_factor)` returns the float32 products of one component, for
            the frames' factor (N, tiles, ...).
        transform_taps: the function of `kernel` and `tile` that gives the taps' factor of each product.
    """
    transform = TRANSFORMS[tile]
    last_tile = frames.shape[1] - tile - TAPS + 1  # index of the first frame under the last tile's taps
    # For each position under a tile's taps, the frames at that position in all tiles.
    under_taps = [frames[:, start : start + last_tile + 1 : tile] for start in range(tile + TAPS - 1)]
    inputs = transform.inputs([of_tiles.astype(jnp.float32) for of_tiles in under_taps])
    products = [
        multiply(frames_factor.astype(frames.dtype), taps_factor)
        for frames_factor, taps_factor in zip(inputs, transform_taps(kernel, tile), strict=True)
    ]
    results = jnp.stack(transform.results(products), axis=2)  # (N, tiles, tile, ...)
    return results.reshape(results.shape[0], -1, *results.shape[3:])
