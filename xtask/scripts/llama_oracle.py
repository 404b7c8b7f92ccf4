"""What llama.cpp computes: token ids, logits, greedy continuations, perplexity, speed, and types of quantised
files.

Runs in a virtual environment that `llama_install.py` made, with the prebuilt package or with the native
build. `llama_oracle.py COMMAND --help` lists what a command takes. Defaults are the most exact that llama.cpp
has: keys and values in f32, no flash attention. Products with quantised weights still round the activations
to 8 bits; expand a model to F32 (`expand`) for logits without that error.
"""

import argparse
import ctypes
import json
import math
import random
import statistics
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_uint8, c_uint32, c_void_p
from pathlib import Path

import gguf
import numpy as np

STRUCTURES = ["llama_model_params", "llama_context_params", "llama_model_quantize_params"]
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
FLASH = {"auto": -1, "off": 0, "on": 1}
POOLING = {"file": -1, "mean": 1, "cls": 2, "last": 3}
CACHE = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}


def from_cffi(ffi, name):
    """The ctypes structure with the layout that a cffi declaration has."""
    def convert(kind):
        if kind.kind == "pointer" or kind.kind == "function":
            return c_void_p
        if kind.kind == "enum":
            return c_int32
        signed = {
            "int32_t": c_int32,
            "uint32_t": c_uint32,
            "int8_t": ctypes.c_int8,
            "size_t": ctypes.c_size_t,
        }
        return {"float": c_float, "_Bool": c_bool, "bool": c_bool, "int": c_int32, **signed}[kind.cname]

    try:
        kind = ffi.typeof(f"struct {name}")
    except Exception:
        kind = ffi.typeof(name)
    fields = [(n, convert(f.type)) for n, f in kind.fields]
    made = type(name, (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(made) == ffi.sizeof(kind), name
    return made


class Batch(ctypes.Structure):
    """llama_batch, the same in all versions, with pointers that can be written through."""

    _fields_ = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(ctypes.c_int8)),
    ]


class Llama:
    """libllama of whichever package is installed. Parameters differ between versions, so the layouts of
    structures come from the package; functions are declared here."""

    def __init__(self, verbose=False):
        try:
            from llama_cpp_py_sync import _cffi_bindings as bindings
            types = {n: from_cffi(bindings.ffi, n) for n in STRUCTURES}
            path = bindings._find_library()
        except ImportError:
            from llama_cpp import llama_cpp as bindings
            types = {n: getattr(bindings, n) for n in STRUCTURES}
            path = bindings._lib._name
        self.lib = lib = ctypes.CDLL(path)
        model_params, context_params, quantize_params = (types[n] for n in STRUCTURES)
        tokens = POINTER(c_int32)
        for name, result, arguments in [
            ("llama_backend_init", None, []),
            ("llama_log_set", None, [LOG, c_void_p]),
            ("llama_print_system_info", c_char_p, []),
            ("llama_model_default_params", model_params, []),
            ("llama_context_default_params", context_params, []),
            ("llama_model_quantize_default_params", quantize_params, []),
            ("llama_model_quantize", c_uint32, [c_char_p, c_char_p, POINTER(quantize_params)]),
            ("llama_model_load_from_file", c_void_p, [c_char_p, model_params]),
            ("llama_model_free", None, [c_void_p]),
            ("llama_init_from_model", c_void_p, [c_void_p, context_params]),
            ("llama_free", None, [c_void_p]),
            ("llama_model_get_vocab", c_void_p, [c_void_p]),
            ("llama_vocab_n_tokens", c_int32, [c_void_p]),
            ("llama_vocab_bos", c_int32, [c_void_p]),
            ("llama_vocab_get_add_bos", c_bool, [c_void_p]),
            ("llama_tokenize", c_int32, [c_void_p, c_char_p, c_int32, tokens, c_int32, c_bool, c_bool]),
            ("llama_decode", c_int32, [c_void_p, Batch]),
            ("llama_batch_get_one", Batch, [tokens, c_int32]),
            ("llama_batch_init", Batch, [c_int32, c_int32, c_int32]),
            ("llama_batch_free", None, [Batch]),
            ("llama_get_logits", POINTER(c_float), [c_void_p]),
            ("llama_model_n_embd", c_int32, [c_void_p]),
            ("llama_get_embeddings_seq", POINTER(c_float), [c_void_p, c_int32]),
            ("llama_get_memory", c_void_p, [c_void_p]),
            ("llama_memory_clear", None, [c_void_p, c_bool]),
            ("llama_synchronize", None, [c_void_p]),
            ("llama_state_seq_get_size", ctypes.c_size_t, [c_void_p, c_int32]),
            (
                "llama_state_seq_get_data",
                ctypes.c_size_t,
                [c_void_p, POINTER(c_uint8), ctypes.c_size_t, c_int32],
            ),
            (
                "llama_state_seq_set_data",
                ctypes.c_size_t,
                [c_void_p, POINTER(c_uint8), ctypes.c_size_t, c_int32],
            ),
        ]:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        if not verbose:
            # Kept on the object: the library calls it for as long as it lives.
            self.quiet = LOG(lambda level, text, data: None)
            lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()


