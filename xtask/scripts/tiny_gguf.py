"""Converts small models that `tiny_models.py` made to GGUF files with llama.cpp's own converter.

`tiny_gguf.py LLAMA_CPP FOLDER OUT.gguf` writes the weights in f32. LLAMA_CPP is the source of llama.cpp, for
example `vendor/llama.cpp` of the source package `llama-cpp-python`. The models have no tokenizer, so the file
has a vocabulary of llama.cpp's kind `none`. Needs torch, transformers and what the converter needs. Then
`llama_oracle.py logits` and `halcyon logits` compare what both programs compute.
"""

import argparse
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("llama_cpp", type=Path, help="folder of llama.cpp's source")
    parser.add_argument("folder", type=Path, help="model in Hugging Face's layout")
    parser.add_argument("out", type=Path, help="GGUF file to write")
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    import conversion
    import gguf
    import torch

    config = conversion.ModelBase.load_hparams(args.folder, False)
    name = conversion.get_model_architecture(config, conversion.ModelType.TEXT)

    class Tiny(conversion.get_model_class(name)):
        model_arch = conversion.get_model_class(name).model_arch

        def set_vocab(self):
            self.gguf_writer.add_tokenizer_model("none")
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    # Some families write the vocabulary's size themselves.
    add = gguf.GGUFWriter.add_vocab_size
    gguf.GGUFWriter.add_vocab_size = lambda w, n: (
        None if any(k.endswith(".vocab_size") for k in w.kv_data[0]) else add(w, n)
    )
    with torch.inference_mode():
        Tiny(args.folder, gguf.LlamaFileType.ALL_F32, args.out, eager=True).write()


if __name__ == "__main__":
    main()
