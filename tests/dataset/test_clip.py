"""One clip as one unit of work."""

import hashlib
import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import DEFAULT, Mock, patch

import av
import pytest
import torch

from cogvideox_torchax.dataset import Bucket, Clip, ClipConfig, ClipError, DecodeClip, EncodeClip
from cogvideox_torchax.dataset.clip import choose
from cogvideox_torchax.files import video
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference
from tests.dataset.conftest import write_clip
from tests.videos import encode_file, moving_frames, read_all


def clip_of(small, name="a.mp4", **options):
    return Clip(name, small.clips / name, **options)


@pytest.mark.parametrize("frames", [9, 17], ids=["one chunk", "two chunks"])
def test_a_clip_gives_the_mean_and_the_log_variance_of_diffusers(small, shallow_vae, tmp_path, frames):
    clip = write_clip(tmp_path / "a.mp4", frames=frames)
    found = small.unit(Clip("a.mp4", clip))
    wanted = shallow_vae.encode(read_all(clip) / 127.5 - 1).latent_dist
    assert relative_error(found.tensor, wanted.mean) < FLOAT32_RELATIVE
    assert relative_error(found.logvar, wanted.logvar) < FLOAT32_RELATIVE
    assert found.sample is None


def test_bytes_of_a_file_are_the_file_and_what_is_about_it_says_where_it_comes_from(small):
    data = (small.clips / "a.mp4").read_bytes()
    given = small.unit(Clip("a.mp4", data, caption="A ball."))
    assert torch.equal(given.tensor, small.wanted["a.mp4"].tensor)
    about = {
        **{"source_sha256": hashlib.sha256(data).hexdigest(), "height": 16, "width": 24, "tiles": None},
        **{"source_frames": 9, "source_fps": "10", "variable_frame_rate": False, "dropped_frames": 0},
        **{"repeated_frames": 0, "source_height": 16, "source_width": 24, "first_frame": 0},
    }
    assert small.wanted["a.mp4"].about == small.wanted["a.mp4"].about | about
    assert given.about == small.wanted["a.mp4"].about | {"caption": "A ball."}
    assert (given.num_frames, given.fps) == (9, 10)
    with pytest.raises(video.VideoError, match="the video .* truncated or not a video"):
        small.unit(Clip("a.mp4", data[:100]))


def test_a_pickled_unit_gives_the_same_bits_and_takes_no_weights_along(small):
    pickled = pickle.dumps(small.unit)
    other = pickle.loads(pickled)
    assert len(pickled) < 5000
    assert torch.equal(other(clip_of(small, "b.mp4")).tensor, small.wanted["b.mp4"].tensor)
    assert other.model_sha256 == small.unit.model_sha256


def test_a_sample_depends_on_seed_and_id_and_not_on_the_clips_before(small):
    def sample(seed, *names, keep="both"):
        unit = EncodeClip(ClipConfig(small.model, "torch", keep=keep, seed=seed))
        return [unit(clip_of(small, name)) for name in names][-1]

    alone, only = sample(1, "b.mp4"), sample(1, "b.mp4", keep="sample")
    assert torch.equal(alone.sample, sample(1, "a.mp4", "b.mp4").sample)
    assert not torch.equal(alone.sample, sample(2, "b.mp4").sample)
    for name, tensor in small.wanted["b.mp4"].tensors.items():
        assert torch.equal(alone.tensors[name], tensor)
    assert torch.equal(only.tensor, alone.sample)
    assert only.logvar is None


BUCKETS = (Bucket(9, 16, 24), Bucket(17, 16, 24), Bucket(9, 24, 16), Bucket(9, 32, 48))


