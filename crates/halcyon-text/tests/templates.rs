//! Chat templates against jinja2 with the settings of `transformers`, and templates that do not end.
//! `xtask/scripts/template_cases.py` wrote the cases.

use halcyon_text::{ChatTemplate, Error, GgufTokenizer, Json, Message, RenderOptions, Tokenizer};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(Deserialize)]
struct Cases {
    now: i64,
    templates: BTreeMap<String, String>,
    chats: BTreeMap<String, Vec<Message>>,
    options: Vec<Json>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    chat: String,
    options: usize,
    text: Option<String>,
    error: Option<String>,
}

fn options(json: &Json, now: i64) -> RenderOptions {
    let text = |key: &str| json.get(key).and_then(Json::as_str).map(String::from);
    let flag = |key: &str| json.get(key).map(|v| v == &Json::Bool(true));
    RenderOptions {
        add_generation_prompt: flag("add_generation_prompt").unwrap(),
        bos_token: Some("<s>".into()),
        eos_token: Some("</s>".into()),
        tools: json.get("tools").cloned(),
        enable_thinking: flag("enable_thinking"),
        reasoning_effort: text("reasoning_effort"),
        date_string: text("date_string"),
        now: Some(now),
        ..RenderOptions::default()
    }
}

#[test]
fn results_are_those_of_jinja2() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/template_cases.json");
    let all: Cases = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut wrong = vec![];
    for c in &all.cases {
        let template = ChatTemplate::new(&all.templates[&c.template]).unwrap();
        let got = template.render(&all.chats[&c.chat], &options(&all.options[c.options], all.now));
        let same = match (&got, &c.text, &c.error) {
            (Ok(got), Some(text), _) => got == text,
            (Err(Error::Argument { what, .. }), None, Some(e)) => what.contains(e),
            _ => false,
        };
        if !same {
            let want = c.text.as_ref().or(c.error.as_ref()).unwrap();
            wrong.push(format!("{} {} {}:\n  got  {got:?}\n  want {want:?}", c.template, c.chat, c.options));
        }
    }
    eprintln!("{} results compared", all.cases.len());
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), all.cases.len(), wrong.join("\n"));
}

fn render(source: &str) -> Result<String, Error> {
    ChatTemplate::new(source)?.render(&[Message::new("user", "hi")], &RenderOptions::default())
}

#[test]
fn templates_without_end_are_errors() {
    let forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(forever), Err(Error::Endless { .. })));
    let grows =
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    assert!(matches!(render(grows), Err(Error::Endless { .. })));
    for source in [
        "{{ 'a' * 9999999999 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{% for i in range(99999999999) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}",
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
        "{{ 'x' | indent(999999999999) }}",
        "{{ 'x' | center(999999999999) }}",
        "{{ [1] * 999999999999 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% include 'Cargo.toml' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'x' %}",
        "{{ undefined.thing }}",
        "{{ 1 // 0 }}",
        "{{ 'abc'.nothing() }}",
    ] {
        let e = render(source).expect_err(source);
        assert!(!matches!(e, Error::Internal(_)), "{source}: {e}");
    }
    let long = "{% for a in range(9000) %}{{ '0123456789' * 2000 }}{% endfor %}";
    assert!(matches!(render(long), Err(Error::Format { .. })), "{:?}", render(long).map(|t| t.len()));
}

/// The longest accepted template.
const LONGEST: usize = 1 << 17;

#[test]
fn deeply_nested_templates_end() {
    for part in
        ["+1", "|e", ".a", "[0]", " if 1", "~1", "()", " is a", " and 1", " or 1", "**1", "==1", " in 1"]
    {
        let chain = part.repeat((LONGEST - 16) / part.len());
        drop(render(&format!("{{{{ 1{chain} }}}}")));
    }
    for (open, close) in
        [("(", ")"), ("[", "]"), ("-", ""), ("not ", ""), ("{1:", "}"), ("a(", ")"), ("1 if ", "")]
    {
        let n = (LONGEST - 16) / (open.len() + close.len());
        drop(render(&format!("{{{{ {}1{} }}}}", open.repeat(n), close.repeat(n))));
    }
    for (open, part) in
        [("{% if 1 %}", "{% if 1 %}"), ("{% if 1 %}", "{% elif 1 %}"), ("", "{% macro a() %}")]
    {
        drop(render(&format!("{open}{}", part.repeat((LONGEST - 16) / part.len()))));
    }
}

#[test]
fn deeply_nested_values_end() {
    let nest = "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let cycle = "{% set ns = namespace() %}{% set ns.x = ns %}";
    for start in [nest, cycle] {
        for end in [
            "",
            "{{ ns.x }}",
            "{{ ns.x|string }}",
            "{{ ns.x ~ '' }}",
            "{{ ns.x == ns.x }}",
            "{{ ns.x|tojson }}",
        ] {
            drop(render(&format!("{start}{end}")));
        }
    }
}

#[test]
fn mistakes_name_the_line() {
    let e = ChatTemplate::new("a\n{% if %}\n").unwrap_err();
    assert!(matches!(&e, Error::Format { .. }) && e.to_string().contains("line 2"), "{e}");
    let e = render("a\n\n{{ raise_exception('no such role') }}").unwrap_err();
    assert!(e.to_string().contains("no such role") && e.to_string().contains("line 3"), "{e}");
    assert!(ChatTemplate::new(&" ".repeat(LONGEST + 1)).is_err());
}

#[test]
fn a_model_without_a_template_says_what_to_do() {
    let g = GgufTokenizer {
        model: "llama".into(),
        tokens: ["<unk>", "<s>", "</s>"].map(String::from).into(),
        ..GgufTokenizer::default()
    };
    let e = ChatTemplate::of(&Tokenizer::from_gguf(g).unwrap()).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains("`generate`"), "{e}");
}

#[test]
fn arguments_of_calls_are_passed_as_objects() {
    let json = r#"{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f",
        "arguments": "{\"z\": 1, \"a\": [true]}"}},
        {"function":{"name":"g","arguments":"no object"}}],"custom":{"b":1,"a":2}}"#;
    let message: Message = serde_json::from_str(json).unwrap();
    assert_eq!(message.extra.len(), 1);
    let template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments|tojson }};{% endfor %}\
                    {{ messages[0].custom|tojson }}{{ messages[0].content is none }}";
    let got = ChatTemplate::new(template)
        .unwrap()
        .render(std::slice::from_ref(&message), &RenderOptions::default())
        .unwrap();
    assert_eq!(got, r#"{"z": 1, "a": [true]};"no object";{"b": 1, "a": 2}True"#);
    let back: Message = serde_json::from_str(&serde_json::to_string(&message).unwrap()).unwrap();
    assert_eq!(back, message);
    assert!(serde_json::from_str::<Message>("[]").is_err());
    assert!(
        serde_json::from_str::<Message>(r#"{"content":"x"}"#).unwrap_err().to_string().contains("'role'")
    );
}
