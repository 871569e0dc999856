"""`verify`: backends compared with diffusers' PyTorch in float32, layer by layer and as a whole.

Every backend gets the same input and the same weights. Layers are compared chunk by chunk, all backends on
one chunk before the next, so that no more than one chunk of activations is held.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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

DTYPES = ("float32", "bfloat16")
"""Names of the dtypes that backends are verified in."""
PROGRAMS_A_NETWORK = 2
"""Programs that a direction may compile: of the first chunk, and of later chunks."""
PIXEL_RANGE = 2.0
"""Range of frames in [-1, 1]: the peak of PSNR and SSIM."""

LAYER_NAME = re.compile(
    r"((encoder|decoder)\.(conv_in|conv_out|norm_out|mid_block|(down|up)_blocks\.\d+)"
    r"(\.(resnets|downsamplers|upsamplers)\.\d+)?|(post_)?quant_conv)"
)
"""Names in diffusers of the layers that are compared."""


@dataclass
class LayerError:
    """The error of a layer's output against the reference's, over all chunks.

    Attributes:
        name: the layer's name.
        mean, largest: mean and maximum of the absolute difference.
        relative: the largest difference over the largest absolute value of the reference.
        rms: root of the mean squared difference.
        chunk: the first chunk in which the difference leaves the tolerance; None if it never does.
    """

    name: str
    mean: float
    largest: float
    relative: float
    rms: float
    chunk: int | None = None


@dataclass
class WholeError:
    """The error of a whole result, moments or decoded frames, against the reference's.

    Attributes:
        mean, largest, relative, rms: as in `LayerError`.
        at_borders: mean difference of the frames next to a border between chunks; None without such frames.
        inside: mean difference of all other frames; None without such frames.
        psnr, ssim: of each decoded frame against the reference's, infinite and 1 for equal frames; empty for
            moments.
    """

    mean: float
    largest: float
    relative: float
    rms: float
    at_borders: float | None
    inside: float | None
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)


@dataclass
class Contract:
    """One contract of docs/architecture.md, as measured.

    Attributes:
        name: the contract in words, with the direction.
        measured, allowed: the measured value and its bound.
        passed: whether the bound is kept; false for a NaN too.
    """

    name: str
    measured: float
    allowed: float
    passed: bool


@dataclass
class Candidate:
    """A backend to verify.

    Attributes:
        name: name of the backend.
        dtype: dtype of its weights and input.
        backend: the backend with its model.
    """

    name: str
    dtype: torch.dtype
    backend: Backend

    @property
    def dtype_name(self) -> str:
        return runtime.dtype_name(self.dtype)

    @property
    def vae(self) -> Any:
        return self.backend.vae

    def run(self, direction: Direction, x: torch.Tensor) -> torch.Tensor:
        """Return the posterior's moments of a video, or the frames of latents, as a plain tensor."""
        return self.backend.run(direction, x.to(self.dtype))


@dataclass
class Result:
    """The results of one backend in one dtype.

    Attributes:
        backend, dtype: their names.
        layers: the errors of the layers of both directions, in running order.
        whole: the whole result's error by direction; without those of a wrong shape.
        contracts: the contracts, kept or not.
        first_bad_layer: the first layer that leaves the tolerance, or None.
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
    """Return a backend, by its name, with a copy of the reference's weights in a dtype.

    Args:
        name: name of the backend.
        dtype: dtype of its weights and input.
        reference: diffusers' own model.

    Raises:
        BackendError: a backend that is unknown, or not part of this installation.
    """
    # The model's own `to` is wrapped by diffusers in a way that pyright cannot follow.
    copied = nn.Module.to(copy.deepcopy(reference), dtype)
    return Candidate(name, dtype, backend(name).from_native(copied))


# Layer by layer


class _Sums:
    """Sums over a layer's chunks from which a `LayerError` is made.

    Attributes:
        count: number of values.
        absolute, square: sums of the absolute and of the squared differences.
        largest: the largest absolute difference.
        scale: the reference's largest absolute value.
        by_chunk: (largest absolute difference, RMS of the differences) of each chunk.
    """

    def __init__(self) -> None:
        self.count = 0
        self.absolute = self.square = self.largest = self.scale = 0.0
        self.by_chunk: list[tuple[float, float]] = []

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Add the differences of one chunk's output from the reference's."""
        if got.shape != want.shape:
            raise ValueError(
                f"got a layer of shape {tuple(got.shape)}, the reference's is {tuple(want.shape)}"
            )
        difference = (got.float() - want).abs_()
        # torch's max passes a NaN on, Python's does not
        largest = torch.stack([difference.max(), torch.tensor(self.largest)]).max().item()
        square = difference.square().sum(dtype=torch.float64).item()
        self.by_chunk.append((difference.max().item(), (square / got.numel()) ** 0.5))
        self.absolute += difference.sum(dtype=torch.float64).item()
        self.largest, self.square = largest, self.square + square
        self.scale = max(self.scale, want.abs().max().item())
        self.count += got.numel()

    def error(self, name: str) -> LayerError:
        """Return the error over all chunks, of the layer with this name."""
        rms = (self.square / self.count) ** 0.5
        return LayerError(
            name, self.absolute / self.count, self.largest, tolerances.ratio(self.largest, self.scale), rms
        )

    def first_chunk(self, allowed_largest: float, allowed_rms: float) -> int | None:
        """Return the first chunk whose largest difference or RMS is above its bound; None if none is."""
        for index, (largest, rms) in enumerate(self.by_chunk):
            # "not" below, instead of above: a NaN is above every bound.
            if not (largest <= allowed_largest and rms <= allowed_rms):
                return index
        return None


