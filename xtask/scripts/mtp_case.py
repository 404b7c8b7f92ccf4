"""Adds a layer that predicts further tokens (multi-token prediction, MTP) to a small random model, and
computes what it predicts.

`mtp_case.py FOLDER OUT` copies FOLDER, a model of deepseek_v3, glm4_moe, qwen3_next, qwen3_5 or qwen3_5_moe
by tiny_models.py, to OUT, and writes OUT/mtp.safetensors with the tensors of such a layer,
OUT/model.safetensors.index.json and OUT/expected.npz. Needs torch and transformers.

transformers ignores these tensors. The formulas are those of vLLM (Apache-2.0): deepseek_mtp.py,
glm4_moe_mtp.py and qwen3_next_mtp.py in vllm/model_executor/models, as of 2026. With the activations h[i] of
the model after its last norm at position i, and the embedding e[i + 1] of the next token:

    x[i] = product([norm(e[i + 1]), norm(h[i])])      the embedding first
    g[i] = norm(layer(x)[i])                          the logits are head(g[i])

A further draft takes g of the last position in place of h. vLLM sets e of position 0 to 0 for DeepSeek;
SGLang and llama.cpp do not, and neither does this script. The layer is computed by transformers, as the only
layer of a model of the same configuration; everything else is computed here, all in float64.

The layer of glm4_moe gets an embedding and a head of its own, that of deepseek_v3 copies of the model's, as in
published files.

Arrays of expected.npz: ids [T]; next, the token after the prompt by greedy choice; ahead [T, vocab], the
logits at each position with the token after it; drafts [3] and draft_logits [3, vocab], the greedy proposals
after `next` and what they were chosen from.
"""

import argparse
import copy
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import causal, double, fill
from transformers import AutoConfig, AutoModelForCausalLM

DRAFTS = 3
OPTIONS = {"attn_implementation": "eager", "experts_implementation": "eager"}


def layer_config(config):
    """A model of one layer, the kind that predicts further tokens."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    if getattr(own, "layer_types", None):
        own.layer_types = ["full_attention"]
    if getattr(own, "mlp_layer_types", None):
        own.mlp_layer_types = ["sparse"]
    return own


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="model in Hugging Face's layout")
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.folder)
    qwen = config.model_type.startswith("qwen3")
    plus, n, h = (1.0 if qwen else 0.0), config.num_hidden_layers, config.hidden_size
    rng = np.random.default_rng(7)
    dtype = torch.bfloat16

    layer = AutoModelForCausalLM.from_config(layer_config(config), dtype=torch.float32, **OPTIONS)
    fill(layer, rng, dtype)
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(layer).to(dtype).save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **OPTIONS).eval()
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float64, **OPTIONS).eval()

    def norm_weight():
        values = 0.4 * rng.standard_normal(h) if plus else rng.uniform(0.5, 1.5, h)
        return torch.from_numpy(values).to(dtype)

    own = {
        "enorm": norm_weight(), "hnorm": norm_weight(),
        "eh_proj": torch.from_numpy(0.3 * rng.standard_normal((h, 2 * h))).to(dtype),
        "shared_head.norm": stored["model.norm.weight"],
    }
    tensors = load_file(args.folder / "model.safetensors")
    if config.model_type == "glm4_moe":
        own |= {"embed_tokens": stored["model.embed_tokens.weight"], "shared_head.head": stored["lm_head.weight"]}
    if config.model_type == "deepseek_v3":
        own |= {
            "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
            "shared_head.head": tensors["lm_head.weight"].clone(),
        }
    place = "mtp.layers.0." if qwen else f"model.layers.{n}."
    added = {}
    for name, t in stored.items():
        if name.startswith("model.layers.0."):
            added[place + name.removeprefix("model.layers.0.")] = t
    names = {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    }
    for name, t in own.items():
        added[(names[name] if qwen else place + name) + ".weight"] = t

    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(args.folder / name, args.out / name)
    save_file(added, args.out / "mtp.safetensors", {"format": "pt"})
    index = {**dict.fromkeys(tensors, "model.safetensors"), **dict.fromkeys(added, "mtp.safetensors")}
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def value(name):
        return own[name].double()

    def norm(x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * (plus + value(name))

    embedding = value("embed_tokens") if "embed_tokens" in own else model.model.embed_tokens.weight
    head = value("shared_head.head") if "shared_head.head" in own else model.lm_head.weight
    ids = np.load(args.folder / "expected.npz")["ids"]
    with double(), torch.no_grad():
        before = model.model(torch.from_numpy(ids)[None], use_cache=False).last_hidden_state[0]
        following = int(causal(model, ids)[-1].argmax())
        tokens = [*ids[1:].tolist(), following]
        drafts, draft_logits, ahead = [], [], None
        for _ in range(DRAFTS):
            both = [norm(embedding[torch.tensor(tokens)], "enorm"), norm(before, "hnorm")]
            x = torch.cat(both, -1) @ value("eh_proj").T
            after = wide.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            logits = after @ head.T
            assert logits.dtype == torch.float64
            ahead = logits if ahead is None else ahead
            drafts.append(int(logits[-1].argmax()))
            draft_logits.append(logits[-1].numpy())
            tokens.append(drafts[-1])
            before = torch.cat([before, after[-1:]])
    np.savez(
        args.out / "expected.npz",
        ids=ids,
        next=np.int64(following),
        ahead=ahead.numpy().astype(np.float32),
        drafts=np.array(drafts, np.int64),
        draft_logits=np.array(draft_logits, np.float32),
    )
    size = sum(p.stat().st_size for p in args.out.iterdir())
    print(f"{args.out.name:22} {size / 1024:4.0f} KiB, T {len(ids)}, drafts {drafts}")


if __name__ == "__main__":
    main()
