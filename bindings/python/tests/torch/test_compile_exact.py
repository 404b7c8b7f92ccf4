"""`torch.compile(backend="halcyon")`: calls of which a result could be wrong without an error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import halcyon.torch.compile as backend  # noqa: E402
from compiling import compiled, fresh, on_halcyon  # noqa: E402, F401
from halcyon.torch.compile.table import ROWS as ROWS_OF_OPS  # noqa: E402

F = torch.nn.functional
aten = torch.ops.aten


def same(f: Callable[..., Any], *args: Any) -> None:
    """The compiled function runs on Halcyon and gives what eager PyTorch gives, with its types."""
    torch._dynamo.reset()
    backend.reset_report()
    torch.testing.assert_close(compiled(f)(*args), f(*args), equal_nan=True)
    on_halcyon()


class Part(torch.nn.Module):
    """A module with a view of its memory as an attribute."""

    def __init__(self, full: Any, part: Any) -> None:
        super().__init__()
        self.full, self.part = full, part

    def forward(self, x: Any) -> Any:
        return (self.part * x).sum(0)


def test_an_attribute_that_grows_over_the_same_memory() -> None:
    full = torch.arange(64.0).reshape(16, 4)
    m = Part(full, full[:4])
    g, x = compiled(m), torch.ones(4)
    for n in (4, 6, 8, 5):
        m.part = full[:n]
        assert torch.equal(g(x), m(x)), n
    on_halcyon()


def test_an_attribute_with_other_strides_over_the_same_memory() -> None:
    full = torch.arange(64.0).reshape(8, 8)
    m = Part(full, full)
    g, x = compiled(m), torch.arange(8.0)
    for view in (full, full.t(), full.view(8, 8), torch._neg_view(full), full):
        m.part = view
        assert torch.equal(g(x), m(x))


@pytest.mark.parametrize("freeze", ["checked", "trusted"])
def test_constants_of_other_views_of_the_same_memory(freeze: str) -> None:
    full = torch.randn(64 * 40)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = full[: 40 * 32].view(40, 32)

        def forward(self, x: Any) -> Any:
            return x @ self.weight

    own = Product()
    g, x = compiled(own, options={"freeze": freeze}), torch.randn(40, 40)
    with torch.no_grad():
        for step in range(12):
            if step >= 3:
                own.weight = full[: 40 * (32 + 8 * (step // 3))].view(40, -1)
            torch.testing.assert_close(g(x), own(x), rtol=1e-4, atol=1e-4)


def test_weights_that_were_made_in_inference_mode() -> None:
    with torch.inference_mode():
        m = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    assert m[0].weight.is_inference()
    g, x = compiled(m, options={"freeze": "trusted"}), torch.randn(1, 3, 12, 12)
    with torch.inference_mode():
        for step in range(12):
            torch.testing.assert_close(g(x), m(x), rtol=1e-4, atol=1e-5)
            if step == 3:
                m[0].weight.mul_(1.5)
    on_halcyon()


# Sizes that change.


def test_results_that_are_not_row_major_keep_their_sizes_dynamic() -> None:
    def f(x: Any) -> Any:
        return (x * 2).t()

    g = compiled(f, dynamic=True)
    for n in range(3, 15):
        x = torch.randn(n, n + 20)
        own = g(x)
        assert torch.equal(own, f(x)) and own.stride() == f(x).stride()
    on_halcyon(1)
    torch._dynamo.reset()
    x = torch.randn(5, 7)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(compiled(f)(x), f(x))


def test_inputs_that_are_not_row_major_keep_their_sizes_dynamic() -> None:
    def f(x: Any, y: Any) -> Any:
        return x * 2 + y, (x.transpose(1, 2) @ x).sin()

    g = compiled(f, dynamic=True)
    for n in range(3, 10):
        x, y = torch.randn(n, 4, n + 2).permute(2, 0, 1), torch.randn(n + 2, n, 4)
        torch.testing.assert_close(g(x, y), f(x, y), rtol=1e-4, atol=1e-4)
        for a, b in zip(g(x, y), f(x, y), strict=True):
            assert a.stride() == b.stride()
    on_halcyon(1)


def test_gradients_through_transposed_values_keep_their_sizes_dynamic() -> None:
    def f(x: Any, w: Any) -> Any:
        h = (x @ w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return (h.softmax(-1) @ h.transpose(-1, -2)).sin()

    g = compiled(f, dynamic=True)
    for n in (3, 5, 7, 9):
        found = []
        for h in (g, f):
            torch.manual_seed(n)
            x, w = torch.randn(n, n + 2, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
            h(x, w).square().sum().backward()
            found.append([x.grad, w.grad])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    on_halcyon(2)


def test_constants_of_dynamic_sizes_add_no_guard() -> None:
    full = torch.randn(4096, 64)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = full[:40]

        def forward(self, x: Any) -> Any:
            return x @ self.weight.t()

    m = Product()
    g, x = compiled(m, dynamic=True), torch.randn(40, 64)
    with torch.no_grad():
        for n in (40, 48, 2000):
            m.weight = full[:n]
            torch.testing.assert_close(g(x), m(x), rtol=1e-4, atol=1e-4)
    assert len(backend.report().graphs) <= 2 and not backend.report().fallbacks


# Indices.

ROWS = torch.arange(12.0).reshape(4, 3)
NEGATIVE = {
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(2, 3)),
    "gather of a scalar": lambda x, i: x.sum().gather(0, i[0]),
    "embedding": lambda x, i: F.embedding(i, x),
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(2, 3), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(2, 3), x * 2),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None].expand(2, 3), x * 2, "amax"),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
    "nll_loss": lambda x, i: F.nll_loss(x[:2], i),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", NEGATIVE)
def test_a_negative_index_is_an_error_where_it_is_one_in_pytorch(name: str, dtype: Any) -> None:
    f = NEGATIVE[name]
    good, bad = torch.tensor([0, 0], dtype=dtype), torch.tensor([-1, 0], dtype=dtype)
    try:
        want = f(ROWS, good)
    except RuntimeError:
        pytest.skip("PyTorch does not take this type")
    with pytest.raises((IndexError, RuntimeError)):
        f(ROWS, bad)
    g = compiled(f)
    torch.testing.assert_close(g(ROWS, good), want)
    with pytest.raises(IndexError):
        g(ROWS, bad)
    on_halcyon()


def test_a_negative_index_counts_from_the_end_where_it_does_in_pytorch() -> None:
    i = torch.tensor([-1, 0, -4])
    columns = torch.tensor([[-1], [0], [-3], [1]])
    same(lambda x, i: (x[i], x[:, i % 3 - 3], x[i, i % 3 - 1]), ROWS, i)
    same(lambda x, i: (x.take(i), x.put(i, x.sum().expand(3)), x.index_fill(0, i, 9.0)), ROWS, i)
    same(lambda x, i: x.index_put([i], x[:1], accumulate=True), ROWS, i)
    same(lambda x, i: x.take_along_dim(i, 1), ROWS, columns)


@pytest.mark.parametrize("wrong", [-1, 16])
def test_an_index_outside_of_an_unpooled_plane_is_an_error(wrong: int) -> None:
    def f(x: Any, i: Any) -> Any:
        return F.max_unpool2d(x, i, 2)

    x, i = F.max_pool2d(torch.randn(2, 3, 4, 4), 2, return_indices=True)
    same(f, x, i)
    same(lambda x, i: F.max_unpool3d(x[:, None], i[:, None], (1, 2, 2)), x, i)
    i[1, 1, 0, 0] = wrong
    with pytest.raises(RuntimeError, match="invalid max index"):
        f(x, i)
    with pytest.raises(IndexError):
        compiled(f)(x, i)


def test_ignored_targets_may_be_negative() -> None:
    def f(x: Any, t: Any) -> Any:
        return F.cross_entropy(x, t)

    target, grads = torch.tensor([1, -100, 0, -100]), []
    for h in (compiled(f), f):
        x = ROWS.sin().requires_grad_()
        h(x, target).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    on_halcyon()


def test_bytes_as_an_index_are_a_mask_and_fall_back() -> None:
    def f(x: Any, m: Any, new: Any) -> Any:
        return x.index_put([m], new)

    mask = torch.tensor([0, 1, 0, 2], dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = torch.tensor([5.0, 6.0])
        assert compiled(f)(torch.zeros(4), mask, new).tolist() == [0, 5, 0, 6]
        # Some versions of PyTorch refuse a single number.
        try:
            want = f(torch.zeros(4), mask, torch.tensor(5.0))
        except RuntimeError:
            with pytest.raises(RuntimeError, match="boolean masks"):
                compiled(f)(torch.zeros(4), mask, torch.tensor(5.0))
        else:
            assert torch.equal(compiled(f)(torch.zeros(4), mask, torch.tensor(5.0)), want)
    assert "an index that is a mask" in str(backend.report())


def test_a_mask_of_other_sizes_is_an_error() -> None:
    def f(x: Any, m: Any) -> Any:
        return x.index_put([m], torch.tensor(5.0))

    with pytest.raises(IndexError), pytest.warns(backend.FallbackWarning):
        compiled(f)(torch.zeros(4), torch.tensor([True]))


# Reductions and pools.


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", ["any", "all"])
def test_a_reduction_over_no_axes(name: str, keepdim: bool) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, 4.0]])
    f = getattr(torch, name)
    same(lambda x: (f(x, dim=(), keepdim=keepdim), f(x, dim=(0,), keepdim=keepdim)), x)
    same(lambda x: (f(x), f(x, dim=(0, 1), keepdim=keepdim), f(x, 1, keepdim)), x)


def test_a_result_of_another_shape_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that reduces too much must not have its result repeated."""
    monkeypatch.setitem(ROWS_OF_OPS, aten.sum.dim_IntList, lambda c, x, *_: c.done(x.sum([0, 1])))
    x = torch.ones(2, 3)
    with pytest.warns(backend.FallbackWarning, match="instead of f32"):
        assert compiled(lambda x: x.sum(1))(x).tolist() == [3, 3]


