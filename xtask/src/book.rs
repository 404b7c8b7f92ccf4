//! The step `book` and `cargo xtask book`: builds the pages of `docs/` as a book with mdBook, and checks its
//! links. The Rust code in the pages is tested by the crate `halcyon-book`.

use crate::Failure;
use crate::prerequisites::succeeds;
use crate::report::{Outcome, run};
use crate::test::Context;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The release of mdBook to install if it is missing.
const MDBOOK: &str = "0.5.4";

/// A tool that cargo installs below the build folder, so that the user's own programs stay as they are.
pub(crate) fn installed(
    cargo: Command,
    tool: &str,
    version: &str,
    flags: &[&str],
    install: bool,
) -> Result<PathBuf, String> {
    let root = crate::target_dir().join("tools").join(format!("{tool}-{version}"));
    let binary = root.join("bin").join(format!("{tool}{}", std::env::consts::EXE_SUFFIX));
    if succeeds(Command::new(&binary).arg("--version")) {
        return Ok(binary);
    }
    if !install {
        return Err(format!("{tool} is missing; run without --no-install"));
    }
    let mut cargo = cargo;
    cargo.args(["install", "--locked", tool, "--version", version, "--root"]).arg(&root).args(flags);
    run(&mut cargo)?;
    Ok(binary)
}

/// Builds the book and returns its folder.
pub(crate) fn build(cargo: Command, install: bool) -> Result<PathBuf, String> {
    let flags = ["--no-default-features", "--features", "search"];
    let mdbook = installed(cargo, "mdbook", MDBOOK, &flags, install)?;
    let (docs, to) = (crate::root().join("docs"), crate::target_dir().join("book"));
    every_page_is_listed(&docs)?;
    // Pages of an earlier build would make broken links look good.
    if to.exists() {
        std::fs::remove_dir_all(&to).map_err(|e| format!("{}: {e}", to.display()))?;
    }
    run(Command::new(mdbook).arg("build").arg(&docs).arg("--dest-dir").arg(&to))?;
    Ok(to)
}

/// `cargo xtask book`.
pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    if let Some(other) = args.first() {
        return Err(Failure::Usage(format!("`book` has no option `{other}`")));
    }
    let book = build(crate::cargo(), true)?;
    let (pages, links) = check_links(&book)?;
    println!("{}: {pages} pages, {links} links", book.join("index.html").display());
    Ok(true)
}

pub(crate) fn step(context: &Context) -> Outcome {
    let work = || -> Result<String, String> {
        let book = build(context.cargo(), context.install)?;
        let (pages, links) = check_links(&book)?;
        Ok(format!("{pages} pages, {links} links"))
    };
    context.outcome(work())
}

/// An error that names the pages of `docs/` that the book leaves out.
fn every_page_is_listed(docs: &Path) -> Result<(), String> {
    let summary = read(&docs.join("SUMMARY.md"))?;
    let mut pages = vec![];
    files(docs, "md", &mut pages)?;
    let name = |p: &PathBuf| p.strip_prefix(docs).unwrap_or(p).to_string_lossy().replace('\\', "/");
    let missing: Vec<String> = pages
        .iter()
        .map(name)
        .filter(|p| {
            p != "SUMMARY.md" && !p.starts_with("hardware-reports/") && !summary.contains(&format!("({p})"))
        })
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("docs/SUMMARY.md does not list {}", missing.join(", "))),
    }
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The files with this extension below a folder, in order.
fn files(dir: &Path, extension: &str, out: &mut Vec<PathBuf>) -> Result<(), String> {
    let error = |e| format!("{}: {e}", dir.display());
    for entry in std::fs::read_dir(dir).map_err(error)? {
        let path = entry.map_err(error)?.path();
        if path.is_dir() {
            files(&path, extension, out)?;
        } else if path.extension().is_some_and(|e| e == extension) {
            out.push(path);
        }
    }
    out.sort();
    Ok(())
}

/// The values of an attribute in a page.
fn attributes<'a>(html: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!(" {name}=\"");
    let mut out = vec![];
    let mut rest = html;
    while let Some(at) = rest.find(&start) {
        rest = &rest[at + start.len()..];
        let Some(end) = rest.find('"') else { break };
        out.push(&rest[..end]);
        rest = &rest[end..];
    }
    out
}

/// A path without `.` and `..`. `None` if it leaves the folder that it starts in.
fn resolved(base: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = base.split('/').filter(|p| !p.is_empty()).collect();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Checks that every link inside of the book has a page and an anchor. Returns the numbers of pages and
/// links.
fn check_links(book: &Path) -> Result<(usize, usize), String> {
    let mut pages = vec![];
    files(book, "html", &mut pages)?;
    let name = |p: &Path| p.strip_prefix(book).unwrap_or(p).to_string_lossy().replace('\\', "/");
    let mut texts = BTreeMap::new();
    for p in &pages {
        texts.insert(name(p), read(p)?);
    }
    let anchors: BTreeMap<&str, BTreeSet<&str>> =
        texts.iter().map(|(n, t)| (&**n, attributes(t, "id").into_iter().collect())).collect();
    let (mut count, mut bad) = (0, vec![]);
    // The page for printing repeats all others with anchors of its own; nobody links to its parts.
    for (page, text) in texts.iter().filter(|(n, _)| !["print.html", "404.html", "toc.html"].contains(&&***n))
    {
        let folder = page.rsplit_once('/').map_or("", |(f, _)| f);
        for link in attributes(text, "href") {
            if link.contains("://") || link.starts_with("mailto:") || link.starts_with("data:") {
                continue;
            }
            count += 1;
            let (path, anchor) = link.split_once('#').map_or((link, None), |(p, a)| (p, Some(a)));
            let to = if path.is_empty() { Some(page.clone()) } else { resolved(folder, path) };
            let good = to.is_some_and(|to| match anchor.filter(|a| !a.is_empty()) {
                Some(a) => anchors.get(&*to).is_some_and(|ids| ids.contains(a)),
                None => book.join(&to).exists(),
            });
            if !good {
                bad.push(format!("{page}: {link}"));
            }
        }
    }
    match bad.is_empty() {
        true if count == 0 => Err("the book has no links".into()),
        true => Ok((texts.len(), count)),
        false => Err(format!("{} broken links:\n  {}", bad.len(), bad.join("\n  "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_resolved_and_broken_ones_are_found() {
        assert_eq!(resolved("backends", "../a.html").as_deref(), Some("a.html"));
        assert_eq!(resolved("", "../a.html"), None);
        assert_eq!(attributes("<a href=\"x\" id=\"y\"> href=\"z", "href"), ["x"]);
        let dir = crate::target_dir().join(format!("book-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        put(
            "a.html",
            "<h1 id=\"top\"> <a href=\"b.html#end\"> <a href=\"#top\"> <a href=\"https://x.org/\">",
        );
        put("b.html", "<p id=\"end\"> <a href=\"a.html\">");
        assert_eq!(check_links(&dir), Ok((2, 3)));
        put("b.html", "<p id=\"begin\"> <a href=\"c.html\">");
        let e = check_links(&dir).unwrap_err();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(e.contains("a.html: b.html#end") && e.contains("b.html: c.html"), "{e}");
    }

    #[test]
    fn the_summary_lists_every_page() {
        every_page_is_listed(&crate::root().join("docs")).unwrap();
    }
}
