#!/usr/bin/env python3
"""Measures one peer for `cargo xtask bench peers`. xtask/src/bench.rs describes the protocol.

Usage: peers.py --engine numpy|onnxruntime|openvino|torch --threads N                  (serves until its input ends)
       peers.py --engine onnxruntime --threads N --start MODEL INPUT.npy      (one answer from a fresh process)
"""
import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

FILL = 0.03  # minimum number of seconds that the runs of one request take together


def timed(run):
    """Returns the mean seconds per run, over as many runs as take FILL seconds. The caller has warmed up."""
    runs, begin = 0, time.perf_counter()
    while True:
        run()
        runs += 1
        spent = time.perf_counter() - begin
        if spent >= FILL:
            return spent / runs


def model_of(item):
    """`model.resnet50.8` or `model16.resnet50.8` -> (path, [8]); `model.minilm.32x128` -> (path, [32, 128]).

    The model is in the folder that HALCYON_PEER_MODELS names.
    """
    _, name, size = item.split(".")
    path = os.path.join(os.environ["HALCYON_PEER_MODELS"], name + ".onnx")
    return (path, [int(n) for n in size.split("x")]) if os.path.exists(path) else None


def feeds_of(np, inputs, size):
    """Returns values for a model's inputs, each (name, shape, is float). `size` are the symbolic dimensions, in order."""
    feeds = {}
    for name, shape, floats in inputs:
        left = iter(size)
        dims = [d if isinstance(d, int) and d > 0 else next(left) for d in shape]
        feeds[name] = matrix(np, *dims) if floats else np.ones(dims, np.int64)
    return feeds


def matrix(np, *shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def parse(item):
    """`gemm.512` -> ("gemm", [512]); `gemv.14336x4096` -> ("gemv", [14336, 4096])."""
    kind, _, size = item.partition(".")
    return kind, [int(n) for n in size.split("x")] if size and size[0].isdigit() else size


class Numpy:
    """Products by OpenBLAS, and the peak rates of memory."""

    def __init__(self, threads):
        import numpy as np

        self.np, self.threads = np, threads
        self.pool = ThreadPoolExecutor(threads)
        self.name = f"numpy {np.__version__}"

    def prepare(self, item):
        np = self.np
        kind, size = parse(item)
        if kind == "gemv":
            a, x = matrix(np, *size), matrix(np, size[1])
            out = np.empty(size[0], np.float32)
            return (lambda: np.dot(a, x, out=out)), None
        if kind == "gemm":
            a, b = matrix(np, size[0], size[0]), matrix(np, size[0], size[0])
            out = np.empty_like(a)
            return (lambda: np.dot(a, b, out=out)), None
        if item == "peak.read":
            # The scalar product of an array with itself reads its 256 MiB once.
            x = np.ones(1 << 26, np.float32)
            return (lambda: np.dot(x, x)), x.nbytes
        if item == "peak.copy":
            # Copies 256 MiB from one buffer to another, each thread a part. Bytes read and written both
            # count.
            source = np.ones(1 << 26, np.float32)
            target = np.zeros_like(source)
            parts = list(zip(np.array_split(target, self.threads), np.array_split(source, self.threads)))
            copy = lambda part: np.copyto(part[0], part[1])
            return (lambda: list(self.pool.map(copy, parts))), 2 * source.nbytes
        return None


class OnnxRuntime:
    def __init__(self, threads):
        import onnxruntime

        self.ort, self.threads = onnxruntime, threads
        self.name = f"onnxruntime {onnxruntime.__version__}"

    def session(self, model):
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        return self.ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def prepare(self, item):
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        if item.startswith("model."):
            found = model_of(item)
            if not found:
                return None
            session = self.session(found[0])
            inputs = [(i.name, i.shape, "float" in i.type) for i in session.get_inputs()]
            feeds = feeds_of(np, inputs, found[1])
            return (lambda: session.run(None, feeds)), None
        kind, size = parse(item)
        if kind == "igemm":
            return self.bytes(np, size[0])
        value = helper.make_tensor_value_info
        node = helper.make_node
        if kind == "gemm":
            n = size[0]
            # The right side is a weight, so the engine packs it once.
            nodes, shape, out_shape = [node("MatMul", ["x", "b"], ["y"])], [n, n], [n, n]
            weights = {"b": matrix(np, n, n)}
        elif kind == "gemv":
            nodes, shape, out_shape = [node("MatMul", ["x", "b"], ["y"])], [1, size[1]], [1, size[0]]
            weights = {"b": np.ascontiguousarray(matrix(np, *size).T)}
        elif kind == "chain":
            rows, columns = size
            nodes = [node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["t"]), node("Mul", ["t", "w"], ["u"]),
                     node("Add", ["u", "b"], ["y"])]
            shape = out_shape = [rows, columns]
            weights = {"w": matrix(np, columns), "b": matrix(np, columns)}
        else:
            return None
        graph = helper.make_graph(
            nodes, "item", [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, out_shape)],
            [numpy_helper.from_array(v, k) for k, v in weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        session = self.session(model.SerializeToString())
        # Input and output stay bound to the same memory, so that nothing but the operations is timed.
        x = self.ort.OrtValue.ortvalue_from_numpy(matrix(np, *shape))
        y = self.ort.OrtValue.ortvalue_from_numpy(np.empty(out_shape, np.float32))
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_ortvalue_output("y", y)
        return (lambda: session.run_with_iobinding(binding)), None

    def bytes(self, np, n):
        """MatMulInteger of unsigned bytes and a weight of signed bytes, without zero points."""
        from onnx import TensorProto, helper, numpy_helper

        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 256, (n, n), np.uint8), rng.integers(-128, 128, (n, n), np.int8)
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node("MatMulInteger", ["x", "b"], ["y"])], "item",
            [value("x", TensorProto.UINT8, [n, n])], [value("y", TensorProto.INT32, [n, n])],
            [numpy_helper.from_array(b, "b")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 8
        session = self.session(model.SerializeToString())
        x = self.ort.OrtValue.ortvalue_from_numpy(a)
        y = self.ort.OrtValue.ortvalue_from_numpy(np.empty((n, n), np.int32))
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x)
        binding.bind_ortvalue_output("y", y)
        return (lambda: session.run_with_iobinding(binding)), None

    def start(self, model, source):
        import numpy as np

        session = self.session(model)
        return session.run(None, {session.get_inputs()[0].name: np.load(source)})[0].argmax()