@pytest.mark.parametrize("size", [(3, 4), (7, 11), (5, 2), (1, 1), (10, 3)])
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_adaptive_pools_spread_nothing_beyond_their_windows(size: tuple[int, int], value: float) -> None:
    x = torch.randn(2, 3, 7, 8)
    x[0, 1, 2, 3] = value
    same(lambda x: F.adaptive_avg_pool2d(x, size), x)
    same(lambda x: F.adaptive_avg_pool3d(x, (2, *size)), x)
    same(lambda x: F.adaptive_max_pool2d(x, size), x)
    grads = []
    for h in (compiled(lambda x: F.adaptive_avg_pool2d(x, size)), lambda x: F.adaptive_avg_pool2d(x, size)):
        own = torch.randn(2, 3, 7, 8).requires_grad_()
        torch.manual_seed(1)
        g = torch.randn(2, 3, *size)
        g[1, 2, 0, 0] = value
        h(own).backward(g)
        grads.append(own.grad)
    torch.testing.assert_close(*grads, equal_nan=True)


# Views.


def test_strided_views_beyond_the_tensor_fall_back() -> None:
    def read(x: Any) -> Any:
        return torch.as_strided(x, (2, 4), (4, 1)) * 2

    def write(x: Any) -> Any:
        return torch.as_strided_scatter(x, torch.ones(2, 2), (2, 2), (2, 1))

    full = torch.arange(12.0)
    same(read, full)
    same(write, full)
    for f, x in ((read, full[:6]), (write, full[:3])):
        torch._dynamo.reset()
        backend.reset_report()
        with pytest.warns(backend.FallbackWarning, match="outside of the tensor"):
            assert torch.equal(compiled(f)(x), f(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_addcdiv_with_a_value_is_rounded_once(dtype: torch.dtype) -> None:
    f = compiled(lambda x, a, b: torch.addcdiv(x, a, b, value=2.5))
    for _ in range(3):
        a, b = torch.randn(512, dtype=dtype), torch.rand(512, dtype=dtype) + 0.5
        # The sum cancels, so that the rounding of its parts would show.
        x = -2.5 * a / b
        torch.testing.assert_close(f(x, a, b), torch.addcdiv(x, a, b, value=2.5), rtol=1e-2, atol=1e-5)
    on_halcyon(1)
    # Three calls are rounded three times, also if each is in the other.
    parts = lambda x, a, b: torch.add(x, torch.mul(torch.div(a, b), 2.5))  # noqa: E731
    allowed = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(compiled(parts)(x, a, b), parts(x, a, b), rtol=0.0, atol=allowed)
