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
from collections.abc import Callable
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
from cogvideox_torchax.vae.quality import ssim
from cogvideox_torchax.vae.torchax.autoencoder import AutoencoderKLCogVideoX

MOST_PROGRAMS = 2
"""Programs that a direction may compile: one for the first chunk, and one for all later chunks."""
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
        mean, largest: mean and maximum of the absolute difference.
        relative: the largest difference over the largest absolute value of the reference.
        rms: root of the mean squared difference.
    """

    mean: float
    largest: float
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
        at_borders: mean difference over the frames next to a border between chunks; None if there are none.
        inside: mean difference over all other frames; None if there are none.
        psnr, ssim: for each decoded frame; equal frames have infinity and 1. Empty for moments.
    """

    at_borders: float | None
    inside: float | None
    psnr: list[float]
    ssim: list[float]


@dataclass
class Contract:
    """One contract of docs/architecture.md, named in words, with its measured value and its bound.

    The value is at most `allowed`; if `exact`, it is `allowed`.
    """

    name: str
    measured: float
    allowed: float
    passed: bool
    exact: bool = False


@dataclass
class Result:
    """The results of one backend in one dtype.

    Attributes:
        layers: the errors of the layers of both directions, in the order in which the layers run.
        whole: by direction, the error of the whole result; a result of a wrong shape has no entry.
        contracts: all contracts, whether kept or not.
        first_bad_layer: the first of `layers` that leaves the tolerance; None if none does.
    """

    backend: str
    dtype: str
    layers: list[LayerError]
    whole: dict[str, WholeError]
    contracts: list[Contract]
    first_bad_layer: LayerError | None

    @property
    def passed(self) -> bool:
        return all(contract.passed for contract in self.contracts)


# The models


def make_candidate(name: str, dtype: torch.dtype, reference: DiffusersAutoencoder) -> Backend:
    """Return a backend with a copy of the reference's weights; `BackendError` if it is not available."""
    # Not `copy.to(dtype)`: diffusers wraps that method in a way that pyright cannot follow.
    copied = nn.Module.to(copy.deepcopy(reference), dtype)
    return backend(name).from_native(copied)


# Layer by layer


def differences_of(got: torch.Tensor, want: torch.Tensor) -> tuple[float, ...]:
    """Return the differences of a layer's output for one chunk, `got`, from the reference's, `want`.

    They are the number of values, the sums of the absolute and of the squared differences, the largest
    absolute difference, and the reference's largest absolute value.
    """
    if got.shape != want.shape:
        raise ValueError(f"got a layer of shape {tuple(got.shape)}, the reference's is {tuple(want.shape)}")
    difference = (got.float() - want).abs_()
    return (
        got.numel(),
        difference.sum(dtype=torch.float64).item(),
        difference.square().sum(dtype=torch.float64).item(),
        difference.max().item(),
        want.abs().max().item(),
    )


Layers = dict[str, list[tuple[float, ...]]]
"""By a layer's name, the `differences_of` each chunk; in the order in which the layers run."""


def compare_layers(
    reference: DiffusersAutoencoder, candidates: list[Backend], direction: Direction, x: torch.Tensor
) -> list[Layers]:
    """Run the reference and all candidates over the same chunks, and compare the outputs of layers.

    Return, for each candidate in order, the differences of the layers that its backend has. `x` is the
    direction's whole input (N, C, T, H, W): a video, or latents.
    """
    # A recorder takes a chunk and a cache, None for the first chunk. It returns the outputs, by name, of the
    # layers whose names `LAYER_NAME` matches, and the cache for the next chunk.
    recorders = [candidate.recorder(direction, LAYER_NAME.fullmatch) for candidate in candidates]
    reference_recorder = backend("torch").of(reference).recorder(direction, LAYER_NAME.fullmatch)
    differences: list[Layers] = [{} for _ in candidates]
    reference_cache = None
    caches = [None] * len(candidates)
    for span in direction.chunks(reference, x.shape[2]):
        chunk = x[:, :, span.start : span.stop]
        reference_outputs, reference_cache = reference_recorder(chunk, reference_cache)
        for i, candidate in enumerate(candidates):
            placed = candidate.put(chunk.to(candidate.vae.dtype))  # on the backend's device
            outputs, caches[i] = recorders[i](placed, caches[i])
            for name, want in reference_outputs.items():
                if name in outputs:
                    differences[i].setdefault(name, []).append(differences_of(outputs[name], want))
    return differences


