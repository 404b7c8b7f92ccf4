"""Makes the cases that halcyon-nn is compared with: layers, losses, optimizers, schedules and the loss scaler
of PyTorch.

`torch_cases.py FOLDER [COUNT]` writes layers.npz and layers.json (COUNT random configurations of layers and
losses, with inputs, weights, results and gradients), optimizers.npz, optimizers.json, schedules.json and
scaler.json. The draws follow from a fixed seed. Needs torch.
"""

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
draw = random.Random(18)
torch.manual_seed(18)


def yes(p=0.5):
    return draw.random() < p


def values(*shape, low=-2.0, high=2.0):
    """Uniform values with few bits, so that files compress and sums are exact more often."""
    raw = torch.randint(-128, 129, shape).float() / 128.0
    return (low + high) / 2 + raw * (high - low) / 2


def spread(*shape):
    """Distinct values in random order, so that a maximum has no ties."""
    n = math.prod(shape)
    return ((torch.randperm(n).float() - n / 2) / 16.0).reshape(shape)


def conv(n, transposed):
    groups = draw.choice([1, 1, 2, 3])
    cin, cout = groups * draw.randint(1, 3), groups * draw.randint(1, 3)
    kernel = [draw.randint(1, 3) for _ in range(n)]
    stride = [draw.randint(1, 2) for _ in range(n)]
    dilation = [draw.randint(1, 2) for _ in range(n)]
    padding = [draw.randint(0, k - 1) for k in kernel]
    c = dict(n=n, inputs=cin, outputs=cout, kernel=kernel, stride=stride, padding=padding, dilation=dilation,
             groups=groups, bias=yes())
    args = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, bias=c["bias"])
    if transposed:
        c["output_padding"] = [draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation)]
        m = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][n - 1](
            cin, cout, kernel, output_padding=c["output_padding"], **args)
    else:
        m = [nn.Conv1d, nn.Conv2d, nn.Conv3d][n - 1](cin, cout, kernel, **args)
    x = values(draw.randint(1, 2), cin, *[draw.randint(5, 7) for _ in range(n)])
    return c, m, [x], lambda m, x: m(x)


