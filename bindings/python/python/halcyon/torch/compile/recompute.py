"""Activation checkpointing: what a backward graph may compute again.

AOTAutograd marks the operations of a checkpointed region, and the split computes them again in the backward
graph. Two kinds must not be computed again. An operation that reads an input that the forward pass
overwrites, such as the statistics of a batch normalisation, would read the new value. A random operation
would give other numbers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from halcyon.torch.compile.table import aten

__all__ = ["keep"]

_NORM = aten._native_batch_norm_legit_functional.default
_NORM_WITHOUT_STATISTICS = aten._native_batch_norm_legit.no_stats


def _overwritten(gm: GraphModule) -> set[Node]:
    """The inputs of which the graph returns a new value that the caller writes back."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    described = [getattr(d, "mutated_input", None) for d in output.meta.get("desc", ())]
    known = {d for d in described if d is not None}
    return {n for n in gm.graph.nodes if n.op == "placeholder" and n.meta.get("desc") in known}


def _separate(gm: GraphModule, norm: Node) -> None:
    """Takes the result of a batch normalisation from a call without running statistics.

    Only the new statistics depend on the old ones. They are results of the forward graph and nothing else
    reads them, so the result can be computed again.
    """
    x, weight, bias, _, _, *rest = norm.args
    with gm.graph.inserting_before(norm):
        new = gm.graph.call_function(_NORM_WITHOUT_STATISTICS, (x, weight, bias, *rest))
    new.meta = {**norm.meta, "val": norm.meta["val"][:3]}
    for user in list(norm.users):
        if user.target is operator.getitem and user.args[1] in (0, 1, 2):
            user.args = (new, user.args[1])


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _save(node: Node) -> None:
    """Marks the tensors that a call returns."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return
    # Of several results, each is saved on its own.
    node.meta.pop("recompute", None)
    for user in node.users:
        if user.target is operator.getitem:
            _save(user)


def keep(gm: GraphModule) -> None:
    """Marks what the split of this joint graph must save and not compute again."""
    overwritten = _overwritten(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        reads = not overwritten.isdisjoint(node.all_input_nodes)
        if reads and node.target is _NORM and node.args[5] is True and "recompute" in node.meta:
            _separate(gm, node)
        if reads or (_is_random(node.target) and "recompute" in node.meta):
            _save(node)
    gm.recompile()
