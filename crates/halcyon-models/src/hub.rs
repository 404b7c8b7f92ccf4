//! Models of the Hugging Face Hub by name: `hf:ORG/REPO`, `hf:ORG/REPO@REVISION` and `hf:ORG/REPO:FILE`.
//!
//! Files that are in the cache of Hugging Face's programs are used without network. Other files are
//! downloaded into that cache if Halcyon was built with the feature `hub`.

mod choose;
#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod http;
mod needed;
#[cfg(feature = "hub")]
mod store;

use choose::Wanted;
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The deepest folder of a repository in which files are looked for.
const DEPTH: usize = 3;

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

    /// The name for messages, without the file.
    fn text(&self) -> String {
        match self.revision.as_str() {
            "main" => format!("hf:{}", self.repo),
            r => format!("hf:{}@{r}", self.repo),
        }
    }
}

/// Whether a file's name stays inside its folder, and can be the name of a file on every system.
fn plain_name(name: &str) -> bool {
    let part = |p: &str| !p.is_empty() && p != "." && p != ".." && !p.ends_with(['.', ' ']);
    let barred = |c: char| c.is_control() || "\\:?*<>|\"".contains(c);
    name.len() < 512 && name.split('/').all(part) && !name.contains(barred)
}

/// How much of a file has been downloaded.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The file's name in the repository.
    pub file: &'a str,
    /// Bytes on this machine.
    pub done: u64,
    /// Bytes of the whole file.
    pub size: u64,
}

/// Where files are kept, and where they come from.
#[derive(Clone)]
pub struct Hub {
    /// The folder with one folder per repository.
    pub cache: PathBuf,
    /// The server: a URL with `http` or `https`.
    pub endpoint: String,
    /// Sent to the server, but not to others to which it redirects.
    pub token: Option<String>,
    /// Whether only files in the cache are used.
    pub offline: bool,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the token, which is a secret.
        let Hub { cache, endpoint, token, offline } = self;
        let mut out = f.debug_struct("Hub");
        out.field("cache", cache).field("endpoint", endpoint).field("token", &token.is_some());
        out.field("offline", offline).finish()
    }
}

/// A model in the cache.
struct Cached {
    path: PathBuf,
    /// Whether the files of the repository that are not in the cache cannot change the choice.
    sure: bool,
}

impl Hub {
    /// The settings of the environment: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else `huggingface/hub` in
    /// the user's folder for caches; `HF_ENDPOINT`, `HF_TOKEN` (else the file `token` in `HF_HOME`), and
    /// `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// `Error::Argument` if no folder is known.
    pub fn from_env() -> Result<Hub> {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.trim().is_empty());
        let caches = || {
            let user = || var("HOME").or_else(|| var("USERPROFILE"));
            var("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(Path::new(&user()?).join(".cache")))
        };
        let home = var("HF_HOME").map(PathBuf::from).or_else(|| Some(caches()?.join("huggingface")));
        let home = home.ok_or_else(|| {
            Error::argument("HF_HOME", "no folder for downloads is known; set HF_HOME to a folder")
        })?;
        let stored = || std::fs::read_to_string(home.join("token")).ok();
        let set = |v: String| !matches!(v.to_ascii_lowercase().as_str(), "0" | "false" | "no" | "off");
        let token = var("HF_TOKEN").or_else(stored).map(|t| t.trim().to_string());
        Ok(Hub {
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token: token.filter(|t| !t.is_empty()),
            offline: var("HF_HUB_OFFLINE").is_some_and(set),
        })
    }

    /// The folder or the GGUF file of a model or of adapters; of a split file, the first part. Files that are
    /// not in the cache are downloaded; `progress` is called with each part of a file.
    ///
    /// # Errors
    /// `Error::Io` if files are missing and cannot be downloaded; `Error::Argument` if the repository has no
    /// such file, or several; `Error::Format` for an answer or an index that is malformed;
    /// `Error::Unsupported` without the feature `hub`.
    pub fn find(&self, name: &HubName, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf> {
        let cached = self.cached(name)?;
        match cached {
            Ok(Cached { path, sure }) if sure || self.offline || !cfg!(feature = "hub") => Ok(path),
            Err(missing) if self.offline => {
                let what = format!(
                    "{missing} in {}, and the network is off; run without --offline and HF_HUB_OFFLINE once",
                    self.cache.display()
                );
                Err(Error::Io { path: name.text(), what })
            }
            cached => self.online(name, cached, progress),
        }
    }

    #[cfg(feature = "hub")]
    fn online(
        &self,
        name: &HubName,
        cached: std::result::Result<Cached, String>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf> {
        match (fetch::fetch(self, name, progress), cached) {
            // What is there may be all that is needed.
            (Err(Error::Io { .. }), Ok(c)) => Ok(c.path),
            (fetched, _) => fetched,
        }
    }

    #[cfg(not(feature = "hub"))]
    fn online(
        &self,
        name: &HubName,
        cached: std::result::Result<Cached, String>,
        _progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf> {
        match cached {
            Ok(c) => Ok(c.path),
            Err(missing) => Err(Error::unsupported(
                format!("downloads: {missing} in {}, and this build has no network", self.cache.display()),
                format!(
                    "Build with --features hub, or fetch the files with `hf download {}`, or give a file's path",
                    name.repo
                ),
            )),
        }
    }

    fn repo(&self, name: &HubName) -> PathBuf {
        self.cache.join(format!("models--{}", name.repo.replace('/', "--")))
    }

    /// The model in the cache, or what is missing.
    fn cached(&self, name: &HubName) -> Result<std::result::Result<Cached, String>> {
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
            Err(_) => return Ok(Err(format!("what the name means in hf:{} is not", name.repo))),
        };
        let (path, parts, sure) = match &wanted {
            Wanted::File { first, parts } => {
                (folder.join(first), parts.clone(), name.file.is_some() || choose::is_usual(first))
            }
            // Programs that need no tokenizer do not fetch it.
            Wanted::Folder { .. } => {
                // Adapters have none.
                let sure = files.contains("tokenizer.json") || !files.contains("config.json");
                (folder.clone(), needed::by_folder(&folder)?, sure)
            }
        };
        Ok(match parts.iter().find(|n| !files.contains(*n)) {
            Some(lost) => Err(format!("'{lost}' of hf:{} is not", name.repo)),
            None => Ok(Cached { path, sure }),
        })
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

/// The name that a path is, if it begins with `hf:` and no such file exists.
///
/// # Errors
/// The errors of [`HubName::parse`].
pub fn name_of(model: &Path) -> Result<Option<HubName>> {
    match model.to_str().map(HubName::parse) {
        Some(Ok(None)) | None => Ok(None),
        Some(_) if model.exists() => Ok(None),
        Some(name) => name,
    }
}

/// The path of a model on this machine, with the settings of the environment. A path that does not begin with
/// `hf:` stays as it is.
///
/// # Errors
/// The errors of [`HubName::parse`], [`Hub::from_env`] and [`Hub::find`].
pub fn local(model: &Path) -> Result<PathBuf> {
    match name_of(model)? {
        Some(name) => Hub::from_env()?.find(&name, &mut |_| {}),
        None => Ok(model.into()),
    }
}