class Model:
    def __init__(self, llama, path, repack=True, vocab_only=False):
        self.llama, self.lib = llama, llama.lib
        params = self.lib.llama_model_default_params()
        params.use_extra_bufts = repack
        params.vocab_only = vocab_only
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}; --verbose says why")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.n_vocab = self.lib.llama_vocab_n_tokens(self.vocab)
        self.context = None

    def tokenize(self, text, add_special, parse_special):
        data = text.encode()
        room = len(data) + 16
        ids = (c_int32 * room)()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), ids, room, add_special, parse_special)
        assert n >= 0, "more tokens than bytes"
        return list(ids[:n])

    def start(self, n_ctx, threads, batch=512, ubatch=512, cache="f32", flash="off", pooling=None):
        """A new, empty context. With `pooling`, it makes embeddings: -1 as the file says, 1 the mean."""
        self.close()
        params = self.lib.llama_context_default_params()
        if pooling is not None:
            params.embeddings, params.pooling_type = True, pooling
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, batch, ubatch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = CACHE[cache]
        params.flash_attn_type = FLASH[flash]
        params.no_perf = True
        self.n_batch = batch
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp cannot make a context; --verbose says why")

    def close(self):
        if self.context:
            self.lib.llama_free(self.context)
            self.context = None

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def decode(self, ids):
        """Runs `ids` after what the context holds; only the last position gets logits."""
        for i in range(0, len(ids), self.n_batch):
            part = (c_int32 * len(ids[i:i + self.n_batch]))(*ids[i:i + self.n_batch])
            code = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(part, len(part)))
            if code != 0:
                sys.exit(f"llama_decode answered {code}")

    def last(self):
        """Logits of the last position that ran."""
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (self.n_vocab,)).copy()

    def logits(self, ids, last=None):
        """Logits of every position of `ids`, or of the last ones, in an empty context."""
        first = 0 if last is None else max(0, len(ids) - last)
        out = np.empty((len(ids) - first, self.n_vocab), np.float32)
        batch = self.lib.llama_batch_init(self.n_batch, 0, 1)
        for start in range(0, len(ids), self.n_batch):
            part = ids[start:start + self.n_batch]
            wanted = []
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = (
                    int(token),
                    start + i,
                    1,
                    0,
                )
                batch.logits[i] = start + i >= first
                if batch.logits[i]:
                    wanted.append(start + i - first)
            batch.n_tokens = len(part)
            code = self.lib.llama_decode(self.context, batch)
            if code != 0:
                sys.exit(f"llama_decode answered {code}")
            if wanted:
                rows = np.ctypeslib.as_array(
                    self.lib.llama_get_logits(self.context), (len(wanted), self.n_vocab)
                )
                out[wanted] = rows
        self.lib.llama_batch_free(batch)
        return out

    def embedding(self, ids):
        """The vector of a text, in a context that makes embeddings of at most one batch."""
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), i, 1, 0
            batch.logits[i] = True
        batch.n_tokens = len(ids)
        code = self.lib.llama_decode(self.context, batch)
        if code != 0:
            sys.exit(f"llama_decode answered {code}")
        self.lib.llama_batch_free(batch)
        vector = self.lib.llama_get_embeddings_seq(self.context, 0)
        return np.ctypeslib.as_array(vector, (self.lib.llama_model_n_embd(self.model),)).copy()

    def greedy(self, ids, n):
        """The n most likely next tokens, and how far each logit was above the second."""
        self.clear()
        self.decode([int(i) for i in ids])
        out, gaps = [], []
        for _ in range(n):
            row = self.last()
            second, first = np.partition(row, -2)[-2:]
            out.append(int(row.argmax()))
            gaps.append(float(first) - float(second))
            self.decode(out[-1:])
        return {"ids": out, "gaps": gaps}


