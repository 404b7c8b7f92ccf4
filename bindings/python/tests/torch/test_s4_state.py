"""Row S4.11 of the contract (docs/compat.md): what models keep while they are checked and changed."""

import copy
import pickle
import warnings

import pytest
import torch
from halcyon import torch as ht
from halcyon.torch import BackendConfig, OptimizationWarning, _pipeline, _prepared
from halcyon.torch import _optimizations as opts
from halcyon.torch._fold import foldable, obstacles
from torch import nn

KEEP = BackendConfig(keep_slower=True, level="O1")
CHECKPOINTS = BackendConfig(level="O2", activation_checkpointing=True, keep_slower=True)


def quietly(name, model, *args, config=KEEP, **options):
    """The result of optimising a model, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        made = getattr(ht.CPUBackend(config), name)(model, *args, **options)
    return made, ht.optimization_result(made)


def reasons(result, name):
    return [w for w in result.warnings if w.startswith(f"{name}:")]


# ---- Folding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "shape", "why"),
    [
        (nn.BatchNorm1d(16, affine=False), (4, 8), "without weights"),
        (nn.BatchNorm1d(5), (4, 5, 8), "over another axis"),
    ],
)
def test_s4_11_batch_norms_that_cannot_be_folded_are_reported(norm, shape, why):
    net, x = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(shape[1], 8)), torch.randn(*shape)
    net = net[:2]
    assert foldable(net) == [] and why in obstacles(net)[0]
    made, result = quietly("optimize_for_inference", net, x)
    (reason,) = reasons(result, "conv-bn-fusion")
    assert reason.startswith("conv-bn-fusion: 0 and 1: ") and why in reason and result.success
    assert isinstance(made[1], nn.BatchNorm1d) and torch.equal(made(x), copy.deepcopy(net).eval()(x))


def test_s4_11_one_pair_is_folded_and_another_reported():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False))
    made, result = quietly("optimize_for_inference", net, torch.randn(4, 8))
    assert "1 batch norm folded" in str(result) and len(reasons(result, "conv-bn-fusion")) == 1
    assert isinstance(made[1], nn.Identity) and isinstance(made[3], nn.BatchNorm1d)
    # A batch norm over one channel scales every feature alike.
    one = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(1))
    one(torch.randn(32, 1, 8))
    x = torch.randn(4, 1, 8)
    made, result = quietly("optimize_for_inference", one, x)
    assert isinstance(made[1], nn.Identity), str(result)
    assert torch.allclose(made(x), one.eval()(x), atol=1e-5)


def test_s4_11_a_proposal_that_raises_is_skipped_with_the_reason(monkeypatch):
    def propose(task, variant):
        raise TypeError("the copy failed\nand more")

    planted = opts.Optimization("planted", "", opts._O1, opts._ALL, propose)
    monkeypatch.setattr(_pipeline, "OPTIMIZATIONS", (planted,))
    _, result = quietly("optimize_for_inference", nn.Linear(2, 2), torch.ones(1, 2))
    assert result.success and reasons(result, "planted") == ["planted: TypeError: the copy failed"]


# ---- Buffers ------------------------------------------------------------------------------------------


class Moving(nn.Module):
    """A layer whose forward replaces one buffer, writes another, and makes a third."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        self.last = x.detach()[0]
        return self.layer(x)


@pytest.mark.parametrize(("name", "argument"), [("optimize_for_training", None), ("prepare_model", "O1")])
def test_s4_11_checking_leaves_buffers_that_a_forward_replaces(name, argument):
    model = Moving()
    held = model.mean
    made, _ = quietly(name, model, argument, sample_input=torch.ones(3, 4))
    assert made.mean is held and made.mean.tolist() == [0.0] * 4
    assert made.count.item() == 0 and made.last is None
    made(torch.ones(3, 4))
    assert made.mean.tolist() == pytest.approx([0.1] * 4) and made.count.item() == 1


# ---- Activation checkpointing -------------------------------------------------------------------------


