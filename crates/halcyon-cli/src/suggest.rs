//! Helpful errors for common mistakes: a missing file, a folder instead of a file, a misspelt name.

use halcyon::{Error, Result};
use halcyon_formats::onnx::{Model, OpenOptions};
use std::path::Path;

/// An existing name is suggested if its Jaro-Winkler similarity to the given name is at least this.
const MIN_SIMILARITY: f64 = 0.8;
/// Limit on the files that a message lists.
const MAX_LISTED: usize = 5;

/// Opens a model.
///
/// # Errors
/// The errors of [`Model::open_with`]; they also suggest names that the user may have meant.
pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Model> {
    if path.is_dir() {
        let models = files(path, |n| extension(n) == "onnx");
        let what = match &models[..] {
            [] => "a folder without an .onnx file; name the model's file".to_string(),
            [one] => format!("a folder; the model in it is {}", path.join(one).display()),
            _ => {
                let all: Vec<String> =
                    models.iter().take(MAX_LISTED).map(|m| path.join(m).display().to_string()).collect();
                let more = if models.len() > MAX_LISTED { ", …" } else { "" };
                format!("a folder; name one of its models: {}{more}", all.join(", "))
            }
        };
        return Err(Error::Io { path: path.display().to_string(), what });
    }
    Model::open_with(path, options).map_err(|e| if path.exists() { e } else { missing(path, e) })
}

/// Adds suggestions of existing files to an error about a missing file.
pub(crate) fn missing(path: &Path, e: Error) -> Error {
    let Error::Io { path: file, what } = e else { return e };
    if path.exists() {
        return Error::Io { path: file, what };
    }
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let what = match dir.is_dir() {
        false => {
            let reason = if dir.exists() { "is not a folder" } else { "does not exist" };
            format!("there is no such file: {} {reason}", dir.display())
        }
        true => {
            let all = files(dir, |_| true);
            let hint = match nearest(&name, all.iter().map(String::as_str)) {
                Some(near) => format!(". Did you mean {}?", path.with_file_name(near).display()),
                None => {
                    let like: Vec<&String> = all
                        .iter()
                        .filter(|n| extension(n) == extension(&name) && !extension(n).is_empty())
                        .collect();
                    match like.len() {
                        0 => String::new(),
                        n => {
                            let named: Vec<&str> = like.iter().take(MAX_LISTED).map(|n| n.as_str()).collect();
                            let more = if n > MAX_LISTED { ", …" } else { "" };
                            format!(". {} has {}{more}", dir.display(), named.join(", "))
                        }
                    }
                }
            };
            format!("there is no such file{hint}")
        }
    };
    Error::Io { path: file, what }
}

/// The name in `all` that is most similar to `name`, if it is similar enough.
pub(crate) fn nearest<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let score = |n: &str| strsim::jaro_winkler(&n.to_lowercase(), &lower);
    let best = all.map(|n| (score(n), n)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= MIN_SIMILARITY).then_some(best.1)
}

fn extension(name: &str) -> String {
    Path::new(name).extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// Sorted names of the files in a folder that `keep` accepts.
fn files(dir: &Path, keep: impl Fn(&str) -> bool) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries
        .filter(|e| e.path().is_file())
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| keep(n))
        .collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_typing_errors_find_the_right_one() {
        let all = ["input_ids", "attention_mask", "token_type_ids"];
        assert_eq!(nearest("input_id", all.into_iter()), Some("input_ids"));
        assert_eq!(nearest("Attention_Mask", all.into_iter()), Some("attention_mask"));
        assert_eq!(nearest("x", all.into_iter()), None);
    }

    #[test]
    fn missing_files_name_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("digits.onnx"), "x").unwrap();
        let say = |name: &str| open(&dir.path().join(name), &OpenOptions::default()).unwrap_err().to_string();
        assert!(say("digit.onnx").contains("Did you mean"), "{}", say("digit.onnx"));
        assert!(say("zebra.onnx").contains("has digits.onnx"), "{}", say("zebra.onnx"));
        assert!(say("no/zebra.onnx").contains("does not exist"), "{}", say("no/zebra.onnx"));
        assert!(say("").contains("the model in it is"), "{}", say(""));
        std::fs::write(dir.path().join("more.onnx"), "x").unwrap();
        assert!(say("").contains("name one of its models"), "{}", say(""));
    }
}
