//! Models of the Hugging Face Hub by name: `hf:ORG/REPO`, `hf:ORG/REPO@REVISION` and `hf:ORG/REPO:FILE`.
//!
//! Files that are in the cache of Hugging Face's programs are found without network. Other files are
//! downloaded into that cache by the crate `hf-hub`, if Halcyon was built with the feature `hub`.

mod choose;
#[cfg(feature = "hub")]
mod fetch;

use choose::Wanted;
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// The most bytes of an index of shards.
const MAX_INDEX: u64 = 64 << 20;
/// The deepest folder of a repository in which files are looked for.
const DEPTH: usize = 3;
static OFFLINE: AtomicBool = AtomicBool::new(false);

/// The name of a model: `hf:ORG/REPO[@REVISION][:FILE]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubName {
    /// `ORG/REPO`.
    pub repo: String,
    /// A branch, a tag or a commit. `main` if the name has none.
    pub revision: String,
    /// A file of the repository, or the name of a quantisation, such as `Q4_K_M`.
    pub file: Option<String>,
}

impl HubName {
    /// Reads a name; `None` for text that does not begin with `hf:`.
    ///
    /// # Errors
    /// `Error::Argument` if what follows `hf:` is not a name.
    pub fn parse(text: &str) -> Result<Option<HubName>> {
        let Some(rest) = text.strip_prefix("hf:") else { return Ok(None) };
        let (rest, file) = match rest.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (rest, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let word = |s: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !s.is_empty() && !s.starts_with('.') && s.chars().all(known)
        };
        let two = repo.split_once('/').is_some_and(|(org, name)| word(org) && word(name));
        if !two || !revision.split('/').all(word) || file.is_some_and(|f| !plain_name(f)) {
            let what =
                format!("'{text}': expected hf:ORG/REPO, hf:ORG/REPO:FILE or hf:ORG/REPO@REVISION:FILE");
            return Err(Error::argument("MODEL", what));
        }
        Ok(Some(HubName { repo: repo.into(), revision: revision.into(), file: file.map(str::to_string) }))
    }
}

/// Whether a file's name stays inside its folder.
fn plain_name(name: &str) -> bool {
    let part = |p: &str| !p.is_empty() && p != "." && p != "..";
    name.split('/').all(part) && !name.contains(['\\', ':', '\0', '?', '#', '%'])
}

/// Where files are kept, and where they come from.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The folder with one folder per repository.
    pub cache: PathBuf,
    pub endpoint: String,
    pub token: Option<String>,
    /// Whether only files in the cache are used.
    pub offline: bool,
}

impl Hub {
    /// The settings of the environment: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else
    /// `.cache/huggingface/hub` in the user's folder; `HF_ENDPOINT`, `HF_TOKEN` (else the file `token` in
    /// `HF_HOME`), and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// `Error::Argument` if no folder is known.
    pub fn from_env() -> Result<Hub> {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let home = var("HF_HOME").map(PathBuf::from).or_else(|| {
            let user = var("HOME").or_else(|| var("USERPROFILE"))?;
            Some(PathBuf::from(user).join(".cache/huggingface"))
        });
        let home = home.ok_or_else(|| {
            Error::argument("HF_HOME", "no folder for downloads is known; set HF_HOME to a folder")
        })?;
        let stored = || std::fs::read_to_string(home.join("token")).ok().map(|t| t.trim().to_string());
        let set = |v: String| !matches!(v.to_ascii_lowercase().as_str(), "0" | "false" | "no" | "off");
        Ok(Hub {
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token: var("HF_TOKEN").or_else(stored).filter(|t| !t.is_empty()),
            offline: OFFLINE.load(Ordering::Relaxed) || var("HF_HUB_OFFLINE").is_some_and(set),
        })
    }