def _layer_error(
    name: str,
    dtype: torch.dtype,
    chunks: list[tuple[float, ...]],
    torch_bfloat16: list[tuple[float, ...]],
) -> LayerError:
    """Return the error of a layer over all chunks, from each chunk's differences.

    `torch_bfloat16` are those of PyTorch in bfloat16; they are not read for a candidate in float32.
    """
    # Each is an array with a value for each chunk.
    sizes, absolutes, squares, largests, scales = np.transpose(chunks)
    # In float32 the bound is on the largest difference, relative to the reference's largest value in all
    # chunks. In bfloat16 it is on the RMS difference, as a multiple of that of PyTorch in bfloat16.
    if dtype == torch.float32:
        passed = largests <= tolerances.FLOAT32_RELATIVE * scales.max()
    else:
        torch_sizes, _, torch_squares, _, _ = np.transpose(torch_bfloat16)
        torch_rms = ((torch_squares / torch_sizes) ** 0.5).max()
        passed = (squares / sizes) ** 0.5 <= tolerances.BFLOAT16_LAYER_RMS_RATIO * torch_rms
    # The figures are of all chunks together.
    return LayerError(
        name=name,
        mean=absolutes.sum() / sizes.sum(),
        largest=largests.max(),
        relative=tolerances.ratio(largests.max(), scales.max()),  # 0 / 0 is 0 here
        rms=(squares.sum() / sizes.sum()) ** 0.5,
        chunk=None if passed.all() else int(passed.argmin()),  # the first False; a NaN never passes
    )


# As a whole


def border_frames(lengths: list[int]) -> list[int]:
    """Return the indices of the frames on both sides of each border between chunks of these lengths."""
    *borders, _end = np.cumsum(lengths).tolist()  # a border's number is that of the first frame after it
    return sorted({frame for border in borders for frame in (border - 1, border)})


