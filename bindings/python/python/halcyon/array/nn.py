"""Functions of neural networks, with the kernels of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from halcyon._errors import ArgumentError, ShapeError
from halcyon.array import _binary
from halcyon.array._array import Array, wrap
from halcyon.array._core import (
    FLOATS,
    INDEX,
    INTEGERS,
    Tensor,
    as_array,
    axis_of,
    cast,
    check_kind,
    full,
    iota,
    literal,
    one_of,
    ops,
)
from halcyon.array._dtypes import DEFAULT_FLOAT, DType, check_dtype
from halcyon.array._indexing import take
from halcyon.array._linear import matmul, matrix_transpose

__all__ = [
    "attention",
    "avg_pool",
    "batch_norm",
    "conv",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "max_pool",
    "one_hot",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
]

Sizes: TypeAlias = int | Sequence[int]
"""One number for all spatial axes, or one for each."""


def _floats(op: str, *arrays: Array | None) -> None:
    for x in arrays:
        if x is not None:
            check_kind(op, as_array(op, x), FLOATS)


def _activation(op: str, native: str, x: Array) -> Array:
    _floats(op, x)
    return wrap(ops.scalar(native, (x._tensor,)))


def relu(x: Array, /) -> Array:
    """The positive numbers, and 0 for others."""
    return _activation("relu", "relu", x)


def leaky_relu(x: Array, /, slope: float = 0.01) -> Array:
    """The positive numbers, and others times a slope."""
    _floats("leaky_relu", x)
    is_positive = ops.scalar("gt", (x._tensor, literal(x._tensor, 0.0)))
    small = ops.scalar("mul", (x._tensor, literal(x._tensor, float(slope))))
    return wrap(ops.scalar("select", (is_positive, x._tensor, small)))


def sigmoid(x: Array, /) -> Array:
    """``1 / (1 + exp(-x))``."""
    return _activation("sigmoid", "sigmoid", x)


def silu(x: Array, /) -> Array:
    """``x * sigmoid(x)``."""
    return _activation("silu", "silu", x)


def gelu(x: Array, /, *, approximate: Literal["none", "tanh"] = "none") -> Array:
    """``x`` times the normal distribution function of ``x``, or its approximation by tanh."""
    one_of("gelu", "approximate", approximate, ("none", "tanh"))
    return _activation("gelu", "gelu" if approximate == "none" else "gelu_tanh", x)


def softmax(x: Array, /, *, axis: int = -1) -> Array:
    """The exponentials along an axis over their sum."""
    _floats("softmax", x)
    return wrap(ops.softmax(x._tensor, axis_of("softmax", axis, x.ndim)))


def log_softmax(x: Array, /, *, axis: int = -1) -> Array:
    """The logarithm of :func:`softmax`."""
    _floats("log_softmax", x)
    return wrap(ops.log_softmax(x._tensor, axis_of("log_softmax", axis, x.ndim)))


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    /,
    *,
    axis: int = -1,
    eps: float = 1e-5,
) -> Array:
    """Normalises the axes from ``axis`` on to mean 0 and variance 1, then scales and moves them."""
    _floats("layer_norm", x, weight, bias)
    at = axis_of("layer_norm", axis, x.ndim)
    scale = _ones(x, x.shape[at:]) if weight is None else weight._tensor
    return wrap(ops.layer_norm(x._tensor, scale, None if bias is None else bias._tensor, at, eps))


def rms_norm(x: Array, weight: Array | None = None, /, *, eps: float = 1e-6) -> Array:
    """Divides the last axis by the root of its mean square, then scales it."""
    _floats("rms_norm", x, weight)
    scale = _ones(x, x.shape[-1:]) if weight is None else weight._tensor
    return wrap(ops.rms_norm(x._tensor, scale, eps))


def _ones(x: Array, shape: Sequence[int]) -> Tensor:
    return full(x._tensor.backend, shape, 1.0, x._dtype)


def batch_norm(
    x: Array, mean: Array, var: Array, weight: Array, bias: Array, /, *, eps: float = 1e-5
) -> Array:
    """Normalises axis 1 with given statistics, then scales and moves it."""
    _floats("batch_norm", x, mean, var, weight, bias)
    tensors = (weight._tensor, bias._tensor, mean._tensor, var._tensor)
    return wrap(ops.batch_norm(x._tensor, *tensors, eps))


def linear(x: Array, weight: Array, bias: Array | None = None, /) -> Array:
    """``x`` times the transposed weight, plus the bias."""
    out = matmul(x, matrix_transpose(weight))
    return out if bias is None else _binary.add(out, bias)


def embedding(weight: Array, indices: Array, /) -> Array:
    """Rows of a table by index."""
    return take(weight, indices, axis=0)


def one_hot(indices: Array, classes: int, /, *, dtype: DType | None = None) -> Array:
    """A new last axis with 1 at each index, and 0 elsewhere."""
    check_kind("one_hot", as_array("one_hot", indices), INTEGERS)
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    at = ops.reshape(cast(indices, INDEX), (*indices.shape, 1))
    hit = ops.scalar("eq", (at, iota(indices._tensor.backend, classes)))
    return wrap(ops.cast(hit, found.native))


def _spatial(op: str, what: str, value: Sizes, n: int) -> list[int]:
    sizes = [value] * n if isinstance(value, int) else list(value)
    if len(sizes) != n:
        raise ArgumentError(f"{op}: {what} has {len(sizes)} numbers for {n} spatial axes")
    return sizes


def _images(op: str, x: Array) -> int:
    """The number of spatial axes of ``[n, channels, …]``."""
    if as_array(op, x).ndim < 3:
        raise ShapeError(f"{op} takes arrays of the shape [n, channels, ...], not {x.shape}")
    return x.ndim - 2


def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    /,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Array:
    """A convolution of ``[n, channels, ...]`` with a weight of ``[out, channels / groups, ...]``."""
    _floats("conv", x, weight, bias)
    n = _images("conv", x)
    steps, pads, gaps = (
        _spatial("conv", what, v, n)
        for what, v in (("stride", stride), ("padding", padding), ("dilation", dilation))
    )
    out = wrap(ops.conv(x._tensor, weight._tensor, steps, [(p, p) for p in pads], gaps, [1] * n, groups))
    if bias is None:
        return out
    return _binary.add(out, wrap(ops.reshape(bias._tensor, (1, bias.size, *([1] * n)))))


def _pool(
    op: str, kind: str, x: Array, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes
) -> Array:
    _floats(op, x)
    n = _images(op, x)
    window = _spatial(op, "kernel", kernel, n)
    steps = window if stride is None else _spatial(op, "stride", stride, n)
    pads = [(p, p) for p in _spatial(op, "padding", padding, n)]
    return wrap(ops.pool(x._tensor, kind, window, steps, pads, _spatial(op, "dilation", dilation, n)))


def max_pool(
    x: Array, kernel: Sizes, /, *, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1
) -> Array:
    """The largest number of each window of ``[n, channels, ...]``. The stride is the kernel by default."""
    return _pool("max_pool", "max", x, kernel, stride, padding, dilation)


def avg_pool(
    x: Array,
    kernel: Sizes,
    /,
    *,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    count_padding: bool = True,
) -> Array:
    """The mean of each window of ``[n, channels, ...]``. The stride is the kernel by default."""
    kind = "avg_padded" if count_padding else "avg"
    return _pool("avg_pool", kind, x, kernel, stride, padding, 1)


def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Array:
    """Scaled dot-product attention of ``[batch, heads, queries, size]``. The mask is added to the scores."""
    _floats("attention", q, k, v, mask)
    added = None if mask is None else mask._tensor
    return wrap(ops.attention(q._tensor, k._tensor, v._tensor, added, causal, scale))


def cross_entropy(x: Array, labels: Array, /, *, ignore_index: int | None = -100) -> Array:
    """The mean negative log-likelihood of integer labels under logits of ``[n, classes, ...]``."""
    _floats("cross_entropy", x)
    check_kind("cross_entropy", as_array("cross_entropy", labels), INTEGERS)
    return wrap(ops.cross_entropy(x._tensor, labels._tensor, ignore_index))
