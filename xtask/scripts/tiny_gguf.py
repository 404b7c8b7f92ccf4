"""Converts small models that `tiny_models.py` made to GGUF files with llama.cpp's own converter.

`tiny_gguf.py LLAMA_CPP FOLDER OUT.gguf` writes the weights in f32, or in bf16 (`--bf16`): for models with
weights in bf16, whose values do not change. llama.cpp itself is exact with f32 only. LLAMA_CPP is the source
of llama.cpp, for example `vendor/llama.cpp` of the source package `llama-cpp-python`. The models have no
tokenizer, so the file has a vocabulary of llama.cpp's kind `none`. Needs torch, transformers and what the
converter needs. Then `llama_oracle.py logits` and `halcyon logits` show what both programs compute.

llama.cpp lacks some of what the models may have: Falcon with parts one after the other (seeds 3, 6, ...), and
GPT-2 whose scores are divided by the number of the layer (the same seeds).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path


def prepare(folder, copy):
    """A copy of the folder with the keys and the file that the converter insists on."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
    if config["model_type"] == "cohere2":
        config["rotary_pct"] = 1.0
    if config["model_type"] == "falcon" and config["multi_query"] and not config["new_decoder_architecture"]:
        # As in the published checkpoints.
        del config["num_kv_heads"]
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").symlink_to((folder / "model.safetensors").resolve())
    # Gemma's converter counts the tokens.
    tokens = {f"t{i}": i for i in range(config["vocab_size"])}
    (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return config


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's source")
    parser.add_argument("folder", type=Path, help="model in Hugging Face's layout")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--bf16", action="store_true", help="matrices in bf16")
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    import conversion
    import gguf
    import torch

    with tempfile.TemporaryDirectory() as copy:
        config = prepare(args.folder, Path(copy))
        name = conversion.get_model_architecture(
            conversion.ModelBase.load_hparams(Path(copy), False), conversion.ModelType.TEXT
        )
        own = conversion.get_model_class(name)

        class Tiny(own):
            model_arch = own.model_arch
            # Layers that predict further tokens are not part of these models.
            no_mtp = True

            def set_vocab(self):
                self.gguf_writer.add_tokenizer_model("none")
                self.gguf_writer.add_vocab_size(config["vocab_size"])

            def set_gguf_parameters(self):
                super().set_gguf_parameters()
                # Some converters assume four times the width.
                inner = config.get("n_inner") or config.get("ffn_hidden_size")
                if inner:
                    self.gguf_writer.add_feed_forward_length(inner)

        with torch.inference_mode():
            kind = gguf.LlamaFileType.MOSTLY_BF16 if args.bf16 else gguf.LlamaFileType.ALL_F32
            Tiny(Path(copy), kind, args.out, eager=True).write()


if __name__ == "__main__":
    main()
