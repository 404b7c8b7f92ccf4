"""Linear layers whose products are computed in 8-bit types, for inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Float8Linear", "Int8Linear", "replace_linears"]


def _scale(values: torch.Tensor, largest: float, dim: int | None) -> torch.Tensor:
    """The factor by which the largest magnitude of `values` (along `dim`) becomes `largest`."""
    top = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    return top.float().clamp(min=1e-12) / largest


class Int8Linear(nn.Module):
    """A linear layer with 8-bit integer weights, one scale per output, and inputs with one scale per row."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        w = linear.weight.detach()
        scale = _scale(w, 127.0, 1)
        self.register_buffer("weight", (w.float() / scale).round().to(torch.int8).t())
        self.register_buffer("scale", scale.t())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether the product of bytes takes the sizes of this layer."""
        return linear.in_features % 8 == 0 and linear.out_features % 8 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result, in the type of `x`."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        scale = _scale(rows, 127.0, 1)
        q = (rows.float() / scale).round().to(torch.int8)
        count = q.shape[0]
        if q.is_cuda and count <= 16:
            # cuBLAS multiplies bytes only for more than 16 rows.
            q = F.pad(q, (0, 0, 0, 17 - count))
        y = torch._int_mm(q, self.weight)[:count].float() * scale * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


class Float8Linear(nn.Module):
    """A linear layer with 8-bit float weights and inputs (`float8_e4m3fn`), each with one scale."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        w = linear.weight.detach()
        scale = _scale(w, _LARGEST, None)
        self.register_buffer("weight", (w.float() / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether the product of 8-bit floats takes the sizes of this layer."""
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's result, in the type of `x`."""
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        scale = _scale(rows, _LARGEST, None)
        q = (rows.float() / scale).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(q, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


#: The largest number of `float8_e4m3fn`.
_LARGEST = 448.0


def replace_linears(
    module: nn.Module, make: Callable[[nn.Linear], nn.Module], takes: Callable[[nn.Linear], bool]
) -> int:
    """Replaces the linear layers below a module that `takes` accepts. Returns their number."""
    count = 0
    made: dict[nn.Linear, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses of `Linear` may compute something else.
            if type(child) is nn.Linear and takes(child):
                if child not in made:
                    made[child] = make(child)
                    count += 1
                setattr(parent, name, made[child])
    return count
