"""Makes small random models of many architectures, as checkpoints of Hugging Face, with what transformers
computes.

`tiny_models.py ARCH FOLDER --seed N` writes config.json, generation_config.json, model.safetensors and
expected.npz into FOLDER. `tiny_models.py --all OUT` writes OUT/ARCH-SEED for every architecture and the seeds
1 to 3. Sizes are drawn from the seed and are odd where the architecture allows it. Needs torch and
transformers.

- Seeds 3, 6, ... store weights in bf16, others in f32; numbers are always computed from the stored weights.
- Seeds 2, 5, ... have the keys of most published checkpoints: see `older`. The others have those of the
  installed transformers.
- Seeds of even number tie the embedding to the output where the architecture allows both.

Arrays of expected.npz for a language model of T prompt tokens:
- ids [T], logits [T, vocab] (f32; computed in f64, see `double`), noise (how far the logits of an f32 run are
  from them at most);
- greedy [16] and gaps [16]: the continuation when every step runs the whole text again, and how far each
  logit was above the second;
- generated [16]: the continuation of `generate` with its cache. It differs from greedy only where a cache
  keeps keys that were turned by another base (dynamic NTK).
Arrays for an encoder: ids [T], hidden [T, width], and for a batch of two texts of which the second is
shorter, padded_ids, padded_mask [2, T] and padded_hidden [2, T, width] (rows of padding are undefined).
"""

import argparse
import contextlib
import copy
import json
import shutil
import sys
import traceback
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

