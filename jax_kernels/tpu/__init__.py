"""Pallas kernels for TPUs: parts of kernels that XLA's own passes are slower at.

Frames lie in the sublanes of a TPU's tiles, channels in the lanes, pixels outside (`layout.pixels_first`).
None of these takes every array: who calls one asks first (`takes`), and leaves the rest to XLA. Nothing can
partition them: they run on one device, or on one shard (`columns.by_shards`).
"""
