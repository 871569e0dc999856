"""The hot spots of CogVideoX's VAE and transformer as pure JAX functions: arrays in, arrays out.

Axis letters, used in shapes and as suffixes throughout:

    N  videos          T  frames      H  rows       W  columns      C  channels
    G  channel groups  I  input channels of a kernel               O  output channels of a kernel

Activations are channels-last (N T H W C) and kernels (T H W I O), the layout XLA convolutions want;
`group_norm` takes its channel axis as an argument. `reference.py` holds the plainest form of every function:
it is the definition that the tests hold the fast forms to.

Columns that are split over devices are for `columns.split_columns` to tell. A program for TPUs that leaves
it to XLA's partitioner to split activations needs the environment's `JAX_KERNELS_PALLAS=off`: the Pallas
kernels (`tpu`) cannot be split so.
"""

from jax_kernels.attention import attention, rotate
from jax_kernels.conv3d import conv3d
from jax_kernels.dense import layer_norm, linear, silu
from jax_kernels.group_norm import group_norm
from jax_kernels.resample import downsample, upsample
from jax_kernels.spatial_norm import spatial_norm

__all__ = [
    "attention",
    "conv3d",
    "downsample",
    "group_norm",
    "layer_norm",
    "linear",
    "rotate",
    "silu",
    "spatial_norm",
    "upsample",
]