def layer(kind):
    """Configuration, module, inputs and forward of a random layer."""
    if kind.startswith("conv"):
        return conv(int(kind[-2]), "transpose" in kind)
    if kind == "linear":
        c = dict(inputs=draw.randint(1, 9), outputs=draw.randint(1, 9), bias=yes())
        lead = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        return c, nn.Linear(c["inputs"], c["outputs"], bias=c["bias"]), [values(*lead, c["inputs"])], lambda m, x: m(x)
    if kind == "embedding":
        c = dict(count=draw.randint(2, 9), size=draw.randint(1, 6))
        c["padding_index"] = draw.randrange(c["count"]) if yes() else None
        m = nn.Embedding(c["count"], c["size"], padding_idx=c["padding_index"])
        index = torch.randint(0, c["count"], [draw.randint(1, 3), draw.randint(1, 4)])
        return c, m, [index], lambda m, x: m(x)
    if kind in ("layer_norm", "rms_norm"):
        dims = [draw.randint(2, 6) for _ in range(draw.randint(1, 2 if kind == "layer_norm" else 1))]
        c = dict(dims=dims, eps=draw.choice([1e-5, 1e-3]), affine=yes(0.7))
        if kind == "layer_norm":
            c["bias"] = yes(0.7)
            m = nn.LayerNorm(dims, eps=c["eps"], elementwise_affine=c["affine"], bias=c["bias"])
        else:
            m = nn.RMSNorm(dims, eps=c["eps"], elementwise_affine=c["affine"])
        return c, m, [values(draw.randint(1, 3), draw.randint(1, 3), *dims)], lambda m, x: m(x)
    if kind == "group_norm":
        groups = draw.randint(1, 3)
        channels = groups * draw.randint(1, 3)
        c = dict(groups=groups, channels=channels, eps=draw.choice([1e-5, 1e-3]), affine=yes(0.7))
        m = nn.GroupNorm(groups, channels, eps=c["eps"], affine=c["affine"])
        rest = [draw.randint(2, 4) for _ in range(draw.randint(1, 2))]
        return c, m, [values(draw.randint(1, 3), channels, *rest)], lambda m, x: m(x)
    if kind == "batch_norm":
        n = draw.randint(0, 3)
        c = dict(channels=draw.randint(1, 4), eps=draw.choice([1e-5, 1e-3]), momentum=draw.choice([0.1, 0.3]),
                 affine=yes(0.7), training=yes())
        m = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][n](
            c["channels"], eps=c["eps"], momentum=c["momentum"], affine=c["affine"])
        m.running_mean.copy_(values(c["channels"]))
        m.running_var.copy_(values(c["channels"], low=0.5, high=2.0))
        m.train(c["training"])
        return c, m, [values(draw.randint(2, 4), c["channels"], *[draw.randint(1, 3) for _ in range(n)])], lambda m, x: m(x)
    if kind == "attention":
        heads = draw.randint(1, 3)
        size = heads * draw.randint(1, 4)
        c = dict(size=size, heads=heads, bias=yes(0.7), batch_first=yes(), causal=yes(), mask=False)
        b, q, k = draw.randint(1, 2), draw.randint(1, 5), draw.randint(1, 5)
        if c["causal"]:
            k = q + draw.randint(0, 2)
        elif yes():
            c["mask"] = True
        m = nn.MultiheadAttention(size, heads, bias=c["bias"], batch_first=c["batch_first"])
        shape = (lambda n: [b, n, size]) if c["batch_first"] else (lambda n: [n, b, size])
        inputs = [values(*shape(q)), values(*shape(k)), values(*shape(k))]
        mask = None
        if c["causal"]:
            mask = torch.full([q, k], -math.inf).triu(k - q + 1)
        if c["mask"]:
            mask = values(q, k)
            inputs.append(mask)
        return c, m, inputs, lambda m, *x: m(*x[:3], attn_mask=mask, need_weights=False)[0]
    if kind in ("lstm", "gru"):
        c = dict(inputs=draw.randint(1, 4), hidden=draw.randint(1, 4), layers=draw.randint(1, 2), bias=yes(0.7),
                 batch_first=yes(), bidirectional=yes(0.4), state=yes())
        m = (nn.LSTM if kind == "lstm" else nn.GRU)(
            c["inputs"], c["hidden"], num_layers=c["layers"], bias=c["bias"], batch_first=c["batch_first"],
            bidirectional=c["bidirectional"])
        t, b = draw.randint(1, 4), draw.randint(1, 3)
        x = [values(*([b, t] if c["batch_first"] else [t, b]), c["inputs"])]
        if c["state"]:
            shape = [c["layers"] * (2 if c["bidirectional"] else 1), b, c["hidden"]]
            x += [values(*shape) for _ in range(2 if kind == "lstm" else 1)]

        def forward(m, x, *state):
            if kind == "lstm":
                y, (h, s) = m(x, state if state else None)
                return [y, h, s]
            y, h = m(x, *state)
            return [y, h]

        return c, m, x, forward
    if kind.endswith("pool"):
        n = draw.randint(1, 3)
        c = dict(n=n, kernel=[draw.randint(1, 3) for _ in range(n)])
        sizes = [draw.randint(5, 7) for _ in range(n)]
        x = spread(draw.randint(1, 2), draw.randint(1, 3), *sizes)
        if kind == "adaptive_avg_pool":
            f = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d][n - 1]
            return c, None, [x], lambda m, x: f(x, c["kernel"])
        c["stride"] = [draw.randint(1, 3) for _ in range(n)]
        c["padding"] = [draw.randint(0, k // 2) for k in c["kernel"]]
        if kind == "max_pool":
            c["dilation"] = [draw.randint(1, 2) for _ in range(n)]
            f = [F.max_pool1d, F.max_pool2d, F.max_pool3d][n - 1]
            return c, None, [x], lambda m, x: f(x, c["kernel"], c["stride"], c["padding"], c["dilation"])
        c["count_include_pad"] = yes()
        f = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][n - 1]
        return c, None, [x], lambda m, x: f(x, c["kernel"], c["stride"], c["padding"],
                                            count_include_pad=c["count_include_pad"])
    if kind == "activation":
        name = draw.choice(["relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus",
                            "mish", "hardswish", "softmax", "log_softmax"])
        c = dict(name=name, parameter=draw.choice([0.01, 0.3, 1.0]), axis=draw.choice([0, 1, -1]))
        f = {
            "leaky_relu": lambda x: F.leaky_relu(x, c["parameter"]),
            "elu": lambda x: F.elu(x, c["parameter"]),
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "softmax": lambda x: F.softmax(x, c["axis"]),
            "log_softmax": lambda x: F.log_softmax(x, c["axis"]),
        }.get(name) or getattr(F, name, None) or getattr(torch, name)
        return c, None, [spread(draw.randint(2, 4), draw.randint(2, 5))], lambda m, x: f(x)
    return loss(kind)


def loss(kind):
    c = dict(reduction=draw.choice(["mean", "sum", "none"]))
    r = c["reduction"]
    shape = [draw.randint(1, 4), draw.randint(2, 5)] + [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
    if kind in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"):
        x, y = spread(*shape), values(*shape) + 0.01
        if kind == "huber_loss":
            c["parameter"] = draw.choice([0.5, 1.0])
            return c, None, [x, y], lambda m, x, y: F.huber_loss(x, y, reduction=r, delta=c["parameter"])
        if kind == "smooth_l1_loss":
            c["parameter"] = draw.choice([0.0, 0.5, 1.0])
            return c, None, [x, y], lambda m, x, y: F.smooth_l1_loss(x, y, reduction=r, beta=c["parameter"])
        return c, None, [x, y], lambda m, x, y: getattr(F, kind)(x, y, reduction=r)
    if kind == "kl_div":
        x, y = F.log_softmax(values(*shape), 1), F.softmax(values(*shape), 1)
        if yes():
            y[0, 0] = 0.0
        return c, None, [x, y], lambda m, x, y: F.kl_div(x, y, reduction=r)
    if kind == "binary_cross_entropy":
        x, y = values(*shape, low=0.02, high=0.98), values(*shape, low=0.0, high=1.0)
        return c, None, [x, y], lambda m, x, y: F.binary_cross_entropy(x, y, reduction=r)
    if kind == "binary_cross_entropy_with_logits":
        x, y = spread(*shape), values(*shape, low=0.0, high=1.0)
        inputs, c["weight"], c["pos_weight"] = [x, y], yes(), yes()
        weight = values(*shape, low=0.1, high=2.0) if c["weight"] else None
        pos = values(shape[-1], low=0.1, high=2.0) if c["pos_weight"] else None
        inputs += [t for t in (weight, pos) if t is not None]
        return c, None, inputs, lambda m, x, y, *_: F.binary_cross_entropy_with_logits(
            x, y, weight=weight, pos_weight=pos, reduction=r)
    if kind in ("cross_entropy", "nll_loss"):
        x = values(*shape)
        classes = shape[1]
        c.update(weight=yes(), probabilities=False, smoothing=0.0, ignore=-100)
        weight = values(classes, low=0.1, high=2.0) if c["weight"] else None
        if kind == "cross_entropy":
            c["probabilities"] = yes(0.3)
            c["smoothing"] = draw.choice([0.0, 0.0, 0.1])
        if c["probabilities"]:
            y = F.softmax(values(*shape), 1)
        else:
            y = torch.randint(0, classes, [shape[0]] + shape[2:])
            if yes():
                c["ignore"] = draw.randrange(classes)
                if bool((y == c["ignore"]).all()):
                    c["ignore"] = -100
        if kind == "nll_loss":
            x = F.log_softmax(x, 1)
            f = lambda m, x, y, *_: F.nll_loss(x, y, weight=weight, ignore_index=c["ignore"], reduction=r)
        else:
            f = lambda m, x, y, *_: F.cross_entropy(x, y, weight=weight, ignore_index=c["ignore"], reduction=r,
                                                   label_smoothing=c["smoothing"])
        return c, None, [x, y] + ([weight] if weight is not None else []), f
    assert kind == "ctc_loss", kind
    t, b, classes = draw.randint(3, 8), draw.randint(1, 3), draw.randint(3, 5)
    c.update(blank=draw.choice([0, classes - 1]), zero_infinity=yes())
    longest = draw.randint(1, 3)
    labels = [k for k in range(classes) if k != c["blank"]]
    target = torch.tensor([[draw.choice(labels) for _ in range(longest)] for _ in range(b)])
    c["target_lengths"] = [draw.randint(1, longest) for _ in range(b)]
    c["input_lengths"] = [draw.randint(max(1, t - 2), t) for _ in range(b)]
    # PyTorch's gradient is right only for the result of a log-softmax.
    return c, None, [values(t, b, classes), target], lambda m, x, y: F.ctc_loss(
        F.log_softmax(x, 2), y, torch.tensor(c["input_lengths"]), torch.tensor(c["target_lengths"]), blank=c["blank"], reduction=r,
        zero_infinity=c["zero_infinity"])


KINDS = (["linear"] * 3 + [f"conv{n}d" for n in (1, 2, 3)] * 2 + [f"conv_transpose{n}d" for n in (1, 2, 3)] * 2
         + ["embedding", "layer_norm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "batch_norm", "attention",
            "attention", "attention", "lstm", "lstm", "gru", "gru", "max_pool", "avg_pool", "adaptive_avg_pool",
            "activation", "activation", "activation", "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "kl_div",
            "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "cross_entropy",
            "cross_entropy", "nll_loss", "ctc_loss", "ctc_loss"])


def layers(folder, count):
    arrays, configurations = {}, []
    while len(configurations) < count:
        kind = KINDS[len(configurations) % len(KINDS)]
        c, m, inputs, forward = layer(kind)
        name = str(len(configurations))
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        before = {k: v.clone() for k, v in m.state_dict().items()} if m else {}
        out = forward(m, *inputs)
        out = out if isinstance(out, list) else [out]
        if not all(bool(torch.isfinite(y).all()) for y in out) and kind != "ctc_loss":
            continue
        # The gradient of a weighted sum, so that every element counts differently.
        seeds = [values(*y.shape) for y in out]
        total = sum((y * w).sum() for y, w in zip(out, seeds))
        if not bool(torch.isfinite(total)):
            continue
        total.backward()
        c["kind"] = kind
        put = lambda key, t: arrays.__setitem__(f"{name}.{key}", t.detach().numpy())
        for i, x in enumerate(inputs):
            put(f"x{i}", x if x.is_floating_point() else x.int())
            # PyTorch's gradient is not finite where a loss expects a probability of 0.
            if x.grad is not None and bool(torch.isfinite(x.grad).all()):
                put(f"dx{i}", x.grad)
        for i, (y, w) in enumerate(zip(out, seeds)):
            put(f"y{i}", y)
            put(f"w{i}", w)
        c["inputs_count"], c["outputs_count"], c["weights"] = len(inputs), len(out), list(before)
        for k, v in before.items():
            put(f"p.{k}", v if v.is_floating_point() else v.int())
        if m:
            for k, p in m.named_parameters():
                put(f"dp.{k}", p.grad if p.grad is not None else torch.zeros_like(p))
            for k, b in m.named_buffers():
                put(f"b.{k}", b if b.is_floating_point() else b.int())
        configurations.append(c)
    np.savez_compressed(folder / "layers.npz", **arrays)
    (folder / "layers.json").write_text(json.dumps(configurations, separators=(",", ":")) + "\n")


SHAPES = [[6, 5], [7], [2, 3, 4], [4, 9]]


def gradient(step, k, shape):
    """The gradient of parameter k in a step, in f32; the tests compute the same."""
    j = np.arange(math.prod(shape), dtype=np.float64)
    g = np.sin(0.7 * step + 0.31 * j + 1.7 * k) * (0.1 + 0.9 * np.abs(np.cos(0.05 * step + 0.2 * j)))
    return torch.from_numpy(g.astype(np.float32).reshape(shape))


def start(k, shape):
    j = np.arange(math.prod(shape), dtype=np.float64)
    return torch.from_numpy(np.cos(0.9 * j + k).astype(np.float32).reshape(shape))


OPTIMIZERS = [
    ("sgd", dict(lr=0.1), {}),
    ("sgd", dict(lr=0.05, momentum=0.9), {}),
    ("sgd", dict(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01), {}),
    ("sgd", dict(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.001), {}),
    ("adam", dict(lr=0.01), {}),
    ("adam", dict(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1), {}),
    ("adam", dict(lr=0.01, amsgrad=True), {}),
    ("adamw", dict(lr=0.01), {}),
    ("adamw", dict(lr=0.02, betas=(0.85, 0.98), eps=1e-5, weight_decay=0.2, amsgrad=True), {}),
    ("adagrad", dict(lr=0.1), {}),
    ("adagrad", dict(lr=0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.5), {}),
    ("rmsprop", dict(lr=0.01), {}),
    ("rmsprop", dict(lr=0.01, alpha=0.9, momentum=0.9, weight_decay=0.01), {}),
    ("rmsprop", dict(lr=0.01, alpha=0.95, centered=True, momentum=0.5), {}),
    ("adafactor", dict(lr=0.05), {}),
    ("adafactor", dict(lr=0.05, weight_decay=0.1, d=1.5), {}),
    ("adamw", dict(lr=0.02), dict(clip_norm=1.0)),
    ("sgd", dict(lr=0.1, momentum=0.9), dict(clip_value=0.3)),
    ("muon", dict(lr=0.02, weight_decay=0.1), {}),
    ("muon", dict(lr=0.05, weight_decay=0.0, nesterov=False, momentum=0.9), {}),
]

CLASSES = dict(sgd="SGD", adam="Adam", adamw="AdamW", adagrad="Adagrad", rmsprop="RMSprop", adafactor="Adafactor",
               muon="Muon")


def lion(p, g, m, step, c):
    """Chen et al. 2023, algorithm 2, in f64."""
    b1, b2 = c["betas"]
    u = np.sign(b1 * m + (1 - b1) * g)
    return p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * u, b2 * m + (1 - b2) * g


def muon(p, g, m, step, c):
    """Jordan et al. 2024 (the post "Muon: an optimizer for hidden layers"), in f64."""
    m = c["momentum"] * m + (1 - c["momentum"]) * g
    u = (1 - c["momentum"]) * g + c["momentum"] * m if c["nesterov"] else m
    x = u if u.shape[0] <= u.shape[1] else u.T
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    x = x if u.shape[0] <= u.shape[1] else x.T
    scale = math.sqrt(max(1.0, u.shape[0] / u.shape[1]))
    return p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * scale * x, m


def optimizers(folder):
    arrays, cases = {}, []

    def keep(case, steps, params):
        for k, p in enumerate(params):
            arrays[f"{len(cases)}.{steps}.{k}"] = np.array(p, dtype=np.float32)

    for kind, config, more in OPTIMIZERS:
        shapes = [s for s in SHAPES if kind != "muon" or len(s) == 2]
        params = [start(k, s).requires_grad_() for k, s in enumerate(shapes)]
        o = getattr(torch.optim, CLASSES[kind])(params, **config)
        for step in range(1, 101):
            for k, (p, s) in enumerate(zip(params, shapes)):
                p.grad = gradient(step, k, s)
            if "clip_norm" in more:
                torch.nn.utils.clip_grad_norm_(params, more["clip_norm"])
            if "clip_value" in more:
                torch.nn.utils.clip_grad_value_(params, more["clip_value"])
            o.step()
            if step in (1, 10, 100):
                keep(cases, step, [p.detach().numpy() for p in params])
        cases.append(dict(kind=kind, by="torch", config=config, more=more, shapes=shapes))
    papers = [("lion", lion, dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)),
              ("muon", muon, dict(lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1)),
              ("muon", muon, dict(lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.0))]
    for kind, rule, config in papers:
        shapes = [s for s in SHAPES if kind != "muon" or len(s) == 2]
        params = [start(k, s).numpy().astype(np.float64) for k, s in enumerate(shapes)]
        momenta = [np.zeros_like(p) for p in params]
        for step in range(1, 101):
            for k, s in enumerate(shapes):
                g = gradient(step, k, s).numpy().astype(np.float64)
                params[k], momenta[k] = rule(params[k], g, momenta[k], step, config)
            if step in (1, 10, 100):
                keep(cases, step, params)
        cases.append(dict(kind=kind, by="paper", config=config, more={}, shapes=shapes))
    np.savez_compressed(folder / "optimizers.npz", **arrays)
    (folder / "optimizers.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


def schedules(folder):
    S = torch.optim.lr_scheduler
    rows = [
        (dict(kind="constant"), lambda o: S.LambdaLR(o, lambda k: 1.0)),
        (dict(kind="step", size=7, gamma=0.3), lambda o: S.StepLR(o, 7, 0.3)),
        (dict(kind="multi_step", at=[3, 11, 30], gamma=0.5), lambda o: S.MultiStepLR(o, [3, 11, 30], 0.5)),
        (dict(kind="linear", start=1.0 / 3, end=1.0, steps=5), lambda o: S.LinearLR(o)),
        (dict(kind="linear", start=1.0, end=0.1, steps=40),
         lambda o: S.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=40)),
        (dict(kind="cosine", steps=50, least=0.01), lambda o: S.CosineAnnealingLR(o, 50, 0.01)),
        (dict(kind="exponential", gamma=0.9), lambda o: S.ExponentialLR(o, 0.9)),
        (dict(kind="one_cycle", most=0.5, steps=50),
         lambda o: S.OneCycleLR(o, 0.5, total_steps=50, cycle_momentum=False)),
        (dict(kind="noam", size=512, warmup=10),
         lambda o: S.LambdaLR(o, lambda k: 512 ** -0.5 * min((k + 1) ** -0.5, (k + 1) * 10 ** -1.5))),
        (dict(kind="warm_up", steps=10, then=dict(kind="step", size=20, gamma=0.1)),
         lambda o: S.LambdaLR(o, lambda k: (k + 1) / 11 if k < 10 else 0.1 ** ((k - 10) // 20))),
        (dict(kind="sequence", first=[[10, dict(kind="linear", start=0.5, end=1.0, steps=10)]],
              last=dict(kind="exponential", gamma=0.8)),
         lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.5, 1.0, 10), S.ExponentialLR(o, 0.8)], [10])),
    ]
    out = []
    for config, make in rows:
        o = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.25)
        s = make(o)
        rates = []
        for _ in range(50):
            rates.append(o.param_groups[0]["lr"])
            o.step()
            if len(rates) < 50:
                s.step()
        out.append(dict(schedule=config, rate=0.25, rates=rates))
    (folder / "schedules.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


def scaler(folder):
    """The scale of a GradScaler and the parameters after each of 60 steps, some with gradients that overflow."""
    rng = np.random.default_rng(18)
    out = []
    for init, growth, backoff, interval in [(65536.0, 2.0, 0.5, 2000), (1024.0, 2.0, 0.5, 3), (8.0, 4.0, 0.25, 5)]:
        p = torch.ones(3, requires_grad=True)
        o = torch.optim.SGD([p], lr=0.5)
        s = torch.amp.GradScaler("cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff,
                                 growth_interval=interval)
        gradients, scales, values = [], [], []
        for _ in range(60):
            g = rng.choice([0.25, -0.5, 1.0], size=3)
            if rng.random() < 0.15:
                g[rng.integers(3)] = np.inf
            gradients.append([str(v) for v in g])
            o.zero_grad()
            s.scale((p * torch.tensor(g, dtype=torch.float32)).sum()).backward()
            s.step(o)
            s.update()
            scales.append(s.get_scale())
            values.append(p.tolist())
        out.append(dict(initial=init, growth=growth, backoff=backoff, interval=interval, gradients=gradients,
                        scales=scales, values=values))
    (folder / "scaler.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
layers(folder, int(sys.argv[2]) if len(sys.argv) > 2 else 600)
optimizers(folder)
schedules(folder)
scaler(folder)