def expand(source, target):
    """A copy of a GGUF file with every tensor in F32."""
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, sub = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor_info(tensor.name, [int(d) for d in tensor.shape[::-1]], np.dtype(np.float32), 0)
        # The writer takes the size of the data from the shape, and the type from that of the numbers.
        writer.tensors[-1][tensor.name].nbytes = 4 * int(np.prod(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape[::-1]))
    writer.close()


def tensor_types(path):
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


def special_tokens(path):
    """Texts of the tokens that a vocabulary marks as control (3) or defined by the user (4)."""
    fields = gguf.GGUFReader(path).fields
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"].contents()
    return [tokens.contents(i) for i, k in enumerate(kinds) if k in (3, 4)]


WORDS = (
    "the quick brown fox don't it's we'll I'M naive na\u00efve caf\u00e9 stra\u00dfe "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f "
    "\uc548\ub155\ud558\uc138\uc694 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac HTTP/1.1 foo_bar fooBar x+=1 != -> :: // /* */ "
    "#[derive] "
    "{} [] () <T> &mut self. \"quoted\" 'single' `tick` 100% $5.00 3.14159 1e-9 0xFF 1,234,567 12345678 "
    "007 2026-11-28 "
    "a@b.co https://example.org/a?b=c&d=%20 \u2014 \u2026 \u201ccurly\u201d \u2019s \u00bd \u00b2 \u2163 "
    "\ufb01 \u0130 \u1e9e \u01c4"
).split(" ")
PIECES = [
    " ", "  ", "   ", "    ", "        ", " " * 17, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n",
    "\n ", " \t ",
    "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\ufeff", "\u0000", "\u0001", "\u007f", "\u0085",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "e\u0301", "a\u0308\u0323", "\U00020000", "\ud7a3",
    "\U0010ffff", "\ufffd", "\u2581", "\u0120", "<0x0A>", "<", ">", "|", "_", "-", "'", "'s", "'S", "'re",
    "'\u017f",
]


def strings(seed, count, special):
    """`count` strings that are hard to cut into tokens; `special` holds texts of special tokens."""
    rng = random.Random(seed)
    code = [
        "def f(x):\n    return x ** 2  # square\n", "fn main() {\n\tprintln!(\"{}\", 1_000u64);\n}\n",
        "for (int i = 0; i < n; ++i) { a[i] += b[i]; }", "SELECT * FROM t WHERE a >= 'b';",
        "{\"k\": [1, 2.5, null]}\n",
        "<div class=\"x\">&nbsp;</div>", "if x:\n        pass\n\n\n    y = 'it''s'",
    ]
    out = [
        "",
        " ",
        "\n",
        "a",
        " a",
        "  a",
        "a ",
        "a  ",
        "\u0120",
        "\u2581",
        "\u2581a",
        "Hello, world!",
        "0",
        "00",
        "000",
        "0000",
    ]

    def unicode():
        while True:
            c = rng.choice(
                [
                    rng.randrange(32, 0x250),
                    rng.randrange(0x250, 0x3000),
                    rng.randrange(0x3000, 0x10000),
                    rng.randrange(0x1F000, 0x20000),
                    rng.randrange(1, 0x110000),
                ]
            )
            if not 0xD800 <= c < 0xE000:
                return chr(c)

    def digits():
        return "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 12)))

    while len(out) < count:
        style, text = rng.randrange(7), ""
        for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 30])):
            roll = rng.random()
            if style == 0:
                text += rng.choice(WORDS) + " "
            elif style == 1:
                text += rng.choice(WORDS + PIECES)
            elif style == 2:
                text += unicode()
            elif style == 3:
                text += rng.choice(code) if roll < 0.5 else rng.choice(PIECES)
            elif style == 4:
                text += digits() + rng.choice(["", " ", ".", ",", "-", "x", "\u0663", "\u00b2"])
            elif style == 5:
                text += rng.choice(PIECES) * rng.randrange(1, 6) if roll < 0.6 else rng.choice(WORDS)
            elif special and roll < 0.35:
                text += rng.choice(special) + rng.choice(["", "", " ", "\n"])
            else:
                text += rng.choice(WORDS) + rng.choice(["", " ", "\n"])
        out.append(text)
    return out[:count]


