"""How near a video is to its source, as people measure it: PSNR is in `tolerances`, SSIM here."""

import torch
from torch.nn import functional

WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03


def ssim(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Mean structural similarity of frames in bytes, 1 for equal ones.

    Each channel of each frame by itself, under a Gaussian window of 11 x 11 pixels and 1.5 pixels' deviation
    that lies wholly in the picture: Wang et al., "Image quality assessment: from error visibility to
    structural similarity", 2004.

    Args:
        got, reference: (N, C, T, H, W), bytes or floats of their range. NaN for fewer than 11 pixels a side.
    """
    if min(reference.shape[-2:]) < WINDOW:
        return float("nan")
    a, b = (frames.double().transpose(1, 2).flatten(0, 2)[:, None] for frames in (got, reference))
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    gaussian = torch.exp(-offsets.square() / (2 * SIGMA**2))
    gaussian /= gaussian.sum()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(
            functional.conv2d(x, gaussian[None, None, None]), gaussian[None, None, :, None]
        )

    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = (K1 * 255) ** 2, (K2 * 255) ** 2
    similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (similarity / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean().item()
