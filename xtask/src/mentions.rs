//! Checks of names: sources and examples must not name a built-in composite by a string, except in its row
//! and in tests; and the files that documents name must exist.

use crate::comments::File;

/// Where the rows of the composites are.
const ROWS: &str = "crates/halcyon-ir/src/ops/";
/// The documents whose paths are checked, besides those in `docs/`.
const DOCUMENTS: &[&str] = &["README.md", "CONTRIBUTING.md"];
/// Files that a document names although the tree does not have them: onnxruntime's page, the user's
/// configuration, and the file that the example of `docs/adding-an-op.md` adds.
const NOT_OURS: &[&str] = &[
    "docs/ContribOperators.md",
    "halcyon/config.toml",
    "crates/halcyon-formats/src/onnx/ops/contrib.rs",
    "contrib.rs",
];

/// Places that name a built-in composite by a string instead of its `CompositeKind`. Tests may do so, because
/// they state what they expect.
pub(crate) fn composites(files: &[File]) -> Result<Vec<String>, String> {
    let mut names = vec![];
    let mut kinds = 0;
    for file in files.iter().filter(|f| f.name.starts_with(ROWS) && f.name.ends_with(".rs")) {
        let text = file.text()?;
        names.extend(row_names(&text));
        kinds += declared(&text);
    }
    if names.is_empty() || names.len() != kinds {
        return Err(format!(
            "{ROWS}: `built_in!` lists {kinds} composites, and their rows have {} names: {names:?}",
            names.len()
        ));
    }
    let mut found = vec![];
    for file in files.iter().filter(|f| names_nothing(&f.name)) {
        for (line, name) in quoted(&file.text()?, &names) {
            found.push(format!("{}:{line}: \"{name}\" is a composite: use its `CompositeKind`", file.name));
        }
    }
    Ok(found)
}

/// Whether this file must not name a composite by a string. This holds for sources and examples, except rows
/// and tests.
fn names_nothing(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    let (Some(last), true) = (parts.last(), name.ends_with(".rs") && !name.starts_with(ROWS)) else {
        return false;
    };
    let source = matches!(parts[..], ["crates", _, "src" | "examples", ..] | ["examples", ..]);
    source && !parts.contains(&"tests") && !last.ends_with("tests.rs")
}

/// The names in the rows of a file: `CompositeRow { name: "softmax", … }`, or `name: NAME` of a constant.
fn row_names(text: &str) -> Vec<String> {
    let quoted = |text: &str| text.split('"').nth(1).map(String::from);
    let rows = text.split("CompositeRow = CompositeRow {").skip(1);
    let name = |row: &str| {
        let value = row.split_once("name: ")?.1.split(',').next()?;
        match value.starts_with('"') {
            true => quoted(value),
            false => quoted(text.split_once(&format!("const {value}: &str = "))?.1),
        }
    };
    rows.filter_map(name).collect()
}

/// The number of composites that `built_in! { … }` lists in this file.
fn declared(text: &str) -> usize {
    let list = text.split_once("\nbuilt_in! {").and_then(|(_, rest)| rest.split_once("\n}"));
    list.map_or(0, |(list, _)| {
        list.lines().filter(|l| !l.trim().starts_with("//") && l.contains(" => ")).count()
    })
}

/// Lines above the test module, outside comments, with one of the names in quotes.
fn quoted<'a>(text: &str, names: &'a [String]) -> Vec<(usize, &'a str)> {
    let mut found = vec![];
    let mut lines = text.lines().enumerate().peekable();
    while let Some((k, line)) = lines.next() {
        let module = |l: &str| l.trim_start().starts_with("mod ") && l.trim_end().ends_with('{');
        if line.trim() == "#[cfg(test)]" && lines.peek().is_some_and(|(_, l)| module(l)) {
            break;
        }
        if !line.trim_start().starts_with("//") {
            let here = names.iter().filter(|n| line.contains(&format!("\"{n}\"")));
            found.extend(here.map(|n| (k + 1, n.as_str())));
        }
    }
    found
}

/// Places in the documents that name a file which the tree does not have.
pub(crate) fn paths(files: &[File]) -> Result<Vec<String>, String> {
    let tree: Vec<String> = files.iter().map(|f| format!("/{}", f.name)).collect();
    let document =
        |f: &&File| f.name.starts_with("docs/") && f.name.ends_with(".md") || DOCUMENTS.contains(&&*f.name);
    let mut found = vec![];
    for file in files.iter().filter(document) {
        for (line, path) in missing(&file.text()?, &tree) {
            found.push(format!("{}:{line}: there is no `{path}`", file.name));
        }
    }
    Ok(found)
}

