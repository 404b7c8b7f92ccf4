//! Which files of a repository make a model.

use super::{HubName, plain_name};
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeSet;

/// The quantisation that is taken if a repository has several and the name does not choose.
const USUAL: &str = "Q4_K_M";
/// The files of a folder beside the weights. The first is required.
const BESIDE: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];

/// The files of adapters in PEFT's format.
const ADAPTERS: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// The files of a model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// A GGUF file with all its parts.
    File { first: String, parts: Vec<String> },
    /// A folder: the files without the weights, which its index lists.
    Folder {
        #[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "only downloads need the names"))]
        beside: Vec<String>,
    },
}

/// The name without `.gguf` and the number of the part, and the number of parts. Numbers have five digits.
fn stem(file: &str) -> Option<(&str, usize)> {
    let stem = file.strip_suffix(".gguf")?;
    let split = stem.rsplit_once("-of-").and_then(|(front, count)| {
        let (front, number) = front.rsplit_once('-')?;
        let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
        (digits(number) && digits(count))
            .then(|| count.parse().ok())
            .flatten()
            .filter(|n| *n > 0)
            .map(|n| (front, n))
    });
    Some(split.unwrap_or((stem, 1)))
}

/// Whether a file has the quantisation that is taken if the name does not choose.
pub(super) fn is_usual(file: &str) -> bool {
    stem(file).is_some_and(|(s, _)| is(s, USUAL))
}

/// Whether a stem names this quantisation: at its end, or as its folder.
fn is(stem: &str, kind: &str) -> bool {
    let ends = |s: &str| {
        let at = s.len().checked_sub(kind.len()).filter(|at| s.is_char_boundary(*at));
        at.is_some_and(|at| {
            let before = s[..at].chars().next_back();
            s[at..].eq_ignore_ascii_case(kind) && before.is_none_or(|c| "-._/".contains(c))
        })
    };
    ends(stem) || stem.rsplit_once('/').is_some_and(|(folder, _)| ends(folder))
}

/// The parts of the GGUF file with this stem.
fn parts(files: &BTreeSet<String>, name: &HubName, wanted: &str) -> Result<Wanted> {
    let count = files.iter().filter_map(|f| stem(f)).find(|(s, _)| *s == wanted).map_or(1, |(_, n)| n);
    let split = |i: usize| format!("{wanted}-{i:05}-of-{count:05}.gguf");
    let parts: Vec<String> = match count {
        1 if files.contains(&format!("{wanted}.gguf")) => vec![format!("{wanted}.gguf")],
        _ => (1..=count).map(split).collect(),
    };
    match parts.iter().find(|p| !files.contains(*p)) {
        Some(lost) => Err(Error::argument("MODEL", format!("hf:{} has no '{lost}'", name.repo))),
        None => Ok(Wanted::File { first: parts[0].clone(), parts }),
    }
}

/// The files of the model among those of the repository.
pub(super) fn choose(name: &HubName, files: &BTreeSet<String>) -> Result<Wanted> {
    // Projectors of images and files of importance are not models.
    let model = |f: &&str| !f.rsplit('/').next().unwrap_or(f).starts_with("mmproj");
    let stems: BTreeSet<&str> = files
        .iter()
        .filter(|f| plain_name(f))
        .filter_map(|f| stem(f))
        .map(|(s, _)| s)
        .filter(model)
        .collect();
    let bad = |what: String| Err(Error::argument("MODEL", format!("hf:{} {what}", name.repo)));
    let listed = || stems.iter().copied().collect::<Vec<_>>().join(", ");
    if let Some(file) = &name.file {
        if files.contains(file) {
            return match stem(file) {
                Some((s, _)) => parts(files, name, s),
                None => bad(format!("has '{file}', but only GGUF files are named; leave the file out")),
            };
        }
        let found: Vec<&str> = stems.iter().copied().filter(|s| is(s, file)).collect();
        return match found[..] {
            [one] => parts(files, name, one),
            [] if stems.is_empty() => bad(format!("has no '{file}' and no GGUF files")),
            [] => bad(format!("has no '{file}'; it has {}", listed())),
            _ => bad(format!("has several files for '{file}': {}; name one of them", found.join(", "))),
        };
    }
    let weights = ["model.safetensors", "model.safetensors.index.json"];
    if files.contains(BESIDE[0]) && weights.iter().any(|w| files.contains(*w)) {
        let beside = BESIDE.iter().filter(|f| files.contains(**f)).map(|f| (*f).to_string()).collect();
        return Ok(Wanted::Folder { beside });
    }
    let usual: Vec<&str> = stems.iter().copied().filter(|s| is(s, USUAL)).collect();
    match (stems.iter().copied().collect::<Vec<_>>().as_slice(), &usual[..]) {
        ([one], _) | (_, [one]) => parts(files, name, one),
        ([], _) if ADAPTERS.iter().all(|f| files.contains(*f)) => {
            Ok(Wanted::Folder { beside: ADAPTERS.map(String::from).to_vec() })
        }
        ([], _) => bad("has neither GGUF files nor config.json with model.safetensors".into()),
        _ => bad(format!("has several GGUF files; name one as hf:{}:NAME: {}", name.repo, listed())),
    }
}
