"""Code that the kernels share: dispatch to a platform, columns over a mesh, layouts in memory, tiles."""
