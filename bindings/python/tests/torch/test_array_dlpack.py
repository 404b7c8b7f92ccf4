"""Exchange of arrays with PyTorch on the CPU, without copies and without leaks."""

import gc
import resource

import halcyon.array as xp
import numpy as np
import pytest
import torch

TYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_of_every_type(dtype):
    t = torch.arange(64).reshape(4, 16).to(dtype)
    x = xp.from_dlpack(t)
    back = torch.from_dlpack(x)
    assert str(x.dtype) == str(dtype).removeprefix("torch.")
    assert back.dtype == dtype and torch.equal(back, t) and back.data_ptr() == t.data_ptr()
    for view in (t.T, t[:, ::3], t[1:, 5:], t[:0], t[0, 0], t.expand(2, 4, 16)):
        x = xp.from_dlpack(view)
        assert x.shape == tuple(view.shape) and torch.equal(torch.from_dlpack(x), view.contiguous())


def test_memory_is_shared_and_never_written():
    t = torch.arange(32.0)
    x, copied = xp.from_dlpack(t), xp.asarray(t)
    t[0] = 7.0
    assert float(x[0]) == 7.0 and float(copied[0]) == 0.0
    x[1] = 100.0
    x += 1
    assert float(x[1]) == 101.0 and float(t[1]) == 1.0
    with pytest.raises(BufferError):
        xp.from_dlpack(t[::2], copy=False)


def test_a_result_is_exported_without_a_copy():
    x = xp.arange(32, dtype=xp.float32) * 2
    t = torch.from_dlpack(x)
    assert t.data_ptr() == x.numpy().ctypes.data and torch.equal(t, torch.arange(32.0) * 2)
    x += 1
    assert float(x[0]) == 1.0 and float(t[0]) == 0.0


def test_tensors_with_a_history_are_refused():
    with pytest.raises(BufferError, match="gradient"):
        xp.from_dlpack(torch.ones(3, requires_grad=True))


def test_no_exchange_leaks():
    """100,000 exchanges; a leak of each would be gigabytes."""
    t, a = torch.arange(4096.0), np.arange(4096.0)

    def exchange(n):
        for _ in range(n):
            torch.from_dlpack(xp.from_dlpack(t))
            np.from_dlpack(xp.asarray(a))
            xp.from_dlpack(a).__dlpack__(max_version=(1, 1))
            torch.from_dlpack(xp.asarray(a))

    exchange(1000)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange(25_000)
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
