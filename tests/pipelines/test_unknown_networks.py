"""Networks that this package does not know, and pipelines of others: calls and effects are as in PyTorch."""

import copy
import functools
import pickle
import types

import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline  # no need of OpenCV
from torch import nn

from cogvideox_torchax import make_mesh, port, runtime
from cogvideox_torchax.pipelines import layers, port as known, transformer
from cogvideox_torchax.runtime import programs
from tests import small_pipelines
from tests.pipelines.test_pipeline import TOLERANCE, frames, latents
from tests.reference import largest_error, randomized

pytestmark = pytest.mark.usefixtures("torchax_off")


def stock_network(make):
    torch.manual_seed(0)
    return randomized(make())


def ported_network(make, **options):
    """Return a network that this package does not know, ported beside a VAE."""
    return port(
        types.SimpleNamespace(vae=small_pipelines.vae(), transformer=stock_network(make)), **options
    ).transformer


class Scaled(nn.Module):
    """A network whose call has numbers, containers and options."""

    def __init__(self):
        super().__init__()
        # Ones are a plain tensor, neither weight nor buffer.
        self.linear, self.ones = nn.Linear(4, 4096), torch.ones(4096)

    def forward(self, given, *, scale=1.0, repeats=1, mode=None):
        x = self.linear(given["x"]) * self.ones * scale
        for _ in range(repeats):
            x = x + given["more"][0]
        return {"mode": mode, "x": x, "half": (x / 2, None)}


@pytest.fixture
def scaled():
    return ported_network(Scaled)


@pytest.fixture
def reasons(caplog):
    """Return a function that lists why networks have run operation by operation, each reason once."""
    words = "runs operation by operation, since "
    return lambda: [message.partition(words)[2] for message in caplog.messages if words in message]


@pytest.fixture
def traces(monkeypatch):
    """Return a list that gets the constants of each call that is traced."""
    call, constants = programs.TorchNetwork.__call__, []

    def traced(self, *args, **options):
        constants.append([value for value in self._module.form.values if value is not None])
        return call(self, *args, **options)

    monkeypatch.setattr(programs.TorchNetwork, "__call__", traced)
    return constants


def call_scaled(model, **options):
    result = model({"x": torch.ones(2, 4), "more": [torch.full((2, 1), 2.0)]}, **options)
    return torch.utils._pytree.tree_map_only(torch.Tensor, runtime.to_torch, result)


