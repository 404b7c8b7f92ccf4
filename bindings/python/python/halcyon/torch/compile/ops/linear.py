"""Matrix products, convolutions and attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from halcyon import _native
from halcyon.torch.compile.ops.reduce import log_sum_exp
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Value, concat

__all__: list[str] = []

_ops = _native.ops


def product(c: Call, a: Value, b: Value) -> Value:
    """The matrix product of values of one type. A product with an empty inner axis is zero."""
    a, b = c.to(c.dtype(), a, b)
    if a.shape[-1] == 0 or a.size == 0 or b.size == 0:
        rows = a.shape[:-1]
        columns = b.shape[-1:] if b.ndim > 1 else ()
        return c.full([*rows, *columns], 0, a.dtype)
    return a.matmul(b)


@op("mm", "bmm", "mv")
def _matmul(c: Call, a: Value, b: Value) -> Value:
    return product(c, a, b)


@op("dot", "vdot")
def _dot(c: Call, a: Value, b: Value) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done((x * y).sum([0]))


def _added(c: Call, bias: Value, made: Value, beta: Number, alpha: Number) -> Value:
    made = made.cast(c.math())
    if alpha != 1:
        made = made * alpha
    if beta == 0:
        return c.done(made)
    extra = bias.cast(c.math())
    return c.done(made + (extra if beta == 1 else extra * beta))


@op("addmm", "baddbmm", "addmv")
def _addmm(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(c, bias, product(c, a, b), beta, alpha)


@op("addbmm")
def _addbmm(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(c, bias, product(c, a, b).cast(c.math()).sum([0]), beta, alpha)


@op("addr")
def _addr(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    x, y = c.to(c.math(), a, b)
    return _added(c, bias, x.unsqueeze(1) * y.unsqueeze(0), beta, alpha)


@op("outer", "ger")
def _outer(c: Call, a: Value, b: Value) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done(x.unsqueeze(1) * y.unsqueeze(0))


# Convolutions.


def _each(values: Sequence[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


class Convolution:
    """The attributes of a convolution over the axes from 2 on, each with an entry per axis."""

    __slots__ = ("dilation", "groups", "padding", "stride")

    def __init__(
        self, n: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation = _each(stride, n), _each(padding, n), _each(dilation, n)
        self.groups = groups

    @property
    def native(self) -> tuple[list[int], list[tuple[int, int]], list[int], list[int], int]:
        """The arguments of the native convolution."""
        pads = [(p, p) for p in self.padding]
        return self.stride, pads, self.dilation, [1] * len(self.stride), self.groups

    def forward(self, x: Value, w: Value) -> Value:
        """The convolution."""
        return Value(_ops.conv(x.t, w.t, *self.native))

    def weight_grad(self, x: Value, w: Value, dy: Value) -> Value:
        """The gradient of the weight."""
        return Value(_ops.conv_grad("weight", x.t, w.t, dy.t, *self.native))

    def input_grad(self, x: Value, w: Value, dy: Value) -> Value:
        """The gradient of the input, of which only the type counts: the transposed convolution of `dy`."""
        g, n = self.groups, len(self.stride)
        out, inner, *kernel = w.shape
        turned = w.reshape([g, out // g, inner, *kernel]).transpose(1, 2)
        turned = turned.reshape([g * inner, out // g, *kernel])
        if any(s > 1 for s in self.stride) and all(d == 1 for d in self.dilation):
            return self._by_phases(x, turned, dy)
        pads = []
        for axis, (s, p, d) in enumerate(zip(self.stride, self.padding, self.dilation, strict=True)):
            reach = (kernel[axis] - 1) * d
            pads.append((reach - p, x.shape[axis + 2] - 1 - (dy.shape[axis + 2] - 1) * s + p))
        turned = turned.flip(list(range(2, n + 2)))
        return Value(_ops.conv(dy.t, turned.t, [1] * n, pads, self.dilation, self.stride, g))

    def _by_phases(self, x: Value, turned: Value, dy: Value) -> Value:
        """The gradient for a stride, from one convolution for each remainder of a position.

        Positions of one remainder read the same taps of the weight, so `dy` need not be spread by zeros.
        """
        n = len(self.stride)
        counts = [-(-size // s) for size, s in zip(x.shape[2:], self.stride, strict=True)]
        parts: dict[tuple[int, ...], Value] = {}
        for phase in itertools.product(*[range(s) for s in self.stride]):
            parts[phase] = self._phase(phase, turned, dy, counts)
        # Interleaves the phases of one axis after the other, from the last one on.
        for axis in reversed(range(n)):
            joined = {}
            for rest in {p[:axis] for p in parts}:
                keys = [(*rest, r) for r in range(self.stride[axis])]
                group = [parts[k].unsqueeze(axis + 3) for k in keys]
                one = concat(group, axis + 3)
                shape = list(group[0].squeeze(axis + 3).shape)
                shape[axis + 2] *= self.stride[axis]
                joined[rest] = one.reshape(shape)
            parts = joined
        made = parts[()]
        for axis, size in enumerate(x.shape[2:]):
            made = made.slice(axis + 2, 0, size)
        return made

    def _phase(self, phase: Sequence[int], w: Value, dy: Value, counts: Sequence[int]) -> Value:
        """The positions `m * stride + phase` of the gradient, for `m` up to `counts`."""
        pads = []
        for axis, (r, s, p) in enumerate(zip(phase, self.stride, self.padding, strict=True)):
            first = (r + p) % s
            taps = -(-(w.shape[axis + 2] - first) // s)
            if taps <= 0:
                return dy.full([dy.shape[0], w.shape[0], *counts], 0)
            w = w.slice(axis + 2, first, taps, s) if s > 1 else w
            low = taps - 1 - (r + p - first) // s
            pads.append((low, counts[axis] + taps - 1 - dy.shape[axis + 2] - low))
        n = len(pads)
        w = w.flip(list(range(2, n + 2)))
        return Value(_ops.conv(dy.t, w.t, [1] * n, pads, [1] * n, [1] * n, self.groups))


def _refuse_empty(*values: Sequence[int]) -> None:
    if any(0 in v for v in values):
        raise Unsupported("a convolution of an empty tensor")


@op("convolution", "_convolution")
def _convolution(
    c: Call,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: bool,
) -> Value:
    conv = Convolution(w.ndim - 2, stride, padding, dilation, groups)
    _refuse_empty(x.shape, w.shape, c.shape())
    y = conv.input_grad(c.full(c.shape(), 0, x.dtype), w, x) if transposed else conv.forward(x, w)
    if bias is None:
        return y
    shape = [1, bias.shape[0], *[1] * (x.ndim - 2)]
    return c.done(y.cast(c.math()) + bias.cast(c.math()).reshape(shape))


@op("convolution_backward")
def _convolution_backward(
    c: Call,
    grad: Value,
    x: Value,
    w: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    conv = Convolution(w.ndim - 2, stride, padding, dilation, groups)
    _refuse_empty(x.shape, w.shape, grad.shape)
    made: list[Value | None] = [None, None, None]
    if mask[0]:
        dx = conv.forward(grad, w) if transposed else conv.input_grad(x, w, grad)
        for axis, size in enumerate(x.shape[2:]):
            # Output padding may leave room for more positions than the input had.
            dx = dx.slice(axis + 2, 0, size)
        made[0] = dx
    if mask[1] and transposed:
        room = conv.forward(grad, w).shape
        more = [a - b for a, b in zip(room[2:], x.shape[2:], strict=True)]
        made[1] = conv.weight_grad(grad, w, x.pad([0] * x.ndim, [0, 0, *more], 0))
    elif mask[1]:
        made[1] = conv.weight_grad(x, w, grad)
    if mask[2]:
        wide = grad.cast("f32") if grad.dtype in ("f16", "bf16") else grad
        made[2] = wide.sum([0, *range(2, grad.ndim)]).cast(grad.dtype)
    return tuple(made)


# Attention.


def _additive(mask: Value, dtype: str) -> Value:
    """The mask as numbers that are added to scores, with four axes."""
    if mask.dtype == "bool":
        mask = mask.where(mask.full([], False).cast(dtype), -math.inf)
    return mask.cast(dtype).reshape([*[1] * (4 - mask.ndim), *mask.shape])


def _sees(bias: Value) -> Value:
    """Which queries see a key at all."""
    return bias.ne(-math.inf).reduce("max", [3], True)


def causal_mask(like: Value, queries: int, keys: int) -> Value:
    """Which keys a query sees: PyTorch aligns the first query with the first key."""
    row, column = like.iota("i64", [queries, keys], 0), like.iota("i64", [queries, keys], 1)
    return column <= row


def _scores(q: Value, k: Value, mask: Value | None, causal: bool, scale: float) -> Value:
    """The scores of queries and keys, masked, in f32 or f64."""
    wide = "f32" if q.dtype in ("f16", "bf16") else q.dtype
    s = (q * scale).matmul(k.transpose(k.ndim - 1, k.ndim - 2)).cast(wide)
    if causal:
        s = causal_mask(s, q.shape[-2], k.shape[-2]).where(s, -math.inf)
    return s if mask is None else s + _additive(mask, wide)


def attention(
    c: Call, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float | None
) -> Value:
    """Scaled dot-product attention over `[batch, heads, positions, size]`."""
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise Unsupported("attention over empty tensors")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if causal and q.shape[-2] != k.shape[-2]:
        # The native mask is aligned with the last key.
        mask, causal = causal_mask(q, q.shape[-2], k.shape[-2]), False
    if mask is None:
        return Value(_ops.attention(q.t, k.t, v.t, None, causal, scale))
    bias = _additive(mask, q.dtype)
    seen = _sees(bias)
    out = Value(_ops.attention(q.t, k.t, v.t, seen.where(bias, 0).t, causal, scale))
    # The result of a query that sees no key is 0 in PyTorch.
    return seen.where(out, 0)


@op("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    c: Call,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value]:
    if dropout_p > 0:
        raise Unsupported("attention with dropout")
    out = attention(c, q, k, v, attn_mask, is_causal, scale)
    # Only the gradient reads the sums; if nothing does, they are not computed.
    size = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if k.shape[1] != q.shape[1]:
        raise Unsupported("attention with shared key heads")
    sums = log_sum_exp(_scores(q, k, attn_mask, is_causal, size), [3]).squeeze(3)
    # PyTorch's kernel stores them as [batch, positions, heads], viewed as [batch, heads, positions].
    return out, sums.cast(c.dtype(1)).reshape(c.shape(1))


@op("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    c: Call,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    sums: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, Value, Value]:
    if dropout_p > 0:
        raise Unsupported("attention with dropout")
    return attention_grad(c, grad, (q, k, v), attn_mask, is_causal, scale)


def attention_grad(
    c: Call,
    grad: Value,
    of: tuple[Value, Value, Value],
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> tuple[Value, Value, Value]:
    """The gradients of `attention` with respect to queries, keys and values."""
    q, k, v = of
    if 0 in (*q.shape, *k.shape, *v.shape) or v.shape[-1] != q.shape[-1]:
        raise Unsupported("attention over empty tensors or with values of another size")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if causal and q.shape[-2] != k.shape[-2]:
        mask, causal = causal_mask(q, q.shape[-2], k.shape[-2]), False
    wide = [t.cast("f32") if t.dtype in ("f16", "bf16") else t for t in (q, k, v, grad)]
    bias = None if mask is None else _additive(mask, wide[0].dtype)
    if bias is not None:
        seen = _sees(bias)
        bias, wide[3] = seen.where(bias, 0), seen.where(wide[3], 0)
    a, b, d, e = wide
    flat = Value(_ops.attention_grad(a.t, b.t, d.t, e.t, None if bias is None else bias.t, causal, scale))
    at, made = 0, []
    for i, t in enumerate((q, k, v)):
        made.append(flat.slice(0, at, t.size).reshape(t.shape).cast(c.dtype(i)))
        at += t.size
    return made[0], made[1], made[2]


@op("halcyon::attention_grad")
def _attention_grad(
    c: Call,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> tuple[Value, Value, Value]:
    return attention_grad(c, grad, (q, k, v), mask, causal, scale)


@op("_cdist_forward")
def _cdist(c: Call, a: Value, b: Value, p: float, mode: int | None) -> Value:
    if a.size == 0 or b.size == 0:
        raise Unsupported("distances of no points")
    x, y = c.to(c.math(), a, b)
    size = (x.unsqueeze(x.ndim - 1) - y.unsqueeze(y.ndim - 2)).scalar("abs")
    last = [size.ndim - 1]
    if p == math.inf:
        return c.done(size.reduce("max", last))
    if p == 0:
        return c.done(size.ne(0.0).cast(size.dtype).sum(last))
    if p == 1:
        return c.done(size.sum(last))
    if p == 2:
        return c.done((size * size).sum(last).scalar("sqrt"))
    return c.done(size.scalar("pow", float(p)).sum(last).scalar("pow", 1.0 / p))
