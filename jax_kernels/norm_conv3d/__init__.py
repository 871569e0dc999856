"""A norm's scale and shift, SiLU and a causal convolution in one kernel."""
