"""`port`, which makes a loaded diffusers model or pipeline ready for torchax, in place.

The module's name is not `port`: an import of `cogvideox_torchax.port` would put the module in the
place of the function `port`.
"""

from typing import Any, Literal, TypeVar

from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from jax.sharding import Mesh
from torch import nn

from cogvideox_torchax.runtime import forget_programs
from cogvideox_torchax.sharding import Parallel, check_mesh
from cogvideox_torchax.upstream import uncompiled
from cogvideox_torchax.vae.torchax.autoencoder import check_vae_class, port_vae

Portable = TypeVar("Portable")


def port(
    model_or_pipeline: Portable,
    *,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    weights: Literal["int8", "int8-dynamic"] | None = None,
) -> Portable:
    """Make a CogVideoX VAE or a whole diffusers pipeline ready for JAX, in place.

    A VAE and its modules get this package's subclasses of their classes. Nothing is copied or moved:
    parameters stay the same objects under the same names, `state_dict()` and `isinstance` do not change, and
    plain torch tensors still run natively. Move the result with `.to("jax")` to run it on JAX.

    A pipeline, of a class of diffusers' or of your own, is moved as well: every network becomes compiled
    programs, its weights go to JAX, and the pipeline's own call runs there, with its own scheduler. A network
    that this package does not know is compiled as it is. A line is logged for each unknown network, and for
    each part that stays on the host. A part that is None stays None. If an object is no pipeline but has a
    VAE, its modules are moved too, and its methods stay as they are.

    If all weights do not fit the devices, or if diffusers' offload is on, the weights of a network wait in
    the host's memory between its uses, as by `pipe.enable_model_cpu_offload()`, which a ported pipeline has.

    A second call with equal arguments drops the compiled programs, and changes nothing else. New programs
    have the global variables of your own functions as they are then.

    Args:
        model_or_pipeline: a diffusers `AutoencoderKLCogVideoX`, a diffusers pipeline, or an object whose
            `vae` is such a VAE.
        mesh: a mesh from `make_mesh`, to split the work over. None changes nothing: the work runs on one
            device, or on the mesh of an earlier `port`.
        parallel: how a pipeline's transformer uses "tp". "context" splits its tokens, with weights whole on
            every device or gathered a layer at a time; "tensor" splits the channels of its weights. None
            chooses "context" where "tp" divides the attention's heads. `pipe.transformer.parallelism` gives
            the choice and its reason.
        weights: "int8" rounds the weights of the linear layers in a pipeline's transformer and T5 encoder,
            in their blocks, to eight bits, with a scale for each output channel: half the memory of bfloat16.
            "int8-dynamic" also rounds what most layers of the transformer's blocks multiply, with a scale for
            each token: a v5e or a v6e multiplies int8 twice as fast. Such a network can be neither saved nor
            fused with a LoRA. Layers that another library has quantized keep their weights. None keeps all
            weights as they are.

    Returns:
        The same object; for torch.compile's wrapper of a model, the model inside.

    Raises:
        ValueError: the object is of another kind, or a VAE class of another package; the mesh was not made by
            `make_mesh`, or does not divide the weights; quantized weights that have no form on JAX;
            an option that the object does not take.
    """
    if weights is not None and isinstance(model_or_pipeline, nn.Module):
        raise ValueError(
            f"port got weights={weights!r} for a {type(model_or_pipeline).__name__}: it is for a pipeline's "
            "transformer and text encoder; leave it out"
        )
    to_port: Any = uncompiled(model_or_pipeline)  # without torch.compile's wrapper: JAX compiles the model
    is_vae = isinstance(to_port, DiffusersAutoencoder)
    has_vae = isinstance(getattr(to_port, "vae", None), DiffusersAutoencoder)
    if not is_vae and not has_vae and not isinstance(to_port, DiffusionPipeline):
        check_vae_class(to_port)  # for a VAE of another package it raises an error with a message of its own
        raise ValueError(
            f"port got {type(to_port).__name__}: it takes diffusers' AutoencoderKLCogVideoX, a pipeline, or "
            "an object with such a VAE as its vae"
        )
    if parallel is not None:
        transformer = getattr(to_port, "transformer", None)
        # Without a new mesh, the transformer has to have one of an earlier `port`.
        if transformer is None or (mesh is None and getattr(transformer, "mesh", None) is None):
            raise ValueError(
                f"port got parallel={parallel!r}: it is for a pipeline over a mesh; pass both, or none"
            )
    if mesh is not None:
        check_mesh(mesh)  # before anything is changed
    if is_vae:
        models = [port_vae(to_port, mesh)]
    else:
        # Imported here, as a VAE alone needs neither T5 nor diffusers' pipelines.
        from cogvideox_torchax.pipelines.eight_bits import check_weights
        from cogvideox_torchax.pipelines.port import port_pipeline

        check_weights(weights)
        models = port_pipeline(to_port, mesh, parallel, weights)
    for model in models:
        forget_programs(model)
    return to_port  # pyright: ignore[reportReturnType]
