//! Token ids against llama.cpp, for texts that `xtask/scripts/tokenizer_cases.py` drew. The vocabularies are
//! those of real models, which are not part of the repository.

mod support;

use halcyon_text::Tokenizer;
use serde::Deserialize;
use std::path::PathBuf;

#[derive(Deserialize)]
struct Set {
    /// File of the vocabulary.
    model: String,
    /// The pre-tokenizer that replaces the file's own.
    #[serde(default)]
    pre: Option<String>,
    /// The value of `tokenizer.ggml.model` that replaces the file's own.
    #[serde(default)]
    kind: Option<String>,
    add_special: bool,
    parse_special: bool,
    ends: Vec<u32>,
    cases: Vec<(String, Vec<u32>)>,
}

fn sets() -> Vec<Set> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer_cases.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn token_ids_are_those_of_llama_cpp() {
    let (mut compared, mut wrong) = (0, vec![]);
    for set in sets() {
        let Some(path) = support::model(&set.model) else {
            eprintln!("skipped: there is no {}; set HALCYON_TEXT_MODELS to its folder", set.model);
            continue;
        };
        let mut g = support::tokenizer(&path);
        g.pre = set.pre.clone().or(g.pre);
        g.model = set.kind.clone().unwrap_or(g.model);
        let t = Tokenizer::from_gguf(g).unwrap();
        assert_eq!(t.end_ids(), set.ends, "{} {:?}", set.model, set.pre);
        for (text, ids) in &set.cases {
            let got = t.encode(text, set.add_special, set.parse_special).unwrap();
            compared += 1;
            if &got != ids {
                let place = format!("{} {:?} {}", set.model, set.pre, set.parse_special);
                wrong.push(format!("{place}: {text:?}\n  got  {got:?}\n  want {ids:?}"));
            }
            if set.pre.is_none() && !text.contains('▁') {
                let plain = t.encode(text, false, set.parse_special).unwrap();
                assert_eq!(&t.decode(&plain, false), text);
                let mut stream = t.stream(false);
                let streamed: String = plain.iter().map(|&id| stream.push(id)).collect();
                assert_eq!(&(streamed + &stream.finish()), text);
            }
        }
    }
    eprintln!("{compared} texts compared");
    assert!(
        wrong.is_empty(),
        "{} of {compared} texts differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(20)].join("\n")
    );
}

#[test]
fn a_tokenizer_json_of_the_metadata_gives_the_same_ids() {
    let (mut compared, mut wrong) = (0, vec![]);
    for set in sets() {
        let Some(path) = support::model(&set.model) else { continue };
        let mut g = support::tokenizer(&path);
        g.pre = set.pre.clone().or(g.pre);
        g.model = set.kind.clone().unwrap_or(g.model);
        let json = match g.to_json() {
            Ok(json) => json,
            // Digits that are cut from the right have no pattern.
            Err(e) => {
                let known = ["tiny_aya", "afmoe"].iter().any(|n| set.pre.as_deref() == Some(n));
                assert!(known, "{:?}: {e}", set.pre);
                continue;
            }
        };
        let t = Tokenizer::from_json(json.as_bytes(), None).unwrap();
        for (text, ids) in &set.cases {
            compared += 1;
            let got = t.encode(text, set.add_special, set.parse_special).unwrap();
            if &got != ids {
                wrong.push(format!("{} {:?}: {text:?}\n  got  {got:?}\n  want {ids:?}", set.model, set.pre));
            }
        }
    }
    eprintln!("{compared} texts compared, {} differ", wrong.len());
    assert!(
        wrong.len() * 100 <= compared,
        "{}",
        wrong.iter().take(20).cloned().collect::<Vec<_>>().join("\n")
    );
}