def test_arguments_and_results_are_trees_and_a_copy_a_pickle_and_a_move_stay_the_network(scaled):
    result = call_scaled(scaled, mode="dark")
    x, (half, none) = result["x"], result["half"]
    assert (result["mode"], none, half.tolist()) == ("dark", None, (x / 2).tolist())
    for other in (copy.deepcopy(scaled), copy.copy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert type(other) is type(scaled)
        assert torch.allclose(call_scaled(other)["x"], x, atol=1e-5)
    for device in ("cpu", "jax"):
        assert torch.allclose(call_scaled(scaled.to(device))["x"], x, atol=1e-5)
        assert runtime.is_on_jax(scaled) == (device == "jax")


def test_a_number_is_a_constant_and_an_argument_with_five_values_is_named(scaled, caplog, traces):
    base = runtime.to_torch(scaled.linear.weight).sum(1) + runtime.to_torch(scaled.linear.bias)
    for repeats in (1, 2, 3, 2):
        x = call_scaled(scaled, repeats=repeats, scale=0.25)["x"]
        assert torch.allclose(x, base * 0.25 + 2.0 * repeats, atol=1e-4)
    assert len(traces) == 3
    for scale in (0.5, 1.5, 2.5):
        call_scaled(scaled, repeats=1, scale=scale)
    assert not caplog.records
    for scale in (3.5, 4.5, torch.tensor(0.25), torch.tensor(0.5)):
        result = call_scaled(scaled, repeats=1, scale=scale)
    assert torch.allclose(result["x"], base * 0.5 + 2.0, atol=1e-4)
    assert len(traces) == 3 + 3 + 2 + 1, "a tensor is an argument"
    assert caplog.messages == [
        "transformer: Scaled was compiled for 5 values of its argument scale, each a constant of a program: "
        "pass a tensor"
    ]


def test_an_argument_inside_of_another_is_named_by_its_place(caplog):
    model = ported_network(functools.partial(Made, lambda m, x, options: m.linear(x) * options["by"][0]))
    for index in range(5):
        model(X, {"by": [0.5 + index]})
    assert caplog.messages[-1].partition(",")[0].endswith("its argument args[1]['by'][0]")


def test_a_form_of_a_call_is_compiled_once_and_forms_do_not_pile_up(scaled, monkeypatch, traces):
    monkeypatch.setattr(runtime.Programs, "KINDS", 3)
    for mode in ("a", 1, True, "a", 1, True):  # two are equal, and no program of one may serve the other
        assert type(call_scaled(scaled, mode=mode)["mode"]) is type(mode)
    assert list(map(repr, traces)) == ["['a']", "[1]", "[True]"]
    call_scaled(scaled, mode="b")
    assert len(runtime.programs_of(scaled)._kept) == 3


def test_of_a_forms_programs_those_asked_for_last_are_kept_and_one_dropped_is_named_once(
    scaled, monkeypatch, caplog, traces
):
    monkeypatch.setattr(runtime.Programs, "KEPT", 2)
    hooks = [lambda _module, _args, y, factor=factor: y * factor for factor in (2, 3)]
    for hook, count in ((hooks[0], 2), (hooks[1], 3), (hooks[0], 4)):
        call_scaled(scaled)
        with scaled.linear.register_forward_hook(hook):
            call_scaled(scaled)
        assert len(traces) == count
    assert [message.partition(": ")[2].partition(",")[0] for message in caplog.messages] == [
        "its last 2 programs are kept"
    ]


def test_weights_are_split_over_the_mesh_where_they_do_not_fit():
    model = ported_network(Scaled, mesh=make_mesh(2, 4))
    whole, placed = call_scaled(model)["x"], [str(model.parallelism)]
    model.place_on(make_mesh(2, 4), memory=1.0)
    assert torch.equal(whole, call_scaled(model)["x"])
    assert [*placed, str(model.parallelism)] == [
        f"batch over dp, weights {weights}, tokens not split" for weights in ("whole", "split")
    ]
    array = runtime.array_of(model.linear.weight)
    assert array.addressable_shards[0].data.size == array.size // 8


@pytest.mark.parametrize("parallel", ["context", "tensor"])
def test_a_split_of_tokens_or_channels_is_refused_for_an_unknown_network(parallel):
    with pytest.raises(ValueError, match=f"parallel='{parallel}' for a Scaled, whose tokens and channels"):
        ported_network(Scaled, mesh=make_mesh(2, 4), parallel=parallel)


X = torch.linspace(-1, 1, 8).view(2, 4)


class Made(nn.Module):
    """A network whose forward is the function that a test gives."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("total", torch.zeros(()))

    def forward(self, *args):
        return self.function(self, *args)

    def encode(self, x):
        return types.SimpleNamespace(latents=self.linear(x))

    def decode(self, encoded):
        return self.linear(encoded.latents)


def stock_and_ported(function):
    """Return two networks of equal weights whose forward is a function: in PyTorch, and ported."""
    return tuple(make(functools.partial(Made, function)) for make in (stock_network, ported_network))


def writes_into_its_argument(self, x):
    x[:, :2] *= 2
    return self.linear(x)


def adds_to_a_buffer(self, x):
    self.total += x.square().sum()
    return self.linear(x)


def adds_twice(self, x, y):
    x.mul_(2)
    return self.linear(x) + y


@pytest.mark.parametrize(
    ("function", "count"), [(writes_into_its_argument, 1), (adds_to_a_buffer, 1), (adds_twice, 2)]
)
def test_what_a_network_writes_is_written_as_in_pytorch(function, count, reasons):
    stock, model = stock_and_ported(function)
    own = X.clone()
    expected = stock(*[own] * count)
    for x in (X.clone(), runtime.to_jax(X)):
        assert largest_error(model(*[x] * count), expected) < 1e-6
        assert torch.equal(runtime.to_torch(x), own)
    assert torch.allclose(runtime.to_torch(model.total), 2 * stock.total)
    assert reasons() == ["it writes into its weights or its arguments"]


def collects(self, x, found):
    found["y"] = self.linear(x)
    return x


LOOKED_UP = {0.1: 3.0, 0.3: 6.0}


CALLS = {
    "a type test": (lambda m, x, v: m.linear(x) * (v if isinstance(v, float) else 100), [0.1, 0.2, 0.3]),
    "a look-up": (lambda m, x, v: m.linear(x) * LOOKED_UP.get(v, 6.0), [0.1, 0.2, 0.3]),
    "a key": (lambda m, x, v: m.linear(x) * {1: 3.0, 2: 5.0, 3: 6.0}[v], [1, 2, 3]),
    "a key that is missing": (lambda m, x, v: m.linear(x) * {1: 3.0}.get(v, 6.0), [3, 4, 1]),
    "a size": (lambda m, x, v: m.linear(x).sum() + torch.zeros(2, v, device=x.device), [1, 2, 3]),
    "a sign of zero": (lambda m, x, v: 1 + torch.atan2(0 * x.abs(), torch.full_like(x, v)), [0.0, -0.0]),
    "arithmetic": (lambda m, x, v: m.linear(x) * (1 - v) ** 2 / (v + 1) - (-v) * 2**v, [0.1, 0.2, 0.3]),
    "functions of torch": (lambda m, x, v: torch.lerp(x, m.linear(x), v).add(x, alpha=v), [0.1, 0.2]),
}


@pytest.mark.parametrize(("function", "values"), CALLS.values(), ids=CALLS)
def test_a_number_means_what_it_means_in_pytorch(function, values, reasons):
    stock, model = stock_and_ported(function)
    for value in (*values, *values):
        assert largest_error(model(X, value), stock(X, value)) < 1e-6, value
    assert reasons() == []


def test_objects_and_containers_of_the_users_own_are_changed_as_in_pytorch():
    stock, model = stock_and_ported(collects)
    expected, found = {}, {}
    stock(X, expected)
    for x in (runtime.to_jax(X), X):  # tensors of the host are moved
        model(x, found)
        assert largest_error(found["y"], expected["y"]) < 1e-6


FACTOR, ENABLED, TABLE, CONFIG = 1.0, False, torch.ones(4), {"weight": 1.0}
settings = types.ModuleType("settings")
settings.weight = 1.0


def factor():
    return FACTOR


def reads_globals(self, x):
    y = self.linear(x) * factor() * CONFIG["weight"] * settings.weight * TABLE.to(x.device)
    return y + 1 if ENABLED else y


CHANGES = {
    "a helper's number": lambda patch: patch.setitem(globals(), "FACTOR", 12.0),
    "a flag": lambda patch: patch.setitem(globals(), "ENABLED", True),
    "another tensor": lambda patch: patch.setitem(globals(), "TABLE", torch.full((4,), 5.0)),
    "a tensor's values": lambda _patch: TABLE.mul_(3),
    "an item": lambda patch: patch.setitem(CONFIG, "weight", 12.0),
    "a module's attribute": lambda patch: patch.setattr(settings, "weight", 12.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_global_that_a_network_of_others_reads_is_a_constant_until_the_next_port(
    change, monkeypatch, traces
):
    stock = stock_network(functools.partial(Made, reads_globals))
    holder = types.SimpleNamespace(vae=small_pipelines.vae(), transformer=copy.deepcopy(stock))
    model = port(holder).transformer
    before = runtime.to_torch(model(X))
    change(monkeypatch)
    assert torch.equal(runtime.to_torch(model(X)), before)
    assert len(traces) == 1
    port(holder)
    assert largest_error(stock(X), before) > 0.1
    assert largest_error(model(X), stock(X)) < 1e-6


class Recorder:
    def __init__(self):
        self.seen = []

    def hook(self, _module, _args, y):
        self.seen.append(y.shape)


class Counting(nn.Linear):
    seen: list[int] = []  # noqa: RUF012

    def forward(self, x):
        self.seen.append(1)
        return super().forward(x)


SEEN, COUNT, TOTAL = [], 0, torch.zeros(())


def counts_in_a_global(_module, _args, _y):
    global COUNT
    COUNT += 1


def adds_to_a_global(_module, _args, _y):
    TOTAL.add_(1)


def enclosing():
    seen = []
    return lambda *_: seen.append({"times": [1]}), seen.__len__


def by_default():
    def hook(_module, _args, _y, seen=[]):  # noqa: B006
        seen.append(1)

    return hook, hook.__defaults__[0].__len__


def recorded():
    recorder = Recorder()
    return recorder.hook, recorder.seen.__len__


def decorated():
    seen = []
    forward = nn.Linear.forward

    @functools.wraps(forward)
    def timed(self, x):
        seen.append(1)
        return forward(self, x)

    return timed, seen.__len__


HOOK = nn.Module.register_forward_hook
OUTSIDE = {
    "a global list": ("SEEN", lambda: (lambda _module, _args, y: SEEN.append(y), SEEN.__len__), HOOK),
    "a global number": ("COUNT", lambda: (counts_in_a_global, lambda: COUNT), HOOK),
    "a global tensor": ("TOTAL", lambda: (adds_to_a_global, lambda: int(TOTAL)), HOOK),
    "a variable of an enclosing function": ("seen", enclosing, HOOK),
    "a default argument": ("a default of hook", by_default, HOOK),
    "an object of a hook": ("Recorder", recorded, HOOK),
    "a decorated method": (
        "seen",
        decorated,
        lambda module, method: setattr(module, "forward", types.MethodType(method, module)),
    ),
    "a class's list": (
        "Counting.seen",
        lambda: (Counting, Counting.seen.__len__),
        lambda module, kind: setattr(module, "__class__", kind),
    ),
}
"""By what a trace changes: its name in the warning, what makes (hook, method or class; count), its use."""


@pytest.mark.parametrize(("name", "make", "use"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_a_trace_changes_outside_of_a_network_is_named_and_changed_by_each_call(
    name, make, use, reasons, traces
):
    changer, count = make()
    model = ported_network(functools.partial(Made, lambda m, x: m.linear(x)))
    expected, before = runtime.to_torch(model(X)), count()
    use(model.linear, changer)
    for _ in range(3):
        assert largest_error(model(X), expected) < 1e-6
    assert (count() - before, len(traces)) == (3, 2), "one trace is with the change"
    assert all(runtime.to_torch(y).shape == (2, 4) for y in SEEN), "no value of a trace is left there"
    assert reasons() == [f"it changes {name}, a variable outside of its modules"]


def test_random_numbers_of_a_network_differ_between_calls_and_follow_the_seed(reasons):
    model = ported_network(functools.partial(Made, lambda m, x: nn.functional.dropout(m.linear(x))))
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append([runtime.to_torch(model(torch.ones(8, 4))) for _ in range(2)])
    (first, second), (again, _), (other, _) = draws
    assert [torch.equal(first, each) for each in (again, second, other)] == [True, False, False]
    assert [reason.partition(" ")[2] for reason in reasons()] == [
        "draws random numbers, which no program on JAX does"
    ]


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_of_weights_and_through_frozen_ones_are_refused_in_words(trained):
    model = ported_network(functools.partial(Made, lambda m, x: m.linear(x))).requires_grad_(trained)
    with torch.enable_grad():
        x = runtime.to_jax(X).requires_grad_()
        with pytest.raises(ValueError, match="on JAX the transformer has no gradients"):
            (model(x).sum() + x.sum()).backward()


READS = {
    "a branch": lambda m, x: m.linear(x) if x.sum() > 0 else x,
    "a number": lambda m, x: m.linear(x) * float(x.max()),
    "an item": lambda m, x: m.linear(x) * x.sum().item(),
    "an index": lambda m, x: m.linear(x)[:, int(x[0, 0].abs())],
    "a mask": lambda m, x: m.linear(x)[x > 0],
    "NumPy": lambda m, x: m.linear(x) * x.numpy().max().item(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_the_values_of_tensors_is_told_so_in_words(read, reasons):
    stock, model = stock_and_ported(read)
    for _ in range(2):
        assert largest_error(runtime.to_torch(model(X)), stock(X)) < 1e-5
    assert reasons() == ["it reads the values of tensors, as a branch on one does"]


def test_of_programs_that_are_dropped_those_that_never_ran_are_not_named(caplog, monkeypatch):
    def count(model, x):
        model.calls = getattr(model, "calls", 0) + 1
        return model.linear(x) * model.calls

    stock, model = stock_and_ported(count)
    for _ in range(2 * runtime.Programs.KEPT):
        assert largest_error(runtime.to_torch(model(X)), stock(X)) < 1e-5
    assert "programs are kept" not in caplog.text


def test_a_method_with_other_objects_runs_operation_by_operation(reasons):
    stock, model = stock_and_ported(None)
    assert largest_error(model.decode(model.encode(X)), stock.decode(stock.encode(X))) < 1e-6
    assert reasons() == ["it returns a SimpleNamespace", "it takes a SimpleNamespace"]


# Pipelines


CONSISID = {
    **small_pipelines.TRANSFORMER,
    "num_layers": 1,
    "num_attention_heads": 6,
    "in_channels": 32,
    "use_rotary_positional_embeddings": True,
    "is_train_face": True,
    "cross_attn_interval": 1,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
    **{"LFE_id_dim": 24, "LFE_vit_dim": 16, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2},
    **{"LFE_output_dim": 64, "LFE_num_querie": 4},
}


def consisid():
    torch.manual_seed(1)
    model = randomized(ConsisIDTransformer3DModel(**CONSISID))
    return ConsisIDPipeline(**small_pipelines.one_layer("image", transformer=model).components)


def faces():
    """Return the arguments of ConsisID's call beside those of a pipeline of images."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    return {"id_cond": draw(1, 24), "id_vit_hidden": [draw(1, 5, 16) for _ in range(5)]}


@pytest.mark.parametrize("mesh", [None, (2, 4)], ids=["one device", "2x4"])
@pytest.mark.slow_cases("one device")
def test_a_pipeline_of_others_equals_pytorch(mesh, caplog):
    expected = frames(consisid(), "image", **faces())
    pipe = port(consisid(), mesh=None if mesh is None else make_mesh(*mesh))
    assert largest_error(frames(pipe, "image", **faces()), expected) < TOLERANCE
    words = "; batch over dp, weights whole, tokens not split" if mesh else ""
    assert caplog.messages == [f"transformer: ConsisIDTransformer3DModel, compiled as it is{words}"], (
        "a network is named once, and none runs operation by operation"
    )
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        tensors = runtime.named_tensors(part).values()
        assert {runtime.on_jax(each) and len(runtime.array_of(each).devices()) for each in tensors} == {
            8 if mesh else 1
        }


def test_layers_of_a_network_get_their_kernels_and_attention_never_has_all_scores():
    model = consisid().transformer
    known.port_network(model)
    kinds = {type(module) for module in model.modules()}
    own = {layers.Linear, layers.LayerNorm, layers.PatchEmbed}
    assert kinds & {nn.Linear, nn.LayerNorm, *own} == own
    assert {type(block.attn1.processor) for block in model.transformer_blocks} == {layers.AttnProcessor}


def test_parts_of_a_ported_pipeline_make_another_pipeline_that_runs(tmp_path):
    pipe = port(consisid())
    made = ConsisIDPipeline(**pipe.components)
    assert torch.equal(*(latents(each, "image", **faces()) for each in (pipe, made)))
    pipe.save_pretrained(tmp_path)
    loaded = ConsisIDTransformer3DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(loaded.proj_out.weight, runtime.to_torch(pipe.transformer.proj_out.weight))


class Faster(CogVideoXPipeline):
    """A subclass that adds arguments to methods which `port` wraps, and whose call is its own."""

    def _prepare_rotary_positional_embeddings(self, height, width, num_frames, device, fps=8):
        tables = super()._prepare_rotary_positional_embeddings(height, width, num_frames, device)
        return tuple(table * (fps / 8) for table in tables)

    def decode_latents(self, latents, brightness=1.0):
        return super().decode_latents(latents) * brightness

    def __call__(self, latents, *, fps):
        tables = self._prepare_rotary_positional_embeddings(8, 16, 3, self.device, fps=fps)
        return *tables, self.decode_latents(latents, brightness=2.0)


def test_a_subclass_may_add_arguments_to_a_pipelines_methods():
    stock, pipe = (Faster(**small_pipelines.one_layer().components) for _ in range(2))
    latents = torch.randn(1, 3, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = stock(latents, fps=12)
    for want, got in zip(expected, port(pipe)(runtime.to_jax(latents), fps=12), strict=True):
        assert largest_error(runtime.to_torch(got), want) < TOLERANCE


class Denoiser(nn.Linear):
    """A transformer that has nothing of diffusers' classes, and a config of its own kind."""

    config = types.SimpleNamespace(depth=1)
    device = property(lambda self: self.weight.device)
    dtype = property(lambda self: self.weight.dtype)

    def forward(self, latents, prompt):
        return super().forward(latents) + prompt.mean()


class OwnLoop(CogVideoXPipeline):
    def __call__(self, latents, height=8, width=16):
        embeds, _ = self.encode_prompt("a cat", do_classifier_free_guidance=False, max_sequence_length=16)
        self.check_inputs("a cat", height, width, None, ["latents"])
        with self.progress_bar(total=2) as bar:
            for _ in range(2):
                latents = latents - self.transformer(latents, embeds)
                bar.update()
        frames = self.decode_latents(latents)
        self.maybe_free_model_hooks()
        return frames


@pytest.mark.parametrize("offload", [False, True])
def test_a_loop_of_its_own_takes_a_transformer_of_no_class_of_diffusers(offload):
    torch.manual_seed(2)
    parts = {**small_pipelines.one_layer().components, "transformer": Denoiser(8, 8)}
    latents = torch.randn(1, 3, 16, 4, 8)
    expected = OwnLoop(**parts)(latents)
    pipe = port(OwnLoop(**parts))
    if offload:
        pipe.enable_model_cpu_offload()
    assert largest_error(runtime.to_torch(pipe(runtime.to_jax(latents))), expected) < TOLERANCE


def test_prompts_on_the_host_are_moved_beside_those_on_jax():
    stock, pipe = small_pipelines.one_layer(), port(small_pipelines.one_layer())
    prompt, negative = stock.encode_prompt("a cat", "", max_sequence_length=16)
    to_jax, given = runtime.to_jax, {"prompt": None, "guidance_scale": 6.0}
    expected = latents(stock, prompt_embeds=prompt, negative_prompt_embeds=negative, **given)
    for one, other in ((prompt, negative), (to_jax(prompt), negative), (prompt, to_jax(negative))):
        got = latents(pipe, prompt_embeds=one, negative_prompt_embeds=other, **given)
        assert largest_error(got, expected) < TOLERANCE


def test_compiled_models_are_unwrapped_at_the_port_and_after_it():
    pipe = small_pipelines.one_layer()
    pipe.vae, pipe.transformer = torch.compile(pipe.vae), torch.compile(pipe.transformer)
    port(pipe)
    for _ in range(2):
        pipe(**small_pipelines.inputs("text", num_inference_steps=1))
        assert type(pipe.transformer) is transformer.CogVideoXTransformer3DModel
        assert pipe.transformer.program.compilations == 1
        pipe.transformer = torch.compile(pipe.transformer)


def test_a_vae_of_another_package_is_refused_by_its_module():
    kind = type("AutoencoderKLCogVideoX", (nn.Module,), {"__module__": "videox_fun.models.vae"})
    pipe = small_pipelines.one_layer()
    pipe.vae = kind()
    for given in (kind(), pipe):
        with pytest.raises(ValueError, match="AutoencoderKLCogVideoX of videox_fun.models.vae: port takes"):
            port(given)


def test_modules_of_an_object_are_moved_and_weights_that_jax_lacks_stay_on_the_host_and_are_named(caplog):
    extra = nn.Linear(2, 2).to(torch.float8_e4m3fn)
    holder = types.SimpleNamespace(vae=small_pipelines.vae(), adapter=nn.Linear(2, 2), extra=extra, size=3)
    port(holder)
    assert [runtime.is_on_jax(part) for part in (holder.vae, holder.adapter, extra)] == [True, True, False]
    assert runtime.on_jax(holder.adapter(torch.ones(1, 2)))
    assert caplog.text.count("extra: Linear stays on the host, since JAX has no ") == 1


def test_a_subclass_that_computes_the_same_is_a_known_network_and_one_that_does_not_is_none():
    class Same(CogVideoXTransformer3DModel):
        extra = 3

    class Other(CogVideoXTransformer3DModel):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    same, other = known.ported_class(Same), known.ported_class(Other)
    own = transformer.CogVideoXTransformer3DModel
    assert (issubclass(same, own), issubclass(other, own), same.extra) == (True, False, 3)
