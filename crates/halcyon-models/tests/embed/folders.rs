//! Encoders from a folder to a GGUF file and back.

use crate::stored::folder;
use halcyon::ConstData;
use halcyon::prelude::*;
use halcyon_formats::safetensors::SafeTensors;
use halcyon_models::export::{Content, WriteOptions, write, write_folder};
use halcyon_models::{EmbedOptions, Embedder, Source};
use half::bf16;
use serde_json::json;
use std::path::{Path, PathBuf};

fn to_file(from: &Path, to: &Path) {
    let source = Source::open(from).expect("a model");
    let content = Content::of(&source).expect("GGUF can describe it");
    let types: Vec<_> = content.tensors.iter().map(|t| t.info.ty).collect();
    let mut options =
        WriteOptions { threads: None, requantise: false, interrupted: &|| false, progress: &mut || {} };
    write(&content, &types, to, &mut options).expect("written");
}

fn vectors(b: &Backend, model: &Path) -> Vec<Vec<f32>> {
    let mut e = Embedder::open(b, model, &EmbedOptions::default()).expect("the model opens");
    let vocabulary = 64;
    let texts: Vec<Vec<u32>> = [1, 7, 13].map(|n| (0..n).map(|i| (3 + i * 11) % vocabulary).collect()).into();
    e.embed_tokens(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>()).expect("vectors")
}

/// A copy of a stored folder which says how vectors are pooled.
fn pooled(family: &str, mode: &str, to: PathBuf) -> PathBuf {
    std::fs::create_dir_all(to.join("1_Pooling")).expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(folder(family).join(name), to.join(name)).expect("copied");
    }
    let of = |path: &str, name: &str| format!(r#"{{"path": "{path}", "type": "x.models.{name}"}}"#);
    let list = format!("[{}, {}]", of("", "Transformer"), of("1_Pooling", "Pooling"));
    std::fs::write(to.join("modules.json"), list).expect("written");
    std::fs::write(to.join("1_Pooling/config.json"), format!(r#"{{"{mode}": true}}"#)).expect("written");
    to
}

fn floats(c: &ConstData) -> (Vec<usize>, Vec<f32>) {
    let values = match c.dtype {
        DType::BF16 => c.to_vec::<bf16>().iter().map(|v| v.to_f32()).collect(),
        _ => c.to_vec::<f32>(),
    };
    (c.dims.to_vec(), values)
}

#[test]
fn encoders_return_from_their_files() {
    let (b, dir) = (Backend::cpu().expect("the CPU"), tempfile::tempdir().expect("a folder"));
    let to = |name: String| dir.path().join(name);
    let modes = ["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_mean_tokens"];
    for (family, mode) in ["bert", "xlm-roberta", "modernbert"].into_iter().zip(modes) {
        let first = pooled(family, mode, to(family.into()));
        let (file, back) = (to(format!("{family}.gguf")), to(format!("{family}-back")));
        to_file(&first, &file);
        let source = Source::open(&file).expect("a model");
        let made = write_folder(&source, &back, DType::F32, &|| false, &mut |_| {}).expect("written");
        let again = to(format!("{family}-again.gguf"));
        to_file(&back, &again);
        let want = vectors(&b, &first);
        for model in [&file, &back, &again] {
            assert_eq!(vectors(&b, model), want, "{family}: {}", model.display());
        }
        let [old, new] =
            [&first, &back].map(|p| SafeTensors::open(&p.join("model.safetensors")).expect("the tensors"));
        assert_eq!(new.names().count(), made.tensors, "{family}");
        // The folder of an XLM-R file is one of BERT, without the rows before the first position. Files
        // have no pooler.
        for name in new.names() {
            let [a, b] = [&old, &new].map(|s| floats(&s.get(name).expect("a tensor")));
            if name.contains("position_embeddings") && family == "xlm-roberta" {
                assert!(a.1.ends_with(&b.1), "{name}");
            } else {
                assert!(a == b, "{family}: {name}");
            }
        }
        let missing: Vec<_> =
            old.names().filter(|n| new.get(n).is_err() && !n.starts_with("pooler.")).collect();
        assert!(missing.is_empty(), "{family}: {missing:?}");
    }
}

/// With accents stripped, files keep only the first letter of a Hangul syllable, as llama.cpp reads them. The
/// model has a tokenizer in both forms nevertheless, and a warning says what differs.
#[test]
fn word_piece_stays_although_hangul_differs() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = pooled("bert", "pooling_mode_cls_token", dir.path().join("bert"));
    let tokens = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", ",", "!", "ᄒ", "##ᅡ", "##ᆫ", "##ᄀ",
        "##ᅮ", "##ᆨ", "##ᄋ", "##ᅥ",
    ];
    let added = [0, 1, 2, 3].map(|i| {
        json!({ "id": i, "content": tokens[i], "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    });
    let special = |i: usize| json!({ "SpecialToken": { "id": tokens[i], "type_id": 0 } });
    let role = |i: usize| json!({ "id": tokens[i], "ids": [i], "tokens": [tokens[i]] });
    let numbers: serde_json::Map<_, _> =
        tokens.iter().enumerate().map(|(i, t)| (t.to_string(), json!(i))).collect();
    let tokenizer = json!({
        "added_tokens": added,
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": { "type": "TemplateProcessing",
            "single": [special(2), { "Sequence": { "id": "A", "type_id": 0 } }, special(3)],
            "pair": [special(2), { "Sequence": { "id": "A", "type_id": 0 } }, special(3)],
            "special_tokens": { "[CLS]": role(2), "[SEP]": role(3) } },
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": numbers },
    });
    std::fs::write(first.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    let config =
        json!({ "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]" });
    std::fs::write(first.join("tokenizer_config.json"), config.to_string()).expect("written");
    let (file, back) = (dir.path().join("bert.gguf"), dir.path().join("back"));
    let source = Source::open(&first).expect("a model");
    let warned = |all: &[String]| all.iter().any(|w| w.contains("Hangul"));
    assert!(warned(&Content::of(&source).expect("GGUF can describe it").warnings));
    to_file(&first, &file);
    let source = Source::open(&file).expect("a model");
    let made = write_folder(&source, &back, DType::F32, &|| false, &mut |_| {}).expect("written");
    assert!(warned(&made.warnings), "{:?}", made.warnings);
    let b = Backend::cpu().expect("the CPU");
    let ids = |model: &Path, text: &str| {
        let e = Embedder::open(&b, model, &EmbedOptions::default()).expect("the model opens");
        e.tokens(text).expect("tokens").ids
    };
    for model in [&first, &file, &back] {
        assert_eq!(ids(model, "Hello worlds!"), [2, 4, 5, 6, 8, 3], "{}", model.display());
    }
    assert_eq!(
        [&first, &file, &back].map(|m| ids(m, "한")),
        [vec![2, 9, 10, 11, 3], vec![2, 9, 3], vec![2, 9, 10, 11, 3]]
    );
}
