//! The fuzz targets for language models on mutated inputs.

use halcyon_test::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[allow(unreachable_pub, reason = "the fuzz targets call it")]
#[path = "../../../../fuzz/src/language.rs"]
mod language;

/// Texts that mean something in one of the formats.
const PIECES: &[&str] = &[
    "\"",
    "\\",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    "|",
    "*",
    "+",
    "?",
    "::=",
    ":",
    ",",
    "~",
    "..",
    "%ignore",
    "/",
    "^",
    "$",
    "-1",
    "1e9",
    "99999999",
    "true",
    "null",
    "\"$ref\":\"#\"",
    "\"allOf\":[",
    "\"type\":",
    "\"object\"",
    "{%",
    "%}",
    "{{",
    "}}",
    "for",
    "\n",
    "é",
    "\u{0}",
];

/// Runs a target on mutations of each seed.
fn mutated(seeds: &[&str], target: impl Fn(&[u8])) {
    let mut rng = Rng::new(11);
    for seed in seeds {
        target(seed.as_bytes());
        for round in 0..120 {
            let mut data = seed.as_bytes().to_vec();
            for _ in 0..1 + round % 4 {
                let at = rng.below(data.len() + 1);
                let to = (at + rng.below(6)).min(data.len());
                match rng.below(4) {
                    0 => drop(data.drain(at..to)),
                    1 => drop(data.splice(at..to, PIECES[rng.below(PIECES.len())].bytes())),
                    2 => {
                        let copy = data[at..(at + rng.below(30)).min(data.len())].to_vec();
                        data.splice(to..to, copy);
                    }
                    _ => drop(data.splice(at..at, [rng.below(256) as u8])),
                }
            }
            data.push(b' ');
            let ran = catch_unwind(AssertUnwindSafe(|| target(&data)));
            assert!(ran.is_ok(), "{:?}", String::from_utf8_lossy(&data));
        }
    }
}

#[test]
fn grammars() {
    let seeds = [
        "root ::= \"a\" x{1,3} | [^b-d\\n]* # c\nx ::= (\"\\u00e9\" | root)? .\n",
        "%import common.INT\n%ignore / +/\nstart: \"x\"i INT~1..2 | [\"a\"..\"c\"] /b+/ -> y\n",
    ];
    mutated(&seeds, language::grammar);
}

#[test]
fn schemas() {
    let seeds = [
        r##"{"properties":{"a":{"type":"integer","minimum":-3},"b":{"$ref":"#"}},"required":["a"]}"##,
        r#"{"items":{"enum":["x",1]},"prefixItems":[{"pattern":"^a+$"}],"minItems":1,"maxItems":4}"#,
        r##"{"allOf":[{"$ref":"#/$defs/n"},{"maximum":2.5}],"$defs":{"n":{"type":"number"}}}"##,
        r#"{"oneOf":[{"type":"null"},{"format":"date"}],"anyOf":[true,{"maxLength":3}]}"#,
    ];
    mutated(&seeds, language::json_schema);
}

#[test]
fn templates_and_tokenizers() {
    let template =
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}{{ bos_token }}";
    mutated(&[template], language::template);
    let tokenizer = r#"{"added_tokens":[{"id":3,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
        "decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
        "model":{"type":"BPE","vocab":{"A":0,"b":1,"Ab":2},"merges":["A b"]}}"#;
    mutated(&[tokenizer], language::tokenizer);
}

#[test]
fn folders() {
    let dir = tempfile::tempdir().expect("a folder");
    let seed = "{\"metadata\":{},\"weight_map\":{\"model.norm.weight\":\"model-1.safetensors\"}}\u{0}\
        {\"model_type\":\"llama\",\"hidden_size\":8,\"num_hidden_layers\":1,\"num_attention_heads\":2,\
        \"intermediate_size\":16,\"vocab_size\":32,\"rms_norm_eps\":1e-5}";
    mutated(&[seed], |data| language::folder(dir.path(), data));
}
