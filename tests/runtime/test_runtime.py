import jax
import pytest
import torch

from cogvideox_torchax import runtime, terminal
from cogvideox_torchax.arrays.compile_cache import COMPILE_CACHE_VARIABLE, configure_compile_cache
from tests.processes import printed_by


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_cross_over_and_back_unchanged_and_writable(dtype):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    back = runtime.to_torch(runtime.to_jax(x))
    assert back.dtype == dtype
    assert torch.equal(back, x)
    back += 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_value_that_is_not_finite_is_found_on_both_backends(bad):
    x = torch.zeros(2, 3, 4)
    assert runtime.first_nonfinite(x) is runtime.first_nonfinite(runtime.to_jax(x)) is None
    assert runtime.largest(x - 2) == runtime.largest(runtime.to_jax(x - 2)) == 2
    assert runtime.largest(x.int()) is None
    x[1, 2, 3] = x[1, 0, 2] = bad
    assert runtime.first_nonfinite(x) == runtime.first_nonfinite(runtime.to_jax(x)) == (1, 0, 2)


@pytest.mark.parametrize(
    ("variable", "configured", "directory"),
    [
        ("", None, "/tmp/caches/cogvideox-torchax/xla"),
        ("/tmp/mine", None, "/tmp/mine"),
        ("off", None, None),
        ("/tmp/mine", "/tmp/users", "/tmp/users"),
    ],
)
@pytest.mark.usefixtures("restored_cache")
def test_the_compile_cache_is_where_it_should_be(variable, configured, directory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/caches")
    monkeypatch.setenv(COMPILE_CACHE_VARIABLE, variable)
    jax.config.update("jax_compilation_cache_dir", configured)
    assert configure_compile_cache() == jax.config.jax_compilation_cache_dir == directory


@pytest.mark.slow
def test_a_cache_configured_after_a_compilation_is_used(tmp_path):
    code = """
import jax, os, sys
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x + 1)(1.0)
from cogvideox_torchax.arrays.compile_cache import configure_compile_cache
configure_compile_cache()
jax.jit(lambda x: x * 3 + 1)(1.0)
assert os.listdir(os.environ["COGVIDEOX_TORCHAX_COMPILE_CACHE"])
"""
    printed_by(code, COGVIDEOX_TORCHAX_COMPILE_CACHE=str(tmp_path))


def test_nested_compile_spans_count_once():
    spans = [("c", 0.0, 4.0), ("c", 1.0, 2.0), ("c", 3.0, 5.0), ("other", 0.0, 9.0)]
    assert terminal.covered_seconds(spans, ("c",)) == 5.0
