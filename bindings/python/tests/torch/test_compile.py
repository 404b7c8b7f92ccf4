"""`torch.compile(backend="halcyon")`: graphs, gradients, mutation, views, sizes, weights, random numbers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import halcyon.torch.compile as backend  # noqa: E402
from compiling import compiled, fresh, on_halcyon  # noqa: E402, F401
from halcyon import ArgumentError  # noqa: E402

F = torch.nn.functional


def close(a: Any, b: Any, **tolerance: float) -> None:
    torch.testing.assert_close(a, b, **tolerance)


def test_inference_and_gradients() -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return F.gelu(x @ w + b).sum(-1), F.softmax(x, 0).t()

    g = compiled(f)
    given = [torch.randn(8, 16), torch.randn(16, 4), torch.randn(4)]
    with torch.no_grad():
        close(g(*given), f(*given))
    own = [t.clone().requires_grad_() for t in given]
    other = [t.clone().requires_grad_() for t in given]
    for h, args in ((g, own), (f, other)):
        a, b = h(*args)
        (a.sin().sum() + b.cos().sum()).backward()
    close([t.grad for t in own], [t.grad for t in other])
    on_halcyon(3)


def test_results_have_the_strides_of_eager() -> None:
    def f(x: Any) -> Any:
        return (x * 2).permute(2, 0, 1), (x + 1).transpose(0, 1).contiguous(), x.sum((0, 1))

    x = torch.randn(2, 3, 4)
    for a, b in zip(compiled(f)(x), f(x), strict=True):
        assert a.stride() == b.stride()
        close(a, b)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        a, b = compiled(conv)(image), conv(image)
    assert a.stride() == b.stride()
    close(a, b, rtol=1e-4, atol=1e-5)
    on_halcyon()


def test_results_share_no_memory() -> None:
    def f(x: Any) -> Any:
        return x + 1, x + 1, (x + 1).view(-1), x.view(-1)

    x = torch.arange(6.0).reshape(2, 3)
    a, b, c, d = compiled(f)(x)
    a.zero_()
    close(b, torch.arange(6.0).reshape(2, 3) + 1)
    close(c, torch.arange(6.0) + 1)
    # A view of an input stays one.
    d.fill_(9)
    close(x, torch.full((2, 3), 9.0))


def test_inputs_that_are_written() -> None:
    def f(x: Any, y: Any) -> Any:
        x.add_(1)
        x[:, 1] = y
        return x * 2

    x, y, x2 = torch.randn(3, 4), torch.randn(3), None
    x2 = x.clone()
    close(compiled(f)(x, y), f(x2, y))
    close(x, x2)
    on_halcyon()


def test_running_statistics_of_batch_normalisation() -> None:
    own = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.ReLU())
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.ReLU())
    other.load_state_dict(own.state_dict())
    g = compiled(own)
    for _ in range(3):
        x = torch.randn(4, 3, 9, 9)
        for h in (g, other):
            h(x).square().mean().backward()
    close(dict(own.named_buffers()), dict(other.named_buffers()))
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    own.eval()
    other.eval()
    with torch.no_grad():
        close(g(x), other(x), rtol=1e-4, atol=1e-5)
    on_halcyon()


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_convolutions(stride: int, transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    conv = kind(4, 6, (3, 4), stride=(stride, 2), padding=1, groups=2)
    own, other = (torch.randn(2, 4, 11, 9).requires_grad_() for _ in range(2))
    with torch.no_grad():
        other.copy_(own)
    found = []
    for h, x in ((compiled(conv), own), (conv, other)):
        conv.zero_grad()
        h(x).sin().sum().backward()
        found.append([x.grad, conv.weight.grad.clone(), conv.bias.grad.clone()])
    close(*found, rtol=1e-4, atol=1e-4)
    on_halcyon()


def test_sizes_that_change() -> None:
    def f(x: Any) -> Any:
        return F.softmax(x.reshape(x.shape[0] * 2, -1), -1) * x.shape[0], x.shape[1]

    g = compiled(f, dynamic=True)
    for n, m in ((4, 6), (5, 8), (7, 2), (4, 6)):
        x = torch.randn(n, m, requires_grad=True)
        (a, k), (b, j) = g(x), f(x)
        close(a, b)
        assert k == j
        a.square().sum().backward()
        own, x.grad = x.grad, None
        b.square().sum().backward()
        close(own, x.grad)
    on_halcyon()
    assert len(backend.report().graphs) <= 4, "a graph for each size"


def test_an_unsupported_operation_falls_back_with_its_graph() -> None:
    def f(x: Any) -> Any:
        return torch.fft.rfft(x).abs().sum() + x.sum()

    x = torch.randn(8)
    g = compiled(f)
    with pytest.warns(backend.FallbackWarning, match=r"_fft_r2c"):
        close(g(x), f(x))
    assert "aten._fft_r2c.default" in backend.report().unsupported
    assert "in eager PyTorch" in str(backend.report())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The same operations are not reported again.
        torch._dynamo.reset()
        close(compiled(f)(x), f(x))


def test_what_a_row_refuses_falls_back() -> None:
    conv, empty = torch.nn.Conv1d(4, 3, 1), torch.randn(0, 4, 5)
    with torch.no_grad(), pytest.warns(backend.FallbackWarning, match="empty"):
        close(compiled(conv)(empty), conv(empty))


def test_a_graph_that_autograd_refuses_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no split")

    monkeypatch.setattr("halcyon.torch.compile.aot.partition", refuse)
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(backend.FallbackWarning, match="no split"):
        y = compiled(torch.sin)(x)
    y.sum().backward()
    close(x.grad, x.detach().cos())
    assert backend.report().unsupported == {"AOTAutograd": "NotImplementedError: no split"}


def test_operations_on_complex_numbers_fall_back() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    with pytest.warns(backend.FallbackWarning, match="complex"):
        compiled(lambda a, b: torch.view_as_real(torch.complex(a, b)).sum())(x, y).backward()
    close(x.grad, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_ends_of_logspace_are_rounded(dtype: Any) -> None:
    def f(a: Any) -> Any:
        return torch.logspace(a, -3, 7, dtype=dtype), torch.logspace(-2, a, 50, 2.3, dtype=dtype)

    # Rounding an exponent or the base to bf16 would change the numbers by more than one unit.
    unit = torch.finfo(dtype).eps
    tolerance = {"rtol": unit if unit > 1e-4 else 1e-5, "atol": 0.0}
    for own, eager in zip(compiled(f)(torch.tensor(4.3)), f(4.3), strict=True):
        close(own, eager, **tolerance)
        assert (own == eager).double().mean() > 0.9 or dtype == torch.float32
    on_halcyon()


def test_an_index_out_of_range_is_an_error() -> None:
    table = torch.nn.Embedding(10, 4)
    g = compiled(table)
    with torch.no_grad():
        close(g(torch.tensor([1, 2])), table(torch.tensor([1, 2])))
        with pytest.raises(IndexError):
            g(torch.tensor([1, 11]))
    on_halcyon()


def test_random_numbers_follow_the_seed() -> None:
    def f(x: Any) -> Any:
        return F.dropout(x, 0.25, training=True)

    g, x = compiled(f), torch.ones(40000, requires_grad=True)
    torch.manual_seed(5)
    a = g(x)
    b = g(x)
    torch.manual_seed(5)
    c = g(x)
    assert torch.equal(a, c) and not torch.equal(a, b)
    kept = a.ne(0)
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    close(a[kept], torch.full((int(kept.sum()),), 1 / 0.75))
    # The gradient has the mask of the forward.
    c.sum().backward()
    assert torch.equal(x.grad.ne(0), c.ne(0))
    on_halcyon()


def test_normal_numbers_have_their_moments() -> None:
    x = compiled(lambda: torch.randn(200000) * 2 + 1)()
    assert abs(x.mean().item() - 1) < 0.03 and abs(x.std().item() - 2) < 0.03
    u = compiled(lambda: torch.rand(200000, dtype=torch.float16))()
    assert u.dtype == torch.float16 and 0 <= u.min() and u.max() < 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(dtype: str) -> None:
    d = getattr(torch, dtype)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 3)).to(d)
    x = torch.randn(5, 16, dtype=d)
    with torch.no_grad():
        close(compiled(model)(x), model(x), rtol=2e-2, atol=2e-2)
    on_halcyon()


def test_autocast() -> None:
    model, x = torch.nn.Linear(16, 32), torch.randn(5, 16)
    g = compiled(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        a, b = g(x), model(x)
    assert a.dtype == torch.bfloat16
    close(a, b, rtol=2e-2, atol=2e-2)
    on_halcyon()


class TestWeights:
    """Weights of convolutions are constants of inference plans, and never stale."""

    def model(self) -> Any:
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)
        ).eval()

    @pytest.mark.parametrize("freeze", ["checked", "trusted", "off"])
    def test_changes_are_seen(self, freeze: str) -> None:
        m, x = self.model(), torch.randn(1, 3, 16, 16)
        g = compiled(m, options={"freeze": freeze})
        with torch.no_grad():
            for step in range(16):
                close(g(x), m(x), rtol=1e-4, atol=1e-5)
                if step == 3:
                    m[0].weight.mul_(1.5)
                elif step == 4:
                    m[1].running_mean.add_(0.5)
                elif step == 5:
                    m[3].weight = torch.nn.Parameter(torch.randn_like(m[3].weight))
                elif step == 6:
                    m[3].bias[1] = 7.0
        on_halcyon()

    def test_a_write_without_a_new_version_is_seen(self) -> None:
        m, x = self.model(), torch.randn(1, 3, 16, 16)
        g = compiled(m)
        with torch.no_grad():
            close(g(x), m(x), rtol=1e-4, atol=1e-5)
            before = m[0].weight._version
            m[0].weight.data[1, 2, 0, 1] = 3.0
            assert m[0].weight._version == before
            close(g(x), m(x), rtol=1e-4, atol=1e-5)
            m[0].weight.data.neg_()
            close(g(x), m(x), rtol=1e-4, atol=1e-5)

    def test_weights_of_products_are_never_stale(self) -> None:
        m = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.GELU(), torch.nn.Linear(300, 8)).eval()
        g, x = compiled(m), torch.randn(40, 300)
        with torch.no_grad():
            for step in range(16):
                close(g(x), m(x), rtol=1e-4, atol=1e-5)
                if step == 3:
                    m[0].weight.data.mul_(1.5)
                elif step == 4:
                    m[2].weight.detach().numpy()[3, 5] = 2.0
                elif step == 12:
                    m[0].weight.detach().numpy()[299, 299] = 4.0
        on_halcyon()

    @pytest.mark.parametrize(
        ("rows", "mode", "want"), [(40, "checked", 2), (4, "checked", 0), (4, "trusted", 2)]
    )
    def test_products_of_few_rows_have_no_constants(self, rows: int, mode: str, want: int) -> None:
        from halcyon.torch.compile import freeze
        from torch.fx.experimental.proxy_tensor import make_fx

        def f(w: Any, b: Any, x: Any) -> Any:
            return torch.nn.functional.linear(x, w, b)

        gm = make_fx(f, tracing_mode="fake")(torch.randn(300, 300), torch.randn(300), torch.randn(rows, 300))
        assert len(freeze.candidates(gm, [0, 1], mode)) == want
        assert freeze.candidates(gm, [0, 1], "off") == []

    def test_checked_makes_no_large_copies(self, monkeypatch: Any) -> None:
        from halcyon.torch.compile import freeze
        from torch.fx.experimental.proxy_tensor import make_fx

        gm = make_fx(torch.mm, tracing_mode="fake")(torch.randn(40, 300), torch.randn(300, 300))
        assert freeze.candidates(gm, [1], "checked") == [1]
        monkeypatch.setattr(freeze, "_LARGEST", 300 * 300 * 4 - 1)
        assert freeze.candidates(gm, [1], "checked") == []
        assert freeze.candidates(gm, [1], "trusted") == [1]

    def test_training_between_evaluations(self) -> None:
        m, x = self.model(), torch.randn(2, 3, 16, 16)
        g = compiled(m)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            m.train()
            optimizer.zero_grad()
            g(x).square().mean().backward()
            optimizer.step()
            m.eval()
            with torch.no_grad():
                close(g(x), m(x), rtol=1e-4, atol=1e-5)
        on_halcyon()

    def test_fingerprints_differ(self) -> None:
        from halcyon import _native
        from halcyon.torch.compile.aot import open_backend

        rng = torch.Generator().manual_seed(1)
        w = torch.randn(700_001, generator=rng)
        weights = _native.Weights(open_backend(None, 2), [torch._C._to_dlpack(w)])
        seen = {weights.fingerprint(1)}
        assert weights.fingerprint(2) in seen, "the number of threads matters"
        for k in range(60):
            at = int(torch.randint(w.numel(), (), generator=rng))
            w[at] = -w[at]
            if k % 2:
                w[at ^ 1] = -w[at ^ 1]
            assert weights.fingerprint(1 + k % 3) not in seen
            seen.add(weights.fingerprint(1))
        for a, b in ((0, 1), (0, 2), (0, 24), (5, 700_000), (699_999, 700_000), (100, 131_172)):
            w[[a, b]] = w[[b, a]]
            assert weights.fingerprint(1) not in seen
            seen.add(weights.fingerprint(1))
        w.neg_()
        assert weights.fingerprint(1) not in seen


def test_parameters_that_are_not_aligned() -> None:
    flat = torch.randn(41)
    m = torch.nn.Linear(8, 5, bias=False)
    m.weight = torch.nn.Parameter(flat[1:].view(5, 8))
    g, x = compiled(m), torch.randn(2, 8)
    with torch.no_grad():
        close(g(x), m(x))
        m.weight.mul_(2)
        close(g(x), m(x))
    on_halcyon()


def test_options_are_checked() -> None:
    for wrong in ({"fast": True}, {"freeze": "sometimes"}):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=str(next(iter(wrong)))) as e:
            compiled(lambda x: x + 1, options=wrong)(torch.ones(2))
        assert isinstance(e.value.inner_exception, ArgumentError)


def test_attention_with_masks() -> None:
    def f(q: Any, k: Any, v: Any, m: Any) -> Any:
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, attn_mask=m),
            F.scaled_dot_product_attention(q, k, v, attn_mask=m.float(), scale=0.3),
        )

    mask = torch.rand(2, 1, 7, 7) > 0.3
    mask[..., 0] = True
    found = []
    for h in (compiled(f), f):
        torch.manual_seed(2)
        args = [torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3)]
        out = h(*args, mask)
        sum(o.sin().sum() for o in out).backward()
        found.append([*out, *[a.grad for a in args]])
    close(*found, rtol=1e-4, atol=1e-5)
    on_halcyon()


def test_a_query_that_sees_no_key() -> None:
    def f(q: Any, m: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m)

    q, m = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    m[2] = False
    close(compiled(f)(q, m), f(q, m), equal_nan=True)
    on_halcyon()


def test_an_optimizer_step() -> None:
    own = [torch.nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    other = [torch.nn.Parameter(p.detach().clone()) for p in own]
    a, b = torch.optim.AdamW(own, lr=0.05), torch.optim.AdamW(other, lr=0.05)
    step = compiled(a.step)
    for k in range(4):
        for p, q in zip(own, other, strict=True):
            p.grad = torch.randn(4, 3) * (k + 1)
            q.grad = p.grad.clone()
        step()
        b.step()
    close(own, other)
    on_halcyon()


def test_graph_breaks() -> None:
    def f(x: Any) -> Any:
        y = x.sin()
        if y.sum() > 0:
            return y * 2
        return y - 1

    g = compiled(f)
    for s in (1.0, -1.0):
        x = torch.full((3,), s, requires_grad=True)
        close(g(x), f(x))
    on_halcyon()


def test_threads() -> None:
    m = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    g, wrong = compiled(m), []
    with torch.no_grad():
        g(torch.randn(1, 3, 8, 8))

        def run(k: int) -> None:
            torch.manual_seed(k)
            for _ in range(20):
                x = torch.randn(1, 3, 8, 8)
                with torch.no_grad():
                    if not torch.allclose(g(x), m(x), rtol=1e-4, atol=1e-5):
                        wrong.append(k)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


def test_constants_of_the_graph() -> None:
    table = torch.arange(12.0).reshape(3, 4)

    def f(x: Any) -> Any:
        return x @ table + torch.tensor([1.0, 2.0, 3.0, 4.0])

    x = torch.randn(2, 3)
    close(compiled(f)(x), f(x))
    on_halcyon()


def test_memory_is_returned() -> None:
    from halcyon.torch.compile.aot import open_backend

    def f(x: Any) -> Any:
        return (x * 2).relu() + 1

    g, x = compiled(f), torch.randn(1 << 16)
    native = open_backend(None, torch.get_num_threads())
    for _ in range(3):
        g(x)
    before = native.memory()["allocated"]
    for _ in range(200):
        g(x)
    assert native.memory()["allocated"] <= before + 4 * x.numel()
