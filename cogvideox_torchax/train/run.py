"""A training from its first step, or from its checkpoint, to its last: losses, validation and checkpoints."""

import csv
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from cogvideox_torchax.files import video
from cogvideox_torchax.files.sheets import contact_sheet
from cogvideox_torchax.files.whole import whole_file
from cogvideox_torchax.train import checkpoints, clips, report
from cogvideox_torchax.train.trainer import Losses, Trainer
from cogvideox_torchax.vae.pixels import from_uint8, to_uint8
from cogvideox_torchax.vae.quality import ssim
from cogvideox_torchax.vae.tolerances import psnr

LOSSES, VALIDATION = "losses.csv", "validation.csv"
"""The tables of a training: a line for each step, and one for each held-out clip and checkpoint."""
HEADS = {
    LOSSES: ("step", "loss", "l1", "mse", "kl", "mean_color", "gradient", "psnr"),
    VALIDATION: ("step", "minutes", "clip", "psnr", "ssim"),
}
"""The names of each table's columns."""


@dataclass(frozen=True)
class HeldOut:
    """A clip that is not trained on: its name, and its frames, uint8 (1, C, T, H, W)."""

    name: str
    frames: torch.Tensor

    @classmethod
    def load(cls, text: str, frames: int) -> "HeldOut":
        """Return a held-out clip to validate with: frames of a file, cropped to sides of multiples of 8.

        Args:
            text: the file, or `file#start-end` for a range of its frames.
            frames: number of frames to take at most.

        Raises:
            ValueError: several clips, or a range without frames.
        """
        part, *others = clips.parts([text])
        if others:
            raise ValueError(f"{text} holds several clips to validate with: name each by itself")
        info = video.probe(part.path)
        framing = video.framing(info, multiple=8, height=None, width=None, crop=True)
        last = min(part.end or info.num_frames, info.num_frames, part.start + frames)
        # The first 8 n + 1 of the frames from `part.start` to `last`, not included: for any other number the
        # VAE gives back more frames than it took.
        count = (last - part.start - 1) // 8 * 8 + 1
        if count < 1:
            raise ValueError(f"{text} has no frame to validate with: {part.path} has {info.num_frames}")
        pixels = torch.from_numpy(clips.read(part, framing, part.start + count))
        return cls(part.name, pixels.permute(3, 0, 1, 2)[None].contiguous())  # (1, C, T, H, W)


@dataclass(frozen=True)
class Validation:
    """The reconstruction quality of a held-out clip."""

    clip: str
    psnr: float
    ssim: float


@dataclass
class Run:
    """A training in a directory of its own.

    Attributes:
        trainer: makes the steps.
        directory: gets the tables, pictures, the checkpoint and the trained model.
        held_out: clips to validate with.
        settings: settings that a resumed training must have too; the checkpoint has them.
        seconds: time of the training so far, without validations; `resume` restores it.
    """

    trainer: Trainer
    directory: Path
    held_out: list[HeldOut]
    settings: dict[str, Any]
    seconds: float = 0.0

    def begin(self) -> int:
        """Remove a killed training's tables from the directory; return 0, the number of steps done."""
        for name in HEADS:  # file names of the tables
            (self.directory / name).unlink(missing_ok=True)
        return 0

    def resume(self) -> int:
        """Restore the checkpoint; return the number of steps done before it.

        Lines of later steps are removed from the tables of losses and validations, the files of `HEADS`.
        """
        state, step, self.seconds = checkpoints.load(self.directory, settings=self.settings)
        self.trainer.restore(state, step)
        for name in HEADS:
            _remove_lines_after(self.directory / name, step)
        return step

    def go(self, *, every: int, stopped: Callable[[], bool]) -> Iterator[tuple[Losses, list[Validation]]]:
        """Make the remaining steps; yield (losses, validations) of each; most steps have no validations.

        Every step adds a line to the table of losses; some are followed by a validation and a checkpoint.

        Args:
            every: number of steps between validations and checkpoints.
            stopped: returns whether to end after the present step, with a checkpoint.
        """
        total = self.trainer.plan.steps
        since = time.perf_counter()  # when the training last went on after a checkpoint
        with _open_table(self.directory / LOSSES) as losses_file:
            table = csv.writer(losses_file)
            while self.trainer.step_number < total:
                losses = self.trainer.step()
                step = self.trainer.step_number
                table.writerow((step, *astuple(losses), losses.psnr))
                last = step == total or stopped()
                validations: list[Validation] = []
                if last or step % every == 0:
                    losses_file.flush()  # so that a checkpoint never has more steps than the table
                    self.seconds += time.perf_counter() - since  # the time of validations is left out
                    validations = self.validate()
                    self.save()
                    since = time.perf_counter()
                yield losses, validations
                if last:
                    return

    def validate(self) -> list[Validation]:
        """Reconstruct each held-out clip with the averaged weights; write and return PSNR and SSIM.

        A picture of each clip and its reconstruction is written too.
        """
        validations, minutes = [], f"{self.seconds / 60:.2f}"
        with _open_table(self.directory / VALIDATION) as file:
            for clip in self.held_out:
                got = to_uint8(self.trainer.reconstruct(from_uint8(clip.frames, "float32")))
                validation = Validation(clip.name, psnr(got, clip.frames), ssim(got, clip.frames))
                validations.append(validation)
                csv.writer(file).writerow((self.trainer.step_number, minutes, *astuple(validation)))
                with whole_file(self.directory / f"{clip.name}.png") as temporary:
                    contact_sheet(clip.frames, got).save(temporary, "PNG")
        return validations

    def finish(self) -> None:
        """Write the averaged weights as a model, the directory "vae", and draw the tables' curves."""
        model = self.directory / "vae"
        with self.trainer.averaged() as vae, whole_file(model, directory=True) as temporary:
            vae.save_pretrained(temporary)  # renamed to `model` when the block ends
            shutil.rmtree(model, ignore_errors=True)  # an earlier run's, which this one has resumed
        report.draw(
            report.curves(self.directory / LOSSES, self.directory / VALIDATION),
            self.directory / "curves.png",
        )

    def save(self) -> None:
        """Write the checkpoint in place of the last one."""
        checkpoints.save(
            self.directory,
            self.trainer.state(),
            step=self.trainer.step_number,
            seconds=self.seconds,
            settings=self.settings,
        )


def _open_table(path: Path) -> TextIO:
    """Open a table, a CSV file, to append lines; begin an empty one with its column names, from `HEADS`."""
    file = path.open("a", newline="")
    if not file.tell():  # the file is empty
        csv.writer(file).writerow(HEADS[path.name])
    return file


def _remove_lines_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step` from a CSV table, and a killed run's incomplete lines.

    The head, the column names that `HEADS` has for this file, is written again: it may be incomplete too.
    """
    if not path.exists():
        return
    with path.open(newline="") as file:
        complete_lines = [line for line in file if line.endswith("\n")]
    head = HEADS[path.name]
    # The number of the step is the first column.
    cells_of_lines = csv.reader(complete_lines[1:])  # without the head
    kept = [cells for cells in cells_of_lines if len(cells) == len(head) and int(cells[0]) <= step]
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        csv.writer(file).writerows([head, *kept])
