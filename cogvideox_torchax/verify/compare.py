"""`verify`: backends compared with diffusers' PyTorch in float32, layer by layer and as a whole.

Every backend gets the same input and the same weights. A *candidate* is a backend in one dtype, and the
*reference* is diffusers in float32 on the CPU. Layers are compared chunk by chunk: all candidates run one
chunk before the next, so that no more than one chunk of activations is held.

bfloat16 has no tolerance of its own: the error of a candidate is compared with that of PyTorch in bfloat16.
*Moments* are what the encoder returns, the mean and the log-variance of the posterior. A *contract* is a
measured value of a candidate, such as an error, with its bound.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import Backend, backend
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction

PIXEL_RANGE = 2.0
"""The range that PSNR and SSIM relate errors to: frames have values in [-1, 1]."""

LAYER_NAME = re.compile(
    r"((encoder|decoder)\.(conv_in|conv_out|norm_out|mid_block|(down|up)_blocks\.\d+)"
    r"(\.(resnets|downsamplers|upsamplers)\.\d+)?|(post_)?quant_conv)"
)
"""Names in diffusers of the layers that are compared."""


@dataclass(kw_only=True)
class Error:
    """The error of a result against the reference's.

    Attributes:
        relative: the largest difference over the largest absolute value of the reference.
        rms: root of the mean squared difference; of a layer that of its worst chunk.
    """

    relative: float
    rms: float


@dataclass(kw_only=True)
class LayerError(Error):
    """The error of a layer's output, over all chunks.

    Attributes:
        name: the layer's name in diffusers.
        chunk: the index of the first chunk in which the layer leaves the tolerance; None if it never does.
    """

    name: str
    chunk: int | None


@dataclass(kw_only=True)
class WholeError(Error):
    """The error of a whole result, moments or decoded frames.

    Attributes:
        psnr, ssim: for each decoded frame; equal frames have infinity and 1. Empty for moments.
    """

    psnr: list[float]
    ssim: list[float]


@dataclass
class Contract:
    """One contract of docs/architecture.md, named in words: a measured value is at most `allowed`."""

    name: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.allowed  # false for NaN


@dataclass
class Result:
    """The results of one backend in one dtype.

    Attributes:
        layers: the errors of the layers of both directions, in the order in which the layers run.
        whole: by direction, the error of the whole result; a result of a wrong shape has no entry.
        contracts: all contracts, whether kept or not.
    """

    backend: str
    dtype: str
    layers: list[LayerError]
    whole: dict[str, WholeError]
    contracts: list[Contract]

    @property
    def passed(self) -> bool:
        return all(contract.passed for contract in self.contracts)

    @property
    def first_bad_layer(self) -> LayerError | None:
        """The first layer that leaves the tolerance; None if none does."""
        return next((layer for layer in self.layers if layer.chunk is not None), None)


def make_candidate(name: str, dtype: torch.dtype, reference: DiffusersAutoencoder) -> Backend:
    """Return a backend with a copy of the reference's weights; `BackendError` if it is not available."""
    # Not `copy.to(dtype)`: diffusers wraps that method in a way that pyright cannot follow.
    copied = nn.Module.to(copy.deepcopy(reference), dtype)
    return backend(name).from_native(copied)


# Layer by layer

Layers = dict[str, list[tuple[float, float, float]]]
"""By a layer's name, the `differences_of` each chunk; in the order in which the layers run."""


def differences_of(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float]:
    """Return the differences of a layer's output for one chunk, `got`, from the reference's, `want`.

    They are the largest absolute difference, the reference's largest absolute value, and the root of the mean
    squared difference.
    """
    if got.shape != want.shape:
        raise ValueError(f"got a layer of shape {tuple(got.shape)}, the reference's is {tuple(want.shape)}")
    largest = (got.float() - want).abs().max().item()
    return largest, want.abs().max().item(), tolerances.rms_error(got, want)


def compare_layers(
    reference: Backend,
    candidates: list[Backend],
    inputs: Mapping[Direction, torch.Tensor],
    say: Callable[[str], None],
) -> list[Layers]:
    """Run the reference and all candidates over the same chunks, and compare the outputs of layers.

    Return, for each candidate in order, the differences of the layers that its backend has. `inputs` are, by
    direction, the whole input (N, C, T, H, W): a video, or latents. `say` gets a line for each direction.
    """
    differences: list[Layers] = [{} for _ in candidates]
    for direction, x in inputs.items():
        say(f"{direction}: layer by layer")
        # A recorder takes a chunk and a cache, None for the first chunk. It returns the outputs, by name, of
        # the layers whose names `LAYER_NAME` matches, and the cache for the next chunk.
        recorders = [each.recorder(direction, LAYER_NAME.fullmatch) for each in (reference, *candidates)]
        caches = [None] * len(recorders)
        for span in direction.chunks(reference.vae, x.shape[2]):
            chunk, wanted = x[:, :, span.start : span.stop], {}
            for i, each in enumerate((reference, *candidates)):
                placed = each.put(chunk.to(each.vae.dtype))  # on the backend's device
                outputs, caches[i] = recorders[i](placed, caches[i])
                wanted = wanted or outputs  # the reference's, which runs first
                for name in filter(outputs.__contains__, wanted if i else ()):
                    layer_differences = differences[i - 1].setdefault(name, [])
                    layer_differences.append(differences_of(outputs[name], wanted[name]))
    return differences


