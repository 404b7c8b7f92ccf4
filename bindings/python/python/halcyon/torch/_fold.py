"""Folds batch normalisation into the convolution or linear layer before it, for inference."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import torch.fx
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

__all__ = ["fold_batch_norms", "foldable", "obstacles"]

_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


def _fits(layer: nn.Module, norm: nn.Module) -> bool:
    if layer._forward_hooks or layer._forward_pre_hooks or norm._forward_hooks or norm._forward_pre_hooks:
        return False
    wanted = _NORMS.get(type(layer))
    return wanted is not None and type(norm) is wanted and norm.running_var is not None


def _obstacle(layer: nn.Module, norm: nn.Module) -> str | None:
    """Why a batch norm cannot become a part of the layer, if it cannot."""
    if not isinstance(layer, nn.Linear) or not isinstance(norm, nn.BatchNorm1d):
        return None
    if not norm.affine:
        return "PyTorch folds no batch norm without weights into a linear layer"
    if norm.num_features not in (1, layer.out_features):
        return "the batch norm is over another axis than the features of the linear layer"
    return None


def foldable(module: nn.Module) -> list[tuple[str, str]]:
    """The names of pairs of a layer and the batch norm that alone reads its result, if they can be one."""
    return [pair for pair, why in _judged(module) if why is None]


def obstacles(module: nn.Module) -> list[str]:
    """The pairs of a layer and the batch norm that alone reads its result that stay two, with reasons."""
    return [f"{first} and {second}: {why}" for (first, second), why in _judged(module) if why is not None]


def _judged(module: nn.Module) -> list[tuple[tuple[str, str], str | None]]:
    found = _pairs(module)
    return [(p, _obstacle(module.get_submodule(p[0]), module.get_submodule(p[1]))) for p in found]


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """The names of pairs of a layer and the batch norm that alone reads its result.

    The module's forward is traced with symbolic values. If it cannot be traced, because values decide how it
    goes on, only neighbours in `nn.Sequential` are found.
    """
    layers = dict(module.named_modules())
    try:
        # A copy, because a forward that is traced may store symbolic values in its module.
        graph = torch.fx.Tracer().trace(copy.deepcopy(module))
    except Exception:  # The forward is the user's code, so tracing it may raise anything.
        return _neighbours(module)
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    pairs = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, torch.fx.Node) or source.op != "call_module" or len(source.users) != 1:
            continue
        first, second = str(source.target), str(node.target)
        if calls[first] == calls[second] == 1 and _fits(layers[first], layers[second]):
            pairs.append((first, second))
    return pairs


def _neighbours(module: nn.Module) -> list[tuple[str, str]]:
    pairs = []
    for name, sequence in module.named_modules():
        if type(sequence) is not nn.Sequential:
            continue
        members = list(sequence.named_children())
        for (a, first), (b, second) in itertools.pairwise(members):
            if _fits(first, second):
                prefix = f"{name}." if name else ""
                pairs.append((prefix + a, prefix + b))
    return pairs


def fold_batch_norms(module: nn.Module) -> int:
    """Folds the pairs of :func:`foldable` in place, in a module that evaluates. Returns their number."""
    pairs = foldable(module)
    for first, second in pairs:
        layer, norm = module.get_submodule(first), module.get_submodule(second)
        fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
        module.set_submodule(first, fuse(layer, norm))  # type: ignore[type-var,arg-type]  # `_fits` says so
        module.set_submodule(second, nn.Identity())
    return len(pairs)
