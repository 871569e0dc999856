"""Programs of JAX arrays, without torch: places, compiled and lowered programs, values, forked processes."""
