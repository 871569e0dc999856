"""`verify`: backends compared with diffusers' PyTorch in float32, layer by layer and as a whole.

Every backend gets the same input and the same weights. Layers are compared chunk by chunk, all backends on
one chunk before the next, so that no more than one chunk of activations is held.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    AutoencoderKLCogVideoX as DiffusersAutoencoder,
)
from torch import nn

from cogvideox_torchax import runtime
from cogvideox_torchax.backends import backend
from cogvideox_torchax.backends.base import Backend
from cogvideox_torchax.backends.native import Torch
from cogvideox_torchax.vae import tolerances
from cogvideox_torchax.vae.directions import DECODE, ENCODE, Direction
from cogvideox_torchax.vae.quality import ssim

PROGRAMS_A_NETWORK = 2
"""Programs that a direction may compile: of the first chunk, and of later chunks."""
PIXEL_RANGE = 2.0
"""Range of frames in [-1, 1]: the peak of PSNR and SSIM."""

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

    `chunk` is the number of the first chunk whose difference leaves the tolerance; None if none does.
    """

    name: str
    chunk: int | None


@dataclass(kw_only=True)
class WholeError(Error):
    """The error of a whole result, moments or decoded frames.

    Attributes:
        at_borders: mean difference of the frames next to a border between chunks; None without such frames.
        inside: mean difference of all other frames; None without such frames.
        psnr, ssim: of each decoded frame, infinite and 1 for equal frames; empty for moments.
    """

    at_borders: float | None
    inside: float | None
    psnr: list[float]
    ssim: list[float]


@dataclass
class Contract:
    """One contract of docs/architecture.md, named in words, with its measured value and its bound."""

    name: str
    measured: float
    allowed: float
    passed: bool


@dataclass
class Candidate:
    """A backend to verify, with its model; `dtype` is that of the weights and of the input."""

    name: str
    dtype: torch.dtype
    backend: Backend

    @property
    def dtype_name(self) -> str:
        return runtime.dtype_name(self.dtype)

    @property
    def vae(self) -> Any:
        return self.backend.vae


@dataclass
class Result:
    """The results of one backend in one dtype.

    Attributes:
        layers: the errors of the layers of both directions, in running order.
        whole: by direction, the error of the whole result; a result of a wrong shape has no entry.
        contracts: the contracts, kept or not.
        first_bad_layer: the first layer, in running order, that leaves the tolerance, or None.
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


def make_candidate(name: str, dtype: torch.dtype, reference: DiffusersAutoencoder) -> Candidate:
    """Return a backend, by its name, that has a copy of the reference's weights in another dtype.

    Raises:
        BackendError: a backend that is unknown, or not part of this installation.
    """
    # Not `copy.to(dtype)`: diffusers wraps that method in a way that pyright cannot follow.
    copied = nn.Module.to(copy.deepcopy(reference), dtype)
    return Candidate(name, dtype, backend(name).from_native(copied))


# Layer by layer


class Differences(NamedTuple):
    """The differences of a layer's output from the reference's: numbers of a chunk, or arrays of all chunks.

    Attributes:
        size: number of values.
        absolute, square: sums of the absolute and of the squared differences.
        largest: the largest absolute difference.
        scale: the reference's largest absolute value.
    """

    size: Any
    absolute: Any
    square: Any
    largest: Any
    scale: Any

    @classmethod
    def between(cls, got: torch.Tensor, want: torch.Tensor) -> "Differences":
        if got.shape != want.shape:
            raise ValueError(
                f"got a layer of shape {tuple(got.shape)}, the reference's is {tuple(want.shape)}"
            )
        difference = (got.float() - want).abs_()
        return cls(
            size=got.numel(),
            absolute=difference.sum(dtype=torch.float64).item(),
            square=difference.square().sum(dtype=torch.float64).item(),
            largest=difference.max().item(),
            scale=want.abs().max().item(),
        )

    @classmethod
    def of_chunks(cls, chunks: "list[Differences]") -> "Differences":
        """Return the differences of all chunks; each attribute is an array with a number for each chunk."""
        return cls(*np.transpose(chunks))  # (chunks, attributes) to (attributes, chunks)

    @property
    def rms(self) -> Any:
        """The root of the mean squared difference, of each chunk."""
        return (self.square / self.size) ** 0.5


Layers = dict[str, list[Differences]]
"""By a layer's name, the differences of each chunk; in running order."""


