"""Makes a folder in Hugging Face's layout with the shape of a published model and random weights, to measure
speed with.

`random_shapes.py SHAPE FOLDER` writes config.json and model.safetensors in f16. `halcyon convert FOLDER
f16.gguf` and `halcyon quantize f16.gguf q8_0.gguf --type q8_0` make GGUF files of it, and `llm_speed.py`
measures them. The models have no tokenizer: `halcyon bench llm` and llama-bench need none. Speed does not
depend on the values, so every matrix takes its rows at random from 64 rows. The f16 files have 0.7 to 1.5 GB.
Needs torch and transformers.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROWS = 64


def layers(count, others, other, usual):
    return [other if i in others else usual for i in range(count)]


SHAPES = {
    # LFM2-350M: short convolutions.
    "lfm2": dict(
        model_type="lfm2",
        hidden_size=1024,
        num_hidden_layers=16,
        layer_types=layers(16, [2, 5, 8, 10, 12, 14], "full_attention", "conv"),
        intermediate_size=6656,
        block_ff_dim=6656,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
        num_attention_heads=16,
        num_key_value_heads=8,
        conv_L_cache=3,
        conv_bias=False,
        vocab_size=65536,
        tie_word_embeddings=True,
    ),
    # Granite-4.0-H-350M: Mamba 2.
    "granite": dict(
        model_type="granitemoehybrid",
        hidden_size=768,
        num_hidden_layers=32,
        layer_types=layers(32, [10, 13, 17, 27], "attention", "mamba"),
        shared_intermediate_size=2048,
        intermediate_size=2048,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_attention_heads=12,
        num_key_value_heads=4,
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        position_embedding_type="nope",
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.246,
        logits_scaling=3.0,
        vocab_size=100352,
        tie_word_embeddings=True,
    ),
    # Qwen3.5-0.8B: gated DeltaNet.
    "qwen35": dict(
        model_type="qwen3_5_text",
        hidden_size=1024,
        num_hidden_layers=24,
        layer_types=layers(24, range(3, 24, 4), "full_attention", "linear_attention"),
        intermediate_size=3584,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        vocab_size=248320,
        tie_word_embeddings=True,
    ),
    # Half the layers of Granite-3.0-1B-A400M, as a Qwen3-MoE: experts.
    "moe": dict(
        model_type="qwen3_moe",
        hidden_size=1024,
        num_hidden_layers=12,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    fields = dict(SHAPES[args.shape], max_position_embeddings=32768, bos_token_id=1, eos_token_id=2,
                  pad_token_id=0)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors, blocks = {}, {}
    head = "lm_head.weight" if config.tie_word_embeddings else None
    for name, t in model.state_dict().items():
        if name == head:
            continue
        if t.dim() < 2 or t.shape[-1] < 32:
            tensors[name] = torch.empty(t.shape).uniform_(0.5, 1.5).to(torch.float16)
            continue
        size = t.shape[-1]
        if size not in blocks:
            blocks[size] = (0.02 * torch.randn(ROWS, size)).to(torch.float16)
        rows = torch.randint(0, ROWS, (t.numel() // size,))
        tensors[name] = blocks[size][rows].reshape(t.shape)
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float16
    config.architectures = [type(model).__name__]
    config.save_pretrained(args.folder)
    count = sum(t.numel() for t in tensors.values())
    print(json.dumps({"shape": args.shape, "parameters": count}))


if __name__ == "__main__":
    main()
