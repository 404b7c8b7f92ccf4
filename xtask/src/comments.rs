//! Checks the comments of all source files: they have at most 110 columns, and each `SAFETY:` gives a reason.
//! The step also checks that list items in documents begin their own lines, that code does not name
//! composites by strings and documents name only existing files (`mentions.rs`), and that the glossary has 60
//! to 100 entries.

use crate::mentions;
use crate::report::Outcome;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 110;
/// Folders of the repository with files that people write. The files at the repository's root are checked
/// too.
const FOLDERS: &[&str] = &[".ci", "bindings", "crates", "docs", "examples", "fuzz", "models", "xtask"];
/// Maximum number of findings that a failed step lists.
const MAX_LISTED: usize = 20;
const GLOSSARY: &str = "docs/glossary.md";
/// How many entries the glossary may have.
const ENTRIES: std::ops::RangeInclusive<usize> = 60..=100;

/// A file and its path from the root, with `/` between folders.
#[derive(Debug)]
pub(crate) struct File {
    pub name: String,
    pub path: PathBuf,
}

/// Runs the step `comments`.
pub(crate) fn step() -> Outcome {
    match findings() {
        Err(why) => Outcome::Failed(why),
        Ok((n, found)) if found.is_empty() => Outcome::Passed(format!("{n} files")),
        Ok((_, found)) => {
            for line in found.iter().take(MAX_LISTED) {
                eprintln!("{line}");
            }
            Outcome::Failed(format!("{} findings, the first: {}", found.len(), found[0]))
        }
    }
}

/// The number of files with comments, and what is wrong: `file:line: what`.
fn findings() -> Result<(usize, Vec<String>), String> {
    let files = files()?;
    let (mut n, mut found) = (0, vec![]);
    for file in &files {
        if file.name.ends_with(".md") {
            let wrong = joined_items(&file.text()?);
            found.extend(wrong.into_iter().map(|line| {
                format!("{}:{line}: a list item begins in the middle of a line; begin a new line", file.name)
            }));
        }
        let Some(language) = Language::of(&file.name) else { continue };
        n += 1;
        let wrong = check(&file.text()?, language);
        found.extend(wrong.into_iter().map(|(line, what)| format!("{}:{line}: {what}", file.name)));
    }
    found.extend(mentions::composites(&files)?);
    found.extend(mentions::paths(&files)?);
    let text =
        std::fs::read_to_string(crate::root().join(GLOSSARY)).map_err(|e| format!("{GLOSSARY}: {e}"))?;
    let exists = |p: &str| ["crates", ""].iter().any(|folder| crate::root().join(folder).join(p).exists());
    found.extend(glossary(&text, exists).into_iter().map(|what| format!("{GLOSSARY}: {what}")));
    Ok((n, found))
}

impl File {
    pub(crate) fn text(&self) -> Result<String, String> {
        std::fs::read_to_string(&self.path).map_err(|e| format!("{}: {e}", self.name))
    }
}

/// All files of [`FOLDERS`] and those at the root, without build outputs, in the order of their names.
fn files() -> Result<Vec<File>, String> {
    let (root, mut files) = (crate::root(), vec![]);
    collect(&root, &root, &|name| FOLDERS.contains(&name), &mut files)?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn collect(
    root: &Path,
    folder: &Path,
    inside: &dyn Fn(&str) -> bool,
    files: &mut Vec<File>,
) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.is_dir() {
            if path.file_name().and_then(|n| n.to_str()).is_some_and(inside) {
                collect(root, &path, &|name| name != "target", files)?;
            }
        } else if let Ok(name) = path.strip_prefix(root) {
            let name = name.to_string_lossy().replace('\\', "/");
            files.push(File { name, path });
        }
    }
    Ok(())
}

/// How a file marks comments that are whole lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Language {
    /// `//`, and a `SAFETY:` gives a reason.
    Rust,
    /// `//`, and `/*` to `*/`.
    C,
    /// `#`.
    Script,
}

