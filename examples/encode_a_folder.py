"""Encode a folder of videos once, then read the latents as a trainer does.

    python examples/encode_a_folder.py clips/ -o latents/ --bucket 49x480x720

`EncodeClip` encodes one video and may be called by any engine. `cogvideox-torchax encode` is a loop around it
that reads ahead and resumes a killed run.
"""

import argparse
from pathlib import Path

import torch

from cogvideox_torchax import Bucket, Clip, ClipConfig, EncodeClip, load_latents, save_latents


class Posteriors(torch.utils.data.Dataset):
    """Latents (C, t, h, w), sampled each time from the means and log-variances of a folder."""

    def __init__(self, folder: Path):
        self.files = sorted(folder.rglob("*.safetensors"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        kept = load_latents(self.files[index])
        drawn = kept.tensor + torch.exp(0.5 * kept.logvar) * torch.randn_like(kept.tensor)
        return drawn[0] * kept.config["scaling_factor"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A folder of videos encoded once, and read by a trainer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of videos")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("latents"), metavar="DIR", help="of the latents"
    )
    parser.add_argument("--model", default="zai-org/CogVideoX-5b", help="a directory or a hub id")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument(
        "--bucket", type=Bucket.parse, default="49x480x720", help="FRAMESxHEIGHTxWIDTH of a clip"
    )
    args = parser.parse_args()

    encode = EncodeClip(ClipConfig(args.model, dtype=args.dtype, buckets=(args.bucket,)))
    for video in sorted(args.folder.rglob("*.mp4")):
        name = str(video.relative_to(args.folder))
        path = args.output / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_latents(encode(Clip(name, video)), path)
        except ValueError as error:
            print(f"left out {name}: {error}")
    for batch in torch.utils.data.DataLoader(Posteriors(args.output), batch_size=2):
        print("a batch for the trainer:", tuple(batch.shape))


if __name__ == "__main__":
    main()
