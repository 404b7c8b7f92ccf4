//! Small vocabularies of each kind, malformed ones, and texts that take long if the work is not linear.

#[allow(dead_code)]
mod support;

use halcyon_text::{Error, GgufTokenizer, Tokenizer};
use std::time::{Duration, Instant};

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

/// SentencePiece: three special tokens, all bytes, then the given tokens with falling scores.
fn spm(tokens: &[&str]) -> GgufTokenizer {
    let mut g = GgufTokenizer { model: "llama".into(), ..GgufTokenizer::default() };
    g.tokens = texts(&["<unk>", "<s>", "</s>"]);
    g.types = vec![2, 3, 3];
    g.tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    g.types.extend([6; 256]);
    g.tokens.extend(texts(tokens));
    g.types.resize(g.tokens.len(), 1);
    g.scores = (0..g.tokens.len()).map(|i| -(i as f32)).collect();
    g
}

/// Byte-level pairs: all bytes that are written as themselves, the space, then the results of the merges.
fn bpe(pre: &str, merges: &[&str]) -> GgufTokenizer {
    let mut g = GgufTokenizer { model: "gpt2".into(), pre: Some(pre.into()), ..GgufTokenizer::default() };
    g.tokens = ('!'..='~').map(String::from).collect();
    g.tokens.push("Ġ".into());
    g.tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    g.types = vec![1; g.tokens.len()];
    g.tokens.extend(texts(&["<|im_end|>", "<tool>"]));
    g.types.extend([3, 4]);
    g.merges = texts(merges);
    g.bos = Some(0);
    g
}

fn bert() -> GgufTokenizer {
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁!", "▁中", "s"];
    let mut g = GgufTokenizer { model: "bert".into(), tokens: texts(&tokens), ..GgufTokenizer::default() };
    g.types = vec![3, 2, 3, 3, 1, 1, 1, 1, 1, 1];
    (g.bos, g.sep, g.unk, g.pad) = (Some(2), Some(3), Some(1), Some(0));
    g
}

#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let g = spm(&["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁he", "lo", "o▁", "<user>"]);
    let mut g = GgufTokenizer { ..g };
    *g.types.last_mut().unwrap() = 4;
    let t = Tokenizer::from_gguf(g.clone()).unwrap();
    let id = |s: &str| t.token_id(s).unwrap();
    let got = t.encode("hello", true, false).unwrap();
    // 'he' has the highest score of the pairs; then 'll', which makes 'hell'.
    assert_eq!(got, [1, id("▁"), id("hell"), id("o")]);
    assert_eq!(t.decode(&got, true), "hello");
    let got = t.encode("é<user>e</s>", false, false).unwrap();
    let (c3, a9, lt) = (id("<0xC3>"), id("<0xA9>"), id("<0x3C>"));
    assert_eq!(&got[..6], [id("▁"), c3, a9, id("<user>"), id("▁"), id("e")]);
    assert_eq!(got[6], lt);
    assert_eq!(t.encode("</s>", false, true).unwrap(), [2]);
    assert_eq!(t.encode("", true, true).unwrap(), [1]);
    assert_eq!((t.vocab_size(), t.end_ids(), t.is_end(2), t.is_end(1)), (271, vec![2], true, false));
    g.add_space_prefix = Some(false);
    let t = Tokenizer::from_gguf(g).unwrap();
    assert_eq!(t.encode("he", false, false).unwrap(), [id("he")]);
    assert_eq!(t.decode(&[id("▁he")], true), " he");
}