impl Language {
    /// The language of a file; `None` for files without comments and for the renderers' snapshots.
    fn of(name: &str) -> Option<Language> {
        match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("rs") => Some(Language::Rust),
            Some("c" | "cpp" | "h") => Some(Language::C),
            Some("py" | "sh" | "toml") => Some(Language::Script),
            _ => (name == ".ci/run").then_some(Language::Script),
        }
    }
}

/// The numbers of faulty lines, each with what is wrong.
fn check(text: &str, language: Language) -> Vec<(usize, String)> {
    let (mut found, mut block) = (vec![], false);
    for (k, line) in text.lines().enumerate() {
        let line_text = line.trim_start();
        let comment = match language {
            Language::Script => line_text.strip_prefix('#').map(|c| c.trim_start_matches('#')),
            Language::C if block || line_text.starts_with("/*") => Some(line_text),
            _ => line_text.strip_prefix("//").map(|c| c.trim_start_matches(['/', '!'])),
        };
        block = language == Language::C && comment.is_some() && {
            let (opens, closes) = (line.rfind("/*"), line.rfind("*/"));
            // If a line has both marks, the last mark counts.
            if opens == closes { block } else { opens > closes }
        };
        let Some(comment) = comment.map(str::trim) else { continue };
        let columns = line.chars().count();
        // Rows of a table and single long words (addresses) cannot be wrapped.
        if columns > COLUMNS && comment.contains(' ') && !comment.starts_with('|') {
            found.push((k + 1, format!("a comment of {columns} columns; at most {COLUMNS} are allowed")));
        }
        if language == Language::Rust
            && let Some(reason) = comment.strip_prefix("SAFETY:")
            && !gives_a_reason(reason, text.lines().nth(k + 1))
        {
            found.push((k + 1, format!("no reason: `{comment}`; say which condition holds and why")));
        }
    }
    found
}

/// What is wrong with the glossary: the number of its entries, an entry without three cells, or an entry
/// whose last cell names no existing file.
fn glossary(text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = vec![];
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with("| **")).collect();
    if !ENTRIES.contains(&rows.len()) {
        let (least, most) = (ENTRIES.start(), ENTRIES.end());
        found.push(format!("{} entries; {least} to {most} are allowed", rows.len()));
    }
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [term, _, place] = cells[..] else {
            found.push(format!("`{row}` does not have three cells"));
            continue;
        };
        let path = place.trim_matches('`');
        if path.is_empty() || !exists(path) {
            found.push(format!("{term}: there is no file {place}"));
        }
    }
    found
}

/// Beginnings that point to another place instead of naming a condition.
const ELSEWHERE: &[&str] =
    &["as above", "as before", "as below", "as for", "as in", "as there", "like", "same", "see", "the same"];
/// Verbs that may follow "the caller", before the condition.
const CALLERS_DO: &[&str] =
    &["check", "checked", "checks", "guarantee", "guarantees", "holds", "keeps", "pass", "passes"];

/// The lines of a document in which a list item begins after another sentence, as when lists are wrapped as
/// prose. Tables and blocks of code are left out.
fn joined_items(text: &str) -> Vec<usize> {
    let mut code = false;
    let mut lines = vec![];
    for (i, line) in text.lines().enumerate() {
        let start = line.trim_start();
        code ^= start.starts_with("```");
        if !code
            && !start.starts_with('|')
            && [". - ", ", - ", "; - ", ": - "].iter().any(|m| line.contains(m))
        {
            lines.push(i + 1);
        }
    }
    lines
}

