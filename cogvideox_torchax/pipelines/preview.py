"""A rough preview of latents without a VAE's decoder: a linear map from a latent's channels to a color.

Axis letters: N videos, T frames, C channels, H rows, W columns, of latents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.files.whole import whole_file

PICTURES, PIXELS, PATCHES = 64, 64, 8
"""Number of pictures that the map is fitted to, their side in pixels, and patches of a color along a side."""

SHOWN, ENLARGED = 4, 3
"""Frames side by side in a picture, and their enlargement."""


@dataclass(frozen=True)
class LinearPreview:
    """A linear map from a latent's channels to a color.

    Attributes:
        weights: (C + 1, 3), the last row the constant.
        explained: the share of the colors' variance that the map explains on pictures that it was not fitted
            to: 1 for all of it, 0 for no more than their mean does.
    """

    weights: torch.Tensor
    explained: float

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Return colors (N, T, H, W, 3), bytes, of unscaled latents (N, T, C, H, W) on the host."""
        # The channel of ones is multiplied by the linear map's constant.
        colors = _with_ones(latents.float().movedim(2, -1)) @ self.weights
        # Colors in [-1, 1] become bytes; the map's colors may exceed that range.
        return ((colors + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def fit(vae: Any) -> LinearPreview:
    """Fit a preview's map to a VAE by least squares, on the latents of patches of random colors.

    Each picture is a video of one frame, of patches blurred into each other. The color of a latent is the
    mean of the pixels that it stands for. Three quarters of the pictures are fitted to; the others give
    `explained`. The VAE is in PyTorch, and its encoder runs for some seconds.
    """
    generator = torch.Generator().manual_seed(0)
    # Colors are in [-1, 1], as the VAE takes them.
    patches = torch.rand(PICTURES, 3, PATCHES, PATCHES, generator=generator) * 2 - 1
    pictures = torch.nn.functional.interpolate(patches, (PIXELS, PIXELS), mode="bilinear")
    latents = torch.cat(
        [vae.encode(picture[None, :, None].to(vae.dtype)).latent_dist.mode() for picture in pictures]
    )
    features = _with_ones(latents[:, :, 0].float().movedim(1, -1))  # ones for the map's constant
    colors = torch.nn.functional.avg_pool2d(pictures, vae.spatial_compression_ratio).movedim(1, -1)
    fitted = PICTURES * 3 // 4  # number of pictures, the first ones, that the map is fitted to
    weights = torch.linalg.lstsq(features[:fitted].flatten(0, 2), colors[:fitted].flatten(0, 2)).solution
    error = (features[fitted:] @ weights - colors[fitted:]).square().mean()
    return LinearPreview(weights, float(1 - error / colors[fitted:].var(correction=0)))


def _with_ones(features: torch.Tensor) -> torch.Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)


def preview_writer(vae: Any, path: str | Path, say: Callable[[str], None]) -> Callable[[torch.Tensor], None]:
    """Return a function of latents (N, T, C, H, W) that writes frames of the first video to a PNG file.

    The map is fitted here, once, to what a copy of the VAE on the host decodes. Each call of the function
    replaces the file. `say` is told how well the map fits.
    """
    from PIL import Image

    colors_of = runtime.without_torchax(fit, runtime.host_skeleton(vae))
    say(f"preview: a linear map of latents that explains {colors_of.explained:.0%} of colors")

    def show(latents: torch.Tensor) -> None:
        (frames,) = colors_of(latents[:1])  # the first video's, (T, H, W, 3)
        # Indices of frames at equal distances, the first and the last among them; a short video has fewer.
        chosen = sorted({round(i * (len(frames) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
        # (T, H, W, 3) to (H, T * W, 3).
        picture = Image.fromarray(frames[chosen].transpose(0, 1).flatten(1, 2).contiguous().numpy())
        with whole_file(path) as temporary:
            picture.resize((picture.width * ENLARGED, picture.height * ENLARGED)).save(temporary, "PNG")

    return show