def compare_layers(
    reference: DiffusersAutoencoder, vaes: dict[str, Candidate], direction: Direction, x: torch.Tensor
) -> dict[str, dict[str, _Sums]]:
    """Run the reference and all candidates over the same chunks; return the sums of their differences.

    Args:
        reference: diffusers' model in float32.
        vaes: the candidates by a name.
        direction: the direction that is compared.
        x: the direction's input, all chunks of it.

    Returns:
        By each candidate's name, the sums by each layer's name, in running order. Layers that a backend does
        not have are left out.
    """
    runs = {name: each.backend.recorder(direction, LAYER_NAME.fullmatch) for name, each in vaes.items()}
    exact_run = Torch(reference).recorder(direction, LAYER_NAME.fullmatch)
    sums: dict[str, dict[str, _Sums]] = {name: {} for name in vaes}
    for chunk in direction.chunks(reference, x.shape[2]):
        piece = x[:, :, chunk.start : chunk.stop]
        exact = exact_run(piece)
        for name, candidate in vaes.items():
            outputs = runs[name](candidate.backend.put(piece.to(candidate.dtype)))
            for layer, want in exact.items():
                if layer in outputs:
                    sums[name].setdefault(layer, _Sums()).add(outputs[layer], want)
    return sums


def _judged(dtype: torch.dtype, sums: dict[str, _Sums], baseline: dict[str, _Sums]) -> list[LayerError]:
    """Return the errors of a candidate's layers, with the first chunk outside the tolerance.

    Args:
        dtype: the candidate's dtype. In float32 the tolerance is of the largest difference, relative to the
            reference; in bfloat16 of the RMS, as a multiple of PyTorch's own in bfloat16.
        sums: the candidate's sums by layer.
        baseline: the sums of PyTorch in bfloat16 by layer; not read in float32.
    """
    layers = []
    for name, layer in sums.items():
        error = layer.error(name)
        if dtype == torch.float32:
            allowed = (tolerances.FLOAT32_RELATIVE * layer.scale, float("inf"))
        else:
            torch_rms = max(rms for _, rms in baseline[name].by_chunk)
            allowed = (float("inf"), tolerances.BFLOAT16_LAYER_RMS_RATIO * torch_rms)
        error.chunk = layer.first_chunk(*allowed)  # (largest difference, RMS)
        layers.append(error)
    return layers


# As a whole


def border_frames(lengths: list[int]) -> list[int]:
    """Return the indices of frames on either side of each border between chunks of these lengths."""
    borders = np.cumsum(lengths)[:-1].tolist()
    return sorted({frame for border in borders for frame in (border - 1, border)})


def compare_whole(got: torch.Tensor, want: torch.Tensor, lengths: list[int], pixels: bool) -> WholeError:
    """Return the error of a whole result (N, C, T, H, W).

    Args:
        got, want: the result and the reference's.
        lengths: number of the result's frames in each chunk.
        pixels: whether they are frames, to add PSNR and SSIM of each.
    """
    difference = (got.double() - want.double()).abs()
    by_frame = difference.mean(dim=(0, 1, 3, 4)).tolist()
    at_borders = border_frames(lengths)
    inside = [frame for frame in range(len(by_frame)) if frame not in at_borders]
    whole = WholeError(
        mean=difference.mean().item(),
        largest=difference.max().item(),
        relative=tolerances.relative_error(got, want),
        rms=tolerances.rms_error(got, want),
        at_borders=_mean([by_frame[frame] for frame in at_borders]),
        inside=_mean([by_frame[frame] for frame in inside]),
    )
    if pixels:
        frames = range(want.shape[2])
        whole.psnr = [tolerances.psnr(got[:, :, t], want[:, :, t], PIXEL_RANGE) for t in frames]
        whole.ssim = [ssim(got[:, :, t : t + 1], want[:, :, t : t + 1], PIXEL_RANGE) for t in frames]
    return whole


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


# The contracts


def _same_function(direction: str, dtype: torch.dtype, whole: WholeError, torchs: WholeError) -> Contract:
    """Return the contract that a whole result is the reference's, within the tolerance.

    Args:
        direction: the direction of the result, for the contract's name.
        dtype: the candidate's dtype.
        whole: the candidate's error.
        torchs: PyTorch's own error in bfloat16, of which that dtype's tolerance is a multiple.
    """
    name, measured, allowed = tolerances.contract(dtype, whole.relative, whole.rms, torchs.rms)
    return Contract(f"{direction}: {name}", measured, allowed, measured <= allowed)