@pytest.mark.parametrize(
    ("frames", "height", "width", "pixel", "bucket"),
    [
        *((9, 90, 160, 1, 3), (20, 90, 160, 1, 1), (9, 160, 90, 1, 2), (9, 24, 16, 1, 2), (16, 10, 10, 1, 3)),
        (9, 160, 90, 4, 3),  # shown four times as wide as it is stored
    ],
)
def test_a_clip_goes_into_the_bucket_nearest_in_the_shape_that_is_shown_then_the_longest(
    frames, height, width, pixel, bucket
):
    info = video.Video(Path("a.mp4"), height, width, Fraction(pixel))
    assert choose(BUCKETS, info, frames) == BUCKETS[bucket]


def test_a_bucket_holds_no_more_frames_than_a_clip_may_give(small, tmp_path):
    path = write_clip(tmp_path / "long.mp4", frames=25)
    unit = EncodeClip(ClipConfig(small.model, "torch", buckets=(Bucket(9, 16, 24), Bucket(17, 16, 24))))
    assert unit.read(Clip("long", path)).num_frames == 17
    assert unit.read(Clip("long", path, frames=12)).num_frames == 9
    with pytest.raises(ClipError, match="gives 8 of its 25 frames, the shortest bucket has 9"):
        unit.read(Clip("long", path, frames=8))
    with pytest.raises(ClipError, match="a height or a width of its own"):
        unit.read(Clip("long", path, height=16))


def test_a_bucket_is_filled_and_its_middle_cut_out(small, tmp_path):
    path = write_clip(tmp_path / "wide.mp4", frames=17, height=32, width=96)
    unit = EncodeClip(replace(small.config, buckets=(Bucket(9, 16, 24),)))
    cut_out = read_all(path, video.Framing(16, 48), 9)[..., 12:36]
    assert torch.equal(unit.read(Clip("wide", path)).frames, cut_out)


