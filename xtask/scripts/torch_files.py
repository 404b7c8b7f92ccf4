"""Writes the .pt files that the tests of halcyon_formats::torch read, and their values as .npz.

    python xtask/scripts/torch_files.py crates/halcyon-formats/tests/data/torch
"""

import sys

import numpy as np
import torch

out = sys.argv[1]
torch.manual_seed(18)
base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
state = {
    "f32": base.clone(),
    "transposed": base.t(),
    "column": base[:, 2],
    "every_other": base[1:, ::2],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "f16": torch.randn(3, 2).half(),
    "bf16": torch.randn(5).bfloat16(),
    "i64": torch.tensor([1, -2, 1 << 40]),
    "i32": torch.tensor([-5], dtype=torch.int32),
    "i16": torch.tensor([300, -300], dtype=torch.int16),
    "i8": torch.tensor([-128, 127], dtype=torch.int8),
    "u8": torch.tensor([0, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "u16": torch.tensor([0, 65535], dtype=torch.uint16),
    "expanded": torch.tensor([1.5]).expand(2, 3),
    "f8": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
}
torch.save(state, f"{out}/types.pt")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.fc2 = torch.nn.Linear(3, 2)


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net.fc2(net.norm(net.fc1(torch.randn(5, 4)))).sum().backward()
opt.step()
checkpoint = {
    "model": net.state_dict(),
    "optimizer": opt.state_dict(),
    "epoch": 3,
    "best": 0.97,
    "note": "ü",
    "none": None,
    "list": [1, (2, 3)],
}
torch.save(checkpoint, f"{out}/checkpoint.pt")
torch.save(net.state_dict(), f"{out}/state.pt", pickle_protocol=4)
torch.save({"w": torch.nn.Parameter(torch.ones(2))}, f"{out}/parameter.pt", pickle_protocol=5)
# A whole model, and the format before version 1.6: both are errors.
torch.save(net, f"{out}/module.pt")
torch.save(net.state_dict(), f"{out}/legacy.pt", _use_new_zipfile_serialization=False)
torch.serialization.set_crc32_options(False)
torch.save({"w": torch.arange(3)}, f"{out}/nocrc.pt")


def array(t):
    small = t.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    return t.float().numpy() if small else t.contiguous().numpy()


np.savez(f"{out}/types.npz", **{k: array(v) for k, v in state.items()})
np.savez(f"{out}/state.npz", **{k: v.numpy() for k, v in net.state_dict().items()})
