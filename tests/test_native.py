"""The host library, its tensors, and the C++ kernels, called as a compiled method calls them."""

import ctypes
import gc
import subprocess
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.kernels import panel_linear
from eyas.kernels.int4_linear import GROUP_SIZES, pack_nibbles
from eyas.lowering.content_cache import ContentCache, default_root
from eyas.lowering.cpu_kernels import FLAGS, KernelLibraries, build_libraries, compiler, defined_symbols
from eyas.runtime import native
from eyas.runtime.native import DTYPES, Host, Tensor
from eyas.tools.bench_kernels import KernelLibrary

EPS = np.finfo(np.float32).eps


@pytest.fixture(scope="module")
def kernels(cache) -> KernelLibrary:
    return KernelLibrary()


@pytest.fixture(scope="module")
def libraries(cache) -> KernelLibraries:
    return build_libraries(ContentCache(default_root()))


@pytest.fixture(scope="module", params=["eyas", "torch"])
def host(request, kernels) -> Host:
    return kernels.host if request.param == "eyas" else Host.torch()


# Tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_shows_the_memory_it_was_made_from(host, dtype):
    kind = DTYPES[dtype][1]
    array = np.arange(24).astype(kind).reshape(2, 3, 4)
    tensor = Tensor.of(host, array, dtype)
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3, 4))
    np.testing.assert_array_equal(tensor.array, array)
    array[1, 2, 3] = 1
    assert tensor.array[1, 2, 3] == 1 and tensor.array.__array_interface__["data"][0] == array.ctypes.data


def test_views_keep_their_strides_and_share_memory(host):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for index in (np.s_[:, 1:3], np.s_[1:, :, ::2], np.s_[:, -1:], np.s_[2:3]):
        part = Tensor.of(host, array).part(index)
        np.testing.assert_array_equal(part.array, array[index])
        assert np.shares_memory(part.array, array)
    turned = Tensor.of(host, array.transpose(2, 0, 1))
    assert turned.shape == (5, 3, 4)
    np.testing.assert_array_equal(turned.array, array.transpose(2, 0, 1))


def test_empty_and_scalar_tensors(host):
    assert Tensor.of(host, np.empty((0, 3), np.float32)).array.shape == (0, 3)
    assert Tensor.of(host, np.array(7)).array == 7


def test_a_view_of_the_memory_keeps_it_alive(host, kernels):
    """A kernel's result belongs to its handle, which must outlive every array over it."""
    x = Tensor.of(kernels.host, np.arange(1 << 18, dtype=np.float32))
    made = kernels("materialize", x)
    part, owner = made.array[5:9], weakref.ref(made._owner)
    del made
    gc.collect()
    assert owner() is not None and part.tolist() == [5, 6, 7, 8]
    del part
    gc.collect()
    assert owner() is None


def test_memory_of_results_is_given_back(kernels):
    x = Tensor.of(kernels.host, np.zeros(1 << 20, np.float32))

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    kernels("materialize", x)
    before = resident()
    for _ in range(50):
        kernels("materialize", x)
    assert resident() - before < 20 * x.array.nbytes  # 50 of them would stay otherwise


def test_bfloat16_is_carried_as_its_bits(host):
    bits = torch.tensor([1.0, -2.5, 3.0]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    tensor = Tensor.of(host, bits, "bfloat16")
    assert tensor.dtype == "bfloat16" and tensor.array.dtype == np.uint16
    assert torch.from_numpy(tensor.array.view(np.int16)).view(torch.bfloat16).tolist() == [1.0, -2.5, 3.0]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [(np.zeros(3, np.complex64), None), (np.zeros(3, ">i8"), None), (np.zeros(3, np.float32), "bfloat16"),
     (np.zeros(3), "float32"), (np.zeros(3, np.uint16), None)],
)  # fmt: skip
def test_types_without_a_tensor(kernels, array, dtype):
    if array.dtype == np.uint16:  # without a name, sixteen bits are read as bfloat16's
        assert Tensor.of(kernels.host, array).dtype == "bfloat16"
        return
    with pytest.raises(TypeError, match=r"no tensor of .*; allowed: uint8, int8, .*, bfloat16"):
        Tensor.of(kernels.host, array, dtype)


def test_a_host_library_is_loaded_once(libraries, kernels, tmp_path):
    again = tmp_path / libraries.host.name
    again.write_bytes(libraries.host.read_bytes())
    assert Host.load(again) is kernels.host