PROMPTS = {
    "plain": "The capital of France is Paris, and the capital of Italy is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "languages": "Guten Morgen! \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u041a\u0430\u043a "
        "\u0434\u0435\u043b\u0430? \U0001f600",
    "story": "Once upon a time there was a small dragon who could not breathe fire. Every morning "
        "she climbed the hill "
    "above the village and practised, and every morning",
    "chat": {
        "llama": "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
        "gemma3": "<start_of_turn>user\nWhat is gravity?<end_of_turn>\n<start_of_turn>model\n",
    },
}
LONG = "".join(
    f"Item {i}: the {a} {b} costs {7 * i % 97} coins.\n" for i, (a, b) in enumerate(
        (a, b) for a in ["red", "old", "tiny", "round", "heavy", "blue", "broken"] for b in
        ["lamp", "chair", "boat", "clock", "bell", "kite", "drum", "coat"])
) + "The most expensive item is"


def write_json(path, value):
    text = json.dumps(value)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")


def load(args, **more):
    return Model(Llama(args.verbose), args.model, **more)


def context(args, model, n_ctx, batch=512):
    model.start(n_ctx, args.threads, batch, min(batch, 512), args.cache, args.flash)


def do_info(args):
    print(Llama(args.verbose).lib.llama_print_system_info().decode())


def do_tokenize(args):
    model = load(args, vocab_only=True)
    texts = json.loads(args.file.read_text())
    write_json(args.out, [model.tokenize(t, args.add_special, args.parse_special) for t in texts])


def do_strings(args):
    special = special_tokens(args.model) if args.model else []
    write_json(args.out, strings(args.seed, args.count, special))


def do_logits(args):
    model, ids = load(args, repack=args.repack), np.load(args.ids)
    context(args, model, len(ids))
    np.save(args.out, model.logits(ids, args.last))


def do_embedding(args):
    """The vector of a text, pooled as the file says or by the mean, and not normalised."""
    model, ids = load(args, repack=args.repack), np.load(args.ids)
    model.start(max(len(ids), 64), args.threads, cache=args.cache, flash=args.flash, pooling=POOLING[args.pooling])
    np.save(args.out, model.embedding(ids))


def do_greedy(args):
    model, ids = load(args, repack=args.repack), np.load(args.ids)
    context(args, model, len(ids) + args.n)
    write_json(args.out, model.greedy(ids, args.n))


def do_perplexity(args):
    """The protocol of llama-perplexity: windows without overlap, of which the second half counts."""
    model = load(args, repack=args.repack)
    ids = np.load(args.input) if args.input.suffix == ".npy" else None
    if ids is None:
        ids = np.array(model.tokenize(args.input.read_text(), True, False), np.int32)
    n, total, squares, count = args.window, 0.0, 0.0, 0
    windows = len(ids) // n if args.windows is None else min(args.windows, len(ids) // n)
    if windows == 0:
        sys.exit(f"{len(ids)} tokens do not fill a window of {n}")
    context(args, model, n)
    for w in range(windows):
        part = ids[w * n:(w + 1) * n].copy()
        if model.lib.llama_vocab_get_add_bos(model.vocab):
            part[0] = model.lib.llama_vocab_bos(model.vocab)
        model.clear()
        first = n // 2
        rows = model.logits(part, n - first)[:-1].astype(np.float64)
        top = rows.max(1)
        log_sum = top + np.log(np.exp(rows - top[:, None]).sum(1))
        nll = log_sum - rows[np.arange(len(rows)), ids[w * n + first + 1:(w + 1) * n]]
        total, squares, count = total + nll.sum(), squares + (nll ** 2).sum(), count + len(nll)
    mean = total / count
    error = math.sqrt(max(squares / count - mean ** 2, 0) / max(count - 1, 1))
    value = math.exp(mean)
    write_json(args.out, {"perplexity": value, "error": error * value, "nll": mean, "tokens": count})


