"""The split of a training graph into forward and backward.

Some gradients read results of the forward that nothing else needs: the indices of a pool, the sums of
attention, the statistics of layer normalisation. Before the split, such gradients are replaced by operations
that compute them from the operands. So the forward graph neither computes nor stores these results. The
operations are real ones of PyTorch, so a graph with them runs in eager PyTorch too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from halcyon.torch.compile.recompute import keep
from halcyon.torch.compile.table import aten

__all__ = ["partition"]


@torch.library.custom_op("halcyon::max_pool2d_grad", mutates_args=())
def max_pool2d_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The gradient of a max pool."""
    rest = (kernel, stride, padding, dilation, ceil_mode)
    _, indices = aten.max_pool2d_with_indices(x, *rest)
    return aten.max_pool2d_with_indices_backward(grad, x, *rest, indices)  # type: ignore[no-any-return]


@max_pool2d_grad.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("halcyon::attention_grad", mutates_args=())
def attention_grad(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of scaled dot-product attention."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = flash_backward(
        grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
    )
    return made


flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


@attention_grad.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@torch.library.custom_op("halcyon::layer_norm_grad", mutates_args=())
def layer_norm_grad(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of layer normalisation with respect to operand, weight and bias."""
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, None, eps)
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = aten.native_layer_norm_backward(
        grad, x, shape, mean, rstd, weight, torch.empty_like(weight), [True, True, True]
    )
    return made


@layer_norm_grad.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _source(node: Any, forward: Any, result: int) -> Node | None:
    """The call of `forward` whose result with this number the node is."""
    import operator

    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != result:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.target is forward else None


def _pool(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    grad, x, kernel, stride, padding, dilation, ceil_mode, indices = node.args
    source = _source(indices, aten.max_pool2d_with_indices.default, 1)
    if source is None or source.args[0] is not x:
        return None
    return torch.ops.halcyon.max_pool2d_grad.default, (grad, x, kernel, stride, padding, dilation, ceil_mode)


def _attention(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    grad, q, k, v, _, sums, dropout, causal = node.args
    source = _source(sums, aten._scaled_dot_product_flash_attention_for_cpu.default, 1)
    if source is None or source.args[:3] != (q, k, v) or dropout != 0:
        return None
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    return torch.ops.halcyon.attention_grad.default, (grad, q, k, v, mask, causal, scale)


def _layer_norm(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    grad, x, shape, _, rstd, weight, bias, mask = node.args
    source = _source(rstd, aten.native_layer_norm.default, 2)
    if source is None or source.args[0] is not x or source.args[2] is not weight:
        return None
    if mask != [True, True, True] or weight is None or bias is None:
        return None
    if x.meta["val"].dtype not in (torch.float32, torch.float64):  # type: ignore[union-attr]
        return None
    return torch.ops.halcyon.layer_norm_grad.default, (grad, x, shape, weight, source.args[4])


_RULES: dict[Any, Callable[[Node], tuple[Any, tuple[Any, ...]] | None]] = {
    aten.max_pool2d_with_indices_backward.default: _pool,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention,
    aten.native_layer_norm_backward.default: _layer_norm,
}


def simplify(gm: GraphModule) -> None:
    """Replaces gradients that read saved results by gradients that compute them."""
    changed = False
    for node in list(gm.graph.nodes):
        rule = _RULES.get(node.target)
        made = None if rule is None else rule(node)
        if made is None:
            continue
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(*made)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def partition(gm: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph; values that are cheap to compute again are not saved."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    simplify(gm)
    keep(gm)
    return min_cut_rematerialization_partition(gm, inputs, **options)
