"""Models of torchvision and transformers with random weights, against eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import halcyon.torch.compile as backend  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def resnet18() -> Any:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(weights=None, num_classes=20), (torch.randn(2, 3, 64, 64),)


def vit() -> Any:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    # The head is zero at first, which would make all gradients before it zero.
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)
    return model, (torch.randn(2, 3, 64, 64),)


def tokens() -> tuple[Any, ...]:
    return (torch.randint(0, 500, (2, 24)),)


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertModel(config), tokens()


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=500,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config), tokens()


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), tokens()


def first(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else output[0]


def gap(a: Any, b: Any, floor: float = 1e-6) -> float:
    """The largest difference, relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(floor))


@pytest.mark.parametrize("make", [resnet18, vit, bert, gpt2, llama])
def test_model(make: Any) -> None:
    torch._dynamo.reset()
    backend.reset_report()
    torch.manual_seed(0)
    own, x = make()
    own.eval()
    compiled = torch.compile(own, backend="halcyon")
    with torch.no_grad():
        want = first(own(*x))
        for _ in range(2):
            assert gap(first(compiled(*x)), want) < 1e-3
        more = tuple(torch.cat([t, t.flip(0)[:1]]) for t in x)
        assert gap(first(compiled(*more)), first(own(*more))) < 1e-3
    own.train()
    other = copy.deepcopy(own)
    outputs = [first(m(*x)) for m in (compiled, other)]
    assert gap(outputs[0].detach(), outputs[1].detach()) < 1e-3
    weights = torch.randn(outputs[1].shape)
    for out in outputs:
        (out * weights).sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (own, other)]
    largest = max(float(g.abs().max()) for g in grads[1].values())
    assert set(grads[1]) <= set(grads[0])
    for name, g in grads[1].items():
        assert gap(grads[0][name], g, floor=1e-3 * largest) < 1e-3, name
    for (name, a), (_, b) in zip(own.named_buffers(), other.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    report = backend.report()
    assert len(report.graphs) >= 4 and not report.fallbacks, str(report)


def by_stages(model: Any, x: Any, checkpointed: bool) -> Any:
    """ResNet, with activation checkpointing of its stages if asked for."""
    x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        x = checkpoint(stage, x, use_reentrant=False) if checkpointed else stage(x)
    return model.fc(torch.flatten(model.avgpool(x), 1))


def test_checkpointed_resnet_trains() -> None:
    """The backward computes stages again. It must not read statistics that the forward has overwritten."""
    torch.manual_seed(0)
    # In f64, so that no activation near zero changes its sign by another order of sums.
    own, x = resnet18()[0].double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    other = copy.deepcopy(own)
    sizes = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        backend.reset_report()
        own.load_state_dict(other.state_dict())
        reference = copy.deepcopy(other)

        def step(x: Any, checkpointed: bool = checkpointed) -> Any:
            return by_stages(own, x, checkpointed)

        compiled = torch.compile(step, backend="halcyon")
        for k in range(2):
            own.zero_grad()
            reference.zero_grad()
            outputs = [compiled(x + k), by_stages(reference, x + k, False)]
            assert gap(outputs[0].detach(), outputs[1].detach()) < 1e-8
            weights = torch.randn(outputs[1].shape, dtype=x.dtype)
            for out in outputs:
                (out * weights).sum().backward()
            grads = [{n: p.grad for n, p in m.named_parameters()} for m in (own, reference)]
            for name, g in grads[1].items():
                assert gap(grads[0][name], g) < 1e-8, name
        # The statistics are updated once for each step.
        for (name, a), (_, b) in zip(own.named_buffers(), reference.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=name)
        report = backend.report()
        assert len(report.graphs) == 2 and not report.fallbacks, str(report)
        sizes.append(report.graphs[1].operations)
    assert sizes[1] > sizes[0], "the backward computes nothing again"


def test_checkpointed_dropout_is_the_same_in_the_backward() -> None:
    torch._dynamo.reset()
    backend.reset_report()
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16)

    def region(x: Any) -> Any:
        return torch.nn.functional.dropout(layer(x), 0.5).sin()

    compiled = torch.compile(lambda x: checkpoint(region, x, use_reentrant=False), backend="halcyon")
    x = torch.randn(64, 16, requires_grad=True)
    out = compiled(x)
    out.sum().backward()
    kept = (out != 0).float()
    assert 0.4 < float(kept.mean()) < 0.6
    y = layer(x).detach()
    want = (2 * kept * torch.cos(2 * kept * y)) @ layer.weight.detach()
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-5)
    assert not backend.report().fallbacks


class Counting(torch.nn.Module):
    """A region that reads a buffer, overwrites it, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.arange(3.0) + 1)
        self.w = torch.nn.Parameter(torch.ones(3))

    def region(self, x: Any) -> Any:
        y = (x * self.b.sin() * self.w).cos()
        self.b.add_(1)
        return (y * self.b.exp() * self.w).sum()

    def forward(self, x: Any, checkpointed: bool) -> Any:
        return checkpoint(self.region, x, use_reentrant=False) if checkpointed else self.region(x)


def test_checkpointed_region_that_overwrites_a_buffer() -> None:
    torch._dynamo.reset()
    backend.reset_report()
    own, other = Counting(), Counting()
    compiled = torch.compile(own, backend="halcyon")
    for _ in range(2):
        grads = []
        for model, f, checkpointed in ((own, compiled, True), (other, other, False)):
            x = torch.linspace(0, 1, 3).requires_grad_()
            model.zero_grad()
            f(x, checkpointed).backward()
            grads.append((x.grad, model.w.grad))
        torch.testing.assert_close(grads[0], grads[1])
        assert torch.equal(own.b, other.b)
    assert not backend.report().fallbacks
