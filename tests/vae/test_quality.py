"""SSIM against scikit-image's, where that is installed, and what it must be anywhere."""

import numpy as np
import pytest
import torch

from cogvideox_torchax.vae.quality import ssim


def clips():
    rng = np.random.default_rng(0)
    smooth = rng.uniform(0, 255, (1, 3, 2, 6, 8)).repeat(5, 3).repeat(5, 4)
    noisy = smooth + rng.normal(0, 20, smooth.shape)
    return (torch.from_numpy(clip.clip(0, 255).round().astype(np.uint8)) for clip in (smooth, noisy))


def test_it_is_scikit_images():
    metrics = pytest.importorskip("skimage.metrics")
    smooth, noisy = clips()
    planes = [(smooth[0, c, t].numpy(), noisy[0, c, t].numpy()) for c in range(3) for t in range(2)]
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    wanted = [metrics.structural_similarity(*plane, **options) for plane in planes]
    assert ssim(noisy, smooth) == pytest.approx(np.mean(wanted), abs=1e-6)


def test_it_is_one_for_equal_clips_and_less_for_any_others():
    smooth, noisy = clips()
    assert ssim(smooth, smooth) == pytest.approx(1, abs=1e-12)
    assert 0 < ssim(noisy, smooth) < 0.95
    assert ssim(255 - smooth, smooth) < 0


def test_small_pictures_have_smaller_windows_and_flat_ones_the_formulas_value():
    smooth, _ = clips()
    small = smooth[..., :5, :7]
    assert ssim(small, small) == pytest.approx(1)
    flat, c1 = torch.zeros(1, 1, 1, 16, 16), (0.01 * 2) ** 2
    assert ssim(flat + 0.5, flat, 2.0) == pytest.approx(c1 / (0.25 + c1))  # no variance
