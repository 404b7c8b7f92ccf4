//! Comments of all Rust files: at most 110 columns, and each `SAFETY:` gives a reason. The glossary: 60 to 100
//! entries, whose files exist.

use crate::report::Outcome;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 110;
/// Folders of the repository that hold Rust files.
const FOLDERS: &[&str] = &["crates", "examples", "fuzz", "xtask"];
/// Findings that a failed step lists.
const MAX_LISTED: usize = 20;
const GLOSSARY: &str = "docs/glossary.md";
/// How many entries the glossary may have.
const ENTRIES: std::ops::RangeInclusive<usize> = 60..=100;

/// The step.
pub fn step() -> Outcome {
    let (mut files, mut found) = (vec![], vec![]);
    for folder in FOLDERS {
        if let Err(why) = collect(&crate::root().join(folder), &mut files) {
            return Outcome::Failed(why);
        }
    }
    files.sort();
    for path in &files {
        match std::fs::read_to_string(path) {
            Ok(text) => {
                let name = path.strip_prefix(crate::root()).unwrap_or(path).display();
                found.extend(check(&text).into_iter().map(|(line, what)| format!("{name}:{line}: {what}")));
            }
            Err(e) => return Outcome::Failed(format!("{}: {e}", path.display())),
        }
    }
    match std::fs::read_to_string(crate::root().join(GLOSSARY)) {
        Ok(text) => {
            let wrong = glossary(&text, |p| {
                crate::root().join("crates").join(p).exists() || crate::root().join(p).exists()
            });
            found.extend(wrong.into_iter().map(|what| format!("{GLOSSARY}: {what}")));
        }
        Err(e) => return Outcome::Failed(format!("{GLOSSARY}: {e}")),
    }
    if found.is_empty() {
        return Outcome::Passed(format!("{} files", files.len()));
    }
    for line in found.iter().take(MAX_LISTED) {
        eprintln!("{line}");
    }
    Outcome::Failed(format!("{} findings, the first: {}", found.len(), found[0]))
}

/// All Rust files below a folder, without build outputs.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|n| n != "target") {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Line numbers and what is wrong there.
fn check(text: &str) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (k, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
        let comment = comment.trim_start_matches(['/', '!']).trim();
        let columns = line.chars().count();
        // Rows of a table and single long words (addresses) cannot be wrapped.
        if columns > COLUMNS && comment.contains(' ') && !comment.starts_with('|') {
            found.push((k + 1, format!("a comment of {columns} columns; at most {COLUMNS} are allowed")));
        }
        if let Some(reason) = comment.strip_prefix("SAFETY:")
            && !gives_a_reason(reason, text.lines().nth(k + 1))
        {
            found.push((k + 1, format!("no reason: `{comment}`; say which condition holds and why")));
        }
    }
    found
}

/// What is wrong with the glossary: the number of its entries, an entry without three cells, or one whose last
/// cell does not name a file that exists.
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

/// Whether the text behind `SAFETY:` says more than where to look. It may go on in the next line.
fn gives_a_reason(text: &str, next: Option<&str>) -> bool {
    let text = text.trim().trim_end_matches('.').to_lowercase();
    let empty = ["", "the caller's", "the caller's word", "as above", "see above", "as before", "same"];
    let goes_on = next.is_some_and(|l| l.trim_start().starts_with("//"));
    !empty.contains(&text.as_str()) || goes_on
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_comments_and_empty_reasons_are_found() {
        let long = format!("    /// {}\n", "word ".repeat(30));
        assert_eq!(check(&long).len(), 1);
        assert!(check(&format!("let s = \"{}\";\n", "x ".repeat(90))).is_empty(), "code is rustfmt's matter");
        assert!(check(&format!("/// | {} |\n", "cell ".repeat(40))).is_empty());
        assert!(check(&format!("// <https://{}>\n", "a".repeat(120))).is_empty());
        for s in ["// SAFETY: the caller's.", "    // SAFETY: as above.", "// SAFETY:"] {
            assert_eq!(check(&format!("{s}\nf();\n")).len(), 1, "{s}");
        }
        assert!(check("// SAFETY: `n` elements are readable, as `run` checked.\n").is_empty());
        assert!(check("// SAFETY:\n// `n` elements are readable.\n").is_empty());
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