def compare_whole(got: torch.Tensor, want: torch.Tensor, lengths: list[int], pixels: bool) -> WholeError:
    """Return the error of a backend's whole result `got` against the reference's `want` (N, C, T, H, W).

    Args:
        lengths: number of the result's frames in each chunk.
        pixels: whether the results are decoded frames, which get PSNR and SSIM too; else they are moments.
    """
    difference = (got.double() - want.double()).abs()
    by_frame = difference.mean(dim=(0, 1, 3, 4)).numpy()
    # True for the frames on both sides of a border between chunks.
    is_border = np.isin(np.arange(len(by_frame)), border_frames(lengths))
    frames = range(want.shape[2]) if pixels else ()
    return WholeError(
        mean=difference.mean().item(),
        largest=difference.max().item(),
        relative=tolerances.relative_error(got, want),
        rms=tolerances.rms_error(got, want),
        at_borders=_mean(by_frame[is_border]),
        inside=_mean(by_frame[~is_border]),
        psnr=[tolerances.psnr(got[:, :, t], want[:, :, t], PIXEL_RANGE) for t in frames],
        ssim=[ssim(got[:, :, t : t + 1], want[:, :, t : t + 1], PIXEL_RANGE) for t in frames],
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


# All of it


class Verifier:
    """The reference and its results for one video, to compare backends with.

    Args:
        reference: stock diffusers in float32 on the CPU.
        x: the video (N, C, T, H, W), float32 in [-1, 1].

    Attributes:
        inputs: by direction, the input: the video, or the reference's latents.
        answers: by direction, the reference's result: moments (mean and log-variance), or decoded frames.
        lengths: by direction, number of the result's frames in each chunk.
    """

    def __init__(self, reference: DiffusersAutoencoder, x: torch.Tensor):
        self.reference = reference
        reference_backend = backend("torch").of(reference)
        moments = reference_backend.run(ENCODE, x)
        # All backends decode these latents, the mean, so that an error in encoding does not reach the frames.
        mean, _log_variance = moments.chunk(2, dim=1)
        self.inputs = {ENCODE: x, DECODE: mean}
        self.answers = {ENCODE: moments, DECODE: reference_backend.run(DECODE, self.inputs[DECODE])}
        self.lengths = {
            direction: direction.result_lengths(reference, self.inputs[direction].shape[2])
            for direction in Direction
        }

    @torch.no_grad()
    def verify(
        self, candidates: list[Backend], say: Callable[[str], None] = lambda line: None
    ) -> list[Result]:
        """Compare all candidates with the reference; return their results, in the candidates' order.

        The slow part, PyTorch in float32, runs once for all candidates. `say` gets a line for each step.
        """
        torch_bfloat16 = None
        baseline_errors = {}  # by direction, of PyTorch's whole results in bfloat16
        if any(candidate.vae.dtype == torch.bfloat16 for candidate in candidates):
            # PyTorch in bfloat16, whose errors set the tolerances of candidates in bfloat16.
            torch_bfloat16 = make_candidate("torch", torch.bfloat16, self.reference)
        layer_errors = self._layer_errors(candidates, torch_bfloat16, say)
        if torch_bfloat16 is not None:
            say("PyTorch's own bfloat16 run")
            # Its own contracts are not reported: it is no candidate.
            baseline_errors, _contracts = self._encode_and_decode(torch_bfloat16)
        results = []
        for candidate, errors in zip(candidates, layer_errors, strict=True):
            say(f"{candidate.name} {runtime.dtype_name(candidate.vae.dtype)}: encode and decode")
            results.append(self._result(candidate, errors, baseline_errors))
        return results

    def _layer_errors(
        self, candidates: list[Backend], torch_bfloat16: Backend | None, say: Callable[[str], None]
    ) -> list[list[LayerError]]:
        """Compare the layers of all candidates; return each candidate's layer errors, in both directions."""
        # `torch_bfloat16` is PyTorch in bfloat16; None if no candidate is in bfloat16.
        errors: list[list[LayerError]] = [[] for _ in candidates]
        compared = candidates if torch_bfloat16 is None else [*candidates, torch_bfloat16]
        for direction in Direction:
            say(f"{direction}: layer by layer")
            differences = compare_layers(self.reference, compared, direction, self.inputs[direction])
            # PyTorch in bfloat16 is the last of those compared, and is no candidate.
            torch_layers = {} if torch_bfloat16 is None else differences.pop()
            for candidate, layers, candidate_errors in zip(candidates, differences, errors, strict=True):
                candidate_errors += [
                    _layer_error(name, candidate.vae.dtype, chunks, torch_layers.get(name, []))
                    for name, chunks in layers.items()
                ]
        return errors

    def _encode_and_decode(self, candidate: Backend) -> tuple[dict[str, WholeError], list[Contract]]:
        """Return a candidate's error by direction, and the contracts on shapes and streaming."""
        errors: dict[str, WholeError] = {}
        contracts = []
        # A result of a wrong shape has a failed contract, and no error.
        for direction in Direction:
            want = self.answers[direction]
            got = candidate.run(direction, self.inputs[direction].to(candidate.vae.dtype))
            frames = got.shape[2]
            wanted = sum(self.lengths[direction])
            contracts.append(Contract(f"{direction}: frames", frames, wanted, frames == wanted, exact=True))
            if got.shape != want.shape:
                # The measured value is the number of wrong shapes: 1, where 0 are allowed.
                contracts.append(
                    Contract(f"{direction}: shape {tuple(got.shape)} for {tuple(want.shape)}", 1, 0, False)
                )
                continue
            errors[direction] = compare_whole(got, want, self.lengths[direction], pixels=direction == DECODE)
            if direction == DECODE and hasattr(candidate.vae, "decode_stream"):
                # `decode_stream` does the work of `decode` in another order, so even in bfloat16 both must
                # agree within the tolerance of float32.
                chunks = candidate.vae.decode_stream(self.inputs[direction].to(candidate.vae.dtype))
                error = tolerances.relative_error(torch.cat(list(chunks), dim=2), got)
                name, allowed = "decode_stream: relative error to decode", tolerances.FLOAT32_RELATIVE
                contracts.append(Contract(name, error, allowed, error <= allowed))
        return errors, contracts

    def _result(
        self, candidate: Backend, layers: list[LayerError], baseline: dict[str, WholeError]
    ) -> Result:
        """Run a candidate on the whole video; return its result, with all contracts.

        `layers` are the errors of its layers, and `baseline` those of PyTorch's whole results in bfloat16.
        """
        whole, shape_contracts = self._encode_and_decode(candidate)
        contracts = []
        for direction, error in whole.items():
            # The baseline is empty if no candidate is in bfloat16. Then `contract` does not read its last
            # argument, for which the candidate's own error stands in.
            torch_error = baseline.get(direction, error)
            # In float32 the relative error is measured, in bfloat16 the RMS error over that of PyTorch.
            name, measured, allowed = tolerances.contract(
                candidate.vae.dtype, error.relative, error.rms, torch_error.rms
            )
            contracts.append(Contract(f"{direction}: {name}", measured, allowed, measured <= allowed))
        contracts += shape_contracts
        # A direction compiles one program for the first chunk, and one for all later chunks.
        for direction in Direction if isinstance(candidate.vae, AutoencoderKLCogVideoX) else ():
            count = candidate.vae.program(direction).compilations
            contracts.append(
                Contract(f"{direction}: programs compiled", count, MOST_PROGRAMS, count <= MOST_PROGRAMS)
            )
        # `chunk` is the first chunk in which a layer leaves the tolerance; None if it leaves it in none.
        first_bad = next((layer for layer in layers if layer.chunk is not None), None)
        return Result(
            candidate.name, runtime.dtype_name(candidate.vae.dtype), layers, whole, contracts, first_bad
        )
