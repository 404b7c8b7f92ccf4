"""Makes small random models with quantised weights, as folders of Hugging Face, with what they compute.

`quantised_folders.py OUT [CASE ...]` writes OUT/CASE for every case, or for those named. Needs torch,
transformers and compressed-tensors.

A folder has config.json, model.safetensors and
- expected.npz: ids [T] and logits [T, vocab], computed in f64 from the decoded weights;
- expected.json: for each quantised matrix, by its name in GGUF files, the type in which Halcyon keeps it, and
  the CRC-32 of its decoded values [outputs, inputs] as f32.

Where the values come from:
- compressed-tensors packs and unpacks its formats itself;
- FP8 and MXFP4 are unpacked by transformers' own conversion;
- GPTQ and AWQ are packed here, in the layouts of GPTQModel and AutoAWQ. The decoded values come from the
  integers before they are packed.
"""

import argparse
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import finegrained_fp8, mxfp4

from tiny_models import Draw, causal, double, fill

LAYER = "model.layers.0."
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Case:
    """A model whose linear layers get quantised one after the other."""

    def __init__(self, name, kind="llama", dtype="bfloat16", **sizes):
        self.draw = Draw(name, 1)
        self.rng, self.dtype = self.draw.rng, dtype
        sizes = {
            "vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            "max_position_embeddings": 128, "tie_word_embeddings": True, **sizes,
        }
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.config = AutoConfig.for_model(kind, **sizes)
        self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, **options).eval()
        fill(self.model, self.rng, torch.float32)
        weights = self.model.state_dict()
        self.tensors = {
            n: t.to(getattr(torch, dtype)) for n, t in weights.items() if not n.startswith("lm_head")
        }
        self.expected, self.decoded = {}, {}

    def linears(self):
        return [n for n in self.tensors if "_proj.weight" in n]

    def take(self, name):
        return self.tensors.pop(name).float()

    def put(self, name, parts, decoded, form):
        """Replaces a matrix by `parts`, tensors by the ends of their names. The decoded values are f32."""
        stem = name.removesuffix(".weight")
        self.tensors |= {stem + end: t.contiguous() for end, t in parts.items()}
        if form in ("bfloat16", "float16"):
            decoded = decoded.to(getattr(torch, form)).float()
        self.decoded[name] = decoded.contiguous()
        form = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(form, form)
        short = name.removesuffix(".weight").removeprefix(LAYER)
        if short == "mlp.experts.gate_up_proj":
            halves = {"ffn_gate_exps": decoded[..., 0::2], "ffn_up_exps": decoded[..., 1::2]}
        elif short == "mlp.experts.down_proj":
            halves = {"ffn_down_exps": decoded}
        else:
            halves = {NAMES[short]: decoded.mT}
        for known, half in halves.items():
            # Zeros lose their sign in some types.
            crc = zlib.crc32((half.mT + 0.0).contiguous().numpy().tobytes())
            self.expected[f"blk.0.{known}.weight"] = [form, crc]

    def save(self, folder, quantisation):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = json.loads(self.config.to_json_string())
        config |= {"architectures": [type(self.model).__name__], "dtype": self.dtype}
        config["quantization_config"] = quantisation
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        exact = {n: t.double() for n, t in (self.tensors | self.decoded).items() if t.is_floating_point()}
        wide = AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        known = wide.state_dict()
        wide.load_state_dict({n: exact[n] for n in known if n in exact}, strict=False)
        wide.tie_weights()
        ids = self.rng.integers(3, self.config.vocab_size, 21)
        with double():
            logits = causal(wide, ids)
        assert logits.dtype == torch.float64
        np.savez(folder / "expected.npz", ids=ids.astype(np.int64), logits=logits.numpy().astype(np.float32))
        lines = [f'"{n}": {json.dumps(e)}' for n, e in sorted(self.expected.items())]
        (folder / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        size = sum(p.stat().st_size for p in folder.iterdir())
        print(f"{folder.name:22} {size / 1024:4.0f} KiB, spread {logits.std():.2f}", flush=True)


# FP8

def fp8(folder, block, config, suffix, exact_block=True):
    """`block` is the shape of the parts with a scale of their own; None: the matrix."""
    c = Case(folder.name)
    for name in c.linears():
        w = c.take(name)
        rows, columns = block or w.shape
        high, wide = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
        padded = torch.zeros(high * rows, wide * columns)
        padded[:w.shape[0], :w.shape[1]] = w
        parts = padded.view(high, rows, wide, columns)
        scale = parts.abs().amax((1, 3)) / 448.0
        q = (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
        # transformers unpacks whole blocks only.
        convert = finegrained_fp8.Fp8Dequantize(None)
        decoded = convert._dequantize_one(q, scale, torch.float32)[:w.shape[0], :w.shape[1]]
        q = q[:w.shape[0], :w.shape[1]]
        if block is None:
            scale = scale.reshape(())
        c.put(name, {".weight": q, suffix: scale}, decoded, c.dtype)
    c.save(folder, config)


def fp8_block(folder):
    # No multiple of the blocks' sizes divides all matrices.
    fp8(folder, (40, 24), {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [40, 24],
    }, ".weight_scale_inv")


def fp8_tensor(folder):
    fp8(folder, None, {"quant_method": "fp8", "activation_scheme": "static"}, ".weight_scale_inv")


def fbgemm(folder):
    fp8(folder, (1, 96), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ".weight_scale")


# GPTQ and AWQ

def integers(c, w, bits, group, symmetric):
    """Codes [rows, columns], zero points and f16 scales [rows, groups]."""
    rows, columns = w.shape
    parts = w.view(rows, columns // group, group)
    most = 2**bits - 1
    if symmetric:
        scale = parts.abs().amax(-1) * 2 / most
        zero = torch.full(scale.shape, 2 ** (bits - 1), dtype=torch.int64)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low) / most
        zero = (-low / scale).round().clamp(0, most).long()
    scale = scale.half()
    q = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, most).long()
    return q.view(rows, columns), zero, scale


def packed(values, bits):
    """A sequence of `bits` bits along the first axis, in words of 32 bits."""
    values = values.numpy().astype(np.uint64)
    n, width = values.shape
    each = np.arange(bits, dtype=np.uint64)[None, :, None]
    bit = (values[:, None] >> each & np.uint64(1)).reshape(-1, width)
    assert len(bit) % 32 == 0, (n, bits)
    bit = bit.reshape(-1, 32, width) << np.arange(32, dtype=np.uint64)[None, :, None]
    return torch.from_numpy(bit.sum(1).astype(np.uint32).view(np.int32))


def gptq(folder, bits=4, group=32, symmetric=True, desc_act=False, v1=True, form=None):
    c = Case(folder.name, dtype="float16")
    for name in c.linears():
        w = c.take(name)
        k = w.shape[1]
        # With desc_act, neighbouring columns belong to different groups.
        order = torch.from_numpy(c.rng.permutation(k)) if desc_act else torch.arange(k)
        q, zero, scale = integers(c, w[:, order], bits, group, symmetric)
        index = torch.arange(k) // group
        decoded = (q - zero[:, index]) * scale.float()[:, index]
        back = torch.argsort(order)
        q, index, decoded = q[:, back], index[back].int(), decoded[:, back]
        zeros = packed(zero, bits).T
        if v1 and bits == 3:
            zeros = packed((zero - 1) % 8, bits).T
        elif v1:
            one = sum(1 << i for i in range(0, 32, bits))
            zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(one)).view(np.int32))
        parts = {".qweight": packed(q.T, bits), ".qzeros": zeros, ".scales": scale.T, ".g_idx": index}
        c.put(name, parts, decoded, c.dtype if desc_act else form)
    c.save(folder, {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": symmetric,
        "checkpoint_format": "gptq" if v1 else "gptq_v2", "lm_head": False,
    })