#[test]
fn streams_give_whole_characters() {
    let t = Tokenizer::from_gguf(spm(&["▁a"])).unwrap();
    let byte = |b: u8| t.token_id(&format!("<0x{b:02X}>")).unwrap();
    let mut stream = t.stream(true);
    let pushed: Vec<String> =
        "a€😀".bytes().chain([0xff, 0xc3, b'x', 0xe2, 0x82]).map(|b| stream.push(byte(b))).collect();
    let want = ["a", "", "", "€", "", "", "", "😀", "\u{fffd}", "", "\u{fffd}x", "", ""];
    assert_eq!(pushed, want);
    assert_eq!((stream.push(1), stream.finish()), (String::new(), "\u{fffd}".into()));
    assert_eq!(t.stream(false).push(2), "</s>");
    assert_eq!((t.token_bytes(999_999), t.decode(&[999_999], false)), (vec![], String::new()));
}

#[test]
fn byte_pairs_merge_in_the_order_of_the_list() {
    let t = Tokenizer::from_gguf(bpe("llama-bpe", &["b c", "a b", "Ġ a", "a bc"])).unwrap();
    let id = |s: &str| t.token_id(s).unwrap();
    assert_eq!(t.encode("abc ab", false, false).unwrap(), [id("abc"), id("Ġ"), id("ab")]);
    assert_eq!(t.encode("a", true, false).unwrap(), [0, id("a")]);
    let special = "a<|im_end|><tool>";
    assert_eq!(t.encode(special, false, true).unwrap(), [id("a"), id("<|im_end|>"), id("<tool>")]);
    assert_eq!(*t.encode(special, false, false).unwrap().last().unwrap(), id("<tool>"));
    assert!(t.is_end(id("<|im_end|>")) && t.special_ids().eot == Some(id("<|im_end|>")));
    let ids = t.encode(" abc~", false, false).unwrap();
    assert_eq!((t.decode(&ids, true), t.token_bytes(id("Ġa"))), (" abc~".into(), b" a".to_vec()));
    // The vocabulary has no token for the bytes of this character.
    assert!(t.encode("é", false, false).unwrap().is_empty());
}

#[test]
fn word_piece_takes_the_longest_tokens() {
    let t = Tokenizer::from_gguf(bert()).unwrap();
    assert_eq!(t.encode("Héllo worlds! 中x", true, true).unwrap(), [2, 4, 5, 6, 9, 7, 8, 1, 3]);
    assert_eq!(t.decode(&[2, 4, 5, 6, 3], true), "hello world");
}

#[test]
fn json_tokenizers_encode_and_decode() {
    let json = br#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[
        {"id":3,"content":"</s>",
        "single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "normalizer":null,
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
        "post_processor":null,
        "decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
        "model":{"type":"BPE","dropout":null,"unk_token":null,
        "continuing_subword_prefix":null,"end_of_word_suffix":null,
        "fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
        "vocab":{"a":0,"b":1,"ab":2,"</s>":3,"<":4,"/":5,"s":6,">":7},"merges":["a b"]}}"#;
    let config = br#"{"eos_token":{"content":"</s>"},"chat_template":[{"name":"rag","template":"x"},
        {"name":"default","template":"y"}]}"#;
    let t = Tokenizer::from_json(json, Some(config)).unwrap();
    assert_eq!(t.encode("aab</s>", true, true).unwrap(), [0, 2, 3]);
    assert_eq!(t.encode("ab</s>", true, false).unwrap(), [2, 4, 5, 6, 7]);
    assert_eq!((t.decode(&[0, 2, 3], true), t.decode(&[2, 3], false)), ("aab".into(), "ab</s>".into()));
    assert_eq!((t.special_ids().eos, t.end_ids(), t.chat_template()), (Some(3), vec![3], Some("y")));
    for bad in
        [&b""[..], b"{}", b"[]", br#"{"model":{"type":"BPE","vocab":{"a":4294967295},"merges":["b c"]}}"#]
    {
        assert!(matches!(Tokenizer::from_json(bad, None), Err(Error::Format { .. })));
    }
    assert!(
        Tokenizer::from_json(json, Some(b"[")).unwrap_err().to_string().contains("tokenizer_config.json")
    );
}