    /// The folder or the GGUF file of a model. Files that are not in the cache are downloaded.
    ///
    /// # Errors
    /// `Error::Io` if files are missing and cannot be downloaded; `Error::Argument` if the repository has no
    /// such file, or several; `Error::Unsupported` without the feature `hub`.
    pub fn find(&self, name: &HubName) -> Result<PathBuf> {
        let missing = match self.cached(name)? {
            Ok(path) => return Ok(path),
            Err(missing) => missing,
        };
        let at = |what: String| Error::Io { path: format!("hf:{}", name.repo), what };
        if self.offline {
            let what = format!(
                "{missing} in {}, and the network is off (--offline or HF_HUB_OFFLINE); run once without it",
                self.cache.display()
            );
            return Err(at(what));
        }
        #[cfg(feature = "hub")]
        return fetch::fetch(self, name);
        #[cfg(not(feature = "hub"))]
        Err(Error::unsupported(
            format!("downloads: {missing} in {}, and this build has no network", self.cache.display()),
            format!(
                "Build with --features hub, or fetch the files with `hf download {}`, or give a file's path",
                name.repo
            ),
        ))
    }

    fn repo(&self, name: &HubName) -> PathBuf {
        self.cache.join(format!("models--{}", name.repo.replace('/', "--")))
    }

    /// The model in the cache, or what is missing.
    fn cached(&self, name: &HubName) -> Result<std::result::Result<PathBuf, String>> {
        let repo = self.repo(name);
        let commit = match std::fs::read_to_string(repo.join("refs").join(&name.revision)) {
            Ok(text) => text.trim().to_string(),
            Err(_) => name.revision.clone(),
        };
        let folder = repo.join("snapshots").join(&commit);
        if !plain_name(&commit) || !folder.is_dir() {
            return Ok(Err(format!("{}@{} is not", name.repo, name.revision)));
        }
        let mut files = BTreeSet::new();
        list(&folder, "", DEPTH, &mut files);
        let wanted = match choose::choose(name, &files) {
            Ok(w) => w,
            // The repository may have more files than the cache.
            Err(_) => return Ok(Err(format!("the files of hf:{} are not all", name.repo))),
        };
        let (path, needed) = match &wanted {
            Wanted::File { first, parts } => (folder.join(first), parts.clone()),
            Wanted::Folder { .. } => (folder.clone(), shards(&folder)?),
        };
        Ok(match needed.iter().find(|n| !files.contains(*n)) {
            Some(lost) => Err(format!("'{lost}' of hf:{} is not", name.repo)),
            None => Ok(path),
        })
    }
}

/// The safetensors files that a folder with `config.json` needs.
fn shards(folder: &Path) -> Result<Vec<String>> {
    let index = folder.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(vec!["model.safetensors".into()]);
    }
    let bad = |what: String| Error::Format { file: index.display().to_string(), what };
    let io = |e: std::io::Error| Error::Io { path: index.display().to_string(), what: e.to_string() };
    if std::fs::metadata(&index).map_err(io)?.len() > MAX_INDEX {
        return Err(bad(format!("it has more than {MAX_INDEX} bytes")));
    }
    let text = std::fs::read(&index).map_err(io)?;
    let json: serde_json::Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    let map = json["weight_map"].as_object().ok_or_else(|| bad("it has no weight_map".into()))?;
    let files: BTreeSet<&str> = map.values().filter_map(|v| v.as_str()).collect();
    match files.iter().find(|f| !plain_name(f)) {
        Some(f) => Err(bad(format!("'{f}' is not the name of a file in the folder"))),
        None => Ok(files.into_iter().map(str::to_string).collect()),
    }
}

/// The files of a folder, with the folders in which they are.
fn list(folder: &Path, prefix: &str, depth: usize, out: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        match (path.is_file(), path.is_dir() && depth > 0) {
            (true, _) => _ = out.insert(format!("{prefix}{name}")),
            (_, true) => list(&path, &format!("{prefix}{name}/"), depth - 1, out),
            _ => {}
        }
    }
}

/// From now on, names of models are looked up in the cache only.
pub fn stay_offline() {
    OFFLINE.store(true, Ordering::Relaxed);
}

/// The path of a model on this machine. A path that does not begin with `hf:` stays as it is.
///
/// # Errors
/// The errors of [`HubName::parse`], [`Hub::from_env`] and [`Hub::find`].
pub fn local(model: &Path) -> Result<PathBuf> {
    match model.to_str().map(HubName::parse).transpose()?.flatten() {
        Some(name) if !model.exists() => Hub::from_env()?.find(&name),
        _ => Ok(model.into()),
    }
}
