"""Decompositions: operations without a row become operations with one, where PyTorch knows how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from halcyon.torch.compile.table import ROWS

__all__ = ["decompositions", "join"]

_MUTATING = {torch.ops.aten.complex.default}
"""Their decompositions write into views of new tensors, which AOTAutograd refuses."""


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of all operations that the table lacks."""
    import torch._decomp as decomp

    known: dict[Any, Callable[..., Any]] = dict(decomp.global_decomposition_table["post_autograd"])
    kept = ROWS.keys() | _MUTATING
    return {op: f for op, f in known.items() if op not in kept and isinstance(op, torch._ops.OpOverload)}


def _parts_of_addcdiv(node: Node) -> tuple[Node, Node] | None:
    """The quotient and the product of a sum, if all three are one call in the program."""
    if node.target is not torch.add or node.kwargs or len(node.args) != 2:
        return None
    product = node.args[1]
    if not isinstance(product, Node) or product.target is not torch.mul or product.kwargs:
        return None
    quotient, factor = product.args
    if not isinstance(quotient, Node) or quotient.target is not torch.div or quotient.kwargs:
        return None
    # One call has one place in the source. Calls inside of each other have several.
    places = {n.meta.get("stack_trace") for n in (quotient, product, node)}
    is_one = len(places) == 1 and None not in places and isinstance(factor, (int, float))
    alone = len(quotient.users) == len(product.users) == 1
    return (quotient, product) if is_one and alone else None


def join(gm: GraphModule) -> None:
    """Joins what Dynamo takes apart: `addcdiv` with a value.

    Dynamo makes three operations of it, which would be rounded one by one. PyTorch rounds once.
    """
    is_changed = False
    for node in list(gm.graph.nodes):
        parts = _parts_of_addcdiv(node) if node.op == "call_function" else None
        if parts is None:
            continue
        quotient, product = parts
        node.target, node.args = torch.addcdiv, (node.args[0], *quotient.args)
        node.kwargs = {"value": product.args[1]}
        gm.graph.erase_node(product)
        gm.graph.erase_node(quotient)
        is_changed = True
    if is_changed:
        gm.recompile()
