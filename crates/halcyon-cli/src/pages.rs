//! The commands in the shell blocks of the pages: each has options and values that the command takes.
//! `halcyon-book` tests the Rust code of the pages, and the Python package's tests run their Python code.

use crate::args::help;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The pages of `docs/`, below it too, and the READMEs.
fn pages() -> Vec<PathBuf> {
    let mut all = vec![root().join("README.md"), root().join("bindings/python/README.md")];
    for dir in ["docs", "docs/backends"] {
        let entries = fs::read_dir(root().join(dir)).expect("a folder").flatten().map(|e| e.path());
        all.extend(entries.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    all
}

/// The lines of a page's shell blocks, where a line that ends with `\` continues.
fn lines(page: &str) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    let (mut inside, mut continues) = (false, false);
    for line in page.lines() {
        if let Some(language) = line.strip_prefix("```") {
            inside = !inside && matches!(language, "sh" | "bash" | "console");
            continue;
        }
        if !inside {
            continue;
        }
        let part = line.trim().trim_end_matches('\\');
        match out.last_mut().filter(|_| continues) {
            Some(last) => *last += part,
            None => out.push(part.into()),
        }
        continues = line.ends_with('\\');
    }
    out
}

/// The simple commands of a line, each as words without their quotes. A comment ends the line.
fn commands(line: &str) -> Vec<Vec<String>> {
    let (mut all, mut word, mut quote) = (vec![vec![]], None::<String>, None);
    for c in line.chars() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            (c, Some(_)) => word.get_or_insert_default().push(c),
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('#', None) if word.is_none() => break,
            (' ' | '|' | '&' | ';', None) => {
                all.last_mut().expect("a command").extend(word.take());
                if c != ' ' {
                    all.push(vec![]);
                }
            }
            (c, None) => word.get_or_insert_default().push(c),
        }
    }
    all.last_mut().expect("a command").extend(word);
    all
}

/// The arguments of the command `halcyon`, its name first. `None` for another program.
fn ours(words: &[String]) -> Option<Vec<String>> {
    let start = words.iter().position(|w| !w.contains('=') || w.starts_with('-'))?;
    let words = &words[start..];
    let from = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["halcyon", ..] => 1,
        ["cargo", "run", ..] => words.iter().position(|w| w == "--")? + 1,
        ["python" | "python3", "-m", "halcyon", ..] => 3,
        _ => return None,
    };
    let arguments = words[from..].iter().take_while(|w| !w.starts_with(['<', '>'])).cloned();
    Some(std::iter::once("halcyon".to_string()).chain(arguments).collect())
}

#[test]
fn every_command_of_the_pages_is_one() {
    let (mut count, mut wrong) = (0, vec![]);
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for line in lines(&text) {
            for words in commands(&line).iter().filter_map(|w| ours(w)) {
                count += 1;
                let words = crate::rewritten(words.into_iter().map(Into::into));
                let parsed = help::command().try_get_matches_from(words);
                if let Some(e) = parsed.err().filter(clap::Error::use_stderr) {
                    wrong.push(format!("{}: {line}\n{e}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} commands were found");
}

#[test]
fn lines_are_split_as_a_shell_does() {
    let words = |line: &str| commands(line);
    assert_eq!(words("a 'b c' \"d\"e # f"), [["a", "b c", "de"]]);
    assert_eq!(words("a x#y && b ''"), [vec!["a", "x#y"], vec![], vec!["b", ""]]);
    assert_eq!(lines("```sh\na \\\n  b\nc\n```\nd\n```rust\ne\n```"), ["a b", "c"]);
    let of = |line: &str| ours(&commands(line)[0]);
    assert_eq!(of("A=1 halcyon run m > f"), Some(vec!["halcyon".into(), "run".into(), "m".into()]));
    assert_eq!(of("cargo run --release -- devices"), Some(vec!["halcyon".into(), "devices".into()]));
    assert_eq!((of("cargo build"), of("A=1")), (None, None));
}