NEW_TOKENS = 16
SEEDS = [1, 2, 3]
# The least difference between the two best logits of a step of a continuation.
GAP = 0.03
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Draw:
    """Choices that depend on the architecture's name and the seed."""

    def __init__(self, name, seed):
        self.rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        self.seed = seed

    def pick(self, *values):
        return values[self.rng.integers(len(values))]

    def size(self, low, high, step=1):
        return int(low + step * self.rng.integers((high - low) // step + 1))

    def tied(self):
        return self.seed % 2 == 0

    def common(self, head_dims=(8, 10, 12, 14, 20), layers=(2, 3), own_head_dim=True, **more):
        """Sizes that all decoders have. Without `own_head_dim`, the width is heads times the head's size."""
        kv, group = self.pick((1, 3), (1, 4), (2, 2), (2, 3), (3, 1), (3, 2))
        heads = kv * group
        # A folder stays near 300 KB at most.
        head = self.pick(*([h for h in head_dims if h * heads <= 60] or [min(head_dims)]))
        sizes = {
            "vocab_size": self.size(101, 173), "num_hidden_layers": self.pick(*layers),
            # Some configurations insist on a multiple of the heads even where the heads have a size of their
            # own.
            "hidden_size": heads * self.size(-(-44 // heads), 68 // heads),
            "intermediate_size": self.size(47, 80, 3), "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        }
        if own_head_dim:
            sizes["head_dim"] = head
        else:
            sizes["hidden_size"] = heads * head
        return {**sizes, **more}


def rope(theta, kind="default", **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": float(theta), **more}}


def alternate(layers, *kinds):
    return [kinds[i % len(kinds)] for i in range(layers)]


SLIDE, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


# Each recipe returns the type of the model and the arguments of its configuration.

def llama(d, scaling=None):
    scaling = scaling or rope(d.pick(10000, 500000))
    return "llama", d.common(
        tie_word_embeddings=d.tied(), attention_bias=d.seed >= 2, mlp_bias=d.seed == 3,
        rms_norm_eps=d.pick(1e-5, 1e-6),
        **scaling,
    )


def llama_linear(d):
    return llama(d, rope(10000, "linear", factor=d.pick(2.0, 3.5)))


def llama_dynamic(d):
    # The prompt is longer than this, so that the base changes.
    name, config = llama(d, rope(10000, "dynamic", factor=d.pick(2.0, 4.0)))
    return name, {**config, "max_position_embeddings": 16}


def llama_yarn(d):
    more = d.pick(
        {},
        {"beta_fast": 20.0, "beta_slow": 2.0},
        {"attention_factor": 1.3},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
    )
    return llama(d, rope(10000, "yarn", factor=d.pick(4.0, 8.0), original_max_position_embeddings=64, **more))


def llama_llama3(d):
    return llama(d, rope(
        d.pick(10000, 500000), "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=d.pick(32, 64),
    ))


def mistral(d):
    return "mistral", d.common(sliding_window=8, tie_word_embeddings=False, **rope(10000))


def qwen2(d):
    window = {}
    if d.seed == 3:
        # Layers from `max_window_layers` on see a window.
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return "qwen2", d.common(own_head_dim=False, tie_word_embeddings=d.tied(), **window, **rope(1000000))


def qwen3(d):
    return "qwen3", d.common(tie_word_embeddings=d.tied(), **rope(1000000))


def qwen3_moe(d):
    dense = d.pick({}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})
    return "qwen3_moe", d.common(
        num_experts=d.pick(5, 6, 7), num_experts_per_tok=d.pick(2, 3),
        moe_intermediate_size=d.size(14, 26, 3),
        norm_topk_prob=d.seed != 3, tie_word_embeddings=False, **dense, **rope(1000000),
    )


def delta(d):
    """Sizes of gated delta networks: the layers with linear attention."""
    keys = d.pick(1, 2)
    return {
        "linear_conv_kernel_dim": d.pick(3, 4), "linear_key_head_dim": d.pick(6, 8),
        "linear_value_head_dim": d.pick(8, 10),
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * d.pick(1, 2), "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] if d.seed != 3 else [LINEAR, FULL, LINEAR, FULL],
    }


def small_moe(d):
    return {
        "num_experts": d.pick(4, 5), "num_experts_per_tok": 2, "moe_intermediate_size": d.size(8, 14, 3),
        "shared_expert_intermediate_size": d.size(9, 15, 2),
    }


def qwen3_5(d):
    config = d.common(
        head_dims=(12, 16, 20), tie_word_embeddings=d.tied(), **rope(1000000, partial_rotary_factor=0.5)
    )
    return "qwen3_5_text", {
        **config,
        **delta(d),
        "hidden_size": d.pick(40, 44),
        "intermediate_size": d.size(40, 60, 3),
    }


def qwen3_5_moe(d):
    name, config = qwen3_5(d)
    return "qwen3_5_moe_text", {**config, **small_moe(d), "tie_word_embeddings": False}


def qwen3_next(d):
    name, config = qwen3_5(d)
    return "qwen3_next", {**config, **small_moe(d), "tie_word_embeddings": False}


def gemma_ropes(d, **full):
    return {"rope_parameters": {
        SLIDE: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "default", "rope_theta": 1000000.0, **full},
    }}


def gemma3(d):
    full = {"rope_type": "linear", "factor": 8.0} if d.seed == 3 else {}
    return "gemma3_text", d.common(
        layers=(4,), layer_types=alternate(4, *d.pick((SLIDE, FULL), (SLIDE, SLIDE, FULL))), sliding_window=8,
        head_dims=(8, 10, 12), intermediate_size=d.size(32, 50, 3),
        query_pre_attn_scalar=d.pick(14, 24), hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
        **gemma_ropes(d, **full),
    )


def gemma2(d):
    return "gemma2", d.common(
        layers=(4,), layer_types=alternate(4, SLIDE, FULL), sliding_window=8,
        query_pre_attn_scalar=d.pick(14, 24),
        attn_logit_softcapping=2.0, final_logit_softcapping=5.0, hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True, **rope(10000),
    )


def gemma4(d, **more):
    config = d.common(layers=(4,), head_dims=(8, 12), tie_word_embeddings=True)
    ropes = gemma_ropes(d, rope_type="proportional", partial_rotary_factor=0.5)
    return "gemma4_text", {
        **config, "layer_types": [SLIDE, FULL, SLIDE, FULL], "sliding_window": 8,
        "global_head_dim": d.pick(16, 24),
        "hidden_size": d.pick(40, 44), "intermediate_size": d.size(40, 60, 3),
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size_per_layer_input": config["vocab_size"], "hidden_size_per_layer_input": d.pick(0, 6, 10),
        "final_logit_softcapping": d.pick(None, 8.0), **ropes, **more,
    }


def gemma4_shared(d):
    """The small models: late layers use keys and values of earlier ones, and have wider networks."""
    return gemma4(
        d, num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=6, hidden_size=32
    )


def gemma4_moe(d):
    """The large models: experts beside the dense network, and values that equal keys in global layers."""
    return gemma4(
        d, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=10,
        attention_k_eq_v=True,
        num_global_key_value_heads=1, hidden_size_per_layer_input=0, hidden_size=32, intermediate_size=30,
    )


def gpt_oss(d):
    yarn = rope(150000, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=16)
    return "gpt_oss", d.common(
        hidden_size=d.pick(36, 40), intermediate_size=d.size(16, 26, 2), num_local_experts=d.pick(4, 5),
        num_experts_per_tok=2, layer_types=None, sliding_window=8, tie_word_embeddings=False,
        swiglu_limit=3.0, layers=(2,),
        **yarn,
    )


def mixtral(d):
    return "mixtral", d.common(
        num_local_experts=d.pick(3, 4, 5), num_experts_per_tok=2, intermediate_size=d.size(14, 23, 3),
        layers=(2,),
        tie_word_embeddings=False, sliding_window=8 if d.seed == 3 else None, **rope(1000000),
    )


def phi3(d):
    config = d.common(own_head_dim=False, head_dims=(8, 12, 16), tie_word_embeddings=False)
    head = config["hidden_size"] // config["num_attention_heads"]
    partial = 0.5 if d.seed == 2 and head % 4 == 0 else 1.0
    half = int(head * partial) // 2
    factors = {
        "short_factor": [round(1.0 + 0.05 * i, 3) for i in range(half)],
        "long_factor": [round(1.1 + 0.7 * i, 3) for i in range(half)],
    }
    # Odd seeds: the prompt is longer than the original context and uses the long factors. Even: all is short.
    original = 16 if d.seed % 2 else 256
    scaling = rope(
        10000, "longrope", original_max_position_embeddings=original, partial_rotary_factor=partial, **factors
    )
    return "phi3", {**config, "original_max_position_embeddings": original, "sliding_window": None, **scaling}


def phi4(d):
    """Phi-4-mini: the class of Phi-3 with part of each head turned and a tied embedding."""
    config = d.common(
        own_head_dim=False, head_dims=(8, 12, 16), tie_word_embeddings=True, sliding_window=None
    )
    return "phi3", {**config, **rope(10000, partial_rotary_factor=0.75 if d.seed != 3 else 1.0)}


def mla(d):
    """Sizes of multi-head latent attention."""
    config = d.common(layers=(3,), hidden_size=d.pick(42, 48), intermediate_size=d.size(40, 60, 3))
    del config["head_dim"]
    config["num_attention_heads"] = config["num_key_value_heads"] = d.pick(2, 3)
    return {
        **config, "kv_lora_rank": d.size(10, 18, 2), "q_lora_rank": d.pick(None, 14, 18),
        "qk_rope_head_dim": d.pick(4, 6),
        "qk_nope_head_dim": d.pick(6, 10), "v_head_dim": d.pick(7, 12),
        "moe_intermediate_size": d.size(8, 14, 3),
        "n_shared_experts": d.pick(1, 2), "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    }


def yarn_mla(d):
    if d.seed == 1:
        return rope(10000)
    return rope(10000, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.8, mscale_all_dim=0.7,
                original_max_position_embeddings=64)


def deepseek_v2(d):
    grouped = {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"} if d.seed == 2 else {}
    grouped |= {"scoring_func": "softmax", "moe_layer_freq": 1}
    return "deepseek_v2", {
        **mla(d),
        "n_routed_experts": 6,
        "routed_scaling_factor": d.pick(1.0, 2.5),
        **grouped,
        **yarn_mla(d),
    }


def deepseek_v3(d):
    return "deepseek_v3", {
        **mla(d),
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_interleave": d.seed != 3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        **yarn_mla(d),
    }


def glm4_moe(d):
    config = d.common(
        head_dims=(8, 12, 16), layers=(3,), hidden_size=d.pick(40, 44), intermediate_size=d.size(40, 60, 3)
    )
    return "glm4_moe", {
        **config, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": d.size(8, 14, 3), "first_k_dense_replace": 1,
        "routed_scaling_factor": d.pick(1.0, 1.5),
        "use_qk_norm": d.tied(), "attention_bias": d.seed != 3, "tie_word_embeddings": False,
        **rope(1000000, partial_rotary_factor=0.5),
    }


def lfm2(d):
    config = d.common(own_head_dim=False, layers=(4,), head_dims=(8, 10, 12), tie_word_embeddings=True)
    adjust = {
        "block_auto_adjust_ff_dim": d.seed == 2,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
    }
    return "lfm2", {
        **config, "layer_types": ["conv", "conv", FULL, "conv"], "conv_L_cache": d.pick(3, 4),
        "conv_bias": d.seed == 3, **adjust,
        **rope(1000000),
    }


def multipliers(d):
    return {
        "embedding_multiplier": d.pick(3.0, 12.0), "logits_scaling": d.pick(0.5, 1.5),
        "residual_multiplier": d.pick(0.22, 0.6),
        "attention_multiplier": d.pick(0.1, 0.25),
    }


def granite(d):
    return "granite", d.common(
        own_head_dim=False, tie_word_embeddings=d.tied(), attention_bias=d.seed == 3, **multipliers(d),
        **rope(10000),
    )


def granite_hybrid(d):
    config = d.common(own_head_dim=False, layers=(3,), head_dims=(8, 12), tie_word_embeddings=d.tied())
    config["hidden_size"] = 48
    config["num_attention_heads"], config["num_key_value_heads"] = d.pick((4, 2), (6, 2), (3, 1))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if d.seed != 2 else {
        "num_local_experts": 0, "num_experts_per_tok": 0}
    heads = d.pick(6, 8)
    return "granitemoehybrid", {
        **config, **experts, **multipliers(d), "intermediate_size": 14, "shared_intermediate_size": 26,
        "layer_types": ["mamba", FULL, "mamba"], "mamba_n_heads": heads, "mamba_d_head": 96 // heads,
        "mamba_expand": 2,
        "mamba_n_groups": d.pick(1, 2), "mamba_d_state": d.pick(6, 10), "mamba_d_conv": d.pick(3, 4),
        "mamba_chunk_size": 8,
        "position_embedding_type": "rope" if d.seed == 3 else "nope", **rope(10000),
    }


def olmo2(d):
    return "olmo2", d.common(own_head_dim=False, tie_word_embeddings=False, **rope(500000))


def smollm3(d):
    return "smollm3", d.common(
        own_head_dim=False, layers=(4,), head_dims=(8, 10, 12), tie_word_embeddings=True,
        no_rope_layers=[1, 0, 1, 0],
        **rope(2000000),
    )


def gpt2(d):
    heads = d.pick(3, 4, 5)
    return "gpt2", {
        "vocab_size": d.size(101, 193), "n_positions": 96, "n_embd": heads * d.pick(10, 12, 14),
        "n_layer": 2, "n_head": heads,
        "n_inner": d.pick(None, 70), "bos_token_id": 1, "eos_token_id": 2,
        "scale_attn_by_inverse_layer_idx": d.seed == 3,
    }


def cohere2(d):
    return "cohere2", d.common(
        head_dims=(8, 10, 12), intermediate_size=d.size(32, 50, 3),
        layers=(4,), layer_types=[SLIDE, SLIDE, SLIDE, FULL] if d.seed != 3 else [SLIDE, FULL] * 2,
        sliding_window=8,
        logit_scale=d.pick(0.25, 0.5), tie_word_embeddings=True, **rope(50000),
    )


def starcoder2(d):
    config = d.common(own_head_dim=False, tie_word_embeddings=d.tied(), use_bias=d.seed != 3, **rope(100000))
    return "starcoder2", {**config, "sliding_window": 8 if d.seed == 2 else None}


def falcon(d):
    config = d.common(own_head_dim=False, head_dims=(8, 12), tie_word_embeddings=True)
    width, heads = config.pop("intermediate_size"), config["num_attention_heads"]
    del config["num_key_value_heads"]
    kv = 2 if heads % 2 == 0 else heads
    # The 7B has one head of keys, the 40B groups and two norms.
    kind = [
        {"multi_query": True, "parallel_attn": True}, {"new_decoder_architecture": True, "num_kv_heads": kv},
        {"multi_query": True, "parallel_attn": False, "bias": True},
    ][(d.seed - 1) % 3]
    return "falcon", {**config, **kind, "alibi": False, "ffn_hidden_size": width, **rope(10000)}


def encoder(d):
    config = d.common(own_head_dim=False)
    for key in ("num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id"):
        del config[key]
    return {**config, "max_position_embeddings": 96}


def bert(d):
    return "bert", {
        **encoder(d),
        "type_vocab_size": 2,
        "hidden_act": d.pick("gelu", "gelu_new"),
        "pad_token_id": 0,
    }


def xlm_roberta(d):
    return "xlm-roberta", {
        **encoder(d),
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def modernbert(d):
    ropes = {"rope_parameters": {
        SLIDE: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "default", "rope_theta": 160000.0},
    }}
    return "modernbert", {
        **encoder(d), "num_hidden_layers": 4, "layer_types": [FULL, SLIDE, SLIDE, FULL],
        "local_attention": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, **ropes,
    }


DECODERS = {
    "llama": llama, "llama-linear": llama_linear, "llama-dynamic": llama_dynamic, "llama-yarn": llama_yarn,
    "llama-llama3": llama_llama3, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
    "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe, "gemma3": gemma3, "gemma4": gemma4,
    "gemma4-shared": gemma4_shared,
    "gemma4-moe": gemma4_moe, "gpt_oss": gpt_oss, "mixtral": mixtral, "phi3": phi3, "phi4": phi4,
    "gemma2": gemma2,
    "deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3, "glm4_moe": glm4_moe, "lfm2": lfm2,
    "granite": granite,
    "granitemoehybrid": granite_hybrid, "olmo2": olmo2, "smollm3": smollm3, "gpt2": gpt2,
    "qwen3_next": qwen3_next,
    "cohere2": cohere2, "starcoder2": starcoder2, "falcon": falcon,
}
ENCODERS = {"bert": bert, "xlm-roberta": xlm_roberta, "modernbert": modernbert}
RECIPES = {**DECODERS, **ENCODERS}


def fill(model, rng, dtype):
    """Random values for every parameter and every buffer that is saved, so that none can be left out
    unnoticed."""
    tied = set()
    for name, p in model.state_dict(keep_vars=True).items():
        if p.data_ptr() in tied or not p.is_floating_point():
            continue
        tied.add(p.data_ptr())
        shape, last = tuple(p.shape), name.split(".")[-1]
        normal = rng.standard_normal(shape)
        if last == "A_log":
            value = np.log(rng.uniform(0.5, 8.0, shape))
        elif last == "dt_bias":
            value = rng.uniform(-2.0, 1.0, shape)
        elif last in ("layer_scalar", "per_expert_scale", "scale"):
            value = rng.uniform(0.5, 1.5, shape)
        elif p.dim() < 2 and float(p.detach().float().mean()) == 1.0:
            value = rng.uniform(0.5, 1.5, shape)
        elif p.dim() < 2 or last.endswith("bias"):
            # Biases, sinks, and the scales of norms that add 1.
            value = 0.4 * normal
        elif "embed" in name or "wte" in name or "wpe" in name:
            # A tied embedding also makes the logits, which would be large, and of the last token above all.
            # Gemma multiplies it by the root of the width, Granite by a number of the configuration.
            tie = model.config.tie_word_embeddings
            scaled = "gemma" in model.config.model_type or "granite" in model.config.model_type
            value = (0.15 if scaled else 0.3 if tie else 1.0) * normal
        else:
            # About 0.2 to 0.4 at these sizes. Experts have [expert, in, out] or [expert, out, in].
            value = 1.6 / min(shape[-1], 64) ** 0.5 * normal
        with torch.no_grad():
            p.copy_(torch.from_numpy(np.asarray(value)).to(dtype))


@contextlib.contextmanager
def double():
    """Within it, models compute in f64 where they ask for f32: transformers' code does so for norms,
    softmax and rotations whatever the type of the weights, which would leave errors of f32 in the
    reference."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept
        torch.set_default_dtype(torch.float32)


def pattern(layers):
    """The distance of the layers with full attention, if it is regular."""
    period = layers.index(FULL) + 1
    return (
        period if layers == [FULL if (i + 1) % period == 0 else SLIDE for i in range(len(layers))] else None
    )


def older(folder):
    """Gives config.json the keys of published checkpoints, most of which were written by transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype", None)
    kind, ropes = config["model_type"], config.pop("rope_parameters", None)
    if kind == "modernbert":
        config["global_rope_theta"], config["local_rope_theta"] = (
            ropes[k]["rope_theta"] for k in (FULL, SLIDE)
        )
    elif kind == "gemma4_text":
        config["rope_parameters"] = ropes
        for value in config.pop("per_layer_config").values():
            config["global_head_dim"] = value["head_dim"]
            if "num_key_value_heads" in value:
                config["num_global_key_value_heads"] = value["num_key_value_heads"]
    elif kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        # The text model is a part of one that sees, even where the checkpoint has no tower.
        config["rope_parameters"] = ropes
        whole = kind.removesuffix("_text")
        names = {
            "qwen3_5": "Qwen3_5ForConditionalGeneration",
            "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        }
        config = {
            "architectures": [names[whole]], "model_type": whole, "text_config": config,
            "tie_word_embeddings": config["tie_word_embeddings"], "torch_dtype": config["torch_dtype"],
        }
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file(
            {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()},
            file,
            {"format": "pt"},
        )
    elif ropes is not None:
        if FULL in ropes:
            config["rope_local_base_freq"] = ropes[SLIDE]["rope_theta"]
            ropes = ropes[FULL]
        config["rope_theta"] = ropes.pop("rope_theta")
        if "partial_rotary_factor" in ropes:
            config["partial_rotary_factor"] = ropes.pop("partial_rotary_factor")
        if kind == "phi3" and ropes["rope_type"] != "default":
            # Phi-3's own files say "type", and keep the original length beside the dictionary.
            ropes["type"] = ropes.pop("rope_type")
            ropes.pop("original_max_position_embeddings")
        config["rope_scaling"] = None if ropes.get("rope_type") == "default" else ropes
    if kind in ("gemma3_text", "cohere2") and pattern(config["layer_types"]) is not None:
        config["sliding_window_pattern"] = pattern(config.pop("layer_types"))
        config.pop("_sliding_window_pattern", None)
    if kind == "granitemoehybrid":
        words = {LINEAR: "mamba", FULL: "attention"}
        config["layer_types"] = [words[t] for t in config["layer_types"]]
    path.write_text(json.dumps(config, indent=2) + "\n")


def causal(model, ids):
    """Logits of all positions, from a model that has seen nothing: dynamic NTK keeps the base of the
    longest text."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, ids):
    model = copy.deepcopy(model)
    ids, gaps = list(ids), []
    for _ in range(NEW_TOKENS):
        top = causal(model, ids)[-1].topk(2)
        ids.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
    return np.array(ids[-NEW_TOKENS:], np.int64), np.array(gaps)


def generated(model, ids):
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, pad_token_id=0,
        )
    return out[0, len(ids):].numpy()


def make(arch, seed, folder, changes=None):
    draw = Draw(arch, seed)
    kind, arguments = RECIPES[arch](draw)
    arguments |= changes or {}
    decoder = arch in DECODERS
    auto = AutoModelForCausalLM if decoder else AutoModel
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = AutoConfig.for_model(kind, **arguments)
    model = auto.from_config(config, dtype=torch.float32, **options).eval()
    dtype = torch.bfloat16 if seed % 3 == 0 else torch.float32
    fill(model, draw.rng, dtype)
    shutil.rmtree(folder, ignore_errors=True)
    # A copy, because the frequencies of rotations must stay f32 in the model.
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    if seed % 3 == 2:
        older(folder)

    # What the files say is what counts: all below runs models that were read from them.
    made, model = model, auto.from_pretrained(folder, dtype=torch.float32, **options).eval()
    wide = auto.from_pretrained(folder, dtype=torch.float64, **options).eval()
    length = draw.size(21, 39)
    ids = draw.rng.integers(3, model.config.vocab_size, length)
    out, lines = {}, []
    if decoder:
        with double():
            for _ in range(20):
                out["greedy"], out["gaps"] = greedy(wide, ids)
                if out["gaps"].min() > GAP:
                    break
                # Another prompt, so that no rounding changes the continuation.
                ids = draw.rng.integers(3, model.config.vocab_size, length)
            logits = causal(copy.deepcopy(wide), ids)
            assert logits.dtype == torch.float64
            logits = logits.numpy()
            out["generated"] = generated(wide, ids)
        single = causal(model, ids).double().numpy()
        assert np.abs(causal(made, ids).numpy() - single).max() < 1e-4, "the files are another model"
        out["logits"] = logits.astype(np.float32)
        out["noise"] = np.abs(single - logits).max()
        lines = [
            f"spread {logits.std():.2f}",
            f"noise {out['noise']:.1e}",
            f"least gap {out['gaps'].min():.3f}",
        ]
        if not np.array_equal(out["greedy"], out["generated"]):
            lines.append("generate differs")
    else:
        padded = np.full((2, length), model.config.pad_token_id)
        mask = np.zeros((2, length), np.int64)
        for i, n in enumerate((length, length - 9)):
            padded[i, :n], mask[i, :n] = draw.rng.integers(3, model.config.vocab_size, n), 1
        single = model(torch.from_numpy(ids)[None]).last_hidden_state[0].detach().double().numpy()
        with double(), torch.no_grad():
            hidden = wide(torch.from_numpy(ids)[None]).last_hidden_state[0]
            batch = wide(torch.from_numpy(padded), attention_mask=torch.from_numpy(mask)).last_hidden_state
        assert hidden.dtype == torch.float64
        out |= {"hidden": hidden.numpy().astype(np.float32), "noise": np.abs(single - hidden.numpy()).max()}
        out |= {"padded_ids": padded, "padded_mask": mask, "padded_hidden": batch.numpy().astype(np.float32)}
        lines = [f"noise {out['noise']:.1e}"]
    out["ids"] = ids.astype(np.int64)
    np.savez(folder / "expected.npz", **out)
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{folder.name:22} {size / 1024:4.0f} KiB, T {length}, {', '.join(lines)}", flush=True)
    assert np.isfinite(out["noise"]), "values that are not finite"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", nargs="?", choices=RECIPES, metavar="ARCH", help=", ".join(RECIPES))
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of sizes, weights and prompt (default 1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=JSON", help="other values of the configuration")
    parser.add_argument(
        "--all", type=Path, metavar="OUT", help=f"all architectures, seeds {SEEDS}, into OUT/ARCH-SEED"
    )
    args = parser.parse_args()
    if args.all is None:
        if args.arch is None or args.folder is None:
            parser.error("ARCH and FOLDER, or --all OUT")
        changes = dict(pair.split("=", 1) for pair in args.set)
        make(args.arch, args.seed, args.folder, {k: json.loads(v) for k, v in changes.items()})
        return
    failed = []
    for arch in RECIPES:
        for seed in SEEDS:
            try:
                make(arch, seed, args.all / f"{arch}-{seed}")
            except Exception:
                failed.append(f"{arch}-{seed}")
                print(f"{failed[-1]:22} failed")
                traceback.print_exc()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