/// Whether the text behind `SAFETY:` names a condition. The condition may continue in the next line.
fn gives_a_reason(text: &str, next: Option<&str>) -> bool {
    let next = next.and_then(|l| l.trim_start().strip_prefix("//")).unwrap_or_default();
    let text = format!("{} {next}", text.trim()).to_lowercase();
    let word = |w: &str| w.trim_matches([',', ';', ':', '.']).to_string();
    let words: Vec<String> = text.split_whitespace().map(word).collect();
    let begins =
        |phrase: &str| phrase.split(' ').enumerate().all(|(i, word)| words.get(i).is_some_and(|w| w == word));
    if words.is_empty() || ELSEWHERE.iter().any(|p| begins(p)) {
        return false;
    }
    // "The caller" or "callers", what they do, and the condition.
    let callers = words.iter().take(2).position(|w| w.starts_with("caller"));
    match callers {
        Some(i) if i == 0 || words[0] == "the" => {
            words.get(i + 1).is_some_and(|w| CALLERS_DO.contains(&w.as_str())) && words.len() > i + 2
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_comments_are_found_in_every_language() {
        let words = "word ".repeat(30);
        let lines = |text: &str, language| -> Vec<usize> {
            check(text, language).into_iter().map(|(line, _)| line).collect()
        };
        assert_eq!(lines(&format!("    /// {words}\n"), Language::Rust), [1]);
        assert_eq!(lines(&format!("\n# {words}\n"), Language::Script), [2]);
        assert_eq!(
            lines(&format!("// {words}\n/* a\n   {words}*/\nint x; // {words}\n"), Language::C),
            [1, 3]
        );
        assert_eq!(lines(&format!("/* a */\nf({words});\n"), Language::C), [0; 0]);
        let code = format!("let s = \"{}\";\n", "x ".repeat(90));
        assert_eq!(lines(&code, Language::Rust), [0; 0], "code is rustfmt's matter");
        assert_eq!(lines(&format!("s = \"# {words}\"\n"), Language::Script), [0; 0]);
        assert_eq!(lines(&format!("/// | {} |\n", "cell ".repeat(40)), Language::Rust), [0; 0]);
        assert_eq!(lines(&format!("// <https://{}>\n", "a".repeat(120)), Language::Rust), [0; 0]);
        for (name, language) in
            [("a/b.rs", Some(Language::Rust)), ("Cargo.toml", Some(Language::Script)), ("a.md", None)]
        {
            assert_eq!(Language::of(name), language, "{name}");
        }
    }

    #[test]
    fn reasons_that_only_point_elsewhere_are_found() {
        let wrong = |text: &str| check(text, Language::Rust).len();
        for s in [
            "",
            "the caller's.",
            "the caller's word.",
            "as above.",
            "as above; the buffers are separate.",
            "as for the fault word.",
            "see there.",
            "See `run`.",
            "same.",
            "the caller.",
            "the caller guarantees.",
            "the caller of `new` answers for it.",
            "callers.",
            "callers take care.",
        ] {
            assert_eq!(wrong(&format!("    // SAFETY: {s}\n    f();\n")), 1, "{s}");
        }
        for s in [
            "`n` elements are readable, as `run` checked.",
            "\n// `n` elements are readable.",
            "the caller guarantees\n// that `n` elements are readable.",
            "callers check for `Isa::Avx512`.",
            "asserted above: `n` elements are readable.",
        ] {
            assert_eq!(wrong(&format!("// SAFETY: {s}\n")), 0, "{s}");
        }
    }

    #[test]
    fn list_items_inside_a_line_are_found() {
        let text = "- one. - two\n- one, - two\n- one\n- two\n| a. - b |\n```\na. - b\n```\nten - two; x\n";
        assert_eq!(joined_items(text), [1, 2]);
    }

    #[test]
    fn glossary_entries_are_counted_and_name_files_that_exist() {
        let row = |n: usize, place: &str| format!("| **t{n}** | Means something. | `{place}` |\n");
        let rows = |n: usize| (0..n).map(|i| row(i, "a.rs")).collect::<String>();
        let wrong = |text: &str| glossary(text, |p| p == "a.rs");
        assert!(wrong(&rows(60)).is_empty() && wrong(&rows(100)).is_empty());
        assert!(wrong(&rows(59))[0].contains("59 entries") && wrong(&rows(101)).len() == 1);
        assert_eq!(wrong(&(rows(60) + &row(60, "b.rs"))), ["**t60**: there is no file `b.rs`"]);
        assert_eq!(wrong(&(rows(60) + "| **u** | Only two cells. |\n")).len(), 1);
    }
}
