"""Streams around what goes wrong: sources that fail, bad input, counts, slices, streams that are dropped."""

import gc
import weakref

import pytest
import torch

from tests import reference
from tests.vae.conftest import check_close


class SourceError(Exception):
    """Error of a user's own source."""


def until(stop, frames):
    """Yield the first `stop` of a video's frames, then raise an error."""
    yield from reference.video(frames).unbind(2)[:stop]
    raise SourceError(f"after {stop}")


def with_change(number, change):
    """Return an iterator of 25 frames, one of them changed."""
    frames = list(reference.video(25).unbind(2))
    frames[number] = change(frames[number])
    return iter(frames)


# 25 frames are encoded as 9, 8 and 8.
@pytest.mark.parametrize(
    ("source", "error", "lengths"),
    [
        pytest.param(lambda: until(5, 25), SourceError, [], id="in the first chunk"),
        pytest.param(lambda: until(9, 25), SourceError, [3], id="at the border of the second"),
        pytest.param(lambda: until(12, 25), SourceError, [3], id="in the second"),
        pytest.param(lambda: until(20, 25), SourceError, [3, 2], id="in the third"),
        pytest.param(lambda: until(25, 25), SourceError, [3, 2, 2], id="at the end"),
        pytest.param(
            lambda: with_change(11, lambda x: x * float("nan")), ValueError, [3], id="by a NaN in the second"
        ),
        pytest.param(
            lambda: with_change(18, lambda x: x[..., :-8]),
            ValueError,
            [3, 2],
            id="by a frame of another size in the third",
        ),
        pytest.param(
            lambda: iter(reference.video(25).unbind(2)[:20]), ValueError, [3, 2], id="by ending in the third"
        ),
        pytest.param(
            lambda: iter((*reference.video(25).unbind(2), torch.zeros(1, 3, 24, 40))),
            ValueError,
            [3, 2, 2],
            id="by going on",
        ),
    ],
)
def test_a_source_that_fails_loses_no_chunk_that_was_whole(small_vae, backend, source, error, lengths):
    stream, given = backend.encode_stream(source(), 25), []
    with pytest.raises(error):
        given.extend(stream)
    assert not list(stream), "what has failed is over"
    moments = [posterior.parameters for posterior in given]
    assert [part.shape[2] for part in moments] == lengths
    if moments:
        want = reference.encoded(small_vae, reference.video(25))[:, :, : sum(lengths)]
        check_close(torch.cat(moments, 2), want)


def decoding(count, *pieces):
    """Return a call that decodes all of a stream of pieces of latents."""
    return lambda vae: list(vae.decode_stream(iter(pieces), count))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda vae: vae.decode_stream(reference.latents(2), output_dtype=torch.int32),
            "output_dtype torch.int32",
            id="an output dtype",
        ),
        pytest.param(
            lambda vae: vae.encode_stream(until(5, 5)), "pass num_frames", id="an iterable of unknown length"
        ),
        pytest.param(lambda vae: vae.encode_stream(until(5, 5), 0), "num_frames", id="no frames announced"),
        pytest.param(
            lambda vae: vae.encode_stream(until(5, 5), -1), "num_frames", id="fewer than none announced"
        ),
        pytest.param(
            lambda vae: vae.encode_stream(reference.video(5), num_frames=9),
            "5 frames.* 9 .*announced",
            id="more announced than a video has",
        ),
        pytest.param(
            lambda vae: vae.encode_stream(reference.video(9), num_frames=5),
            "9 frames.* 5 .*announced",
            id="fewer announced than a video has",
        ),
        pytest.param(decoding(None, reference.latents(3)), "pass num_frames", id="pieces of no count"),
        pytest.param(decoding(3), "no frames where 3", id="no piece"),
        pytest.param(decoding(5, reference.latents(3)), "ended after 3 frames where 5", id="too few pieces"),
        pytest.param(
            decoding(3, reference.latents(3), reference.latents(1)),
            "goes on after the 3",
            id="too many pieces",
        ),
        pytest.param(decoding(3, reference.latents(4)), "goes on after the 3", id="too many in one piece"),
        pytest.param(
            decoding(5, reference.latents(3), reference.latents(2, width=6)),
            r"frame 3 is \(1, 16, 1, 3, 6\), the ones before it \(1, 16, 1, 3, 5\)",
            id="pieces of two sizes",
        ),
        pytest.param(
            decoding(5, reference.latents(3), reference.latents(2) * float("nan")),
            "frame 3",
            id="a NaN in a piece",
        ),
    ],
)
def test_what_is_bad_is_refused_by_the_call_itself(backend, call, words):
    with pytest.raises(ValueError, match=words):
        call(backend)  # and no `next`


def test_a_stream_keeps_no_gradients_where_they_are_on(backend):
    with torch.enable_grad():
        parts = list(backend.decode_stream(reference.latents(3)))
        parts += [posterior.parameters for posterior in backend.encode_stream(reference.video(9))]
        assert torch.is_grad_enabled()
    assert not any(part.requires_grad for part in parts)


def started(vae, kind):
    """Return a stream of several chunks, one of them taken, and more being computed."""
    decodes = kind == "decode"
    stream = vae.decode_stream(reference.latents(9)) if decodes else vae.encode_stream(reference.video(33))
    next(stream)
    return stream


@pytest.mark.parametrize("backend", ["torchax", "flax"], indirect=True)
@pytest.mark.parametrize("abandoned", ["closed", "dropped"])
@pytest.mark.parametrize("kind", ["decode", "encode"])
@pytest.mark.slow_cases("*-flax")
def test_an_abandoned_stream_frees_its_memory(backend, kind, abandoned):
    list(started(backend, kind))  # weights are where they stay, programs are compiled
    gc.collect()
    gc.disable()
    try:
        before = reference.live_bytes()
        stream = started(backend, kind)
        assert reference.live_bytes() > before
        if abandoned == "closed":
            stream.close()  # whoever holds on to it holds no memory
        else:
            del stream
        assert reference.live_bytes() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["torchax", "flax"], indirect=True)
def test_a_stream_that_failed_frees_its_memory(backend):
    list(backend.encode_stream(reference.video(25)))
    gc.collect()
    before = reference.live_bytes()
    stream = backend.encode_stream(until(12, 25), 25)
    with pytest.raises(SourceError):
        list(stream)
    gc.collect()  # the traceback holds frames that hold each other
    assert reference.live_bytes() == before


def test_an_abandoned_stream_lets_go_of_its_source(backend):
    source = until(25, 25)
    stream, kept = backend.encode_stream(source, 25), weakref.ref(source)
    del source
    next(stream)
    assert kept()
    stream.close()
    assert not kept()


@pytest.mark.parametrize("lengths", [[7], [1] * 7, [3, 2, 2], [2, 4, 1]])
def test_latents_in_pieces_are_decoded_as_in_one(native_vae, lengths):
    z = reference.latents(7)
    streams = native_vae.decode_stream(iter(z.split(lengths, dim=2)), 7), native_vae.decode_stream(z)
    assert all(torch.equal(*parts) for parts in zip(*streams, strict=True))