def compare_layers(
    reference: DiffusersAutoencoder, candidates: list[Candidate], direction: Direction, x: torch.Tensor
) -> list[Layers]:
    """Run the reference and all candidates over the same chunks.

    Args:
        reference: diffusers' model in float32.
        candidates: the backends to compare.
        direction: the direction that is compared.
        x: the direction's whole input (N, C, T, H, W): a video, or latents.

    Returns:
        For each candidate, in order, the differences of the layers that its backend has.
    """
    # A recorder is the step of a chunk, with the outputs of layers, whose names `LAYER_NAME` matches.
    recorders = [candidate.backend.recorder(direction, LAYER_NAME.fullmatch) for candidate in candidates]
    reference_recorder = Torch(reference).recorder(direction, LAYER_NAME.fullmatch)
    found: list[Layers] = [{} for _ in candidates]
    reference_cache, caches = None, [None] * len(candidates)
    for chunk in direction.chunks(reference, x.shape[2]):
        piece = x[:, :, chunk.start : chunk.stop]
        wanted, reference_cache = reference_recorder(piece, reference_cache)
        for i, candidate in enumerate(candidates):
            outputs, caches[i] = recorders[i](candidate.backend.put(piece.to(candidate.dtype)), caches[i])
            for name, want in wanted.items():
                if name in outputs:
                    found[i].setdefault(name, []).append(Differences.between(outputs[name], want))
    return found


def _layer_error(
    name: str, dtype: torch.dtype, chunks: list[Differences], torch_bfloat16: list[Differences]
) -> LayerError:
    each = Differences.of_chunks(chunks)  # its attributes are arrays, with a number for each chunk
    if dtype == torch.float32:
        passed = each.largest <= tolerances.FLOAT32_RELATIVE * each.scale.max()
    else:
        allowed = tolerances.BFLOAT16_LAYER_RMS_RATIO * Differences.of_chunks(torch_bfloat16).rms.max()
        passed = each.rms <= allowed
    size, largest = each.size.sum(), each.largest.max()
    return LayerError(
        name=name,
        mean=each.absolute.sum() / size,
        largest=largest,
        relative=tolerances.ratio(largest, each.scale.max()),
        rms=(each.square.sum() / size) ** 0.5,
        chunk=None if passed.all() else int(passed.argmin()),  # the first False; a NaN never passes
    )


# As a whole


def border_frames(lengths: list[int]) -> list[int]:
    """Return the indices of the frames on both sides of each border between chunks of these lengths."""
    *borders, _end = np.cumsum(lengths).tolist()  # each is the first frame after a border
    return sorted({frame for border in borders for frame in (border - 1, border)})