#[test]
fn malformed_vocabularies_are_errors_that_name_the_key() {
    let fails = |g: GgufTokenizer, part: &str| {
        let e = Tokenizer::from_gguf(g).unwrap_err();
        assert!(e.to_string().contains(part), "{e}");
    };
    let base = spm(&["a"]);
    fails(GgufTokenizer::default(), "tokenizer.ggml.model");
    fails(GgufTokenizer { model: "rwkv".into(), ..base.clone() }, "'rwkv'");
    fails(GgufTokenizer { tokens: vec![], ..base.clone() }, "tokenizer.ggml.tokens");
    fails(GgufTokenizer { tokens: texts(&["a", "b", "a"]), ..base.clone() }, "token 0 and token 2");
    fails(GgufTokenizer { types: vec![1], ..base.clone() }, "token_type: 1 entries for 260");
    fails(GgufTokenizer { scores: vec![1.0], ..base.clone() }, "scores");
    fails(GgufTokenizer { scores: vec![f32::NAN; 300], ..base.clone() }, "not a number");
    fails(GgufTokenizer { merges: vec![], ..bpe("gpt-2", &["a b"]) }, "merges");
    fails(GgufTokenizer { pre: Some("new\u{1b}[31m".into()), ..bpe("", &["a b"]) }, "tokenizer.ggml.pre");
    fails(GgufTokenizer { bos: None, sep: None, ..bert() }, "bos_token_id");
    fails(
        GgufTokenizer { add_eos: Some(true), eos: None, tokens: texts(&["a", "b"]), ..base.clone() },
        "eos_token_id",
    );
    // Ids out of range count as absent.
    let t = Tokenizer::from_gguf(GgufTokenizer { eos: Some(99_999), pad: Some(u32::MAX), ..base }).unwrap();
    assert_eq!((t.special_ids().eos, t.special_ids().pad), (Some(2), None));
}

#[test]
fn odd_vocabularies_work() {
    let odd = ["", "", "▁", "▁▁", "<0xZZ>", "<0x>", "Ġ", "\0", "a\u{301}", "[EMPTY_1]x", "unused"];
    for model in ["llama", "gpt2", "gemma4", "bert"] {
        for types in
            [vec![], vec![1; 20], vec![3; 20], vec![4; 20], vec![6; 20], vec![5; 20], vec![i32::MIN; 20]]
        {
            let g = GgufTokenizer {
                model: model.into(),
                tokens: texts(&odd),
                types,
                merges: texts(&[
                    "",
                    " ",
                    "  ",
                    "a",
                    " a",
                    "a ",
                    "▁ ▁",
                    "▁▁ ▁▁",
                    "é é",
                    "\0 \0",
                    "Ġ Ġ",
                    "Ġ Ġ",
                ]),
                scores: [f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0].repeat(5),
                bos: Some(0),
                sep: Some(1),
                name: Some("Phi-3".into()),
                ..GgufTokenizer::default()
            };
            let t = Tokenizer::from_gguf(g).unwrap();
            for text in
                ["", " ", "   x  ", "\0\0", "a\u{301}é", "▁▁▁", "[EMPTY_0] [EMPTY_1]x  unused", "\u{10ffff}"]
            {
                for flags in 0..4 {
                    let ids = t.encode(text, flags & 1 != 0, flags & 2 != 0).unwrap();
                    t.decode(&ids, false);
                    ids.iter().for_each(|&id| drop(t.token_bytes(id)));
                }
            }
        }
    }
}

/// Long texts that are costly if any step looks at them again and again.
fn hostile() -> Vec<String> {
    let n = 1 << 17;
    let parts = [
        "a", " ", "\n", " \n", "é", "0", "'", "~", "▁", "a ", "<", "ab", "A", "\u{301}", "中", "\u{3000}",
        "aA1 ",
    ];
    parts.iter().map(|p| p.repeat(n / p.len())).chain(["a".repeat(1 << 20)]).collect()
}