def awq(folder):
    c, group = Case(folder.name, dtype="float16"), 32
    for name in c.linears():
        q, zero, scale = integers(c, c.take(name), 4, group, False)
        index = torch.arange(q.shape[1]) // group
        decoded = (q - zero[:, index]) * scale.float()[:, index]

        def words(v):
            """Eight rows in a word, the even ones first."""
            v = v.T.reshape(v.shape[1], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].numpy().astype(np.uint32)
            shifts = 4 * np.arange(8, dtype=np.uint32)
            return torch.from_numpy((v << shifts).sum(-1, dtype=np.uint32).view(np.int32))

        c.put(name, {".qweight": words(q), ".qzeros": words(zero), ".scales": scale.T}, decoded, "q5_0")
    c.save(folder, {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
    })


# compressed-tensors

def compressed(folder, form, kind, dtype="bfloat16", **arguments):
    """The library computes scales, packs and unpacks."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    c = Case(folder.name, dtype=dtype)
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tool = BaseCompressor.get_value_from_registry(kind)
    for name in c.linears():
        w = c.take(name)
        rows, k = w.shape
        group = args.group_size or k
        parts = w.view(rows, -1, group) if args.strategy != "tensor" else w.view(1, 1, -1)
        more = {}
        if kind.startswith("nvfp4"):
            more["weight_global_scale"] = (448.0 * 6.0 / w.abs().max()).reshape(1)
        low, high = parts.amin(-1), parts.amax(-1)
        if args.strategy == "block":
            high_rows, high_columns = args.block_structure
            grid = w.view(rows // high_rows, high_rows, k // high_columns, high_columns)
            low, high = grid.amin((1, 3)), grid.amax((1, 3))
        scale, zero = calculate_qparams(low, high, args, global_scale=more.get("weight_global_scale"))
        scale = scale.to(getattr(torch, dtype)) if not kind.startswith(("nvfp4", "mxfp4")) else scale
        state = {"weight": w, "weight_scale": scale, **more}
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        state = tool.compress(state, scheme)
        stored = {f".{n}": t for n, t in state.items()}
        wide = {
            n: t.float() if n == "weight_scale" and t.element_size() > 1 else t for n, t in state.items()
        }
        decoded = tool.decompress(wide, scheme)["weight"]
        c.put(name, stored, decoded.float(), form or c.dtype)
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    c.save(folder, {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    })


# MXFP4

def mxfp4_experts(folder):
    c = Case(
        folder.name, "gpt_oss", intermediate_size=32, num_local_experts=3, num_experts_per_tok=2,
        sliding_window=8, layer_types=["sliding_attention"], swiglu_limit=3.0, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    for name in ("gate_up_proj", "down_proj"):
        name = f"{LAYER}mlp.experts.{name}"
        w = c.take(name).transpose(1, 2)
        e, n, k = w.shape
        parts = w.reshape(e, n, k // 32, 32)
        exponent = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
        near = (parts / exponent.exp2()[..., None]).abs().unsqueeze(-1) - torch.from_numpy(FP4)
        code = near.abs().argmin(-1) + 8 * (parts < 0).long()
        blocks = (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)
        scales = (exponent + 127).to(torch.uint8)
        decoded = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        c.put(name, {"_blocks": blocks, "_scales": scales}, decoded, "mxfp4")
    c.save(folder, {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    })


GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
CASES = {
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "fbgemm": fbgemm,
    "gptq-4": lambda f: gptq(f, form="q4_0"),
    "gptq-4-asym": lambda f: gptq(f, symmetric=False, form="q5_0"),
    "gptq-4-desc": lambda f: gptq(f, symmetric=False, desc_act=True, v1=False),
    "gptq-2": lambda f: gptq(f, 2, form="q4_0"),
    "gptq-3": lambda f: gptq(f, 3, symmetric=False, form="q4_0"),
    "gptq-8": lambda f: gptq(f, 8, v1=False, form="q8_0"),
    "awq": awq,
    "pack-4": lambda f: compressed(f, "q4_0", "pack-quantized", symmetric=True, **GROUP),
    "pack-4-asym": lambda f: compressed(f, "q5_0", "pack-quantized", symmetric=False, **GROUP),
    "pack-8": lambda f: compressed(
        f, "q8_0", "pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "int-8": lambda f: compressed(
        f, None, "int-quantized", "float32", num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "float-8": lambda f: compressed(f, None, "float-quantized", strategy="channel", **FLOAT),
    "float-8-block": lambda f: compressed(
        f, None, "float-quantized", strategy="block", block_structure=[32, 16], **FLOAT
    ),
    "nvfp4": lambda f: compressed(
        f, None, "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16,
        symmetric=True, scale_dtype=torch.float8_e4m3fn,
    ),
    "mxfp4": mxfp4_experts,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    for name in args.cases or CASES:
        if name not in CASES:
            parser.error(f"'{name}': expected one of {', '.join(CASES)}")
        CASES[name](args.out / name)


if __name__ == "__main__":
    main()