def test_every_function_of_the_host_is_declared_by_torch(libraries):
    own = {name for name in defined_symbols(libraries.host) if name.startswith("aoti_torch_")}
    folder = torch.__path__[0] + "/lib/libtorch_cpu.so"
    assert own and {f"aoti_torch_{name}" for name in native.HOST_FUNCTIONS} <= own
    from pathlib import Path

    assert own <= defined_symbols(Path(folder))


# Linear kernels


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of very different size, some of them 0, so that a wrong row, column or scale cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * 10.0 ** torch.randint(-2, 3, shape[-1:], generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) < 0.05, 0, x)


def operands(form: str, n: int, k: int, group: int = 32) -> tuple[torch.Tensor, list]:
    """A weight in float64, and what its kernel takes after ``x``."""
    generator = torch.Generator().manual_seed(n + k)
    if form == "panel_linear":
        w = values(n, k, seed=3)
        return w.double(), [panel_linear.pack_panels(w), n]
    if form == "panel_int8_linear":
        q = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
        scales = torch.rand(n, generator=generator) * 10
        w = q.double() * scales.double()[:, None]
        return w, [panel_linear.pack_panels(q), panel_linear.pack_scales(scales), n]
    groups = -(-k // group)
    q = torch.randint(0, 16, (n, groups * group), generator=generator, dtype=torch.uint8)
    scales, offsets = (torch.randn(n, groups, generator=generator) for _ in range(2))
    w = (q.double().unflatten(1, (groups, group)) * scales.double()[..., None] + offsets.double()[..., None]).flatten(1)
    packed = panel_linear.pack_panels(pack_nibbles(q)), panel_linear.pack_scale_offset(scales, offsets)
    return w[:, :k], [*packed, group, n]


def linear(kernels: KernelLibrary, form: str, x: torch.Tensor | np.ndarray, rest: list) -> np.ndarray:
    taken = [kernels.tensor(value) if isinstance(value, torch.Tensor) else value for value in rest]
    array = x.numpy() if isinstance(x, torch.Tensor) else x
    return kernels(form, Tensor.of(kernels.host, array), *taken).array


FORMS = ("panel_linear", "panel_int8_linear", "panel_int4_linear")


@pytest.mark.parametrize(("n", "k"), [(16, 64), (1, 1), (17, 33), (130, 48), (31, 257), (64, 32), (5, 640)])
@pytest.mark.parametrize("form", FORMS)
def test_linear_against_float64(kernels, form, n, k):
    """Off by no more than rounding k products and their sum can be, for every number of rows."""
    w, rest = operands(form, n, k)
    for m in (1, 2, 3, 5, 6, 7, 8, 9, 13, 14, 40):
        x = values(m, k, seed=m)
        want = x.double() @ w.T
        bound = (k + 8) * EPS * (x.double().abs() @ (w.abs() + (0 if form != FORMS[2] else 20)).T) + 1e-30
        assert ((torch.from_numpy(linear(kernels, form, x, rest)).double() - want).abs() <= bound).all()


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("k", [31, 64, 100, 256, 300])
def test_int4_groups(kernels, group, k):
    w, rest = operands("panel_int4_linear", 20, k, group)
    x = values(3, k)
    got = torch.from_numpy(linear(kernels, "panel_int4_linear", x, rest)).double()
    assert ((got - x.double() @ w.T).abs() <= (k + 8) * EPS * (x.double().abs() @ (w.abs() + 20).T)).all()


@pytest.mark.parametrize("form", FORMS)
def test_references_agree_with_the_kernels(kernels, form):
    w, rest = operands(form, 37, 70)
    x = values(4, 70)
    want = getattr(torch.ops.eyas, form)(x, *rest)
    bound = 2 * 80 * EPS * (x.abs() @ (w.abs() + 20).T.float())
    assert ((torch.from_numpy(linear(kernels, form, x, rest)) - want).abs() <= bound).all()


@pytest.mark.parametrize("k", [33, 640])
@pytest.mark.parametrize("form", FORMS)
def test_a_linear_row_has_the_same_bits_in_any_company(kernels, form, k):
    _, rest = operands(form, 50, k)
    x = values(16, k)
    alone = [linear(kernels, form, x[i : i + 1], rest).tobytes() for i in range(16)]
    assert len(set(alone)) == 16
    for m in range(1, 17):
        for first in range(17 - m):
            got = linear(kernels, form, x[first : first + m], rest)
            assert [row.tobytes() for row in got] == alone[first : first + m], f"{m} rows from {first}"
    several = linear(kernels, form, values(40, k), rest)
    assert several.tobytes() == linear(kernels, form, values(40, k), rest).tobytes()
    assert [row.tobytes() for row in several] == [
        linear(kernels, form, values(40, k)[i : i + 1], rest).tobytes() for i in range(40)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_strided_rows(kernels, form):
    """Rows may lie apart, as a slice of a wider tensor does; elements of a row may not."""
    _, rest = operands(form, 20, 33)
    wide = values(10, 100).numpy()
    got = linear(kernels, form, wide[::2, 7:40], rest)
    assert got.tobytes() == linear(kernels, form, np.ascontiguousarray(wide[::2, 7:40]), rest).tobytes()
    with pytest.raises(RuntimeError, match=f"kernel {form} refused"):
        linear(kernels, form, wide[:, : 2 * 33 : 2], rest)
    with pytest.raises(RuntimeError, match=f"kernel {form} refused"):
        linear(kernels, form, wide[None, :, :33], rest)


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_row_spoils_no_other(kernels, form):
    w, rest = operands(form, 20, 33)
    x = values(5, 33)
    clean = linear(kernels, form, x, rest)
    x[1, 0], x[3, 4] = float("nan"), float("inf")
    got = linear(kernels, form, x, rest)
    assert np.isnan(got[1]).all() and not np.isfinite(got[3][w[:, 4] != 0]).any()
    assert all(got[i].tobytes() == clean[i].tobytes() for i in (0, 2, 4))


# Attention


def reference(q, k, v, mask, scale: float) -> np.ndarray:
    """float64 ``[H, M, D]``; keys that a row does not see count for nothing, whatever they hold."""
    q, k, v = (value[0].double().numpy() for value in (q, k, v))
    out = np.zeros(q.shape)
    group = q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        for m in range(q.shape[1]):
            seen = np.flatnonzero(mask[m].numpy())
            if len(seen):
                s = k[h // group][seen] @ q[h, m] * scale
                w = np.exp(s - s.max())
                out[h, m] = w @ v[h // group][seen] / w.sum()
    return out


def attention(kernels: KernelLibrary, q, k, v, mask, scale: float) -> np.ndarray:
    """The kernel's result, ``[H, M, D]``."""
    taken = [Tensor.of(kernels.host, value.numpy()) for value in (q, k, v, mask)]
    return kernels("masked_sdpa", *taken, float(scale)).array[0]


def problem(heads: int, kv: int, m: int, length: int, width: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, m, width, generator=generator)
    k, v = (torch.randn(1, kv, length, width, generator=generator) for _ in range(2))
    mask = torch.rand(m, length, generator=generator) < 0.4
    return q, k, v, mask


@pytest.mark.parametrize(
    ("heads", "kv", "m", "length", "width"),
    [(4, 4, 1, 64, 16), (4, 2, 5, 300, 32), (8, 2, 3, 257, 64), (8, 1, 8, 1024, 48), (2, 1, 40, 513, 16),
     (1, 1, 2, 1, 16), (4, 1, 2, 255, 512), (16, 2, 11, 700, 128)],
)  # fmt: skip
def test_attention_against_float64(kernels, heads, kv, m, length, width):
    q, k, v, mask = problem(heads, kv, m, length, width)
    mask[:, 0] = True
    got = attention(kernels, q, k, v, mask, width**-0.5)
    np.testing.assert_allclose(got, reference(q, k, v, mask, width**-0.5), rtol=3e-6, atol=3e-6)


def test_the_reference_operator_agrees(kernels):
    q, k, v, mask = problem(4, 2, 5, 300, 32)
    mask[2] = False
    want = torch.ops.eyas.masked_sdpa(q, k, v, mask, 0.2)[0].numpy()
    np.testing.assert_allclose(attention(kernels, q, k, v, mask, 0.2), want, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_are_zero(kernels):
    q, k, v, mask = problem(4, 2, 6, 600, 32)
    mask[1], mask[4], mask[5, :590] = False, False, False
    got = attention(kernels, q, k, v, mask, 0.2)
    assert not got[:, [1, 4]].any() and got[:, [0, 2, 3, 5]].all()
    assert not attention(kernels, q, k, v, torch.zeros_like(mask), 0.2).any()


def test_one_visible_key_gives_its_value(kernels):
    q, k, v, mask = problem(4, 2, 6, 600, 32)
    mask[:] = False
    chosen = [0, 255, 256, 511, 512, 599]
    mask[range(6), chosen] = True
    got = attention(kernels, q, k, v, mask, 0.2)
    for m, key in enumerate(chosen):
        np.testing.assert_array_equal(got[:, m], v[0, :, key].numpy().repeat(2, axis=0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_slots_that_nobody_sees_are_not_read(kernels, poison):
    q, k, v, mask = problem(8, 2, 5, 777, 32)
    dead = torch.rand(777, generator=torch.Generator().manual_seed(1)) < 0.5
    dead[256:512] = True
    mask[:, dead] = False
    clean = attention(kernels, q, k, v, mask, 0.2)
    k[:, :, dead], v[:, :, dead] = poison, poison
    assert attention(kernels, q, k, v, mask, 0.2).tobytes() == clean.tobytes()


@pytest.mark.parametrize("size", [30.0, 1e3, 1e18])
def test_large_logits(kernels, size):
    """One key wins by far; sums of exponentials must neither overflow nor vanish."""
    q, k, v, mask = problem(2, 1, 4, 300, 16)
    got = attention(kernels, q * size, k, v, mask, 1.0)
    np.testing.assert_allclose(got, reference(q * size, k, v, mask, 1.0), rtol=1e-4, atol=1e-4)
    same = torch.ones_like(k)
    got = attention(kernels, -q.abs() * 50, same, v, mask, 1.0)  # equal logits, all of them far below 0
    np.testing.assert_allclose(got, reference(-q.abs() * 50, same, v, mask, 1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_an_attention_row_has_the_same_bits_in_any_company(kernels, causal):
    q, k, v, mask = problem(8, 2, 16, 600, 32)
    if causal:
        mask = torch.arange(600)[None] <= torch.arange(500, 516)[:, None]
    mask[7] = False
    alone = [attention(kernels, q[:, :, i : i + 1], k, v, mask[i : i + 1], 0.2).tobytes() for i in range(16)]
    for m in range(1, 17):
        for first in range(17 - m):
            rows = slice(first, first + m)
            got = attention(kernels, q[:, :, rows].contiguous(), k, v, mask[rows], 0.2)
            assert [got[:, i].tobytes() for i in range(m)] == alone[rows], f"{m} rows from {first}"
    again = attention(kernels, q, k, v, mask, 0.2)
    assert again.tobytes() == attention(kernels, q, k, v, mask, 0.2).tobytes()


def test_strided_attention_inputs(kernels):
    """Queries come transposed from a projection, keys as a part of a longer cache."""
    q, k, v, mask = problem(4, 2, 5, 300, 32)
    want = attention(kernels, q, k, v, mask, 0.2)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    longer = torch.full((1, 2, 400, 64), float("nan"))
    longer[:, :, :300, :32] = k
    got = attention(kernels, turned, longer[:, :, :300, :32], v, torch.cat([mask, mask], 1)[:, :300], 0.2)
    assert got.tobytes() == want.tobytes()
    with pytest.raises(RuntimeError, match="kernel masked_sdpa refused"):
        attention(kernels, torch.zeros(1, 4, 5, 24), torch.zeros(1, 2, 300, 24), torch.zeros(1, 2, 300, 24), mask, 0.2)


def test_the_result_lies_by_rows(kernels):
    q, k, v, mask = problem(4, 2, 5, 300, 32)
    taken = [Tensor.of(kernels.host, value.numpy()) for value in (q, k, v, mask)]
    out = kernels("masked_sdpa", *taken, 0.2).array
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous


# Materialize


@pytest.mark.parametrize(
    "make",
    [lambda a: a, lambda a: a.transpose(2, 0, 1), lambda a: a[:, 1:, ::2], lambda a: a[1:2], lambda a: a[:, :0],
     lambda a: np.broadcast_to(a[:, :1], a.shape), lambda a: a[0, 0, 0:1]],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
def test_materialize_is_a_dense_copy(kernels, make, dtype):
    whole = np.arange(4 * 5 * 6).astype(DTYPES[dtype][1]).reshape(4, 5, 6)
    array = make(whole)
    made = kernels("materialize", Tensor.of(kernels.host, array, dtype))
    assert made.dtype == dtype and made.array.flags.c_contiguous and not np.shares_memory(made.array, whole)
    np.testing.assert_array_equal(made.array, array)


# Attention by position


def by_position(kernels: KernelLibrary, q, k, v, positions, scale: float) -> np.ndarray:
    """What the kernel that takes positions in place of a mask gives, ``[H, M, D]``."""
    taken = [Tensor.of(kernels.host, value.numpy()) for value in (q, k, v, positions)]
    return kernels("sdpa_midm", *taken, float(scale)).array[0]


@pytest.mark.parametrize(("length", "last"), [(64, 0), (300, 63), (513, 255), (513, 256), (700, 699)])
def test_positions_give_the_bits_of_their_mask(kernels, length, last):
    for m in (1, 2, 5, 16):
        q, k, v, _ = problem(4, 2, m, length, 32, seed=m)
        positions = torch.arange(m).flip(0) * 7 % (last + 1)  # in no order
        positions[m // 2] = last
        mask = positions[:, None] >= torch.arange(length)
        want = attention(kernels, q, k, v, mask, 0.3)
        assert by_position(kernels, q, k, v, positions, 0.3).tobytes() == want.tobytes()
        k[:, :, last + 1 :], v[:, :, last + 1 :] = float("nan"), float("inf")  # rows that nobody has written yet
        assert by_position(kernels, q, k, v, positions, 0.3).tobytes() == want.tobytes()
        reference = torch.ops.eyas.sdpa_midm(q, k, v, positions, 0.3)[0]
        np.testing.assert_allclose(want, reference.numpy(), atol=2e-5)


def test_positions_past_the_cache_are_an_error(kernels):
    q, k, v, _ = problem(2, 1, 1, 64, 16)
    with pytest.raises(RuntimeError, match="sdpa_midm"):
        by_position(kernels, q, k, v, torch.tensor([64]), 1.0)


# Vector functions

HARNESS = """
#include <immintrin.h>
#define APPLY(name) \\
  extern "C" __m256 name(__m256); \\
  extern "C" void apply_##name(const float* in, float* out, long n) { \\
    for (long i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, name(_mm256_loadu_ps(in + i))); \\
  }
APPLY(Sleef_expf8_u10) APPLY(Sleef_tanhf8_u10) APPLY(Sleef_sinf8_u10) APPLY(Sleef_sinf8_u35)
APPLY(Sleef_cosf8_u10) APPLY(Sleef_cosf8_u35)
"""


@pytest.fixture(scope="module")
def functions(libraries, kernels, tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "harness.cpp").write_text(HARNESS)
    command = [compiler(), *FLAGS, "-shared", str(folder / "harness.cpp"), str(libraries.kernels)]
    subprocess.run([*command, f"-Wl,-rpath,{libraries.folder}", "-o", str(folder / "harness.so")], check=True)
    return ctypes.CDLL(str(folder / "harness.so"))


def apply(functions: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(x) // 8) * 8, np.float32)
    padded[: len(x)] = x
    out = np.empty_like(padded)
    pointers = (array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (padded, out))
    getattr(functions, f"apply_{name}")(*pointers, ctypes.c_long(len(padded)))
    return out[: len(x)]


def ulps(got: np.ndarray, want: np.ndarray) -> float:
    """Largest distance from the float64 value, in units of the last place of float32 at it."""
    spacing = np.maximum(np.spacing(np.abs(want).astype(np.float32)).astype(np.float64), np.float64(2.0**-149))
    return float(np.max(np.abs(got.astype(np.float64) - want) / spacing))


def spread(low: float, high: float, n: int = 200_000) -> np.ndarray:
    generator = np.random.default_rng(0)
    both = [generator.uniform(low, high, n), generator.uniform(-1, 1, n) * 10.0 ** generator.uniform(-30, 0, n)]
    return np.clip(np.concatenate(both), low, high).astype(np.float32)


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="these functions are for AVX2")
@pytest.mark.parametrize(
    ("name", "function", "low", "high", "bound"),
    [
        ("Sleef_expf8_u10", np.exp, -104, 89, 1.0),
        ("Sleef_tanhf8_u10", np.tanh, -20, 20, 1.5),
        ("Sleef_sinf8_u10", np.sin, -131072, 131072, 2.0),
        ("Sleef_cosf8_u10", np.cos, -131072, 131072, 2.0),
        ("Sleef_sinf8_u35", np.sin, -10, 10, 2.0),
        ("Sleef_cosf8_u35", np.cos, -10, 10, 2.0),
    ],
)
def test_vector_functions_against_float64(functions, name, function, low, high, bound):
    x = spread(low, high)
    with np.errstate(over="ignore"):
        want = function(x.astype(np.float64))
        finite = np.abs(want) <= np.finfo(np.float32).max
        got = apply(functions, name, x)
    assert ulps(got[finite], want[finite]) <= bound
    assert np.isinf(got[~finite]).all()