def do_bench(args):
    """The protocol of llama-bench: random tokens, one warm-up of each test, the mean of the repetitions."""
    model, rng = load(args, repack=args.repack), random.Random(0)
    lib, results = model.lib, []

    def token():
        return rng.randrange(model.n_vocab)

    def prompt(n):
        model.decode([token() for _ in range(n)])
        lib.llama_synchronize(model.context)

    def generate(n):
        for _ in range(n):
            model.decode([token()])
            lib.llama_synchronize(model.context)

    for depth in args.depth:
        for name, n, test in [("pp", args.prompt, prompt), ("tg", args.generate, generate)]:
            if n == 0:
                continue
            model.start(depth + n, args.threads, args.batch, args.ubatch, args.cache, args.flash)
            test(min(n, args.batch) if name == "pp" else 1)
            model.clear()
            state = None
            if depth:
                prompt(depth)
                size = lib.llama_state_seq_get_size(model.context, 0)
                state = (c_uint8 * size)()
                lib.llama_state_seq_get_data(model.context, state, size, 0)
            speeds = []
            for _ in range(args.repetitions):
                model.clear()
                if state is not None:
                    lib.llama_state_seq_set_data(model.context, state, len(state), 0)
                start = time.perf_counter()
                test(n)
                speeds.append(n / (time.perf_counter() - start))
            label = f"{name}{n}" + (f" @ d{depth}" if depth else "")
            spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
            results.append({"test": label, "mean": statistics.mean(speeds), "stdev": spread, "all": speeds})
            if not args.json:
                print(
                    f"{args.model.name:30} {label:16} {results[-1]['mean']:9.2f} +- {spread:.2f} t/s",
                    flush=True,
                )
    if args.json:
        write_json(None, results)


def do_quantize(args):
    llama = Llama(args.verbose)
    kinds = {k.name.removeprefix("MOSTLY_").removeprefix("ALL_"): k.value for k in gguf.LlamaFileType}
    if args.type.upper() not in kinds:
        sys.exit(f"no type {args.type}; there are {', '.join(kinds)}")
    params = llama.lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = kinds[args.type.upper()], args.threads
    params.allow_requantize, params.pure = args.requantize, args.pure
    code = llama.lib.llama_model_quantize(
        str(args.source).encode(), str(args.target).encode(), ctypes.byref(params)
    )
    if code != 0:
        sys.exit(f"llama_model_quantize answered {code}; --verbose says why")
    if args.types:
        write_json(args.types, tensor_types(args.target))


def do_types(args):
    for name, kind in tensor_types(args.model).items():
        print(f"{kind:8} {name}")


def do_expand(args):
    expand(args.source, args.target)


