"""Times models of torchvision and transformers: eager PyTorch, Halcyon and Inductor.

    python bench/torch_models.py --threads 2 --rounds 15

All models have random weights. In each round, the contestants take turns, so that a change of the machine's
load affects all of them. A turn is one call that is not timed and some that are: the threads of PyTorch and
of Halcyon wait busily for a while after a call, which would slow the first call of another contestant. The
table has the medians, and the median of the ratios of eager PyTorch's time to Halcyon's in a round. Above 1,
Halcyon is faster. `--train` times a step with gradients, without an optimizer. Inductor needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import halcyon.torch.compile as backend
import torch
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def resnet18() -> Made:
    """ResNet-18 on one image of 224 pixels."""
    import torchvision  # type: ignore[import-untyped]

    return torchvision.models.resnet18(weights=None), (torch.randn(1, 3, 224, 224),)


def vit() -> Made:
    """A vision transformer of 6 layers on one image of 224 pixels."""
    import torchvision

    made = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=6, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    # The head is zero at first, which would make all outputs equal.
    nn.init.normal_(made.heads.head.weight, std=0.02)
    return made, (torch.randn(1, 3, 224, 224),)


def bert() -> Made:
    """BERT of 6 layers on 128 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config), (torch.randint(0, 30000, (1, 128)),)


def gpt2() -> Made:
    """GPT-2 of 6 layers on 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8000,
        n_embd=384,
        n_layer=6,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config), (torch.randint(0, 8000, (1, 128)),)


def llama() -> Made:
    """Llama of 6 layers on 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1024,
        use_cache=False,
    )
    return LlamaForCausalLM(config), (torch.randint(0, 8000, (1, 128)),)


CALLS = 3
"""The timed calls of a turn."""

MODELS: dict[str, Callable[[], Made]] = {f.__name__: f for f in (resnet18, vit, bert, gpt2, llama)}


def first(output: Any) -> torch.Tensor:
    """The first tensor of a model's output."""
    return output if isinstance(output, torch.Tensor) else output[0]


def call(f: Callable[..., Any], x: tuple[torch.Tensor, ...], module: nn.Module | None) -> torch.Tensor:
    """One inference, or one step with gradients if a module is given."""
    if module is None:
        with torch.no_grad():
            return first(f(*x))
    module.zero_grad(set_to_none=True)
    out = first(f(*x))
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * weights).mean().backward()  # type: ignore[no-untyped-call]
    return out


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp_min(1e-12))


def turn(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    """The median time of the calls of one turn."""
    run()
    times = []
    for _ in range(CALLS):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


def measure(name: str, train: bool, rounds: int, inductor: bool, clock: Callable[[], float]) -> list[str]:
    """A row of the table."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    backend.reset_report()
    model, x = MODELS[name]()
    model.train(train)
    module = model if train else None
    contestants: dict[str, Callable[..., Any]] = {"eager": model}
    for name_of in ["halcyon", "inductor"] if inductor else ["halcyon"]:
        contestants[name_of] = torch.compile(model, backend=name_of)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    outputs, grads = {}, {}
    for k, f in contestants.items():
        model.load_state_dict(state)
        outputs[k] = call(f, x, module).clone()
        grads[k] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    report = backend.report()
    if report.fallbacks:
        raise SystemExit(f"{name} fell back:\n{report}")
    worst = gap(outputs["halcyon"], outputs["eager"])
    largest = max((g.abs().max() for g in grads["eager"].values()), default=torch.tensor(1.0))
    for n, g in grads["eager"].items():
        worst = max(worst, float((grads["halcyon"][n] - g).abs().max() / max(g.abs().max(), 1e-3 * largest)))
    times: dict[str, list[float]] = {k: [] for k in contestants}
    for _ in range(rounds):
        for k, f in contestants.items():
            times[k].append(turn(functools.partial(call, f, x, module), clock))
    ms = {k: 1e3 * statistics.median(v) for k, v in times.items()}
    ratio = statistics.median([e / h for e, h in zip(times["eager"], times["halcyon"], strict=True)])
    cells = [name, f"{ms['eager']:.1f}", f"{ms['halcyon']:.1f}", f"{ratio:.2f}"]
    cells += [f"{ms['inductor']:.1f}", f"{ms['inductor'] / ms['halcyon']:.2f}"] if inductor else ["-", "-"]
    return [*cells, f"{worst:.1e}"]


def main() -> int:
    """Reads the arguments, measures and prints the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--train", action="store_true", help="a step with gradients")
    p.add_argument("--no-inductor", action="store_true")
    p.add_argument("--cpu-time", action="store_true", help="processor time, for a machine with other work")
    p.add_argument("models", nargs="*", metavar="MODEL", help=f"all, if none is given: {', '.join(MODELS)}")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    titles = [
        "model",
        "eager ms",
        "halcyon ms",
        "eager/halcyon",
        "inductor ms",
        "inductor/halcyon",
        "difference",
    ]
    print(f"| {' | '.join(titles)} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    clock = time.process_time if a.cpu_time else time.perf_counter
    for name in a.models or MODELS:
        print(f"| {' | '.join(measure(name, a.train, a.rounds, not a.no_inductor, clock))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
