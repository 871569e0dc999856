"""The structural similarity (SSIM) of a video to its source."""

import numpy as np
import torch

WINDOW, SIGMA = 11, 1.5
"""The side of the Gaussian window and its standard deviation in pixels, as in the paper that `ssim` names."""
K1, K2 = 0.01, 0.03
"""The paper's constants, relative to the peak, for quotients in which means or variances are near zero."""


def ssim(got: torch.Tensor, reference: torch.Tensor, peak: float = 255.0) -> float:
    """Return the mean structural similarity (SSIM) of two videos (N, C, T, H, W), 1 if they are equal.

    Each channel of each frame is compared under a Gaussian window at every position that is wholly in the
    frame. A frame that is smaller than the window gets a smaller one. See Wang et al., "Image quality
    assessment: from error visibility to structural similarity", 2004. `peak` is the range of the videos'
    values.
    """
    frames = zip(got.unbind(2), reference.unbind(2), strict=True)
    return float(np.mean([_similarity(a.double().numpy(), b.double().numpy(), peak) for a, b in frames]))


def _similarity(a: np.ndarray, b: np.ndarray, peak: float) -> float:
    """Return the mean structural similarity of two batches of frames (N, C, H, W)."""
    mean_a, mean_b = _window_means(a), _window_means(b)
    var_a, var_b = _window_means(a * a) - mean_a**2, _window_means(b * b) - mean_b**2
    covariance = _window_means(a * b) - mean_a * mean_b
    # The paper's constants c1 and c2 keep the quotient stable where means or variances are near zero.
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    denominator = (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    return float((numerator / denominator).mean())


def _window_means(image: np.ndarray) -> np.ndarray:
    """Return the Gaussian-weighted means of all windows of an image (..., H, W)."""
    # A Gaussian in two dimensions is the product of one along the rows and one along the columns. So the
    # image is averaged along one axis, and the result along the other.
    for axis in (-2, -1):
        taps = min(WINDOW, image.shape[axis])  # the window's side; a small image gets a smaller window
        offsets = np.arange(taps) - (taps - 1) / 2
        weights = np.exp(-0.5 * (offsets / SIGMA) ** 2)
        windows = np.lib.stride_tricks.sliding_window_view(image, taps, axis=axis)
        image = windows @ (weights / weights.sum())  # over the last axis, which has a window's pixels
    return image
