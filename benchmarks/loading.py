"""Host memory while a pipeline's weights go to a mesh, beside the devices' memory.

    PYTHONPATH=. python benchmarks/loading.py            # writes results/loading.json

A pipeline of some 0.8 GB in several files, random weights in bfloat16, over eight CPU devices whose memory is
the host's own: it is subtracted from the process's memory, every five milliseconds. Each way of loading runs
in a process of its own: `load_pipeline`, and diffusers' `from_pretrained` with `port` after it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

OUTPUT = Path(__file__).parent / "results" / "loading.json"
FILES = "200MB"
WAYS = ("load_pipeline", "from_pretrained and port")


def build(directory: str) -> None:
    """Save a pipeline whose networks take several files each."""
    import torch
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    from tests import small_pipelines

    sizes = {"num_attention_heads": 16, "attention_head_dim": 64, "num_layers": 16, "time_embed_dim": 512}
    transformer = CogVideoXTransformer3DModel(
        **{**small_pipelines.TRANSFORMER, **small_pipelines.VERSIONS["5b"], **sizes}
    )
    config = T5Config(
        vocab_size=4096,
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=16,
        num_heads=16,
        feed_forward_proj="gated-gelu",
    )
    pipe = CogVideoXPipeline(
        tokenizer=small_pipelines.tokenizer(),
        text_encoder=T5EncoderModel(config).to(torch.bfloat16),
        vae=small_pipelines.vae().to(torch.bfloat16),
        transformer=transformer.to(torch.bfloat16),
        scheduler=small_pipelines.scheduler(),
    )
    pipe.save_pretrained(directory, max_shard_size=FILES)


class Watch:
    """Looks all the time at what this process holds beside what lies on the devices."""

    def __init__(self) -> None:
        self._stop, self.highest, self.looks = threading.Event(), 0, 0
        self._start = self._now()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        import jax

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") - on_devices(jax.live_arrays())

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self.highest, self.looks = max(self.highest, self._now() - self._start), self.looks + 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def on_devices(arrays: list[Any]) -> int:
    return sum(
        array.nbytes if array.is_fully_replicated is False else array.nbytes * len(array.sharding.device_set)
        for array in arrays
        if not array.is_deleted()
    )


def load(way: str, directory: str) -> dict[str, Any]:
    """Load in this process, and measure it."""
    import jax
    import torch
    from diffusers import CogVideoXPipeline

    from cogvideox_torchax import enable, load_pipeline, make_mesh, port
    from cogvideox_torchax.pipelines import loading  # noqa: F401  (imported before anything is measured)

    enable()
    mesh = make_mesh(1, 8)
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    watch = Watch()
    if way == WAYS[0]:
        pipe = load_pipeline(directory, mesh=mesh, parallel="tensor")
    else:
        loaded = CogVideoXPipeline.from_pretrained(directory, torch_dtype=torch.bfloat16)
        pipe = port(loaded, mesh=mesh, parallel="tensor")
    watch.stop()
    assert pipe.transformer.mesh is mesh
    held = on_devices(jax.live_arrays())
    return {"way": way, "on_devices_bytes": held, "host_bytes": watch.highest, "looks": watch.looks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", nargs=2, metavar=("WAY", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(load(*args.child)))
        return
    from cogvideox_torchax.files import reports
    from cogvideox_torchax.versions import versions

    with tempfile.TemporaryDirectory() as directory:
        build(directory)
        files = [path.stat().st_size for path in Path(directory).rglob("*.safetensors")]
        results = []
        for way in WAYS:
            command = [sys.executable, __file__, "--child", way, directory]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = json.loads(printed.splitlines()[-1])
            result["host_over_largest_file"] = result["host_bytes"] / max(files)
            results.append(result)
            print(result, flush=True)
    document = {
        "versions": versions("torch", "torchax", "jax", "diffusers", "transformers"),
        "weights_bytes": sum(files),
        "largest_file_bytes": max(files),
        "results": results,
    }
    reports.write_json(OUTPUT, document)


if __name__ == "__main__":
    main()
