//! Running a model on many inputs: images from folders, patterns or repeated `--input`, and lines of text.

use crate::args::InputArgs;
use crate::source::{self, Spec};
use halcyon::{Error, Result};
use halcyon_formats::onnx::{Port, PortType};
use std::cmp::Ordering;
use std::path::{Path, PathBuf};

/// Image file extensions. Formats without a decoder are in the list, so that such files are reported instead
/// of skipped silently.
const PICTURES: &[&str] = &[
    "png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "tiff", "avif", "heic", "pbm", "pgm", "ppm", "pnm",
    "pam", "jp2",
];
/// Limit on the files of all folders and patterns together.
const MAX_FILES: usize = 1 << 24;

/// The values that a run is repeated for.
#[derive(Debug)]
pub(crate) enum Rows {
    /// Files, each a value of the same input.
    Files { port: usize, files: Vec<PathBuf> },
    /// Lines of text, and the input that they were given for.
    Lines { port: Option<usize>, lines: Vec<String> },
}

/// The rows given by `--input`, and the inputs that all rows share. `None` if a single run takes everything.
pub(crate) fn of(ports: &[Port], a: &InputArgs) -> Result<Option<(Rows, InputArgs)>> {
    let mut rest = InputArgs { inputs: vec![], ..a.clone() };
    let (mut files, mut lines, mut others) = (vec![], vec![], vec![]);
    let mut no_text = vec![];
    for text in &a.inputs {
        let (i, spec) = source::split(ports, text)?;
        if !matches!(spec, Spec::Text(_)) {
            no_text.push(text.clone());
        }
        match (i, spec) {
            (i, Spec::Text(l)) => lines.push((i, l)),
            (i, Spec::File(path)) if several(&path) || picture(&path) => files.push((i, path, text)),
            (i, _) => others.push((i, text)),
        }
    }
    let count: usize = lines.iter().map(|(_, l)| l.len()).sum();
    let strings = |p: &Port| matches!(p.ty, PortType::Text { .. });
    let to_strings = match lines.first() {
        Some((Some(i), _)) => strings(&ports[*i]),
        _ => ports.iter().any(strings),
    };
    let many_lines = count > 1 && !to_strings;
    let port = many_files(ports, &files, &others)?;
    match (port, many_lines) {
        (None, false) => Ok(None),
        (Some(_), true) => {
            Err(Error::argument("--input", "several pictures and several lines of text; give one of them"))
        }
        (Some(port), false) => {
            // Sources for other inputs are given to every run.
            let mine = |i: &Option<usize>| i.is_none_or(|i| i == port);
            let is_mine = |t: &String| files.iter().any(|(i, _, text)| *text == t && mine(i));
            rest.inputs = a.inputs.iter().filter(|t| !is_mine(t)).cloned().collect();
            let mut all = vec![];
            for (_, path, _) in files.iter().filter(|(i, ..)| mine(i)) {
                expand(path, &mut all)?;
            }
            Ok(Some((Rows::Files { port, files: all }, rest)))
        }
        (None, true) => {
            let port = lines.iter().find_map(|(i, _)| *i);
            if lines.iter().any(|(i, _)| i.is_some() && *i != port) {
                return Err(Error::argument("--input", "text is given for two inputs; give it for one"));
            }
            rest.inputs = no_text;
            let lines = lines.into_iter().flat_map(|(_, l)| l).collect();
            Ok(Some((Rows::Lines { port, lines }, rest)))
        }
    }
}

/// The input for which several files are given, if any.
fn many_files(
    ports: &[Port],
    files: &[(Option<usize>, PathBuf, &String)],
    others: &[(Option<usize>, &String)],
) -> Result<Option<usize>> {
    for i in 0..ports.len() {
        let named: Vec<_> = files.iter().filter(|f| f.0 == Some(i)).collect();
        if named.len() > 1 || named.iter().any(|f| several(&f.1)) {
            return Ok(Some(i));
        }
    }
    let unnamed: Vec<_> = files.iter().filter(|f| f.0.is_none()).collect();
    let taken = |i: usize| files.iter().any(|f| f.0 == Some(i)) || others.iter().any(|o| o.0 == Some(i));
    let open: Vec<usize> = (0..ports.len()).filter(|i| !taken(*i)).collect();
    let rest = others.iter().filter(|o| o.0.is_none()).count();
    let more = unnamed.len() > 1 && unnamed.len() + rest > open.len();
    if !more && !unnamed.iter().any(|f| several(&f.1)) {
        return Ok(None);
    }
    let image = |i: &&usize| ports[**i].shape().is_none_or(|s| (2..=4).contains(&s.rank()));
    match open.iter().find(image).or(open.first()) {
        Some(i) => Ok(Some(*i)),
        None => Err(Error::argument("--input", "more files are given than the model has inputs")),
    }
}

/// Whether a path stands for several files: a folder, or a pattern that is not itself a file.
fn several(path: &Path) -> bool {
    path.is_dir() || pattern(path)
}

fn pattern(path: &Path) -> bool {
    path.to_str().is_some_and(|s| s.contains(['*', '?', '['])) && !path.exists()
}

/// Whether the file is an image. The name decides, because the file may be missing or damaged.
fn picture(path: &Path) -> bool {
    path.extension().is_some_and(|e| PICTURES.iter().any(|p| e.eq_ignore_ascii_case(p)))
}

