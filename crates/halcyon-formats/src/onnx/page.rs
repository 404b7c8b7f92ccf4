//! Generates parts of `docs/onnx.md`: the tables of imported operators and of exported ops.
//!
//! `UPDATE_DOCS=1 cargo test -p halcyon-formats --lib page` (or `cargo xtask docs`) updates the page.

use super::export::spellings;
use super::ops::{self, Build, Row};
use halcyon_ir::ops::element_wise::Rule;
use std::fmt::Write;
use std::path::PathBuf;

/// Operators for which the host computes or decides something, with the part or the case: the shape of their
/// result depends on data, their data is not numeric, or a condition decides which nodes run. All other
/// operators run on the device.
const HOST: &[(&str, &str)] = &[
    ("CastMap", "wholly"),
    ("Cast", "from and to strings"),
    ("CastLike", "from and to strings"),
    ("Compress", "the condition is read back"),
    ("DictVectorizer", "wholly"),
    ("If", "the condition is read back"),
    ("ImageDecoder", "wholly"),
    ("LabelEncoder", "from and to strings"),
    ("Loop", "the condition is read back, unless it is constant"),
    ("NonMaxSuppression", "wholly"),
    ("NonZero", "wholly"),
    ("OneHotEncoder", "on strings"),
    ("RegexFullMatch", "wholly"),
    ("StringConcat", "wholly"),
    ("StringNormalizer", "wholly"),
    ("StringSplit", "wholly"),
    ("TfIdfVectorizer", "on strings"),
    ("Unique", "wholly"),
    ("ZipMap", "wholly"),
];

fn notes(r: &Row) -> String {
    let mut out = vec![];
    if let Some((_, why)) = HOST.iter().find(|(op, _)| *op == r.op) {
        out.push(format!("host: {why}"));
    }
    if matches!(r.build, Build::Items(_)) {
        out.push("also takes or returns strings, sequences, maps or optionals".into());
    }
    if r.domain.is_empty() && ops::on_strings(r.op) {
        out.push("strings too".into());
    }
    out.join("; ")
}

fn operators() -> String {
    let mut domains: Vec<&str> = ops::rows().map(|r| r.domain).collect();
    domains.sort();
    domains.dedup();
    let mut out = String::new();
    for d in domains {
        let mut rows: Vec<&Row> = ops::rows().filter(|r| r.domain == d).collect();
        rows.sort_by_key(|r| r.op);
        let name = if d.is_empty() { "ai.onnx" } else { d };
        // Writing to a string cannot fail.
        let _ =
            writeln!(out, "### `{name}`, up to operator set {}: {} operators\n", ops::latest(d), rows.len());
        out += "| operator | from | attributes | |\n|---|---|---|---|\n";
        for r in rows {
            let attrs = r.attrs.iter().map(|a| format!("`{a}`")).collect::<Vec<_>>().join(" ");
            let _ = writeln!(out, "| {} | {} | {attrs} | {} |", r.op, r.since, notes(r));
        }
        out.push('\n');
    }
    out
}

fn exports() -> String {
    let mut out = String::from("| scalar op | on | ONNX |\n|---|---|---|\n");
    for (op, on, text) in spellings() {
        let on = match on {
            _ if op.row().rule == Rule::Select => "any",
            "fiub" => "any",
            "fiu" => "numbers",
            "f" => "floats",
            "fi" => "floats, signed",
            "iu" => "integers",
            "u" => "unsigned",
            "b" => "bool",
            other => other,
        };
        let _ = writeln!(out, "| {} | {on} | {} |", op.name(), text.replace('|', "\\|"));
    }
    out
}

/// Replaces the text between `<!-- begin NAME … -->` and `<!-- end NAME -->` in the file.
fn replace_part(file: &str, name: &str, text: &str) -> Option<String> {
    let begin = file.find(&format!("<!-- begin {name}"))?;
    let start = begin + file[begin..].find("-->")? + 3;
    let end = start + file[start..].find(&format!("<!-- end {name} -->"))?;
    Some(format!("{}\n\n{}\n\n{}", &file[..start], text.trim(), &file[end..]))
}

#[test]
fn the_page_is_current() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/onnx.md");
    let have = std::fs::read_to_string(&path).unwrap();
    let want =
        replace_part(&have, "operators", &operators()).and_then(|f| replace_part(&f, "export", &exports()));
    let want = want.expect("docs/onnx.md has the marks of its generated parts");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &want).unwrap();
    } else {
        assert!(have == want, "docs/onnx.md is out of date: run `cargo xtask docs`");
    }
}

#[test]
fn operators_on_the_host_are_in_the_page() {
    for (op, _) in HOST {
        assert!(ops::rows().any(|r| r.op == *op), "{op}");
    }
}

#[test]
fn parts_are_found_and_replaced() {
    let f = "a\n<!-- begin x (made by y) -->\nold\n<!-- end x -->\nb\n";
    let g = replace_part(f, "x", "new").unwrap();
    assert_eq!(g, "a\n<!-- begin x (made by y) -->\n\nnew\n\n<!-- end x -->\nb\n");
    assert_eq!(replace_part(&g, "x", "new").unwrap(), g);
    assert!(replace_part(f, "z", "").is_none());
}
