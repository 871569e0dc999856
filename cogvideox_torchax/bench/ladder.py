"""Jobs of `bench device`, ways to run each, and sizes, of which the first that fits is taken."""

from dataclasses import dataclass
from typing import Any

KERNELS = (
    *("norm_conv3d", "upsample", "group_norm", "spatial_norm"),
    *("attention", "qk_norm_rope", "adaptive_layer_norm", "linear_gelu", "gated_linear"),
)
"""The ops of `jax_kernels` with a kernel of their own, the VAE's first."""
VAE_JOBS = ("decode", "encode", "still")
JOBS = ("kernels", *VAE_JOBS, "train", "step", "prompt")
OFF = "torchax, kernels off"
WAYS = ("torchax", OFF, "torchax-stock", "flax", "torch", "torch-compile")
"""The port, also with XLA doing its kernels' work, and its peers."""


@dataclass(frozen=True)
class Size:
    """A model, "5b" or "2b" for the published shapes or "small", and a video in pixels."""

    model: str
    frames: int
    height: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.frames} x {self.height} x {self.width}"


SMALL = {
    "kernels": Size("small", 4, 32, 64),
    "vae": Size("small", 17, 32, 48),
    "train": Size("small", 5, 32, 32),
    "step": Size("small", 9, 64, 96),
    "prompt": Size("small", 9, 64, 96),
}
"""Sizes for a CPU, and the last resort where memory runs out."""
PUBLISHED = {
    "kernels": (Size("5b", 49, 480, 720), Size("5b", 17, 160, 240)),
    "vae": (Size("5b", 49, 480, 720), Size("5b", 49, 320, 480), Size("5b", 17, 160, 240)),
    "train": (Size("5b", 9, 256, 256), Size("5b", 1, 64, 64)),
    "step": (Size("5b", 49, 480, 720), Size("2b", 49, 480, 720), Size("2b", 17, 160, 240)),
    "prompt": (Size("5b", 49, 480, 720),),
}
CHECKED = {
    "kernels": Size("small", 4, 128, 256),
    "vae": Size("5b", 9, 96, 128),
    "train": Size("5b", 1, 64, 64),
    "step": SMALL["step"],
    "prompt": SMALL["prompt"],
}
"""Sizes for PyTorch in float32 on the host of an accelerator; the kernels are large enough to be used."""

SMALL_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_layers": 2,
    "use_rotary_positional_embeddings": True,
    "text_embed_dim": 256,
    "max_text_seq_length": 64,
}
SMALL_TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 512,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}


def family(job: str) -> str:
    """Return the job that sizes and kernels are listed under."""
    name = job.partition(" ")[0]
    return "vae" if name in VAE_JOBS else name


def used_kernels(job: str) -> tuple[str, ...]:
    """Return the kernels that a job may run."""
    if job.startswith("kernels "):
        return (job.removeprefix("kernels "),)
    return KERNELS[4:] if family(job) in ("step", "prompt") else KERNELS[:4]


def sizes(job: str, on_cpu: bool) -> tuple[Size, ...]:
    """Return the sizes of a job, the largest first."""
    small = SMALL[family(job)]
    return (small,) if on_cpu else (*PUBLISHED[family(job)], small)


def checked(job: str, on_cpu: bool) -> Size:
    """Return the size at which a job is compared with the reference."""
    return (SMALL if on_cpu else CHECKED)[family(job)]


def ways(job: str, device: dict[str, Any], several: bool) -> tuple[str, ...]:
    """Return the ways to run a job on a device as `measure.probe` describes it, or on several of them."""
    name = family(job)
    found = [way for way in WAYS if way != "flax" or name == "vae"]
    if name in ("kernels", "train"):
        found.remove("torchax-stock")
    no_torch = name == "kernels" or several or device["torch"] is None
    left_out = {
        OFF: device["platform"] == "cpu",  # the same programs
        "torchax-stock": several,  # stock modules take an uneven width's padding for picture
        "torch": no_torch,
        "torch-compile": no_torch or device["torch"] == "cpu",
    }
    return tuple(way for way in found if not left_out.get(way))


def all_jobs(chosen: list[str], several: bool) -> list[str]:
    """Return the jobs of a run, each kernel one; on several devices none of the kernels.

    Raises:
        ValueError: a job that there is not.
    """
    for name in chosen:
        if name not in JOBS:
            raise ValueError(f"got job {name!r}: one of {', '.join(JOBS)}")
    kernels = [f"kernels {name}" for name in KERNELS] if "kernels" in chosen and not several else []
    return kernels + [name for name in JOBS[1:] if name in chosen]