/// Adds the files of a path to `all`, in natural order.
fn expand(path: &Path, all: &mut Vec<PathBuf>) -> Result<()> {
    let name = path.display().to_string();
    let io = |e: std::io::Error| Error::Io { path: name.clone(), what: e.to_string() };
    let mut found: Vec<PathBuf> = vec![];
    if path.is_dir() {
        let mut others = 0;
        for entry in std::fs::read_dir(path).map_err(io)? {
            let p = entry.map_err(io)?.path();
            let hidden = p.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
            match picture(&p) && !hidden && !p.is_dir() {
                true => found.push(p),
                false => others += 1,
            }
        }
        if found.is_empty() {
            let rest = match others {
                0 => "it is empty".into(),
                n => format!("its {n} other entries are ignored; its subfolders are not searched"),
            };
            let what = format!("{name} has no pictures (.png, .jpg): {rest}");
            return Err(Error::argument("--input", what));
        }
    } else if pattern(path) {
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
        let matches = glob::glob_with(&name, options)
            .map_err(|e| Error::argument("--input", format!("{name} is not a pattern: {e}")))?;
        for m in matches {
            let p = m.map_err(|e| Error::Io {
                path: e.path().display().to_string(),
                what: e.error().to_string(),
            })?;
            if !p.is_dir() {
                found.push(p);
            }
        }
        if found.is_empty() {
            let what = format!(
                "no file matches {name} (in {})",
                std::env::current_dir().map_or(".".into(), |d| d.display().to_string())
            );
            return Err(Error::argument("--input", what));
        }
    } else {
        found.push(path.into());
    }
    found.sort_by(|a, b| natural(&a.to_string_lossy(), &b.to_string_lossy()));
    all.extend(found);
    if all.len() > MAX_FILES {
        return Err(Error::argument("--input", format!("more than {MAX_FILES} files")));
    }
    Ok(())
}

/// Natural order: numbers in names compare by value, so `2.png` precedes `10.png`.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.chars().peekable(), b.chars().peekable());
    while let (Some(&c), Some(&d)) = (x.peek(), y.peek()) {
        let order = if c.is_ascii_digit() && d.is_ascii_digit() {
            let number = |i: &mut std::iter::Peekable<std::str::Chars<'_>>| {
                let mut s = String::new();
                while let Some(c) = i.next_if(char::is_ascii_digit) {
                    s.push(c);
                }
                s.trim_start_matches('0').to_string()
            };
            let (m, n) = (number(&mut x), number(&mut y));
            m.len().cmp(&n.len()).then(m.cmp(&n))
        } else {
            x.next();
            y.next();
            c.to_lowercase().cmp(d.to_lowercase())
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    x.peek().is_some().cmp(&y.peek().is_some()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::{DType, Shape};

    #[test]
    fn order_is_natural() {
        let mut v = ["b.png", "a10.png", "a2.png", "A1.png", "a02.png", "a.png", "a2"];
        v.sort_by(|a, b| natural(a, b));
        assert_eq!(v, ["a.png", "A1.png", "a2", "a02.png", "a2.png", "a10.png", "b.png"]);
    }

    fn port(name: &str, shape: Shape) -> Port {
        Port { name: name.into(), ty: PortType::Tensor { dtype: DType::F32, shape: Some(shape) } }
    }

    #[test]
    fn several_files_or_lines_become_rows() {
        let dir = tempfile::tempdir().unwrap();
        for n in ["2.png", "10.png", "note.txt", ".hidden.png"] {
            std::fs::write(dir.path().join(n), "x").unwrap();
        }
        let at = |n: &str| dir.path().join(n).to_str().unwrap().to_string();
        let image = port("image", ["n", "c", "h", "w"].into());
        let pair = [port("scale", Shape::from([1usize])), image.clone()];
        let rows = |ports: &[Port], inputs: &[&str]| {
            let a =
                InputArgs { inputs: inputs.iter().map(|s| s.to_string()).collect(), ..InputArgs::default() };
            of(ports, &a).map(|r| {
                r.map(|(rows, rest)| match rows {
                    Rows::Files { port, files } => (
                        port,
                        files.iter().map(|f| f.file_name().unwrap().to_str().unwrap().to_string()).collect(),
                        rest.inputs.len(),
                    ),
                    Rows::Lines { lines, .. } => (99, lines, rest.inputs.len()),
                })
            })
        };
        let one = std::slice::from_ref(&image);
        let s = |v: &[&str]| v.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        let folder = dir.path().to_str().unwrap();
        assert_eq!(rows(one, &[folder]).unwrap(), Some((0, s(&["2.png", "10.png"]), 0)));
        assert_eq!(rows(one, &[&at("*.png")]).unwrap(), Some((0, s(&["2.png", "10.png"]), 0)));
        assert_eq!(rows(one, &[&at("10.png"), &at("2.png")]).unwrap(), Some((0, s(&["10.png", "2.png"]), 0)));
        assert_eq!(rows(one, &[&at("2.png")]).unwrap(), None);
        assert_eq!(rows(&pair, &["ones", folder]).unwrap(), Some((1, s(&["2.png", "10.png"]), 1)));
        let named = format!("image={folder}");
        assert_eq!(rows(&pair, &["ones", &named]).unwrap(), Some((1, s(&["2.png", "10.png"]), 1)));
        // One image per input is a single run.
        assert_eq!(rows(&[image.clone(), image.clone()], &[&at("2.png"), &at("10.png")]).unwrap(), None);
        assert_eq!(rows(one, &["text:a", "text:b"]).unwrap(), Some((99, s(&["a", "b"]), 0)));
        assert!(rows(one, &[&at("*.jpg")]).unwrap_err().to_string().contains("no file matches"));
        std::fs::create_dir(dir.path().join("empty")).unwrap();
        assert!(rows(one, &[&at("empty")]).unwrap_err().to_string().contains("it is empty"));
    }
}