class OpenVino:
    """Models in f32 (`model.`) or with permission to round to bf16 (`model16.`), and bf16 products (`gemm16.`)."""

    def __init__(self, threads):
        import openvino

        self.ov, self.threads = openvino, threads
        self.name = f"openvino {openvino.__version__.split('-')[0]}"

    def prepare(self, item):
        import numpy as np

        if item.startswith("gemm16."):
            return self.product(np, parse(item)[1][0])
        if not item.startswith(("model.", "model16.")):
            return None
        found = model_of(item)
        if not found:
            return None
        core = self.ov.Core()
        model = core.read_model(found[0])
        inputs = []
        for port in model.inputs:
            dims = [d.get_length() if d.is_static else 0 for d in port.partial_shape]
            inputs.append((port.any_name, dims, port.element_type.is_real()))
        feeds = feeds_of(np, inputs, found[1])
        model.reshape({k: list(v.shape) for k, v in feeds.items()})
        hint = "bf16" if item.startswith("model16.") else "f32"
        options = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = core.compile_model(model, "CPU", options).create_infer_request()
        return (lambda: request.infer(feeds)), None

    def product(self, np, n):
        """The product of a bf16 matrix and a weight, with a bf16 result."""
        from openvino import opset13 as ops

        bf16 = self.ov.Type.bf16
        x = ops.parameter([n, n], bf16)
        y = ops.matmul(ops.convert(x, "f32"), ops.constant(matrix(np, n, n)), False, False)
        options = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "PERFORMANCE_HINT": "LATENCY",
        }
        model = self.ov.Model([ops.convert(y, "bf16")], [x])
        request = self.ov.Core().compile_model(model, "CPU", options).create_infer_request()
        a = self.ov.Tensor(bf16, [n, n])
        a.data.view(np.uint16)[:] = (matrix(np, n, n).view(np.uint32) >> 16).astype(np.uint16)
        request.set_input_tensor(a)
        # (infer() does not copy the result: it returns a view.)
        return (lambda: request.infer()), None


