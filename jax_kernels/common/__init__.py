"""Code that the kernels share: columns over a mesh, layouts in memory, tiles."""
