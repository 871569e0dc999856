"""diffusers' CogVideoX pipelines on JAX: their networks, their schedulers, and a video from a prompt.

Terms of this package:
    sequence: the tokens of a video on one axis, the prompt's text first, then the patches, then padding.
    local tokens: the tokens of a sequence that one device computes.
    prompted video: with classifier-free guidance the batch has each video twice, first without the prompt,
        then with it; the second is the prompted one.
    step cache: one of diffusers' caches, which skip layers of a denoising step and use earlier results.
    context: diffusers' `cache_context`, which separates calls of a step that are not batched, such as those
        with and without the prompt.
    form of a step: the layers that it skips, and the results that it keeps; each form is a program.
    numbers of a step: the scalars and vectors that its program takes besides the tensors
        (`cached_layers.NUMBERS`).
    residual of blocks: their result minus their input.
    trace for shapes: a trace without kept arrays, to find the shapes of the arrays that a step keeps.
"""