def test_windows_are_the_frames_in_order_and_each_has_a_sample_of_its_own(small, tmp_path, monkeypatch):
    path = write_clip(tmp_path / "long.mp4", frames=23)
    unit = EncodeClip(replace(small.config, windows=True, frames=9, keep="both"))
    for ahead in (2**30, 1000):  # read ahead, or while it is encoded
        monkeypatch.setattr("cogvideox_torchax.dataset.clip.AHEAD_BYTES", ahead)
        windows = unit.read(Clip("long", path)).windows()
        assert torch.equal(torch.cat([window.frames for window in windows], dim=2), read_all(path, count=18))
    one, two = unit.encode_all(unit.read(Clip("long", path)))
    assert (one.about["id"], two.about["id"], two.about["first_frame"]) == ("long/00000", "long/00001", 9)
    assert (two.num_frames, two.about["dropped_frames"]) == (9, 5)
    noise = [(z.sample - z.tensor) / torch.exp(0.5 * z.logvar) for z in (one, two)]
    assert not torch.allclose(noise[0], noise[1])
    with pytest.raises(ClipError, match="call `encode_all"):
        unit(Clip("long", path))
    with pytest.raises(ClipError, match="windows of no length"):
        replace(small.config, windows=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.bfloat16}, "got dtype=torch.bfloat16: one of float64, float32"),
        ({"fps": 8}, "got fps=8: give a text"),
        ({"buckets": ("9x16x24",)}, "give a tuple of `Bucket`"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_its_name(options, words):
    with pytest.raises(ClipError, match=words):
        ClipConfig("model", **options)


@pytest.mark.parametrize(
    ("fps", "wanted"),
    [("10", [0, 1, 2, 4, 4, 4, 5, 5, 6]), ("5", [0, 2, 4, 5, 6]), ("5/2", [0, 4, 6])],
)
def test_a_clip_is_resampled_by_the_times_of_its_frames(small, tmp_path, fps, wanted):
    # Times in milliseconds: the rate varies.
    encode_file(tmp_path / "a.mkv", moving_frames(7, 16, 24), "ffv1", times=[0, 100, 200, 250, 300, 700, 800])
    unit, clip = EncodeClip(replace(small.config, fps=fps)), Clip("a", tmp_path / "a.mkv")
    found = unit.read(clip)
    assert list(found.indices) == wanted
    assert torch.equal(found.frames, read_all(tmp_path / "a.mkv")[:, :, wanted])
    assert found.changes["repeated_frames"] == len(wanted) - len(set(wanted))
    assert unit(clip).fps == Fraction(fps)


@pytest.mark.parametrize(
    "stored",
    [lambda time: time, lambda time: Fraction(round(time * 1000), 1000)],
    ids=["exact times", "times as .mkv stores them"],
)
@pytest.mark.parametrize("fps", [8, 24, 25, Fraction(30000, 1001)])
@pytest.mark.parametrize("count", [1, 2, 8, 49, 240])
def test_at_its_own_rate_a_video_keeps_its_frames_and_at_half_of_it_every_second(fps, count, stored):
    info, times = video.Video(Path("a.mp4")), [stored(Fraction(index) / fps) for index in range(count)]
    info._decoded = lambda: ((time, None) for time in (*times, times[-1] + 1 / Fraction(fps)))
    assert [number for number, _ in info.frames(Fraction(fps))] == list(range(count))
    assert [number for number, _ in info.frames(Fraction(fps) / 2)] == list(range(0, count, 2))


@pytest.mark.parametrize(("ahead", "is_held", "times"), [(2**30, True, 1), (1000, False, 2)])
def test_a_clip_is_decoded_once_and_a_long_one_again_while_it_is_encoded_and_gives_the_same(
    small, monkeypatch, ahead, is_held, times
):
    monkeypatch.setattr("cogvideox_torchax.dataset.clip.AHEAD_BYTES", ahead)
    with patch.object(av, "open", wraps=av.open) as opened:
        part = small.unit.read(clip_of(small))
        assert (part.frames is not None) == is_held
        assert torch.equal(small.unit.encode(part).tensor, small.wanted["a.mp4"].tensor)
    assert opened.call_count == times


def test_tiles_of_one_clip_are_put_back_before_the_next_and_written_down(small, monkeypatch):
    follow, say = Mock(side_effect=lambda results, *_: results), Mock()
    unit = EncodeClip(replace(small.config, tiling="8x12"), follow=follow)
    latents = unit(clip_of(small))
    assert follow.call_args.args[1:] == (1, "encode in tiles of 8 x 12")
    assert latents.about["tiles"] == "8x12"
    assert not torch.equal(latents.tensor, small.wanted["a.mp4"].tensor)
    assert not unit.vae.use_tiling
    with reference.tiled(unit.vae, tile_sample_min_height=8, tile_sample_min_width=12):
        wanted = unit.vae.encode(read_all(small.clips / "a.mp4") / 127.5 - 1).latent_dist.mode()
    assert relative_error(latents.tensor, wanted) < FLOAT32_RELATIVE
    decoder = DecodeClip(small.config, say)
    whole = decoder(latents)
    # Out of memory once: then come the tiles, and then the next clip.
    ends = [RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), DEFAULT, DEFAULT]
    monkeypatch.setattr(decoder.vae, "decode_stream", Mock(wraps=decoder.vae.decode_stream, side_effect=ends))
    assert not torch.equal(decoder(latents), whole)
    say.assert_called_once_with("out of memory after 0 chunks: going on in tiles of 8 x 12 pixels")
    assert torch.equal(decoder(latents), whole)


def test_decoding_has_a_dtype_of_its_own_and_gives_diffusers_bytes(small, shallow_vae):
    latents = small.wanted["a.mp4"]
    frames = DecodeClip(small.config)(latents)
    wanted = ((shallow_vae.decode(latents.tensor).sample * 0.5 + 0.5).clip(0, 1) * 255).round()
    assert (frames.float() - wanted).abs().max() <= 1  # a value between two bytes may go either way
    rough = DecodeClip(ClipConfig(small.model, "torch", "bfloat16"))(latents)
    assert rough.dtype == torch.uint8
    assert 0 < (rough.float() - frames.float()).abs().mean() < 20