fn timed(t: &Tokenizer, name: &str) {
    for text in hostile() {
        let start = Instant::now();
        t.encode(&text, true, true).unwrap();
        let time = start.elapsed();
        // Quadratic work would take minutes. The machine may be busy, so the bound is wide.
        assert!(
            time < Duration::from_secs(20),
            "{name}: {:?} took {time:?}",
            text.chars().take(4).collect::<String>()
        );
    }
}

#[test]
fn long_and_monotonous_texts_take_linear_time() {
    let runs: Vec<String> = (1..40).map(|n| format!("{} a", "a".repeat(n))).collect();
    let runs: Vec<&str> = runs.iter().map(String::as_str).collect();
    for pre in ["llama-bpe", "gpt-4o", "deepseek-v3", "smollm"] {
        timed(&Tokenizer::from_gguf(bpe(pre, &runs)).unwrap(), pre);
    }
    let joined: Vec<String> = runs.iter().map(|r| r.replace(' ', "")).collect();
    let joined: Vec<&str> = joined.iter().map(String::as_str).collect();
    timed(&Tokenizer::from_gguf(spm(&joined)).unwrap(), "llama");
    timed(&Tokenizer::from_gguf(bert()).unwrap(), "bert");
}

#[test]
fn real_vocabularies_are_fast() {
    let words =
        "The quick brown fox, isn't it? Größe 12345 = x_1;\n\tfn main() { println!(\"日本語 😀\"); }  ";
    let text: String = (0..12_000).map(|i| format!("{words}{}", i * 7919)).collect();
    for name in ["smollm2.gguf", "gemma3.gguf"] {
        let Some(path) = support::model(name) else {
            eprintln!("skipped: there is no {name}; set HALCYON_TEXT_MODELS to its folder");
            continue;
        };
        let t = Tokenizer::from_gguf(support::tokenizer(&path)).unwrap();
        let start = Instant::now();
        let ids = t.encode(&text, false, true).unwrap();
        eprintln!("{name}: {} bytes, {} tokens, {:?}", text.len(), ids.len(), start.elapsed());
        timed(&t, name);
        assert_eq!(t.decode(&ids, false), text);
    }
}

#[test]
fn a_tokenizer_json_cuts_as_its_gguf_file_does() {
    let mut unigram = GgufTokenizer { model: "t5".into(), ..GgufTokenizer::default() };
    unigram.tokens =
        texts(&["<s>", "<pad>", "</s>", "<unk>", "▁", "▁he", "llo", "l", "lo", "▁hel", "o", "h", "e"]);
    unigram.scores = vec![0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -3.5, -4.0, -4.1, -3.2, -5.0, -5.0, -5.0];
    unigram.types = vec![3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    (unigram.bos, unigram.eos, unigram.unk) = (Some(0), Some(2), Some(3));
    (unigram.add_bos, unigram.add_eos) = (Some(true), Some(true));
    let merges = ["h e", "l l", "he ll", "Ġ w", "hell o"];
    let all = [
        spm(&["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁he", "lo", "o▁", "w", "▁w"]),
        GgufTokenizer { add_space_prefix: Some(false), ..spm(&["▁", "h", "e", "he", "▁h"]) },
        bpe("llama-bpe", &merges),
        bpe("gpt-4o", &merges),
        bpe("qwen2", &merges),
        bert(),
        unigram,
    ];
    let texts =
        ["hello", " hello  hello", "he lo w", "HELLO, w0rld!", "<|im_end|>he<tool>ll", "", "  ", "a\n\nb"];
    for g in all {
        let own = Tokenizer::from_gguf(g.clone()).unwrap();
        let json = Tokenizer::from_json(g.to_json().unwrap().as_bytes(), None).unwrap();
        for text in texts {
            for add in [true, false] {
                let (a, b) = (own.encode(text, add, true).unwrap(), json.encode(text, add, true).unwrap());
                assert_eq!(a, b, "{} {:?}: {text:?}", g.model, g.pre);
            }
        }
    }
    let e = GgufTokenizer { model: "rwkv".into(), ..GgufTokenizer::default() }.to_json().unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
}
