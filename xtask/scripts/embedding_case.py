#!/usr/bin/env python3
"""A small random Qwen3 model in the layout of Qwen3-Embedding: its names lack `model.`, and sentence-transformers'
files choose the last token and the length 1. `expected.npz` has the tokens of two texts, `long` and `short`, and
their vectors, computed by transformers in float64 as one batch with padding on the left.

    python3 xtask/scripts/embedding_case.py crates/halcyon-models/tests/embed/data/qwen3-lasttoken
"""
import json
import os
import sys

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

folder = sys.argv[1]
torch.manual_seed(3)
config = Qwen3Config(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, dtype="float32",
    architectures=["Qwen3ForCausalLM"],
)
model = Qwen3Model(config)
with torch.no_grad():
    for p in model.parameters():
        p.copy_((torch.randn(p.shape) * (0.1 if p.dim() == 1 else 0.35) + (1.0 if p.dim() == 1 else 0)).bfloat16())
model.save_pretrained(folder)
os.makedirs(os.path.join(folder, "1_Pooling"), exist_ok=True)
kinds = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
texts = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 24, **{f"pooling_mode_{k}": k == "lasttoken" for k in kinds}, "include_prompt": True
    },
}
for name, value in texts.items():
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=2)
long, short = torch.randint(0, 61, (17,)), torch.randint(0, 61, (6,))
pad = 17 - 6
ids = torch.stack([long, torch.cat([torch.zeros(pad, dtype=torch.long), short])])
mask = torch.ones_like(ids)
mask[1, :pad] = 0
with torch.no_grad():
    hidden = model.double().eval()(input_ids=ids, attention_mask=mask).last_hidden_state
vectors = torch.nn.functional.normalize(hidden[:, -1], dim=-1)
np.savez_compressed(os.path.join(folder, "expected.npz"), long=long.numpy(), short=short.numpy(), vectors=vectors.numpy())
