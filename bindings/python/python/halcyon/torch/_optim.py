"""Optimizers of training: they follow their model to a device, and update all parameters in one kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from halcyon._errors import ArgumentError
from halcyon.torch._check import Results, compare, time_pairs
from halcyon.torch._optimizations import Task, counted
from halcyon.torch._prepared import one_line
from halcyon.torch._result import Receipt

__all__ = ["FUSED", "check_optimizer", "follow", "fuse", "fused_gain"]

FUSED = "fused-optimizer"
#: The largest relative difference of parameters after the steps of the check.
_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: The steps of the check, and the largest number of elements that the check copies.
_STEPS = 3
_MOST = 4 << 20


def check_optimizer(optimizer: object, model: nn.Module) -> Optimizer:
    """Raises an error for a value that is not an optimizer of this model's parameters."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"the optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ArgumentError(
            "the optimizer updates none of the model's parameters; make it from model.parameters()"
        )
    return optimizer


def follow(optimizer: Optimizer, before: list[nn.Parameter], after: list[nn.Parameter]) -> None:
    """Lets an optimizer update the parameters of a model that moved, and moves its state to their devices.

    PyTorch keeps the parameters of a module that moves, but on some devices it makes new ones.
    """
    new = {id(old): p for old, p in zip(before, after, strict=True) if old is not p}
    if new:
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in new]:
            optimizer.state[new[id(old)]] = optimizer.state.pop(old)
    moved = any(
        name != "step" and isinstance(value, torch.Tensor) and value.device != p.device
        for p, state in optimizer.state.items()
        for name, value in state.items()
    )
    if moved:
        # Loading a state moves it to the devices of the parameters.
        optimizer.load_state_dict(optimizer.state_dict())


def _probe(optimizer: Optimizer, fused: bool) -> Optimizer:
    """An optimizer like this one, with its own copies of parameters, up to a number of elements."""
    groups, count = [], 0
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = []
        for p in group["params"]:
            if params and count + p.numel() > _MOST:
                break
            count += p.numel()
            params.append(nn.Parameter(p.detach().clone()))
        groups.append({**group, "params": params, "fused": fused})
    # A class may take fewer options than its base class keeps.
    known = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in known and k not in ("fused", "foreach")}
    make: Callable[..., Optimizer] = type(optimizer)
    return make(groups, **options, fused=fused)


def _run(optimizer: Optimizer, gradients: list[torch.Tensor]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()


def _compare(task: Task, optimizer: Optimizer) -> Receipt | str:
    """Checks the fused update against the plain one on copies of the parameters, and measures it."""
    plain, fused = _probe(optimizer, False), _probe(optimizer, True)
    pairs = (plain, fused)
    params = [[p for group in o.param_groups for p in group["params"]] for o in pairs]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        # Like gradients of PyTorch, these have the layouts of their parameters.
        gradients = [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator)) for p in params[0]]
        for o in pairs:
            _run(o, gradients)
    # All parameters are compared together, as gradients are.
    want, got = (Results([], [p.detach() for p in ps]) for ps in params)
    error = compare(want, got).error(True)
    bound = max(_BOUNDS[p.dtype] for p in params[0])
    if not error <= bound:
        return (
            f"the difference of the parameters after {_STEPS} steps is {error:.1e}, the bound is {bound:.1e}"
        )
    times = time_pairs(lambda: plain.step, lambda: fused.step, lambda: task.runtime.synchronize(task.index))
    detail = f"{type(optimizer).__name__}, {counted(len(params[0]), 'parameter')}"
    return Receipt(FUSED, detail, times.gain, times.interval, error, None, bound)


def _match_layouts(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Gives gradients and state the layouts of their parameters.

    Fused updates on the CPU walk through memory without looking at strides. Another layout than that of the
    parameter comes from a state that was made, or stored, before the layout of the model changed.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dim() < 4:
                continue
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
            state = optimizer.state.get(p, {})
            for name, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == p.shape
                    and value.stride() != p.stride()
                ):
                    state[name] = torch.empty_like(p).copy_(value)


def fuse(task: Task, optimizer: Optimizer) -> Receipt | str:
    """Switches an optimizer to PyTorch's fused update, in place. Returns the receipt, or why not."""
    if "fused" not in optimizer.defaults:
        return f"PyTorch has no fused {type(optimizer).__name__}"
    if all(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer is fused already"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer cannot be fused"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.is_floating_point() for p in params):
        return "a parameter is not a real float"
    try:
        found = _compare(task, optimizer)
    # PyTorch reports devices and classes that it cannot fuse by several kinds of errors.
    except Exception as error:
        return one_line(error)
    if isinstance(found, str):
        return found
    if found.gain is not None and found.gain < 1 and not task.config.keep_slower:
        return f"it is slower on copies of the parameters, {found.gain:.2f}x"
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["fused"], group["foreach"] = True, False
    # The constructor sets this for fused optimizers: `GradScaler` then passes its scale to the update.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # set by the constructors too
    optimizer.register_step_pre_hook(_match_layouts)
    if optimizer.state:
        # A fused update wants its counters on the device; loading a state moves them.
        optimizer.load_state_dict(optimizer.state_dict())
    return found


def fused_gain(task: Task) -> float | None:
    """The gain of a fused AdamW over 30 small parameters on a device; None if PyTorch has none there."""
    params = [nn.Parameter(torch.ones(64, 64, device=task.device)) for _ in range(30)]
    try:
        found = _compare(task, torch.optim.AdamW(params))
    # See `fuse`.
    except Exception:
        return None
    return None if isinstance(found, str) else found.gain