/// The paths of source files and documents in a text that are not the end of any path of the tree.
fn missing(text: &str, tree: &[String]) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (k, line) in text.lines().enumerate() {
        let of_a_path = |c: char| c.is_ascii_alphanumeric() || "_./<>{}*~$-".contains(c);
        let files = line.split(|c| !of_a_path(c)).map(|w| w.trim_end_matches('.')).filter(|w| is_source(w));
        for path in files {
            let end = path.trim_start_matches("../");
            let known = |p: &String| p.ends_with(&format!("/{end}"));
            if !is_pattern(path) && !NOT_OURS.contains(&path) && !tree.iter().any(known) {
                found.push((k + 1, path.to_string()));
            }
        }
    }
    found
}

/// Whether a word is the path of a source file or a document: not an address, and not a build output.
fn is_source(word: &str) -> bool {
    let known = word.rsplit_once('.').is_some_and(|(stem, extension)| {
        !stem.is_empty() && !stem.ends_with('/') && ["rs", "md", "py", "toml"].contains(&extension)
    });
    known && !word.starts_with("//") && !word.starts_with("target/")
}

/// Whether a path stands for others, because it has a wildcard or a part in capitals (`ops/FILE.rs`).
fn is_pattern(path: &str) -> bool {
    const REAL: &[&str] = &["README", "CONTRIBUTING", "CHANGELOG"];
    let capitals = |part: &str| part.len() > 1 && part.chars().all(|c| c.is_ascii_uppercase());
    path.contains(['*', '<', '{', '$', '~'])
        || path.split(['/', '.', '-']).any(|part| capitals(part) && !REAL.contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOFTMAX: &str = "pub(super) static SOFTMAX: CompositeRow = CompositeRow {\n    name: \"softmax\",\n    packs: false,\n};\n";

    #[test]
    fn names_of_composites_are_read_from_their_rows() {
        let constant = "const NAME: &str = \"slice_at\";\nstatic S: CompositeRow = CompositeRow {\n    name: NAME,\n};\n";
        assert_eq!(row_names(&format!("{SOFTMAX}{constant}")), ["softmax", "slice_at"]);
        assert_eq!(row_names("pub struct CompositeRow {\n    pub name: &'static str,\n}\n"), [""; 0]);
        let list =
            "\nbuilt_in! {\n    Softmax => softmax::SOFTMAX,\n    /// A => B\n    SliceAt => s::S,\n}\n";
        assert_eq!(declared(list), 2);
        assert_eq!(declared("macro_rules! built_in {\n    () => {};\n}\n"), 0);
    }

    #[test]
    fn a_composite_named_by_a_string_is_found() {
        let names = ["softmax".to_string(), "attention".to_string()];
        let text = "f(\"softmax\");\n// f(\"softmax\")\nf(\"Softmax\");\nf(\"soft\", \"attention\");\n\
                    #[cfg(test)]\nmod tests {\n    f(\"softmax\");\n}\n";
        assert_eq!(quoted(text, &names), [(1, "softmax"), (4, "attention")]);
        for (name, checked) in [
            ("crates/halcyon/src/ops/nn.rs", true),
            ("crates/halcyon/examples/bench.rs", true),
            ("examples/01.rs", true),
            ("crates/halcyon-ir/src/ops/softmax.rs", false),
            ("crates/halcyon-ir/src/passes/recognize_tests.rs", false),
            ("crates/halcyon-ir/src/grad/tests.rs", false),
            ("crates/halcyon/tests/api.rs", false),
            ("crates/halcyon/src/peer.py", false),
        ] {
            assert_eq!(names_nothing(name), checked, "{name}");
        }
    }

    #[test]
    fn paths_that_do_not_exist_are_found() {
        let tree = ["/docs/testing.md", "/crates/a/src/gemm/panels.rs", "/README.md"].map(String::from);
        let missing = |text: &str| missing(text, &tree);
        let text = "See `gemm/panels.rs`, [testing](../testing.md#tests) and `gemm_i8.rs`.\n\
                    `ops/FILE.rs`, `check-*.md`, https://example.org/x.md, `target/a.py`, contrib.rs, `.rs`, `a.onnx`\n\
                    `anels.rs`; CHANGELOG.md; README.md.";
        let found = [(1, "gemm_i8.rs"), (3, "anels.rs"), (3, "CHANGELOG.md")];
        let want: Vec<(usize, String)> = found.iter().map(|(k, p)| (*k, p.to_string())).collect();
        assert_eq!(missing(text), want);
    }
}
