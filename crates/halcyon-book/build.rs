//! Makes a documentation test of each Rust block of the pages in `docs/`.
//!
//! An HTML comment `<!-- setup … -->` before a block has lines that the test needs and a reader does not;
//! those after a line `---` follow the block. A block without `fn main` is the body of a function that
//! returns a `Result`. Attributes of the block, such as `no_run`, are those of rustdoc.

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn main() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    println!("cargo::rerun-if-changed={}", docs.display());
    let mut pages: Vec<PathBuf> = std::fs::read_dir(&docs)
        .expect("docs/")
        .map(|e| e.expect("docs/").path())
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
        .collect();
    pages.sort();
    let mut out = String::new();
    for page in &pages {
        println!("cargo::rerun-if-changed={}", page.display());
        let text = std::fs::read_to_string(page).expect("a page");
        add(&mut out, &page.file_stem().expect("a name").to_string_lossy(), &text);
    }
    let to = Path::new(&std::env::var_os("OUT_DIR").expect("OUT_DIR")).join("pages.rs");
    std::fs::write(to, out).expect("OUT_DIR");
}

/// Adds a module for each Rust block of a page.
fn add(out: &mut String, page: &str, text: &str) {
    let (mut setup, mut lines) = (vec![], text.lines().enumerate());
    while let Some((number, line)) = lines.next() {
        if line.starts_with("<!-- setup") {
            setup = lines.by_ref().map(|(_, l)| l).take_while(|l| *l != "-->").collect();
        } else if let Some(kind) = line.strip_prefix("```").filter(|k| !k.is_empty()) {
            let block: Vec<&str> = lines.by_ref().map(|(_, l)| l).take_while(|l| *l != "```").collect();
            if kind == "rust" || kind.starts_with("rust,") {
                let name = format!("{}_{}", page.replace('-', "_"), number + 1);
                write_test(out, &name, kind, &setup, &block);
            }
            setup.clear();
        } else if line.starts_with("```") {
            lines.by_ref().take_while(|(_, l)| *l != "```").for_each(drop);
        }
    }
}

fn write_test(out: &mut String, name: &str, kind: &str, setup: &[&str], block: &[&str]) {
    let (before, after) = match setup.iter().position(|l| *l == "---") {
        Some(at) => (&setup[..at], &setup[at + 1..]),
        None => (setup, &[][..]),
    };
    let whole = block.iter().any(|l| l.contains("fn main"));
    let doc = |out: &mut String, line: &str| writeln!(out, "#[doc = {line:?}]").expect("a string");
    doc(out, &format!("```{kind}"));
    if !whole {
        doc(out, "# fn main() -> Result<(), Box<dyn std::error::Error>> {");
        before.iter().for_each(|l| doc(out, &format!("# {l}")));
    }
    block.iter().for_each(|l| doc(out, l));
    if !whole {
        after.iter().for_each(|l| doc(out, &format!("# {l}")));
        doc(out, "# Ok(())\n# }");
    }
    doc(out, "```");
    writeln!(out, "pub mod {name} {{}}").expect("a string");
}
