"""Convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from halcyon import _native
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value, concat

__all__: list[str] = []

_ops = _native.ops


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
        return Value(_ops.conv_grad("weight", x.t, w.t, dy.t, self.native))

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
    *geometry: Any,
) -> Value:
    stride, padding, dilation, transposed, _, groups = geometry[:6]
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
    *geometry: Any,
) -> tuple[Value | None, ...]:
    stride, padding, dilation, transposed, _, groups, mask = geometry
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
