"""Clips to train on: what is left out, by name, and what a batch is made of."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cogvideox_torchax import cli
from cogvideox_torchax.train.clips import Part, Sampler, Shape, Source, load, parts
from cogvideox_torchax.vae.pixels import from_uint8
from tests.files.test_video import moving_frames
from tests.train.test_command import arguments

pytestmark = pytest.mark.usefixtures("torchax_off")


@pytest.mark.parametrize("output", ["run", "clips", "."])
def test_what_lies_in_the_output_is_left_out_of_a_directory_around_it_alone(material, output):
    Path("notes.txt").write_text("no clip")
    assert [part.name for part in parts(["."])] == ["clip.mp4", "picture.png"]
    Path("clips/run").mkdir(parents=True)
    Path("clip.mp4").rename("clips/clip.mp4")
    Path("picture.png").rename("clips/run/sheet.png")
    assert list(map(str, parts(["clips"], without=Path(output)))) == ["clips/clip.mp4", "clips/run/sheet.png"]
    assert parts(["clips"], without=Path("clips/run")) == [Part(Path("clips/clip.mp4"))]


@pytest.mark.parametrize(
    ("text", "want"), [("clip.mp4#3-7", (3, 7)), ("clip.mp4#3-", (3, None)), ("clip.mp4", (0, None))]
)
def test_a_range_is_read_and_written_alike(text, want):
    (part,) = parts([text])
    assert ((part.start, part.end), str(part)) == (want, text)


@pytest.mark.parametrize("span", ["7", "7-3", "a-b"])
def test_a_range_that_is_none_is_named(span):
    with pytest.raises(ValueError, match=f"clip.mp4#{span}: .* write #start-end"):
        parts([f"clip.mp4#{span}"])


def test_frames_outside_of_a_range_are_never_seen(material):
    source = load(Part(Path("clip.mp4"), 2, 12), frames=9, size=16)
    blue = source.levels[0][..., 2].mean((1, 2))
    assert source.frames == 10
    assert np.abs(blue - 20 * np.arange(2, 12)).max() < 15


BAD = {
    "cut.mp4": "cut.mp4",
    "text.png": "as an image",
    "broken.png": "as an image (broken PNG file",
    "large.png": "as an image (Image size (9801 pixels) exceeds limit",
    "clip.mp4#15-": "has 5 frames from its start on, 9 are needed",
    "gone.mp4": "there is no file",
}


def test_a_bad_clip_is_named_and_the_others_trained_on(material, capsys, monkeypatch):
    Path("cut.mp4").write_bytes(Path("clip.mp4").read_bytes()[:900])
    Path("text.png").write_text("x" * 99)
    picture = Path("picture.png").read_bytes()
    Path("broken.png").write_bytes(picture[:33] + b"\0\0\0\x09" + picture[37:50] + bytes(40))  # a chunk of 9
    Image.new("RGB", (99, 99)).save("large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    code = cli.main(arguments("out", "--steps", 1, clips=(*BAD, "clip.mp4#0-9")))
    said = capsys.readouterr().err.splitlines()
    assert code == 0, said
    for line, (name, words) in zip(said, BAD.items(), strict=True):
        assert line.startswith(f"left out: {name}")
        assert words in line


def test_a_source_smaller_than_the_largest_crops_is_refused(material):
    with pytest.raises(ValueError, match="is 24 x 40, at least 48 are needed"):
        load(Part(Path("clip.mp4")), frames=9, size=32)


def still(value):
    frames = np.full((1, 40, 40, 3), value, np.uint8)
    return Source(Part(Path(f"{value}.png")), (frames,))


def test_a_batch_is_made_of_its_number_alone():
    video = moving_frames(12)[0].permute(1, 2, 3, 0).numpy()
    sources = [Source(Part(Path("v.mp4")), (video,)), still(90)]
    first, second = Sampler(sources, seed=3), Sampler(sources, seed=3)
    second.batch(0, Shape(2, 9, 16))
    batch = first.batch(7, Shape(4, 9, 16))
    assert torch.equal(batch, second.batch(7, Shape(4, 9, 16)))
    assert not torch.equal(batch, first.batch(8, Shape(4, 9, 16)))
    assert not torch.equal(batch, Sampler(sources, seed=4).batch(7, Shape(4, 9, 16)))
    assert batch.shape == (4, 3, 9, 16, 16)
    assert -1 <= batch.min() < batch.max() <= 1


def turning(at, frames=200):
    """Return a video that changes at one frame alone."""
    video = np.full((frames, 40, 40, 3), 40, np.uint8)
    video[at:] = 200
    return Source(Part(Path("v.mp4")), (video,))


def changes(cuts, size):
    """Return how many cuts each of 200 clips holds."""
    source = replace(turning(100), whole=turning(100).levels[0])
    batch = Sampler([source], seed=0, cuts=cuts).batch(0, Shape(200, 9, size))
    return (batch.mean((1, 3, 4)).diff(dim=1).abs() > 0.1).sum(1)


@pytest.mark.parametrize(
    ("size", "least"),
    [(16, 90), pytest.param(None, 60, id="whole")],  # one that is moved to where a chunk begins may lose it
)
def test_cuts_are_asked_for(size, least):
    """Crops cut to another, and more than by chance hold the frame at which their video changes."""
    plain, cut = changes(False, size), changes(True, size)
    assert plain.max() == 1
    assert plain.sum() < 20
    assert least < (cut > 0).sum() < 2 * least
    assert (cut.max() > 1) == (size is not None)


def test_stills_are_not_cut():
    stills = Sampler([turning(100), still(90)], seed=0, cuts=True).batch(0, Shape(8, 1, 16))
    assert stills.shape == (8, 3, 1, 16, 16)


def test_a_frame_is_drawn_by_how_much_it_changes():
    events = turning(5).event_probabilities
    assert (len(events), events.argmax()) == (199, 4)
    assert events[4] > 0.99


def test_whole_frames_come_as_they_are(material):
    source = load(Part(Path("clip.mp4"), 2, 20), frames=9, size=16, whole=(32, 48))
    want = from_uint8(torch.from_numpy(source.whole).permute(3, 0, 1, 2), "float32")
    assert want.shape == (3, 18, 32, 48)
    sampler = Sampler([source, load(Part(Path("picture.png")), frames=9, size=16)], seed=0)
    windows = want.unfold(1, 9, 1).permute(1, 0, 4, 2, 3)
    clips = torch.cat([sampler.batch(number, Shape(4, 9, None)) for number in range(25)])
    starts = [[torch.equal(clip, window) for window in windows].index(True) for clip in clips]
    aligned = sum(start in (0, 8) for start in starts)
    assert set(starts) == set(range(10))
    assert 45 < aligned < 75
    assert torch.equal(sampler.batch(3, Shape(4, 9, None)), clips[12:16])


def test_whole_frames_that_were_not_loaded_are_named():
    with pytest.raises(ValueError, match="v.mp4 was loaded without whole frames"):
        Sampler([turning(100)], seed=0).batch(0, Shape(1, 9, None))


def test_channels_keep_their_places():
    red = Source(Part(Path("red.png")), (np.uint8([200, 0, 0]) * np.ones((1, 40, 40, 1), np.uint8),))
    means = Sampler([red], seed=0).batch(0, Shape(32, 1, 16)).mean((2, 3, 4))
    assert (means[:, 0] > means[:, 1:].amax(1)).all()
