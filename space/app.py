"""A page for a prompt: the bundled pipeline's video on JAX, and beside it PyTorch's from the same noise.

    pip install gradio && python space/app.py     # then open http://127.0.0.1:7860

On a Hugging Face Space, this folder is the repository: README.md has its settings.
"""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXPipeline

import cogvideox_torchax
from cogvideox_torchax import port, save_video

MODEL = Path(cogvideox_torchax.__file__).parent / "assets" / "tiny-pipeline"
SAMPLING = {"num_frames": 9, "num_inference_steps": 20, "guidance_scale": 1.5}
PROMPTS = [
    "a red circle moves to the left on a blue background",
    "a yellow square grows on a black background",
    "on a white background, a green triangle moves up",
    "a gray circle stays still on an orange background",
]
TEXT = """# CogVideoX on JAX

A diffusers pipeline after `cogvideox_torchax.port(pipe)`, which moves it to JAX: to a TPU, or to the CPU of
this page. Beside it is the same pipeline in PyTorch, from the same noise.

This small model knows circles, squares and triangles in red, orange, yellow, green, blue, gray, white and
black, which move, grow, shrink or stay still on a background. It knows no other words.
"""
FILES = Path(tempfile.mkdtemp())
"""Where the two videos are; the page copies them, and takes one prompt at a time."""


@functools.cache
def pipelines() -> dict[str, Any]:
    """Return the pipeline on JAX and the pipeline in PyTorch, by the names of their files."""
    load = functools.partial(CogVideoXPipeline.from_pretrained, MODEL, dtype=torch.float32)
    return {"jax": port(load()), "torch": load()}


def generate(prompt: str) -> tuple[str, str, str]:
    """Return the paths of both videos of a prompt, and how far they differ and how long they took.

    Raises:
        ValueError: the prompt is longer than the model reads.
    """
    videos, seconds = {}, {}
    for name, pipe in pipelines().items():
        length = pipe.transformer.config["max_text_seq_length"]
        if (tokens := len(pipe.tokenizer(prompt).input_ids)) > length:
            raise ValueError(f"got a prompt of {tokens} tokens: the model takes {length}; shorten it")
        pipe.set_progress_bar_config(disable=True)
        noise = torch.Generator("cpu").manual_seed(0)
        start = time.perf_counter()
        made = pipe(prompt, generator=noise, max_sequence_length=length, output_type="pt", **SAMPLING)
        videos[name] = made.frames[0].cpu()
        seconds[name] = time.perf_counter() - start
        save_video(videos[name], FILES / f"{name}.mp4", fps=8)
    difference = (videos["jax"] - videos["torch"]).abs().max().item()
    said = (
        f"The two videos differ by at most {255 * difference:.3g} of 255. JAX took {seconds['jax']:.1f} s, "
        f"PyTorch {seconds['torch']:.1f} s. For the first prompt, JAX compiles."
    )
    return str(FILES / "jax.mp4"), str(FILES / "torch.mp4"), said


def page() -> Any:
    """Return the page, a `gradio.Blocks`."""
    import gradio  # here, so that `generate` does without it

    with gradio.Blocks(title="CogVideoX on JAX") as blocks:
        gradio.Markdown(TEXT)
        prompt = gradio.Textbox(PROMPTS[0], label="Prompt")
        button = gradio.Button("Generate", variant="primary")
        with gradio.Row():
            videos = [
                gradio.Video(label=label, autoplay=True, loop=True, height=300)
                for label in ("This project, on JAX", "PyTorch")
            ]
        said = gradio.Markdown()
        gradio.Examples(PROMPTS, prompt)
        gradio.on([button.click, prompt.submit], generate, prompt, [*videos, said])
    return blocks


if __name__ == "__main__":
    page().launch(show_error=True)
