"""Errors of results: those that a backend may have against diffusers in float32 on the CPU, PSNR and SSIM."""

import numpy as np
import torch

FLOAT32_RELATIVE = 1e-5
"""The bound of `relative_error` in float32."""

BFLOAT16_RMS_RATIO = 1.1
"""The bound of `rms_error` in bfloat16, as a multiple of PyTorch's own error in bfloat16."""

BFLOAT16_LAYER_RMS_RATIO = 1.5
"""The bound of the same ratio for one layer in one chunk, where fewer roundings average out.

A report finds the layer at fault by it. No check fails by it.
"""


WINDOW, SIGMA = 11, 1.5
"""The side of the Gaussian window and its standard deviation in pixels, as in the paper that `ssim` names."""
K1, K2 = 0.01, 0.03
"""The paper's constants, relative to the peak, for quotients in which means or variances are near zero."""


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference over the reference's largest absolute value; NaN if there is a NaN."""
    reference = reference.double()
    return ((got.double() - reference).abs().max() / reference.abs().max()).item()


def rms_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return (got.double() - reference.double()).square().mean().sqrt().item()


def contract(dtype: torch.dtype, relative: float, rms: float, torch_rms: float) -> tuple[str, float, float]:
    """Return (name, value, largest allowed value) of the error that decides whether a result is accepted.

    In float32 the result's `relative_error` decides. In another dtype its `rms_error` decides, as a multiple
    of `torch_rms`, the error of PyTorch's own run in this dtype.
    """
    if dtype == torch.float32:
        return "relative error", relative, FLOAT32_RELATIVE
    return "RMS error over PyTorch's own", ratio(rms, torch_rms), BFLOAT16_RMS_RATIO


def ratio(error: float, scale: float) -> float:
    """Return `error / scale`; if `scale` is zero, return 0 for no error, else infinity."""
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def psnr(got: torch.Tensor, reference: torch.Tensor, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio in decibels; infinite for equal tensors."""
    error = (got.double() - reference.double()).square().mean().item()
    return float("inf") if error == 0 else 10 * torch.log10(torch.tensor(peak**2 / error)).item()


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
