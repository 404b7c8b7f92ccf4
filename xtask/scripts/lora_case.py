"""Makes a small adapter with PEFT and the logits that transformers computes with it.

    python3 xtask/scripts/lora_case.py crates/halcyon-models/tests/data/llama crates/halcyon-models/tests/lora

The adapters are random; nothing is trained. Needs torch, transformers, peft and numpy.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main():
    model_dir, out = map(pathlib.Path, sys.argv[1:])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config).to(torch.float64).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                # f32 values, so that the file has exactly what was computed with.
                p.copy_((torch.randn(p.shape) * 0.3).to(torch.float32).to(p.dtype))
        ids = np.load(model_dir / "expected.npz")["ids"]
        logits = model(torch.tensor(ids.reshape(1, -1))).logits[0].numpy()
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    config = json.loads((out / "adapter_config.json").read_text())
    # The path on the machine that made the case.
    config["base_model_name_or_path"] = model_dir.name
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    np.savez_compressed(out / "expected.npz", ids=ids, logits=logits)


main()