def _stream(candidate: Candidate, z: torch.Tensor, want: torch.Tensor) -> Contract:
    """Return the contract that `decode_stream` of latents `z` gives `want`, the result of `decode`.

    Only the order of work differs, so the tolerance of float32 holds in every dtype.
    """
    parts = list(candidate.vae.decode_stream(z.to(candidate.dtype)))
    error = tolerances.relative_error(torch.cat(parts, dim=2), want)
    allowed = tolerances.FLOAT32_RELATIVE
    return Contract("decode_stream: relative error to decode", error, allowed, error <= allowed)


# All of it


class Verifier:
    """The reference and its results for one video, to compare backends with.

    Args:
        reference: stock diffusers in float32 on the CPU.
        x: the video (N, C, T, H, W), float32 in [-1, 1].

    Attributes:
        inputs, answers: the reference's input and result by direction.
        lengths: by direction, number of the result's frames in each chunk.
    """

    def __init__(self, reference: DiffusersAutoencoder, x: torch.Tensor):
        """Compute the reference's results, in both directions."""
        self.reference = reference
        exact = Torch(reference)
        moments = exact.run(ENCODE, x)
        # All backends decode the reference's latents: no error of encoding is counted again in the frames.
        self.inputs = {ENCODE: x, DECODE: moments.chunk(2, dim=1)[0]}
        self.answers = {ENCODE: moments, DECODE: exact.run(DECODE, self.inputs[DECODE])}
        self.lengths = {
            direction: direction.results(reference, self.inputs[direction].shape[2])
            for direction in Direction
        }

    @torch.no_grad()
    def verify(
        self, candidates: list[Candidate], say: Callable[[str], None] = lambda line: None
    ) -> list[Result]:
        """Return the results of all candidates, in their order.

        The slow part, PyTorch in float32, runs once for all of them. `say` is called with lines on progress.
        """
        torchs = None
        if any(candidate.dtype == torch.bfloat16 for candidate in candidates):
            torchs = make_candidate("torch", torch.bfloat16, self.reference)
        layers = self._layers(candidates, torchs, say)
        baseline = {}
        if torchs is not None:
            say("PyTorch's own bfloat16 run")
            baseline, _contracts = self._whole(torchs)
        results = []
        for index, candidate in enumerate(candidates):
            say(f"{candidate.name} {candidate.dtype_name}: encode and decode")
            results.append(self._result(candidate, layers[index], baseline))
        return results

    def _layers(
        self, candidates: list[Candidate], torchs: Candidate | None, say: Callable[[str], None]
    ) -> list[list[LayerError]]:
        """Return the errors of each candidate's layers, of both directions, in the candidates' order.

        `torchs` is PyTorch in bfloat16, whose own errors set that dtype's tolerances; None if all candidates
        are in float32.
        """
        compared = {str(index): candidate for index, candidate in enumerate(candidates)}
        if torchs is not None:
            compared["baseline"] = torchs
        found: list[list[LayerError]] = [[] for _ in candidates]
        for direction in Direction:
            say(f"{direction}: layer by layer")
            sums = compare_layers(self.reference, compared, direction, self.inputs[direction])
            for index, candidate in enumerate(candidates):
                found[index] += _judged(candidate.dtype, sums[str(index)], sums.get("baseline", {}))
        return found

    def _whole(self, candidate: Candidate) -> tuple[dict[str, WholeError], list[Contract]]:
        """Return (errors of whole results by direction, contracts on shapes and on streaming).

        A result of a wrong shape has no error, but a contract that is not kept.
        """
        errors: dict[str, WholeError] = {}
        contracts = []
        for direction in Direction:
            got, want = candidate.run(direction, self.inputs[direction]), self.answers[direction]
            frames, wanted = got.shape[2], sum(self.lengths[direction])
            contracts.append(Contract(f"{direction}: frames", frames, wanted, frames == wanted))
            if got.shape != want.shape:
                contracts.append(
                    Contract(f"{direction}: shape {tuple(got.shape)} for {tuple(want.shape)}", 1, 0, False)
                )
                continue
            errors[direction] = compare_whole(got, want, self.lengths[direction], pixels=direction == DECODE)
            if direction == DECODE and hasattr(candidate.vae, "decode_stream"):
                contracts.append(_stream(candidate, self.inputs[direction], got))
        return errors, contracts

    def _result(
        self, candidate: Candidate, layers: list[LayerError], baseline: dict[str, WholeError]
    ) -> Result:
        """Run a candidate, and return its result.

        Args:
            candidate: the backend.
            layers: the errors of its layers.
            baseline: PyTorch's own whole errors in bfloat16, by direction; empty if all are in float32.
        """
        whole, contracts = self._whole(candidate)
        same = [
            _same_function(direction, candidate.dtype, error, baseline.get(direction, error))
            for direction, error in whole.items()
        ]
        contracts += [
            Contract(f"{kind}: programs compiled", count, PROGRAMS_A_NETWORK, count <= PROGRAMS_A_NETWORK)
            for kind, count in candidate.backend.program_counts.items()
        ]
        first_bad = next((layer for layer in layers if layer.chunk is not None), None)
        return Result(candidate.name, candidate.dtype_name, layers, whole, same + contracts, first_bad)