def do_expected(args):
    """Everything that tests compare with, for one model."""
    args.dir.mkdir(parents=True, exist_ok=True)
    model, stem = load(args, repack=args.repack), args.model.stem
    kind = gguf.GGUFReader(args.model).fields["general.architecture"].contents()
    greedy = {}
    for name, text in [*PROMPTS.items(), ("long", LONG)]:
        text = text.get(kind, PROMPTS["plain"]) if isinstance(text, dict) else text
        ids = model.tokenize(text, True, True)
        model.start(len(ids) + args.n, args.threads, cache=args.cache, flash=args.flash)
        np.save(args.dir / f"{stem}-{name}-ids.npy", np.array(ids, np.int32))
        # A row has up to a megabyte, so that only the last rows of the long prompt are kept.
        rows = model.logits(np.array(ids), 16 if name == "long" else None)
        np.save(args.dir / f"{stem}-{name}-logits.npy", rows)
        greedy[name] = {"text": text, "prompt": ids, **model.greedy(ids, args.n)}
        print(stem, name, len(ids), f"least gap {min(greedy[name]['gaps']):.4f}", flush=True)
    write_json(args.dir / f"{stem}-greedy.json", greedy)
    if args.strings:
        cases = []
        for i, text in enumerate(strings(args.seed, args.strings, special_tokens(args.model))):
            # Most callers want special tokens parsed; a quarter of the cases each get the other choices.
            add, parse = [(True, True), (False, True), (True, False), (False, False)][i % 4]
            ids = model.tokenize(text, add, parse)
            cases.append({"text": text, "add_special": add, "parse_special": parse, "ids": ids})
        write_json(args.dir / f"{stem}-tokens.json", cases)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verbose", action="store_true", help="print what llama.cpp logs")
    sub = parser.add_subparsers(dest="command", required=True)

    def command(name, call, text, run=False, cache="f32", flash="off"):
        p = sub.add_parser(name, help=text, description=call.__doc__ or text)
        p.set_defaults(call=call)
        if run:
            p.add_argument("model", type=Path, help="GGUF file")
            p.add_argument("-t", "--threads", type=int, default=2, help="threads (default 2)")
            p.add_argument(
                "--cache", choices=CACHE, default=cache, help=f"type of keys and values (default {cache})"
            )
            p.add_argument("--flash", choices=FLASH, default=flash, help=f"flash attention (default {flash})")
            p.add_argument("--no-repack", dest="repack", action="store_false",
                           help="keep weights in the file's layout; products are then of another kernel")
        return p

    command("info", do_info, "instruction sets that the library uses")

    p = command("tokenize", do_tokenize, "token ids of a JSON list of strings")
    p.add_argument("model", type=Path, help="GGUF file")
    p.add_argument("file", type=Path, help="JSON list of strings")
    p.add_argument("--add-special", action="store_true", help="add the tokens that begin and end a text")
    p.add_argument("--parse-special", action="store_true", help="texts of special tokens become these tokens")
    p.add_argument("--out", type=Path, help="file for the JSON (default: standard output)")

    p = command("strings", do_strings, "a JSON list of strings that are hard to tokenise")
    p.add_argument("--model", type=Path, help="GGUF file whose special tokens appear in the strings")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=500)
    p.add_argument("--out", type=Path, help="file for the JSON (default: standard output)")

    p = command("logits", do_logits, "f32 logits [tokens, vocab] of all positions", run=True)
    p.add_argument("ids", type=Path, help="integers, .npy")
    p.add_argument("out", type=Path, help="file to write, .npy")
    p.add_argument("--last", type=int, help="only this many last positions")

    p = command("embedding", do_embedding, "the vector of a text", run=True)
    p.add_argument("ids", type=Path, help="integers, .npy")
    p.add_argument("out", type=Path, help="file to write, .npy")
    p.add_argument("--pooling", choices=POOLING, default="mean", help="how vectors are pooled (default mean)")

    p = command(
        "greedy",
        do_greedy,
        "most likely continuation, with the gap between the two best of each step",
        run=True,
    )
    p.add_argument("ids", type=Path, help="integers, .npy")
    p.add_argument("n", type=int, help="tokens to add")
    p.add_argument("--out", type=Path, help="file for the JSON (default: standard output)")

    p = command("perplexity", do_perplexity, "perplexity of a text", run=True)
    p.add_argument("input", type=Path, help="a text file, or token ids as .npy")
    p.add_argument("--window", type=int, default=512, help="tokens of a window (default 512)")
    p.add_argument("--windows", type=int, help="only this many windows")
    p.add_argument("--out", type=Path, help="file for the JSON (default: standard output)")

    p = command("bench", do_bench, "tokens per second", run=True, cache="f16", flash="auto")
    p.add_argument(
        "-p", "--prompt", type=int, default=512, help="tokens of the prompt test (default 512, 0: none)"
    )
    p.add_argument(
        "-n", "--generate", type=int, default=128, help="tokens of the generation test (default 128)"
    )
    p.add_argument("-d", "--depth", type=lambda s: [int(v) for v in s.split(",")], default=[0],
                   help="tokens already in the context, a list with commas (default 0)")
    p.add_argument("-r", "--repetitions", type=int, default=5)
    p.add_argument("-b", "--batch", type=int, default=2048)
    p.add_argument("-u", "--ubatch", type=int, default=512)
    p.add_argument("--json", action="store_true", help="print JSON, with every repetition")

    p = command("quantize", do_quantize, "llama_model_quantize")
    p.add_argument("source", type=Path, help="GGUF file")
    p.add_argument("target", type=Path, help="file to write")
    p.add_argument("type", help="such as Q4_K_M, Q8_0 or F16")
    p.add_argument("-t", "--threads", type=int, default=2, help="threads (default 2)")
    p.add_argument("--types", type=Path, help="JSON file for the type of each tensor")
    p.add_argument("--pure", action="store_true", help="all tensors get the same type")
    p.add_argument("--requantize", action="store_true", help="allow a source that is quantised")

    p = command("types", do_types, "type of each tensor")
    p.add_argument("model", type=Path, help="GGUF file")

    p = command("expand", do_expand, "a copy with all tensors in F32")
    p.add_argument("source", type=Path, help="GGUF file")
    p.add_argument("target", type=Path, help="file to write")

    p = command(
        "expected",
        do_expected,
        "logits, continuations and token ids of a set of prompts and strings",
        run=True,
    )
    p.add_argument("dir", type=Path, help="folder to write into")
    p.add_argument("-n", type=int, default=48, help="tokens of a continuation (default 48)")
    p.add_argument("--strings", type=int, default=500, help="strings to tokenise (default 500, 0: none)")
    p.add_argument("--seed", type=int, default=1, help="seed of the strings")

    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