class Torch:
    def __init__(self, threads):
        import torch

        self.torch = torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        self.name = f"torch {torch.__version__}"

    def prepare(self, item):
        torch = self.torch
        if item.startswith(("train.", "train16.")):
            return training_step(torch, item), None
        kind, size = parse(item)
        if kind in ("gemm16", "gemv16"):
            a = torch.randn(size[0], size[-1]).bfloat16()
            b = torch.randn(*([size[0]] * 2 if kind == "gemm16" else [size[1]])).bfloat16()
            out = torch.empty(*([size[0]] * 2 if kind == "gemm16" else [size[0]]), dtype=torch.bfloat16)
            product = torch.mm if kind == "gemm16" else torch.mv
            return (lambda: product(a, b, out=out)), None
        if kind == "igemm":
            a, b = (torch.randint(-128, 128, (size[0], size[0]), dtype=torch.int8) for _ in range(2))
            return (lambda: torch._int_mm(a, b)), None
        if kind == "gemm":
            a, b = torch.randn(size[0], size[0]), torch.randn(size[0], size[0])
            out = torch.empty_like(a)
            return (lambda: torch.mm(a, b, out=out)), None
        if kind == "gemv":
            a, x, out = torch.randn(*size), torch.randn(size[1]), torch.empty(size[0])
            return (lambda: torch.mv(a, x, out=out)), None
        if kind == "chain":
            x, w, b = torch.randn(*size), torch.randn(size[1]), torch.randn(size[1])
            t = torch.empty_like(x)

            def chain():
                torch.sigmoid(x, out=t)
                t.mul_(x).mul_(w).add_(b)

            return chain, None
        if kind in ("softmax", "layernorm", "silu"):
            x = torch.randn(*size)
            w, b = torch.randn(size[-1]), torch.randn(size[-1])
            out = torch.empty_like(x)
            functions = {
                "softmax": lambda: torch.softmax(x, -1, out=out),
                # (layer_norm has no variant that writes to existing memory.)
                "layernorm": lambda: torch.nn.functional.layer_norm(x, (size[-1],), w, b),
                "silu": lambda: torch.ops.aten.silu.out(x, out=out),
            }
            return functions[kind], None
        if kind in ("attention", "causal"):
            heads, length, width = size
            q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))
            attend = torch.nn.functional.scaled_dot_product_attention
            return (lambda: attend(q, k, v, is_causal=kind == "causal")), None
        return None


def training_step(torch, item):
    """One step per call, with AdamW: the networks of crates/halcyon-nn/examples/bench_train.rs."""
    from torch import nn

    torch.set_grad_enabled(True)
    kind, name = item.split(".")

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.heads = heads

        def forward(self, x):
            batch, length, width = x.shape
            # [batch, heads, length, width of a head]
            split = lambda t: t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            q, k, v = (split(t) for t in self.qkv(self.norm1(x)).split(width, dim=2))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self, vocabulary, context, width):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block(width, 6) for _ in range(6)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
            self.register_buffer("places", torch.arange(context))

        def forward(self, x):
            x = self.tokens(x) + self.positions(self.places)
            return self.head(self.norm(self.blocks(x))).flatten(0, 1)

    if name == "mlp":
        net = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        data = lambda: (torch.rand(128, 784), torch.randint(0, 10, (128,)))
    elif name == "cnn":
        net = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
        data = lambda: (torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    else:
        net = Gpt(65, 256, 384)
        data = lambda: (torch.randint(0, 65, (16, 256)), torch.randint(0, 65, (16 * 256,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    # With one batch the gradients would soon vanish, and arithmetic with denormal numbers is slow.
    batches = itertools.cycle([data() for _ in range(32)])
    low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "train16")

    def step():
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with low:
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def peak_memory():
    """The largest resident size of this process so far, in bytes; None if the system does not report it."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except OSError:
        return None


ENGINES = {"numpy": Numpy, "onnxruntime": OnnxRuntime, "openvino": OpenVino, "torch": Torch}


def serve(engine):
    def answer(**fields):
        print(json.dumps(fields), flush=True)

    answer(name=engine.name)
    current, prepared = None, None
    for line in sys.stdin:
        item = line.strip()
        if item != current:
            # Only one item is held at a time, so that memory stays small and the caches hold no data of other
            # items.
            current, prepared = item, None
            prepared = engine.prepare(item)
            if prepared:
                prepared[0]()
                prepared[0]()
        if not prepared:
            answer(unsupported=item)
            continue
        run, work = prepared
        run()
        answer(seconds=timed(run), peak_memory=peak_memory(), **({"work": work} if work else {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--start", nargs=2, metavar=("MODEL", "INPUT"))
    options = parser.parse_args()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    engine = ENGINES[options.engine](options.threads)
    if options.start:
        print(engine.start(*options.start))
    else:
        serve(engine)


if __name__ == "__main__":
    main()
