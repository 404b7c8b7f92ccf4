"""Scaled dot-product attention over `[batch, heads, positions, size]`."""

from __future__ import annotations

import math
from typing import Any

from halcyon import _native
from halcyon.torch.compile.dtypes import wide
from halcyon.torch.compile.ops.reduce import log_sum_exp
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []

_ops = _native.ops


def _causal(like: Value, queries: int, keys: int) -> Value:
    """Which keys a query sees: PyTorch aligns the first query with the first key."""
    row, column = like.iota("i64", [queries, keys], 0), like.iota("i64", [queries, keys], 1)
    return column <= row


class Attention:
    """Queries, keys, values, and which keys a query sees."""

    __slots__ = ("bias", "causal", "k", "q", "scale", "seen", "v")

    def __init__(
        self, of: tuple[Value, Value, Value], mask: Value | None, causal: bool, scale: float | None
    ) -> None:
        q, k, v = of
        if 0 in (*q.shape, *k.shape, *v.shape):
            raise Unsupported("attention over empty tensors")
        if k.shape[1] != q.shape[1]:
            raise Unsupported("attention with shared key heads")
        if causal and q.shape[-2] != k.shape[-2]:
            # The native mask is aligned with the last key.
            mask, causal = _causal(q, q.shape[-2], k.shape[-2]), False
        self.q, self.k, self.v, self.causal = q, k, v, causal
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        self.bias: Value | None = None
        """What is added to the scores."""
        self.seen: Value | None = None
        """Which queries see a key at all."""
        if mask is not None:
            self.bias, self.seen = self._added(mask)

    def _added(self, mask: Value) -> tuple[Value, Value]:
        dtype = self.q.dtype
        if mask.dtype == "bool":
            mask = mask.where(mask.full([], False).cast(dtype), -math.inf)
        bias = mask.cast(dtype).reshape([*[1] * (4 - mask.ndim), *mask.shape])
        seen = bias.ne(-math.inf).reduce("max", [3], True)
        # Otherwise the scores of a query that sees no key would become NaN.
        return seen.where(bias, 0), seen

    def result(self) -> Value:
        """The attention. The result of a query that sees no key is 0, as in PyTorch."""
        bias = None if self.bias is None else self.bias.t
        out = Value(_ops.attention(self.q.t, self.k.t, self.v.t, bias, self.causal, self.scale))
        return out if self.seen is None else self.seen.where(out, 0)

    def sums(self) -> Value:
        """The logarithm of the sum of the exponentials of each query's scores."""
        dtype = wide(self.q.dtype)
        s = (self.q * self.scale).matmul(self.k.transpose(2, 3)).cast(dtype)
        if self.causal:
            s = _causal(s, self.q.shape[-2], self.k.shape[-2]).where(s, -math.inf)
        if self.bias is not None:
            s = s + self.bias.cast(dtype)
        return log_sum_exp(s, [3]).squeeze(3)

    def grad(self, c: Call, dy: Value) -> tuple[Value, Value, Value]:
        """The gradients of queries, keys and values."""
        if self.v.shape[-1] != self.q.shape[-1]:
            raise Unsupported("the gradient of attention with values of another size")
        dtype = wide(self.q.dtype)
        q, k, v, d = (t.cast(dtype) for t in (self.q, self.k, self.v, dy))
        if self.seen is not None:
            d = self.seen.where(d, 0)
        bias = None if self.bias is None else self.bias.cast(dtype).t
        flat = Value(_ops.attention_grad(q.t, k.t, v.t, d.t, bias, self.causal, self.scale))
        at, made = 0, []
        for i, t in enumerate((q, k, v)):
            made.append(flat.slice(0, at, t.size).reshape(t.shape).cast(c.dtype(i)))
            at += t.size
        return made[0], made[1], made[2]


@op("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    c: Call, q: Value, k: Value, v: Value, dropout: float = 0.0, causal: bool = False, **options: Any
) -> tuple[Value, Value]:
    if dropout > 0:
        raise Unsupported("attention with dropout")
    a = Attention((q, k, v), options.get("attn_mask"), causal, options.get("scale"))
    # Only the gradient reads the sums; if nothing does, they are not computed.
    return a.result(), a.sums().cast(c.dtype(1))


@op("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    c: Call, grad: Value, q: Value, k: Value, v: Value, *rest: Any, **options: Any
) -> tuple[Value, Value, Value]:
    _, _, dropout, causal = rest
    if dropout > 0:
        raise Unsupported("attention with dropout")
    return Attention((q, k, v), options.get("attn_mask"), causal, options.get("scale")).grad(c, grad)


@op("halcyon::attention_grad")
def _attention_grad(
    c: Call, grad: Value, q: Value, k: Value, v: Value, *rest: Any
) -> tuple[Value, Value, Value]:
    mask, causal, scale = rest
    return Attention((q, k, v), mask, causal, scale).grad(c, grad)
