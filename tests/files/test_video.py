"""Videos: written, read back and refused; what pipelines return is saved."""

import dataclasses
import io
import os
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
import torchax
from diffusers.video_processor import VideoProcessor
from PIL import Image, ImageSequence

from cogvideox_torchax import runtime, save_video
from cogvideox_torchax.files import video, whole as whole_files
from cogvideox_torchax.vae.pixels import amplified_difference
from tests.videos import encode, encode_file, moving_frames, pictures, read_all, write

PICTURE = Image.fromarray(moving_frames(1)[0, :, 0].permute(1, 2, 0).numpy())


@pytest.fixture
def clip(tmp_path):
    write(tmp_path / "clip.mp4", moving_frames(), Fraction(30000, 1001))
    return tmp_path / "clip.mp4"


def test_what_is_written_is_read_back_in_the_size_and_number_that_are_asked_for(clip):
    info = video.probe(clip)
    assert (info.height, info.width, info.num_frames) == (24, 40, 9)
    assert (info.fps, info.variable) == (Fraction(30000, 1001), False)
    whole = read_all(clip)
    assert (whole.float() - moving_frames().float()).abs().mean() < 4
    assert torch.equal(read_all(clip, count=4), whole[:, :, :4])
    assert read_all(clip, video.Framing(16, 16)).shape == (1, 3, 9, 16, 16)
    assert torch.equal(read_all(clip, video.Framing(16, 32, crop=True)), whole[..., 4:20, 4:36])


def test_equal_frames_make_equal_files(tmp_path):
    noise = torch.rand(1, 3, 17, 240, 360, generator=torch.Generator().manual_seed(0))
    frames = (torch.nn.functional.avg_pool3d(noise, 5, 1, 2) * 255).to(torch.uint8)
    for number in range(12):
        write(tmp_path / f"{number}.mp4", frames, 25)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_smaller_frame_is_made_of_all_pixels(tmp_path):
    noise = torch.randint(256, (1, 1, 3, 48, 96), generator=torch.Generator().manual_seed(0))
    write(tmp_path / "noise.mp4", noise.expand(1, 3, 3, 48, 96).to(torch.uint8))
    whole, small = (read_all(tmp_path / "noise.mp4", size) for size in (None, video.Framing(16, 32)))
    want = torch.nn.functional.interpolate(whole[0].float(), (16, 32), mode="bicubic", antialias=True)
    assert want.std() > 15
    assert (small[0] - want).abs().mean() < 5


@pytest.mark.parametrize(("height", "standard"), [(480, 6), (712, 6), (720, 1), (768, 1)])
def test_colors_are_tagged_and_read_back_under_the_tags(tmp_path, height, standard):
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 30, 120), (10, 200, 90), (128, 128, 128)]
    path, row = tmp_path / "colors.mp4", torch.tensor(colors, dtype=torch.uint8).T.repeat_interleave(16, 1)
    write(path, row[None, :, None, None].expand(1, 3, 2, height, -1))
    with av.open(path) as container:
        frame = next(container.decode(video=0))
    assert [frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range] == [
        *3 * [standard],
        1,
    ]
    assert (read_all(path).int() - row[:, None, None].int())[..., 8::16].abs().max() <= 3


def test_a_gif_has_all_frames_and_lasts_as_long(tmp_path):
    write(tmp_path / "clip.gif", moving_frames(5))
    with Image.open(tmp_path / "clip.gif") as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (5, (40, 24), 100)
        shown = np.stack([np.asarray(frame.convert("RGB"), int) for frame in ImageSequence.Iterator(gif)])
    assert np.abs(shown - moving_frames(5)[0].permute(1, 2, 3, 0).numpy()).mean((1, 2, 3)).max() < 4
    for rate, seconds in ((30, 0.6), (24, 0.75), (120, 18 * 0.02)):  # no frame lasts less than 20 ms
        write(tmp_path / "clip.gif", moving_frames(18), rate)
        with Image.open(tmp_path / "clip.gif") as gif:
            lasting = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
        assert len(lasting) == 18
        assert sum(lasting) == pytest.approx(1000 * seconds)
        assert max(lasting) - min(lasting) in (0, 10)


