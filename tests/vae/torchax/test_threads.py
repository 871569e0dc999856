"""Threads that call one ported VAE get what one caller gets."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.vae.tolerances import FLOAT32_RELATIVE, relative_error
from tests import reference
from tests.vae.torchax.shallow import decodes_as, shallow_latents


def in_threads(count, work):
    """Run `work(number)` in threads that start together; the first error is raised here."""
    together = threading.Barrier(count)

    def run(number):
        together.wait()
        with torch.no_grad():
            work(number)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count)))


def test_threads_over_a_mesh_get_what_one_gets(stock):
    vae, x = (
        reference.on_jax(port(copy.deepcopy(stock), mesh=make_mesh(1, 2))),
        reference.video(1, height=4, width=8),
    )

    def work(number):
        z = shallow_latents(width=4 + 2 * (number % 2))
        assert decodes_as(vae, stock, z)
        assert relative_error(next(vae.decode_stream(z)), stock.decode(z).sample) < FLOAT32_RELATIVE
        moments = next(vae.encode_stream(x)).parameters
        assert relative_error(moments, stock.encode(x).latent_dist.parameters) < FLOAT32_RELATIVE

    in_threads(8, work)


def test_a_thread_that_enabled_nothing_streams_one_video_at_a_time(vae, stock):
    vae.enable_slicing()
    z, x = shallow_latents(1, batch=2), reference.video(5, height=8, width=16, batch=2)
    on_jax = [runtime.to_jax(tensor) for tensor in (z, x)]
    drawn = stock(x, sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample

    def work(_):
        got = torch.cat(list(vae.decode_stream(on_jax[0])), dim=2)
        assert relative_error(got, reference.decoded(stock, z)) < FLOAT32_RELATIVE
        moments = [runtime.to_torch(part.parameters) for part in vae.encode_stream(on_jax[1])]
        assert relative_error(torch.cat(moments, 2), reference.encoded(stock, x)) < FLOAT32_RELATIVE
        got = vae(on_jax[1], sample_posterior=True, generator=torch.Generator().manual_seed(3)).sample
        assert relative_error(runtime.to_torch(got), drawn) < FLOAT32_RELATIVE

    in_threads(1, work)
