"""Makes adapters of a small model and the gradients that torch computes for them in float64.

    python3 xtask/scripts/gradient_case.py crates/halcyon-models/tests/data/qwen3_5 \\
        crates/halcyon-models/tests/lora/gradients/qwen3_5

Writes the adapters as PEFT does (random values, nothing is trained), and gradients.npz: `ids` [1, T], `loss`, the
mean cross-entropy of the next tokens, and the gradient of each adapter's tensor under the tensor's name. Needs
torch, transformers, safetensors and numpy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_models import double
from transformers import AutoModelForCausalLM

RANK, ALPHA, TOKENS = 2, 3, 70
TARGETS = [
    "q_proj", "v_proj", "o_proj", "in_proj", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
]


def main():
    folder, out = map(Path, sys.argv[1:])
    torch.manual_seed(7)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    modules = [n.removesuffix(".weight") for n in weights if n.endswith(".weight") and n.split(".")[-2] in TARGETS]
    parts = {}
    for m in modules:
        outputs, inputs = weights[f"{m}.weight"].shape
        for which, shape in [("A", (RANK, inputs)), ("B", (outputs, RANK))]:
            # f32 values, so that the file has exactly what is computed with.
            values = (torch.randn(shape) * 0.3).to(torch.float32)
            parts[f"base_model.model.{m}.lora_{which}.weight"] = values
    leaves = {n: v.double().requires_grad_() for n, v in parts.items()}
    for m in modules:
        a, b = (leaves[f"base_model.model.{m}.lora_{w}.weight"] for w in "AB")
        weights[f"{m}.weight"] = weights[f"{m}.weight"] + ALPHA / RANK * b @ a
    ids = torch.randint(3, model.config.vocab_size, (1, TOKENS))
    with double():
        logits = torch.func.functional_call(model, weights, (ids,), {"use_cache": False}).logits
    assert logits.dtype == torch.float64
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    out.mkdir(parents=True, exist_ok=True)
    save_file(parts, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": TARGETS}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    grads = {n: v.grad.numpy().astype(np.float32) for n, v in leaves.items()}
    np.savez_compressed(out / "gradients.npz", ids=ids.numpy(), loss=loss.item(), **grads)
    print(folder.name, len(modules), loss.item(), max(np.abs(g).max() for g in grads.values()))


main()
