//! Whatever a model with random weights predicts, its text matches the grammar.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_models::{Constraint, Finish, GenerateOptions, Sampling, generate};
use halcyon_text::{GgufTokenizer, Tokenizer};
use std::ops::ControlFlow;

/// A tokenizer for the random model: three special tokens, each byte, and pieces of JSON.
pub(crate) fn tokenizer() -> Tokenizer {
    let pieces = ["{\"", "\":", "\",", "\"}", "true", "null", "10", "▁{", "▁[", "],", "日本", "name", "▁\""];
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(pieces.map(String::from));
    let filler = tokens.len()..VOCABULARY;
    tokens.extend(filler.map(|i| format!("word{i}")));
    let kind = |i: usize| match i {
        0 => 2,
        1 | 2 => 3,
        3..259 => 6,
        _ => 1,
    };
    let g = GgufTokenizer {
        model: "llama".into(),
        types: (0..tokens.len()).map(kind).collect(),
        scores: vec![0.0; tokens.len()],
        tokens,
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufTokenizer::default()
    };
    Tokenizer::from_gguf(g).expect("a tokenizer")
}

#[test]
fn noise_of_a_model_satisfies_the_schema() {
    let schema = r#"{"properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": -3, "maximum": 40},
        "s": {"type": "string", "maxLength": 4}, "l": {"type": "array", "items": {"enum": ["x", null]}, "maxItems": 2}},
        "required": ["n", "ok"]}"#;
    let t = tokenizer();
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let mut e = engine(&decoder(&cpu, &file(&metadata("llama"), &tensors(None)), 128), 1, 64);
    let mask = Constraint::json_schema(schema, &t).expect("a schema");
    let mut ended = 0;
    for seed in 0..40 {
        e.truncate(0, 0);
        let options = GenerateOptions {
            max_tokens: Some(120),
            sampling: Sampling {
                temperature: 1.5,
                seed,
                top_k: 0,
                top_p: 1.0,
                min_p: 0.0,
                ..Sampling::default()
            },
            mask: Some(Box::new(mask.clone())),
            ..GenerateOptions::default()
        };
        let g = generate(&mut e, 0, Some(&t), &[1, 50], &options, &mut |_| ControlFlow::Continue(()))
            .expect("a text");
        if g.finish != Finish::Stop {
            continue;
        }
        ended += 1;
        let v: serde_json::Value = serde_json::from_str(&g.text).expect("valid JSON");
        assert!(v["ok"].is_boolean() && (-3..=40).contains(&v["n"].as_i64().expect("an integer")), "{v}");
        assert!(v["s"].as_str().is_none_or(|s| s.chars().count() <= 4), "{v}");
        assert!(v["l"].as_array().is_none_or(|l| l.len() <= 2), "{v}");
        let known = |k: &String| ["ok", "n", "s", "l"].contains(&k.as_str());
        assert!(v.as_object().is_some_and(|o| o.keys().all(known)), "{v}");
    }
    assert!(ended > 20, "{ended}");
}

#[test]
fn the_text_ends_only_where_the_grammar_does() {
    let t = tokenizer();
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let mut e = engine(&decoder(&cpu, &file(&metadata("llama"), &tensors(None)), 128), 1, 64);
    for (grammar, end) in
        [("root ::= \"yes\" | \"no\"", Finish::Stop), ("root ::= \"a\"{200}", Finish::Length)]
    {
        e.truncate(0, 0);
        let options = GenerateOptions {
            max_tokens: Some(30),
            // Even if the model's best token ends the text.
            sampling: Sampling::greedy(),
            mask: Some(Box::new(Constraint::grammar(grammar, &t).expect("a grammar"))),
            ..GenerateOptions::default()
        };
        let g = generate(&mut e, 0, Some(&t), &[1, 7], &options, &mut |_| ControlFlow::Continue(()));
        let g = g.expect("a text");
        assert_eq!(g.finish, end);
        match end {
            Finish::Stop => assert!(["yes", "no"].contains(&g.text.as_str()), "{}", g.text),
            _ => assert_eq!(g.text, "a".repeat(30)),
        }
    }
    // The model has no token for what must follow: an error, and not a wrong text.
    let few = GgufTokenizer {
        model: "llama".into(),
        tokens: ["<unk>", "<s>", "</s>", "a", "b"].map(String::from).to_vec(),
        types: vec![2, 3, 3, 1, 1],
        scores: vec![0.0; 5],
        eos: Some(2),
        ..GgufTokenizer::default()
    };
    let few = Tokenizer::from_gguf(few).expect("a tokenizer");
    let options = GenerateOptions {
        mask: Some(Box::new(Constraint::grammar("root ::= \"abc\"", &few).expect("a grammar"))),
        ..GenerateOptions::default()
    };
    e.truncate(0, 0);
    let made = generate(&mut e, 0, Some(&few), &[1], &options, &mut |_| ControlFlow::Continue(()));
    assert!(made.expect_err("no token fits").to_string().contains("no token of the model's vocabulary"));
}