def compare_whole(got: torch.Tensor, want: torch.Tensor, lengths: list[int], pixels: bool) -> WholeError:
    """Return the error of a whole result (N, C, T, H, W).

    Args:
        got: the backend's result.
        want: the reference's result.
        lengths: number of the result's frames in each chunk.
        pixels: whether the results are decoded frames, which get PSNR and SSIM too, and not moments.
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
        exact = Torch(reference)
        moments = exact.run(ENCODE, x)
        # All backends decode the reference's latents, so an error in encoding does not reach the frames.
        mean, _log_variance = moments.chunk(2, dim=1)
        self.inputs = {ENCODE: x, DECODE: mean}
        self.answers = {ENCODE: moments, DECODE: exact.run(DECODE, self.inputs[DECODE])}
        self.lengths = {
            direction: direction.results(reference, self.inputs[direction].shape[2])
            for direction in Direction
        }

    @torch.no_grad()
    def verify(
        self, candidates: list[Candidate], say: Callable[[str], None] = lambda line: None
    ) -> list[Result]:
        """Compare all candidates with the reference; return their results, in the candidates' order.

        The slow part, PyTorch in float32, runs once for all candidates. `say` gets a line for each step.
        """
        torch_bfloat16, baseline_errors = None, {}
        if any(candidate.dtype == torch.bfloat16 for candidate in candidates):
            # PyTorch's own bfloat16 errors, which set the tolerances of bfloat16.
            torch_bfloat16 = make_candidate("torch", torch.bfloat16, self.reference)
        layer_errors = self._layer_errors(candidates, torch_bfloat16, say)
        if torch_bfloat16 is not None:
            say("PyTorch's own bfloat16 run")
            baseline_errors, _contracts = self._encode_and_decode(torch_bfloat16)
        results = []
        for candidate, errors in zip(candidates, layer_errors, strict=True):
            say(f"{candidate.name} {candidate.dtype_name}: encode and decode")
            results.append(self._result(candidate, errors, baseline_errors))
        return results

    def _layer_errors(
        self, candidates: list[Candidate], torch_bfloat16: Candidate | None, say: Callable[[str], None]
    ) -> list[list[LayerError]]:
        errors: list[list[LayerError]] = [[] for _ in candidates]
        compared = candidates if torch_bfloat16 is None else [*candidates, torch_bfloat16]
        for direction in Direction:
            say(f"{direction}: layer by layer")
            found = compare_layers(self.reference, compared, direction, self.inputs[direction])
            torch_layers = {} if torch_bfloat16 is None else found.pop()  # `torch_bfloat16` is compared last
            # `layers` has, by a layer's name, a list: for each chunk, the differences from the reference.
            for candidate, layers, candidate_errors in zip(candidates, found, errors, strict=True):
                candidate_errors += [
                    _layer_error(name, candidate.dtype, differences, torch_layers.get(name, []))
                    for name, differences in layers.items()
                ]
        return errors

    def _encode_and_decode(self, candidate: Candidate) -> tuple[dict[str, WholeError], list[Contract]]:
        """Run a candidate; return (errors of whole results by direction, contracts on shapes and streaming).

        A result of a wrong shape has a failed contract, and no entry in the errors.
        """
        errors: dict[str, WholeError] = {}
        contracts = []
        for direction in Direction:
            want = self.answers[direction]
            got = candidate.backend.run(direction, self.inputs[direction].to(candidate.dtype))
            frames, wanted_frames = got.shape[2], sum(self.lengths[direction])
            contracts.append(Contract(f"{direction}: frames", frames, wanted_frames, frames == wanted_frames))
            if got.shape != want.shape:
                contracts.append(  # one wrong shape, where none is allowed
                    Contract(f"{direction}: shape {tuple(got.shape)} for {tuple(want.shape)}", 1, 0, False)
                )
                continue
            errors[direction] = compare_whole(got, want, self.lengths[direction], pixels=direction == DECODE)
            if direction == DECODE and hasattr(candidate.vae, "decode_stream"):
                # Only the order of work differs, so the tolerance of float32 holds in every dtype.
                chunks = candidate.vae.decode_stream(self.inputs[direction].to(candidate.dtype))
                error = tolerances.relative_error(torch.cat(list(chunks), dim=2), got)
                name, allowed = "decode_stream: relative error to decode", tolerances.FLOAT32_RELATIVE
                contracts.append(Contract(name, error, allowed, error <= allowed))
        return errors, contracts

    def _result(
        self, candidate: Candidate, layers: list[LayerError], baseline: dict[str, WholeError]
    ) -> Result:
        """Run a candidate on the whole video; return its result, with all contracts."""
        whole, shape_contracts = self._encode_and_decode(candidate)
        contracts = []
        for direction, error in whole.items():
            torch_error = baseline.get(direction, error)  # in float32 there is none, and none is read
            name, measured, allowed = tolerances.contract(
                candidate.dtype, error.relative, error.rms, torch_error.rms
            )
            contracts.append(Contract(f"{direction}: {name}", measured, allowed, measured <= allowed))
        contracts += shape_contracts
        contracts += [
            Contract(
                f"{direction}: programs compiled", count, PROGRAMS_A_NETWORK, count <= PROGRAMS_A_NETWORK
            )
            for direction, count in candidate.backend.program_counts.items()
        ]
        # `chunk` is the first chunk in which a layer leaves the tolerance, or None.
        first_bad = next((layer for layer in layers if layer.chunk is not None), None)
        return Result(candidate.name, candidate.dtype_name, layers, whole, contracts, first_bad)