def layer_error(
    name: str, dtype: torch.dtype, chunks: list[tuple[float, float, float]], torch_rms: float
) -> LayerError:
    """Return the error of a layer over all chunks, from each chunk's differences.

    `torch_rms` is the largest of PyTorch in bfloat16; it is not read for a candidate in float32.
    """
    largests, scales, rms = np.transpose(chunks)  # each has a value for each chunk
    # In float32 the bound is on the largest difference, relative to the reference's largest value in all
    # chunks. In bfloat16 it is on the RMS difference, as a multiple of that of PyTorch in bfloat16.
    if dtype == torch.float32:
        passed = largests <= tolerances.FLOAT32_RELATIVE * scales.max()
    else:
        passed = rms <= tolerances.BFLOAT16_LAYER_RMS_RATIO * torch_rms
    return LayerError(
        name=name,
        relative=tolerances.ratio(largests.max(), scales.max()),  # 0 / 0 is 0 here
        rms=rms.max(),
        chunk=None if passed.all() else int(passed.argmin()),  # the first False; a NaN never passes
    )


# As a whole


class Verifier:
    """The reference and its results for one video, to compare backends with.

    Args:
        reference: stock diffusers in float32 on the CPU.
        x: the video (N, C, T, H, W), float32 in [-1, 1].

    Attributes:
        inputs: by direction, the input: the video, or the reference's latents.
        answers: by direction, the reference's result: moments (mean and log-variance), or decoded frames.
    """

    def __init__(self, reference: DiffusersAutoencoder, x: torch.Tensor):
        self.reference = backend("torch").of(reference)
        moments = self.reference.run(ENCODE, x)
        # All backends decode these latents, the mean, so that an error in encoding does not reach the frames.
        mean, _log_variance = moments.chunk(2, dim=1)
        self.inputs = {ENCODE: x, DECODE: mean}
        self.answers = {ENCODE: moments, DECODE: self.reference.run(DECODE, mean)}

    @torch.no_grad()
    def verify(
        self, candidates: list[Backend], say: Callable[[str], None] = lambda line: None
    ) -> list[Result]:
        """Compare all candidates with the reference; return their results, in the candidates' order.

        The slow part, PyTorch in float32, runs once for all candidates. `say` gets a line for each step.
        """
        # PyTorch in bfloat16, whose errors set the tolerances of candidates in bfloat16. It is the last of
        # those compared, and no candidate.
        baseline = [
            make_candidate("torch", torch.bfloat16, self.reference.vae)
            for _ in range(any(candidate.vae.dtype == torch.bfloat16 for candidate in candidates))
        ]
        differences = compare_layers(self.reference, [*candidates, *baseline], self.inputs, say)
        torch_rms = {name: max(rms for *_, rms in chunks) for name, chunks in differences[-1].items()}
        torch_whole: dict[str, WholeError] = {}
        for each in baseline:
            say("PyTorch's own bfloat16 run")
            torch_whole, _ = self._encode_and_decode(each, torch_whole)
        results = []
        for candidate, layers in zip(candidates, differences, strict=False):
            dtype = candidate.vae.dtype
            say(f"{candidate.name} {runtime.dtype_name(dtype)}: encode and decode")
            errors = [
                layer_error(name, dtype, chunks, torch_rms.get(name, 0)) for name, chunks in layers.items()
            ]
            whole, contracts = self._encode_and_decode(candidate, torch_whole)
            results.append(Result(candidate.name, runtime.dtype_name(dtype), errors, whole, contracts))
        return results

    def _encode_and_decode(
        self, candidate: Backend, torch_whole: dict[str, WholeError]
    ) -> tuple[dict[str, WholeError], list[Contract]]:
        """Return a candidate's error by direction, and the contracts on shapes, errors and streaming.

        `torch_whole` has the errors of PyTorch in bfloat16, by direction; none if no candidate needs them.
        """
        errors: dict[str, WholeError] = {}
        contracts = []
        for direction in Direction:
            want = self.answers[direction]
            x = self.inputs[direction].to(candidate.vae.dtype)
            got = candidate.run(direction, x)
            shapes = f"{direction}: shape {tuple(got.shape)} for {tuple(want.shape)}"
            contracts.append(Contract(shapes, float(got.shape != want.shape), 0))
            if not contracts[-1].passed:  # such a result has no error
                continue
            errors[direction] = error = compare_whole(got, want, pixels=direction == DECODE)
            # In float32 the relative error is measured, in bfloat16 the RMS error over that of PyTorch, which
            # `contract` does not read in float32: there the candidate's own stands in.
            torch_rms = torch_whole.get(direction, error).rms
            name, *bound = tolerances.contract(candidate.vae.dtype, error.relative, error.rms, torch_rms)
            contracts.append(Contract(f"{direction}: {name}", *bound))
            if direction == DECODE and hasattr(candidate.vae, "decode_stream"):
                # `decode_stream` does the work of `decode` in another order, so even in bfloat16 both must
                # agree within the tolerance of float32.
                streamed = torch.cat(list(candidate.vae.decode_stream(x)), dim=2)
                relative = tolerances.relative_error(streamed, got)
                name = "decode_stream: relative error to decode"
                contracts.append(Contract(name, relative, tolerances.FLOAT32_RELATIVE))
        return errors, contracts


def compare_whole(got: torch.Tensor, want: torch.Tensor, pixels: bool) -> WholeError:
    """Return the error of a backend's whole result `got` against the reference's `want` (N, C, T, H, W).

    `pixels` says whether the results are decoded frames, which get PSNR and SSIM too; else they are moments.
    """
    pairs = zip(got.split(1, 2), want.split(1, 2), strict=True) if pixels else ()
    scores = [(tolerances.psnr(*pair, PIXEL_RANGE), tolerances.ssim(*pair, PIXEL_RANGE)) for pair in pairs]
    return WholeError(
        relative=tolerances.relative_error(got, want),
        rms=tolerances.rms_error(got, want),
        psnr=[psnr for psnr, _ in scores],
        ssim=[similarity for _, similarity in scores],
    )
