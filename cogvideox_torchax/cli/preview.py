"""A rough preview of latents without a VAE's decoder: a linear map from a latent's channels to a color.

Axis letters: N videos, T frames, C channels, H rows, W columns, of latents.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cogvideox_torchax import runtime
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.vae.pixels import to_uint8

PICTURES, PIXELS, PATCHES = 48, 64, 8
"""Number of pictures to fit the map with, their side in pixels, and patches of one color along a side.

They are few and small, so that fitting takes seconds. There are still many more latents than weights.
"""

SHOWN, ENLARGED = 4, 3
"""Number of frames side by side in the PNG file, and the factor of their sides: a latent has few pixels."""


def colors_of(latents: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return colors (N, T, H, W, 3), as bytes, of latents (N, T, C, H, W) on the host, by the map of `fit`.

    The latents are as the VAE's decoder takes them: not multiplied by its scaling factor.
    """
    # A channel of ones is added, which is multiplied by the last row of the weights.
    colors = torch.nn.functional.pad(latents.float().movedim(2, -1), (0, 1), value=1) @ weights
    return to_uint8(colors)  # from [-1, 1]; the map's colors may exceed that range


@torch.no_grad()
def fit(vae: Any) -> torch.Tensor:
    """Fit a map by least squares, to pictures of random colors and the latents that a VAE encodes.

    Return weights (C + 1, 3), which map a latent's channels to red, green and blue. Their last row is added
    to every color.

    Each picture is a video of one frame: patches of random colors, blurred into each other. The color of a
    latent pixel is the mean color of the picture's pixels that it stands for. The VAE has to be in PyTorch.
    Its encoder runs for some seconds.
    """
    generator = torch.Generator().manual_seed(0)
    # Colors are in [-1, 1], as the VAE takes them.
    patches = torch.rand(PICTURES, 3, PATCHES, PATCHES, generator=generator) * 2 - 1
    pictures = torch.nn.functional.interpolate(patches, (PIXELS, PIXELS), mode="bilinear")
    latents = torch.cat(
        # A picture (3, H, W) becomes a video (N, 3, T, H, W), of N = T = 1.
        [vae.encode(picture[None, :, None].to(vae.dtype)).latent_dist.mode() for picture in pictures]
    )
    # (N, H, W, C + 1), with a channel of ones for the map's constant.
    features = torch.nn.functional.pad(latents[:, :, 0].float().movedim(1, -1), (0, 1), value=1)
    colors = torch.nn.functional.avg_pool2d(pictures, vae.spatial_compression_ratio).movedim(1, -1)
    return torch.linalg.lstsq(features.flatten(0, 2), colors.flatten(0, 2)).solution


def preview_writer(vae: Any, path: str | Path, say: Callable[[str], None]) -> Callable[[torch.Tensor], None]:
    """Return a function of latents (N, T, C, H, W) that writes frames of the first video to a PNG file.

    Each call of the function replaces the file.

    Args:
        vae: the VAE; the map is fitted once, with a copy of it on the host.
        path: path of the PNG file.
        say: is called with a line of text, before the map is fitted.
    """
    from PIL import Image

    say("preview: fitting a map from latents to colors on the host: for CogVideoX-5b half a minute")
    weights = fit(runtime.host_skeleton(vae))

    def show(latents: torch.Tensor) -> None:
        (frames,) = colors_of(latents[:1], weights)  # the first video's colors, (T, H, W, 3)
        # Indices of SHOWN frames at equal distances, from the first to the last. In a short video some
        # indices are equal: the set has each of them once.
        chosen = sorted({round(i * (len(frames) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
        # (T, H, W, 3) to (H, T * W, 3): the frames side by side.
        picture = Image.fromarray(frames[chosen].transpose(0, 1).flatten(1, 2).contiguous().numpy())
        with whole_file(path) as temporary:
            picture.resize((picture.width * ENLARGED, picture.height * ENLARGED)).save(temporary, "PNG")

    return show