def normed():
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    return nn.Sequential(block(), block(), nn.Linear(8, 2))


def twins(make):
    """A model with checkpointing, and the same model without."""
    plain = make()
    model, result = quietly("optimize_for_training", make(), None, config=CHECKPOINTS)
    assert "activation-checkpointing" in result.optimizations_applied
    return plain, model


def agree(plain, model):
    for (name, a), (_, b) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_s4_11_checkpointing_updates_statistics_once():
    plain, model = twins(normed)
    for step in range(3):
        x = torch.randn(16, 8) + step
        for m in (plain, model):
            m.zero_grad()
            m(x).square().sum().backward()
        assert model[0][1].num_batches_tracked == step + 1
        agree(plain, model)
    # Two forwards before the gradients.
    for m in (plain, model):
        torch.manual_seed(5)
        m.zero_grad()
        (m(torch.randn(4, 8)).square().sum() + m(torch.randn(4, 8)).sin().sum()).backward()
    agree(plain, model)
    assert model[0][1].num_batches_tracked == 5


class Reading(nn.Module):
    """A block that reads a buffer, replaces it, and writes another after some calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x * self.scale)) * self.scale)
        self.scale = self.scale + 1
        if self.scale[0] > 2:
            self.calls += 1
        return y


def test_s4_11_checkpointing_computes_with_the_buffers_of_the_forward():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Reading(), Reading())

    plain, model = twins(make)
    for _ in range(4):
        for m in (plain, model):
            m.zero_grad()
            m(torch.linspace(-1, 1, 4).expand(3, 4)).square().sum().backward()
        agree(plain, model)
    assert model[0].calls == 3 and model[0].scale[0] == 5


# ---- Layouts ------------------------------------------------------------------------------------------


def image_net(memory_format):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    net = net.to(memory_format=memory_format)
    # A layout that is none of PyTorch's two.
    net[0].weight.data = torch.randn(3, 3, 8, 3).permute(2, 1, 0, 3)
    net(torch.randn(1, 3, 8, 8)).sum().backward()
    return net


def strides(net):
    return [(p.stride(), p.grad.stride()) for p in net.parameters()]


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_s4_11_a_refused_layout_leaves_the_layouts_of_the_model(memory_format, monkeypatch):
    net, x, seen = image_net(memory_format), torch.randn(1, 3, 8, 8), []
    before, values = strides(net), [p.detach().clone() for p in net.parameters()]
    measure = _pipeline.measure

    def slower(task, old, new):
        old.install()
        seen.append(strides(old.module))
        new.install()
        seen.append([p.is_contiguous(memory_format=torch.channels_last) for p in list(net.parameters())[::2]])
        made = measure(task, old, new)
        return type(made)(made.before, made.after, 0.5, made.interval)

    monkeypatch.setattr(_pipeline, "measure", slower)
    config = BackendConfig(level="O1")
    made, result = quietly("optimize_for_training", net, None, sample_input=x, config=config)
    assert "it is slower" in reasons(result, "channels-last")[0] and made is net
    assert strides(net) == before and "_halcyon_layouts" not in net.__dict__
    assert seen[:2] == [before, [True, True]], "each is timed in its layout"
    assert all(torch.equal(p, v) for p, v in zip(net.parameters(), values, strict=True))


def test_s4_11_layouts_come_back_when_a_prepared_model_is_made_plain():
    net = image_net(torch.channels_last)
    before = strides(net)
    _prepared.install(net, _prepared.Settings(channels_last=True))
    assert strides(net) != before
    again = pickle.loads(pickle.dumps(net))
    for model in (net, again):
        # A weight of other sizes came meanwhile.
        model[2].weight = nn.Parameter(torch.randn(5, 8, 3, 3).to(memory_format=torch.channels_last))
        _prepared.install(model, _prepared.PLAIN)
        assert model[0].weight.stride() == before[0][0]
        assert model[2].weight.is_contiguous()
    assert net[0].weight.grad.stride() == before[0][1]