def cut(path, share):
    """Leave a share of a file's bytes, from its begin."""
    os.truncate(path, int(share * path.stat().st_size))


def write_part(path, share, options):
    with av.open(path, "w", options=options) as container:
        encode(container, moving_frames(30))
    cut(path, share)


BAD_FILES = {
    "missing": (lambda p: None, "there is no file"),
    "a directory": (lambda p: p.mkdir(), "is a directory"),
    "text": (lambda p: p.write_text("hello" * 100), "truncated or not a video"),
    "empty": (lambda p: p.touch(), "truncated or not a video"),
    "no video stream": (
        lambda p: p.write_text("1\n00:00:00,000 --> 00:00:01,000\nHello.\n"),
        "no video stream",
    ),
    # FFmpeg takes an album's cover for a video stream.
    "a cover": (lambda p: write_streams(p, COVER, is_film=False), "no video stream"),
    **{
        f"{share} of an mp4{where}": (
            lambda path, given=(share, options): write_part(path, *given),
            "truncated",
        )
        for where, options in {"": {}, " with its index first": {"movflags": "faststart"}}.items()
        for share in (0.3, 0.5, 0.9)
    },
}


@pytest.mark.parametrize("count", [None, 1], ids=["", "its first frame"])
@pytest.mark.parametrize(("make", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named(tmp_path, make, words, count):
    make(tmp_path / "bad.mp4")
    with pytest.raises(video.VideoError, match=words):
        read_all(tmp_path / "bad.mp4", count=count)


def test_a_crop_is_rounded_down_and_cut_out_of_no_smaller_video(clip):
    info = video.probe(clip)
    assert video.framing(info, multiple=16, height=None, width=None, crop=True) == video.Framing(16, 32, True)
    with pytest.raises(video.VideoError, match="cannot crop 24 x 40 pixels to 48 x 32"):
        video.framing(info, multiple=16, height=48, width=None, crop=True)
    with pytest.raises(video.VideoError, match="multiples of 8; pass --height 24 --width 8 to resize"):
        video.framing(dataclasses.replace(info, width=6), multiple=8, height=None, width=None, crop=False)


@pytest.mark.parametrize(
    ("name", "fps", "words"),
    [
        ("clip.avi", 10, "give a name in .mp4 or .gif, or a directory"),
        ("nowhere/clip.mp4", 10, "there is no directory"),
        ("taken.mp4", 10, "it is a directory"),
        ("full", 10, "that is not empty"),
        ("here", 10, "it is the current directory"),
        ("file", 10, "it is a file"),
        ("file/clip.mp4", 10, "there is no directory"),
        *(
            ("a.mp4", fps, "give a rate above 0")
            for fps in (0, -3, Fraction(-1, 2), float("nan"), float("inf"))
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_named(tmp_path, monkeypatch, name, fps, words):
    for directory in ("taken.mp4", "full", "here"):
        (tmp_path / directory).mkdir()
    (tmp_path / "full/x").touch()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "file").touch()
    with pytest.raises(whole_files.OutputError, match=words), video.writing(tmp_path / name, fps):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"taken.mp4", "full", "here", "file"}


def test_a_video_that_changes_size_midway_is_an_error_that_says_where(tmp_path):
    """A transport stream may change size: here two of them, one behind the other."""
    data = io.BytesIO()
    for size in ((24, 40), (32, 48)):
        encode_file(data, moving_frames(5, *size), "mpeg2video", 25, format="mpegts")
    with pytest.raises(video.VideoError, match=r"changes size at frame [45], from 24 x 40 pixels to 32 x 48"):
        read_all(data.getvalue())


def copy_packets(source, path, first=0, offset="0"):
    """Write a video's packets from the `first` on into another file, their times moved by seconds."""
    with av.open(source) as container, av.open(path, "w", options={"output_ts_offset": offset}) as copy:
        stream = copy.add_stream_from_template(container.streams.video[0])
        for packet in [packet for packet in container.demux(video=0) if packet.size][first:]:
            packet.stream = stream
            copy.mux(packet)


@pytest.mark.parametrize("kept_from", [0, 4])
def test_a_clip_cut_without_encoding_anew_begins_where_it_is_shown(tmp_path, kept_from):
    """Its file holds frames from a key frame before the cut; an edit list hides them."""
    whole, part = tmp_path / "whole.mp4", tmp_path / "part.mp4"
    encode_file(whole, moving_frames(12), g="4", bf="0", sc_threshold="0")
    copy_packets(whole, part, first=kept_from, offset="-0.6")
    assert video.probe(part).times == [Fraction(n, 10) for n in range(6)]
    assert torch.equal(read_all(part), read_all(whole)[:, :, 6:])


# The matrix of an mp4's track, in units of 2^16, and what it says.
@pytest.mark.parametrize(
    ("placed", "upright_of"),
    [
        pytest.param([0, -1, 0, 1, 0, 0, 0, 0, 0x4000], lambda x: x.rot90(1, (3, 4)), id="turned left"),
        pytest.param([0, 1, 0, -1, 0, 0, 0, 0, 0x4000], lambda x: x.rot90(-1, (3, 4)), id="turned right"),
        pytest.param([-1, 0, 0, 0, -1, 0, 0, 0, 0x4000], lambda x: x.flip(3, 4), id="upside down"),
        pytest.param([-1, 0, 0, 0, 1, 0, 0, 0, 0x4000], lambda x: x.flip(4), id="mirrored"),
        pytest.param([1, 0, 0, 0, -1, 0, 0, 0, 0x4000], lambda x: x.flip(3), id="mirrored upside down"),
        pytest.param([0, 1, 0, 1, 0, 0, 0, 0, 0x4000], lambda x: x.mT, id="rows for columns"),
    ],
)
def test_a_phones_portrait_is_read_upright(clip, placed, upright_of):
    whole, (before, tracks, rest) = read_all(clip), clip.read_bytes().partition(b"tkhd")
    stored, turned = (
        struct.pack(">9i", *(part << 16 for part in matrix))
        for matrix in ([1, 0, 0, 0, 1, 0, 0, 0, 0x4000], placed)
    )
    clip.write_bytes(before + tracks + rest.replace(stored, turned, 1))
    assert torch.equal(read_all(clip), upright_of(whole))
    middle = video.cover(video.probe(clip), 16, 16)
    resized = read_all(clip, video.Framing(*middle.resized))
    top, left = ((side - 16) // 2 for side in middle.resized)
    assert torch.equal(read_all(clip, middle), resized[..., top : top + 16, left : left + 16])


@pytest.mark.parametrize(
    ("tag", "upright_of"),
    {
        2: lambda x: x.flip(4),
        3: lambda x: x.flip(3, 4),
        4: lambda x: x.flip(3),
        5: lambda x: x.mT,
        6: lambda x: x.rot90(-1, (3, 4)),
        7: lambda x: x.mT.flip(3, 4),
        8: lambda x: x.rot90(1, (3, 4)),
    }.items(),
)
@pytest.mark.parametrize("suffix", ["avif", "jpg", "png", "tiff", "webp"])
def test_a_picture_is_read_upright_by_its_exif(tmp_path, tag, upright_of, suffix):
    exif, files = Image.Exif(), [tmp_path / f"{name}.{suffix}" for name in ("stored", "tagged")]
    for path in files:
        PICTURE.save(path, exif=exif, subsampling="4:4:4")
        exif[0x0112] = tag
    stored, tagged = map(read_all, files)
    assert torch.equal(tagged, upright_of(stored))
    stored, tagged = (
        torch.from_numpy(np.array(video.read_image(path))).permute(2, 0, 1)[None, :, None] for path in files
    )
    assert torch.equal(tagged, upright_of(stored))


def test_one_side_alone_keeps_the_shape_that_is_shown_of_pixels_that_are_not_square_too(clip, tmp_path):
    encode_file(tmp_path / "wide.mp4", moving_frames(), pixel=Fraction(64, 45))
    square, info = video.probe(clip), video.probe(tmp_path / "wide.mp4")
    assert (square.pixel, info.pixel, info.shape) == (1, Fraction(64, 45), Fraction(40 * 64, 24 * 45))
    # Resized as it is shown: 24 x 56.9 square pixels.
    assert video.cover(info, 24, 40).resized == (24, 57)
    for shown, height, width, framing in (
        (square, 48, None, video.Framing(48, 80)),
        (square, None, 16, video.Framing(8, 16)),
        (info, 48, None, video.Framing(48, 112)),
        (info, None, 112, video.Framing(48, 112)),
        (info, 16, None, video.Framing(16, 40, crop=True)),
    ):
        assert framing == video.framing(shown, multiple=8, height=height, width=width, crop=framing.crop)


def test_a_colon_in_a_name_is_no_protocol(clip, tmp_path, monkeypatch):
    clip.rename(tmp_path / "12:30:05.mp4")
    monkeypatch.chdir(tmp_path)
    assert read_all("12:30:05.mp4").shape == (1, 3, 9, 24, 40)


ANGLE = "mpeg4", "yuv420p", av.stream.Disposition(0)
COVER = "mjpeg", "yuvj420p", av.stream.Disposition.attached_pic


def write_streams(path, first=None, *, is_film=True):
    """Write nine frames in 0.9 seconds, after a stream of one picture, `first`, if there is one."""
    with av.open(path, "w") as out:
        if first:
            codec, pixels, disposition = first
            other = out.add_stream(
                codec, rate=10, height=64, width=64, pix_fmt=pixels, disposition=disposition
            )
        if is_film:
            encode(out, moving_frames(), g="4")
        if first:
            picture = av.VideoFrame(64, 64, pixels)
            picture.pts = 5  # half a second after the film begins
            out.mux([*other.encode(picture), *other.encode(None)])
    return path


NTSC = [Fraction(1001 * n, 30000) for n in (0, 1, 2, 3, 4, 6)]


@pytest.mark.parametrize(
    ("times", "tick", "is_variable"),
    [
        (NTSC[:5], Fraction(1, 1000), False),  # rounding to the file's clock
        (NTSC[:5], Fraction(1, 90000), False),
        (NTSC, Fraction(1, 1000), True),  # the last frame but one is shown twice as long
        (NTSC, Fraction(1, 90000), True),
        (
            [Fraction(n, 25) for n in (0, 1, 2, 4, 5)],
            Fraction(1, 25),
            True,
        ),  # a clock that ticks once a frame
    ],
)
def test_a_rate_varies_where_a_gap_does_by_more_than_rounding(clip, times, tick, is_variable):
    rounded = [round(time / tick) * tick for time in times]
    assert video.Video(clip, times=rounded, tick=tick).variable == is_variable


EVEN, VARYING = range(0, 400, 33), [0, 33, 66, 100, 300, 333, 366, 400, 433, 466, 500, 533]
"""Milliseconds."""


@pytest.mark.parametrize(
    ("suffix", "codec", "rate", "times", "fps"),
    [
        ("webm", "libvpx", 1000, EVEN, 1 / 0.033),
        ("webm", "libvpx", 1000, VARYING, 21),
        ("mkv", "libx264", 30, VARYING, 21),
        ("mp4", "libx264", 1000, EVEN, 1 / 0.033),  # whose last frame lasts a millisecond
        ("ts", "mpeg4", 30, None, 30),  # whose header has no rate
        ("avi", "mpeg4", 30, EVEN, 1 / 0.033),  # whose rate is that of its clock; empty packets fill the gaps
        ("mkv", "libx264", Fraction(30000, 1001), None, 29.97),
    ],
)
def test_the_rate_is_that_of_the_times_where_the_headers_does_not_fit_them(
    tmp_path, suffix, codec, rate, times, fps
):
    encode_file(tmp_path / f"a.{suffix}", moving_frames(12), codec, rate, times)
    info = video.probe(tmp_path / f"a.{suffix}")
    assert (info.num_frames, len(info.times), float(info.fps)) == (12, 12, pytest.approx(fps, rel=2e-3))


OPEN = "open-gop=1:keyint=8:min-keyint=8:bframes=3:scenecut=0:b-adapt=0"
X264, X265, MPEG2 = {"x264-params": OPEN}, {"x265-params": f"{OPEN}:log-level=none"}, {"g": "8", "bf": "2"}


@pytest.mark.parametrize(
    ("suffix", "codec", "options", "first", "part"),
    [
        *((suffix, "libx264", X264, 16, (0, 1)) for suffix in ("mkv", "mp4", "flv")),
        *((suffix, "libx265", X265, 16, (0, 1)) for suffix in ("mkv", "ts")),
        *((suffix, "mpeg2video", MPEG2, 16, (0, 1)) for suffix in ("mpg", "avi")),
        ("ts", "libx264", {"g": "8"}, 0, (0.3, 1)),
        ("ts", "libx265", X265, 0, (0, 0.83)),
        ("m2v", "mpeg2video", MPEG2, 0, (0.4, 1)),
    ],
)
def test_the_frames_of_a_video_are_those_that_its_decoder_shows(
    tmp_path, suffix, codec, options, first, part
):
    whole, path = tmp_path / "a.mkv", tmp_path / f"b.{suffix}"
    encode_file(whole, moving_frames(40, 64, 96), codec, **options)
    copy_packets(whole, path, first)
    path.write_bytes(path.read_bytes()[slice(*(int(share * path.stat().st_size) for share in part))])
    with av.open(path) as container:
        packets = [(packet.size, packet.decode()) for packet in container.demux(video=0)]
    shown = [frame for _, frames in packets for frame in frames]
    assert 10 < len(shown) < sum(size > 0 for size, _ in packets)
    info = video.probe(path)
    assert info.times == [frame.time_base * (frame.pts - shown[0].pts) for frame in shown]
    assert info.num_frames == len(shown)
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in shown])
    assert np.array_equal(read_all(path)[0].permute(1, 2, 3, 0).numpy(), pixels)


@pytest.mark.parametrize(
    ("suffix", "times", "share", "is_whole"),
    [
        *((suffix, range(0, 3000, 50), 0.7, False) for suffix in ("mkv", "webm", "flv")),
        ("mkv", [*range(0, 1000, 50), 5000], 1, True),  # its last frame was held
        ("mkv", range(0, 3000, 50), 1, True),
    ],
)
def test_a_video_much_shorter_than_its_header_announces_is_truncated(
    tmp_path, suffix, times, share, is_whole
):
    path = tmp_path / f"a.{suffix}"
    encode_file(path, moving_frames(len(times)), "libvpx" if suffix == "webm" else "libx264", 20, times)
    cut(path, share)
    if is_whole:
        assert video.probe(path).num_frames == len(times)
    else:
        with pytest.raises(
            video.VideoError, match=r"is truncated: (3|3.1|2.95) s are announced, \d.* s are there"
        ):
            video.probe(path)


@pytest.mark.parametrize("suffix", ["jfif", "jpg", "png", "webp"])
def test_a_picture_that_another_one_follows_is_one_frame(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    PICTURE.save(path)
    path.write_bytes(2 * path.read_bytes())
    assert video.probe(path).num_frames == 1
    if suffix == "jpg":
        PICTURE.save(path, "MPO", save_all=True, append_images=[PICTURE])  # as phones write a second view
        assert video.probe(path).num_frames == 1


@pytest.mark.parametrize(
    ("transfer", "name"), [("smpte2084", "PQ"), ("arib-std-b67", "HLG"), ("bt709", None)]
)
def test_a_video_of_high_dynamic_range_is_named(tmp_path, caplog, transfer, name):
    encode_file(tmp_path / "a.mkv", moving_frames(), **{"x264-params": f"transfer={transfer}"})
    video.probe(tmp_path / "a.mkv")
    assert [f"is HDR video ({name})" in each.message for each in caplog.records] == [True] * bool(name)


def test_no_more_frames_are_decoded_than_are_asked_for_and_the_others_are_counted(tmp_path):
    path = tmp_path / "a.mkv"
    encode_file(path, moving_frames(40), rate=20)
    info = video.probe(path, 5)
    assert (info.num_frames, info.fps) == (40, 20)
    assert 5 <= len(info.times) <= 6  # one more tells where the last one ends
    assert [number for number, _ in video.Video(path).frames(at_most=5)] == [*range(5)]


def test_times_that_begin_anew_go_on_at_the_headers_rate(tmp_path):
    """As in two streams, one behind the other."""
    data = io.BytesIO()
    for _ in range(2):
        encode_file(data, moving_frames(5), "mpeg2video", 25, format="mpegts")
    info = video.probe(data.getvalue())
    assert 8 <= len(info.times) == info.num_frames <= 10
    assert info.times == [Fraction(number, 25) for number in range(info.num_frames)]
    assert info.fps == 25


@pytest.mark.parametrize("first", [ANGLE, COVER], ids=["another angle", "a cover"])
def test_of_two_video_streams_the_best_is_read(tmp_path, first):
    one, two = write_streams(tmp_path / "one.mp4"), write_streams(tmp_path / "two.mp4", first)
    info = video.probe(two)
    assert (info.height, info.width, info.num_frames, info.fps) == (24, 40, 9, 10)
    assert torch.equal(read_all(two), read_all(one))


def test_a_difference_is_amplified_and_does_not_wrap_around():
    source, result = torch.tensor([[50, 50, 60], [60, 255, 50]], dtype=torch.uint8)
    assert amplified_difference(source, result).tolist() == [40, 255, 40]


FRAMES = moving_frames(5)
"""uint8 (1, 3, T, H, W)."""
SIGNED = FRAMES.float() / 127.5 - 1


def returned(output_type):
    """Return `frames` as a pipeline makes them of its VAE's."""
    return VideoProcessor(vae_scale_factor=8).postprocess_video(SIGNED, output_type)


TAKEN = {
    **{f"{kind}, whole": lambda kind=kind: returned(kind) for kind in ("np", "pt", "pil")},
    **{f"{kind}, the first": lambda kind=kind: returned(kind)[0] for kind in ("np", "pt", "pil")},
    "bytes": lambda: FRAMES[0].permute(1, 2, 3, 0).numpy(),
    "bytes in torch": lambda: FRAMES.transpose(1, 2),
    "a list of arrays": lambda: list(returned("np")[0]),
    "a list of tensors": lambda: list(returned("pt")[0]),
    "float16": lambda: returned("np").astype(np.float16),
    "on JAX": lambda: runtime.to_jax(returned("pt")[0]),
    "bfloat16 on JAX": lambda: runtime.to_jax(returned("pt").bfloat16()),
    "with transparency": lambda: [image.convert("RGBA") for image in returned("pil")[0]],
    "a hair beyond 1": lambda: returned("np") * 1.0001,
}


@pytest.mark.usefixtures("torchax_off")
@pytest.mark.parametrize("torchax_is_on", [False, True], ids=["", "torchax on"])
@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_what_a_pipeline_returns_is_saved(tmp_path, make, torchax_is_on):
    frames = make()
    if torchax_is_on:
        torchax.enable_globally()
    save_video(frames, tmp_path / "frames", fps=np.float32(8))
    assert np.abs(pictures(tmp_path / "frames") - FRAMES[0].permute(1, 2, 3, 0).numpy()).max() <= 1


REFUSED = {
    "two videos": (
        lambda: returned("np").repeat(2, 0),
        r"2 videos, ndarray of shape \(2, 5, 24, 40, 3\): save fr",
    ),
    "a VAE's frames": (lambda: SIGNED, r"Tensor of shape \(1, 3, 5, 24, 40\).*transpose\(0, 1\) / 2 \+ 0.5"),
    "latents": (lambda: torch.zeros(1, 3, 16, 4, 6), "decode latents first"),
    "[-1, 1]": (lambda: SIGNED.transpose(1, 2), "from -1 to 0.569, floats.*frames / 2"),
    "[0, 255]": (lambda: returned("np") * 255, "values from 0 to 200, .*uint8"),
    "NaN": (lambda: returned("np") * np.nan, "values from nan"),
    "integers": (lambda: FRAMES.transpose(1, 2).int(), "Tensor of int32"),
    "a result": (lambda: {"frames": returned("np")}, "dict of object: give a pipeline's frames"),
    "a path": (lambda: "cat.mp4", "got str of"),
    "one image": (lambda: returned("pil")[0][0], r"got Image of shape \(24, 40, 3\)"),
    "no frame": (list, r"list of shape \(0,\)"),
    "two sizes": (lambda: [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 16))], "frames of several sizes"),
    "an odd side": (lambda: FRAMES.transpose(1, 2)[..., 1:], "24 x 39 pixels: an .mp4 needs even sides"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_by_name(tmp_path, make, words):
    with pytest.raises(video.VideoError, match=words):
        save_video(make(), tmp_path / "a.mp4", fps=8)
    assert not list(tmp_path.iterdir())
