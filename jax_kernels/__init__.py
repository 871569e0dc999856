"""The hot spots of CogVideoX's VAE and transformer as pure JAX functions: arrays in, arrays out.

Axis letters, used in shapes and as suffixes throughout:

    N  videos          T  frames      H  rows       W  columns      C  channels
    G  channel groups  I  input channels of a kernel               O  output channels of a kernel

Activations are channels-last (N T H W C) and kernels (T H W I O), the layout XLA convolutions want;
`group_norm` takes its channel axis as an argument.

Terms of several kernels:

    form     one implementation of a function
    run      the frames that a TPU computes together: the first frame alone, or two, four or eight frames
    image    a single frame
    shard    one device's columns of a frame
    moments  the mean of some numbers and M2, the sum of their squared deviations from it
    tokens   a sequence of text tokens, then of patches of frames, which begin at the index `first`

Each function has a folder. `op.py` holds its signature and chooses the form; `reference.py` is the plainest
form, the definition that the tests hold the others to; `xla.py` and `tpu.py` hold the forms that XLA compiles
and those with a Pallas kernel. `common` is what several functions share.

Each function chooses its form for the platform that its program is lowered for. It leaves Pallas kernels out
where the environment has `JAX_KERNELS_PALLAS=off` when it is called. Its argument `split` says how columns
are split over devices (`common.columns.Split`). A program for TPUs in which XLA's partitioner alone splits
activations needs `JAX_KERNELS_PALLAS=off`: XLA cannot split a Pallas kernel.
"""

from jax_kernels.attention.op import apply_rotary, attention, attention_transposed
from jax_kernels.attention.qk_norm_rope import qk_norm_rope
from jax_kernels.conv3d.op import conv3d
from jax_kernels.dense.op import (
    adaptive_layer_norm,
    gated_linear,
    gated_residual,
    gelu,
    layer_norm,
    linear,
    linear_gelu,
    silu,
    split_linear,
)
from jax_kernels.group_norm.op import group_norm
from jax_kernels.norm_conv3d.op import ColumnMoments, NormParams, norm_conv3d
from jax_kernels.resample.op import downsample, upsample
from jax_kernels.spatial_norm.op import spatial_norm

__all__ = [
    "ColumnMoments",
    "NormParams",
    "adaptive_layer_norm",
    "apply_rotary",
    "attention",
    "attention_transposed",
    "conv3d",
    "downsample",
    "gated_linear",
    "gated_residual",
    "gelu",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_gelu",
    "norm_conv3d",
    "qk_norm_rope",
    "silu",
    "spatial_norm",
    "split_linear",
    "upsample",
]
