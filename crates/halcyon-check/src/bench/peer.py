# Measures PyTorch for halcyon-check. Each line of the input is a request in JSON: {"make": {"do": NAME, ...}}
# prepares some work and runs it once; {"time": SECONDS} measures the work prepared last, after a run that is
# not timed, as bench/mod.rs does for Halcyon. The answer to a request is one line of JSON, {"error": TEXT} if
# the request failed. Operands have random or undefined values and results are not checked, because only times
# are compared.
import importlib
import importlib.metadata
import json
import sys
import time

out, sys.stdout = sys.stdout, sys.stderr


def say(v):
    print(json.dumps(v), file=out, flush=True)


try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except Exception as e:
    say({"error": f"import torch: {type(e).__name__}: {e}"})
    sys.exit(0)

kind = sys.argv[1]
if kind == "cuda" and not torch.cuda.is_available():
    say({"error": f"PyTorch {torch.__version__} finds no GPU"})
    sys.exit(0)
on_gpu = kind == "cuda"
dev = torch.device(kind)
torch.manual_seed(0)
torch.set_grad_enabled(False)

# The maximum number of timed runs per request, and the number of runs that determine how many are timed. Both
# are as in bench/mod.rs.
MOST, BATCH = 2000, 10
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def wait():
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def tf32(on):
    torch.set_float32_matmul_precision("high" if on else "highest")
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = on
        torch.backends.cudnn.allow_tf32 = on


def randn(*dims, dtype="f32"):
    return torch.randn(*dims, device=dev).to(DTYPES[dtype])


def graphed(f):
    """Captures f as a graph. A launch of the graph costs the host about as much as a launch of Halcyon's capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()

    # The graph has only the addresses of the operands, so f, which owns the operands, must stay alive.
    def replay(keep=f):
        graph.replay()

    return replay


def matmul(m, n, k, dtype, tf32, graph):
    globals()["tf32"](tf32)
    f = product(m, n, k, dtype)
    return graphed(f) if graph and on_gpu else f


def product(m, n, k, dtype):
    if dtype == "i8":
        a, b = (torch.randint(-90, 90, (d, k), device=dev, dtype=torch.int8) for d in (m, n))
        b = b.t()
        return lambda: torch._int_mm(a, b)
    if dtype == "f8":
        a = torch.randn(m, k, device=dev).to(torch.float8_e4m3fn)
        # The second operand of _scaled_mm is column-major.
        b = torch.randn(n, k, device=dev).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=dev)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
    return lambda: a @ b


def attention(batch, heads, kv_heads, queries, keys, size, dtype, causal):
    q = randn(batch, heads, queries, size, dtype=dtype)
    k, v = randn(batch, kv_heads, keys, size, dtype=dtype), randn(batch, kv_heads, keys, size, dtype=dtype)
    more = {} if heads == kv_heads else {"enable_gqa": True}
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, **more)


def copy(bytes):
    a = torch.empty(bytes // 4, device=dev)
    b = torch.empty_like(a)
    return lambda: b.copy_(a)


def upload(bytes):
    a, b = torch.empty(bytes, dtype=torch.uint8, pin_memory=on_gpu), torch.empty(bytes, dtype=torch.uint8, device=dev)
    return lambda: b.copy_(a, non_blocking=True)


def download(bytes):
    a, b = torch.empty(bytes, dtype=torch.uint8, device=dev), torch.empty(bytes, dtype=torch.uint8, pin_memory=on_gpu)
    return lambda: b.copy_(a, non_blocking=True)


class Block(nn.Module):
    def __init__(self, width, middle, stride, wider):
        super().__init__()
        conv = lambda i, o, k, s: nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))
        self.a, self.b, self.c = conv(width, middle, 1, 1), conv(middle, middle, 3, stride), conv(middle, 4 * middle, 1, 1)
        self.side = conv(width, 4 * middle, 1, stride) if wider else nn.Identity()

    def forward(self, x):
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.side(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for i, count in enumerate([3, 4, 6, 3]):
        middle = 64 << i
        for j in range(count):
            layers.append(Block(width, middle, 2 if i and not j else 1, j == 0))
            width = 4 * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000), nn.Softmax(-1))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.n1, self.n2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x, mask):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), attn_mask=mask)
        x = self.n1(x + self.o(a.transpose(1, 2).flatten(-2)))
        return self.n2(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    def __init__(self, words=30522, width=384, heads=12, layers=6):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(words, width), nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids, mask):
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]] + self.kinds.weight[0])
        seen = torch.where(mask[:, None, None, :] > 0, 0.0, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, seen)
        m = mask[..., None].to(x.dtype)
        return F.normalize((x * m).sum(1) / m.sum(1))


def model(name, compile, batch, length):
    tf32(True)
    if name == "resnet50":
        f, inputs = resnet50(), [torch.randn(batch, 3, 224, 224, device=dev)]
    elif name != "minilm":
        raise ValueError(f"there is no PyTorch version of {name}")
    else:
        ids = torch.randint(0, 30000, (batch, length), device=dev)
        f, inputs = MiniLM(), [ids, torch.ones_like(ids)]
    f = f.to(dev).eval()
    if compile:
        # PyTorch keeps the code compiled for earlier models and batch sizes. It does not compile a function
        # that has too many compiled versions, so all versions are dropped here.
        importlib.import_module("torch._dynamo").reset()
        f = torch.compile(f, dynamic=False, mode="max-autotune-no-cudagraphs" if not on_gpu else "reduce-overhead")
        f(*inputs)
        f(*inputs)
    return lambda: f(*inputs)


WORKS = {f.__name__: f for f in [matmul, attention, copy, upload, download, model]}
work = None



def seconds(n):
    start = time.perf_counter()
    for _ in range(n):
        work()
    wait()
    return (time.perf_counter() - start) / n


def installed(*names):
    """Returns the name and version of each of the packages that is installed. They contain libraries that PyTorch loads."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def libraries():
    if not on_gpu:
        return kind.upper()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    wheels = [f"nvidia-{lib}{cu}" for lib in ("cublas", "cudnn") for cu in ("-cu11", "-cu12", "-cu13", "")]
    return ", ".join([build, f"cuDNN {torch.backends.cudnn.version()}", *installed(*wheels, "triton")])


where = torch.cuda.get_device_name() if on_gpu else kind
say({"torch": torch.__version__, "device": where, "libraries": libraries()})
for line in sys.stdin:
    try:
        ask = json.loads(line)
        if "make" in ask:
            work = None
            made = dict(ask["make"])
            work = WORKS[made.pop("do")](**made)
            work()
            wait()
            say({"made": True})
        else:
            each = seconds(1)
            if each < ask["time"]:
                each = seconds(BATCH)
            n = max(1, min(MOST, int(ask["time"] / max(each, 1e-9))))
            seconds(1)
            say({"seconds": seconds(n)})
    except Exception as e:
        say({"error": f"{type(e).__name__}: {e}"[:500]})
