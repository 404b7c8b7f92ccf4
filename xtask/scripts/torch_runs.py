"""Makes the losses that `crates/halcyon-nn/tests/torch/runs.rs` is compared with: three networks, each trained
for 100 steps with each of two optimizers, by PyTorch in f32.

`torch_runs.py FILE` writes a JSON list of runs: {"net", "optimizer", "losses"}. Initial weights and batches are
formulas of their position, so that no other data is needed. Needs torch.
"""

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

STEPS = 100
torch.set_num_threads(1)


def unit(seed, n):
    """n values in [-1, 1): the high 24 bits of a linear congruential sequence (Knuth's MMIX constants)."""
    state, out = (seed * 2654435761 + 1) % 2**64, np.empty(n, np.float32)
    for i in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out[i] = (state >> 40) / 2**23 - 1.0
    return out


def start(net, gain):
    """Weights uniform in plus and minus gain / sqrt(inputs); biases 0, scales of norms 1."""
    for i, (name, p) in enumerate(net.named_parameters()):
        with torch.no_grad():
            if p.dim() < 2:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                bound = gain / (p.numel() / p.shape[0]) ** 0.5
                p.copy_(torch.from_numpy(unit(i + 1, p.numel()).reshape(tuple(p.shape)) * np.float32(bound)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(20, 32), nn.Linear(32, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(F.relu(self.fc1(x)))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(8 * 3 * 3, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.fc(F.relu(self.conv2(x)).flatten(1))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h, n = self.norm1(x), x.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block(16, 2), Block(16, 2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11)

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x)).flatten(0, 1)


def batch(net, step):
    seed = 1000 + step % 20
    if net == "gpt":
        # A sequence with a rule to learn: the next token depends on the two before it.
        first = ((unit(seed, 8) + 1) * 5.5).astype(np.int64).clip(0, 10).reshape(4, 2)
        rows = first
        for _ in range(11):
            rows = np.concatenate([rows, (rows[:, -1:] * 3 + rows[:, -2:-1] + 1) % 11], 1)
        return torch.from_numpy(rows[:, :12].copy()), torch.from_numpy(rows[:, 1:13].reshape(-1).copy())
    shape = (16, 20) if net == "mlp" else (8, 1, 10, 10)
    x = unit(seed, int(np.prod(shape))).reshape(shape)
    flat = x.reshape(shape[0], -1)
    y = (np.abs(flat[:, :5]) * 4).sum(1).astype(np.int64) % 5
    return torch.from_numpy(x), torch.from_numpy(y)


def run(name, make, gain, optimizer):
    net = make()
    start(net, gain)
    net.train()
    losses = []
    o = optimizer(net.parameters())
    for step in range(STEPS):
        x, y = batch(name, step)
        loss = F.cross_entropy(net(x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        losses.append(loss.item())
    return losses


def main():
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-5),
    }
    runs = []
    for name, make, gain in [("mlp", Mlp, 1.5), ("cnn", Cnn, 1.5), ("gpt", Gpt, 1.0)]:
        for kind, o in optimizers.items():
            losses = run(name, make, gain, o)
            print(name, kind, losses[0], losses[-1])
            runs.append({"net": name, "optimizer": kind, "losses": losses})
    with open(sys.argv[1], "w") as f:
        json.dump(runs, f)


if __name__ == "__main__":
    main()
