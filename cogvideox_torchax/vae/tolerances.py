"""The tolerated error of a backend against diffusers in float32 on CPU: one table, for tests and `verify`."""

import torch

FLOAT32_RELATIVE = 1e-5
"""Largest difference in float32, over the largest absolute value of the reference."""

BFLOAT16_RMS_RATIO = 1.1
"""Bound of the root-mean-square error in bfloat16, as a multiple of PyTorch's own bfloat16 error."""

BFLOAT16_LAYER_RMS_RATIO = 1.5
"""Bound of the same ratio for a single layer in a single chunk, where fewer roundings average out.

It only finds the layer to report; no check fails by it.
"""


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference over the reference's largest absolute value; NaN if there is a NaN."""
    reference = reference.double()
    return ((got.double() - reference).abs().max() / reference.abs().max()).item()


def rms_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the root-mean-square difference."""
    return (got.double() - reference.double()).square().mean().sqrt().item()


def contract(dtype: torch.dtype, relative: float, rms: float, torch_rms: float) -> tuple[str, float, float]:
    """Return (name, value, largest allowed value) of the error that decides whether a result is accepted.

    Args:
        dtype: of the computation; in float32 the relative error decides, else the RMS error.
        relative, rms: the result's `relative_error` and `rms_error`.
        torch_rms: the root-mean-square error of PyTorch's own run in this dtype.
    """
    if dtype == torch.float32:
        return "relative error", relative, FLOAT32_RELATIVE
    return "RMS error over PyTorch's own", ratio(rms, torch_rms), BFLOAT16_RMS_RATIO


def ratio(error: float, scale: float) -> float:
    """Return `error / scale`. If `scale` is zero, the result is 0 for no error, else infinity."""
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def psnr(got: torch.Tensor, reference: torch.Tensor, peak: float = 255.0) -> float:
    """Return the peak signal-to-noise ratio in decibels; infinite for equal tensors."""
    error = (got.double() - reference.double()).square().mean().item()
    return float("inf") if error == 0 else 10 * torch.log10(torch.tensor(peak**2 / error)).item()
