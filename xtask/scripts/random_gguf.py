"""Writes a GGUF file of a Llama with random weights and an invented vocabulary, to measure speed with.

`random_gguf.py FILE --type q8_0` has the shape of TinyLlama 1.1B; options give others. Speed does not depend
on the values, so every matrix takes its rows at random from 64 rows: making the file takes seconds, and no two
matrices are equal (Halcyon would keep equal ones once, and read less memory). Q4_K_M and such come from
`llama_oracle.py quantize` on the f16 file. Needs gguf and numpy.
"""

import argparse
from itertools import islice, product
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
}
ROWS = 64


def vocabulary(count):
    """A vocabulary of SentencePiece's kind: special tokens, bytes, then invented words, the shortest
    first."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    kinds = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    letters = "\u2581etaoinshrdlcumwfgypbvkjxqz"
    # Every beginning of a word is in the list too, so that merging one letter after another can reach it.
    words = (
        first + "".join(rest)
        for n in range(5)
        for first in letters
        for rest in product(letters[1:], repeat=n)
    )
    tokens += islice(words, count - len(tokens))
    kinds += [gguf.TokenType.NORMAL] * (count - len(kinds))
    scores = [0.0] * 259 + [-float(i) for i in range(count - 259)]
    return tokens, scores, kinds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--type", choices=TYPES, default="f16", help="type of the matrices (default f16)")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tied", action="store_true", help="no matrix of its own for the output")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    kind = gguf.GGMLQuantizationType[TYPES[args.type]]
    head = args.hidden // args.heads
    writer = gguf.GGUFWriter(args.file, "llama")
    writer.add_name(f"random {args.layers}x{args.hidden}")
    writer.add_file_type(gguf.LlamaFileType[("ALL_" if args.type == "f32" else "MOSTLY_") + TYPES[args.type]])
    writer.add_context_length(args.context)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.ffn)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(args.vocab)
    tokens, scores, kinds = vocabulary(args.vocab)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)

    blocks = {}

    def matrix(name, rows, columns):
        if columns not in blocks:
            values = (0.02 * rng.standard_normal((ROWS, columns))).astype(np.float32)
            blocks[columns] = gguf.quants.quantize(values, kind)
        block = blocks[columns]
        data = block[rng.integers(0, ROWS, rows)]
        writer.add_tensor(name, data, raw_dtype=kind)

    def norm(name):
        writer.add_tensor(name, rng.uniform(0.5, 1.5, args.hidden).astype(np.float32))

    matrix("token_embd.weight", args.vocab, args.hidden)
    norm("output_norm.weight")
    if not args.tied:
        matrix("output.weight", args.vocab, args.hidden)
    for i in range(args.layers):
        norm(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", args.heads * head, args.hidden)
        matrix(f"blk.{i}.attn_k.weight", args.kv_heads * head, args.hidden)
        matrix(f"blk.{i}.attn_v.weight", args.kv_heads * head, args.hidden)
        matrix(f"blk.{i}.attn_output.weight", args.hidden, args.heads * head)
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", args.ffn, args.hidden)
        matrix(f"blk.{i}.ffn_up.weight", args.ffn, args.hidden)
        matrix(f"blk.{i}.ffn_down.weight", args.hidden, args.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
