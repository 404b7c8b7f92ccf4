//! Downloads with the crate `hf-hub`.

use super::choose::{Wanted, choose};
use super::{Hub, HubName, plain_name, shards};
use halcyon::ir::error::{Error, Result};
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Repo, RepoType};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// How often a broken connection is tried again.
const RETRIES: usize = 3;

/// Downloads what is missing of a model, and returns its folder or its first file.
pub(super) fn fetch(hub: &Hub, name: &HubName) -> Result<PathBuf> {
    let fail = |e: ApiError| error(hub, name, "", &e);
    let api = ApiBuilder::new()
        .with_cache_dir(hub.cache.clone())
        .with_endpoint(hub.endpoint.trim_end_matches('/').into())
        .with_token(hub.token.clone())
        .with_retries(RETRIES)
        .build()
        .map_err(fail)?;
    let repo = api.repo(Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone()));
    let names = repo.info().map_err(fail)?.siblings.into_iter().map(|s| s.rfilename);
    // A name that leaves its folder is never asked for.
    let files: BTreeSet<String> = names.filter(|n| plain_name(n)).collect();
    let one = |file: &str| download(hub, name, &api, &repo, file);
    match choose(name, &files)? {
        Wanted::File { first, parts } => {
            let paths: Vec<PathBuf> = parts.iter().map(|p| one(p)).collect::<Result<_>>()?;
            let at = parts.iter().position(|p| *p == first).unwrap_or(0);
            Ok(paths[at].clone())
        }
        Wanted::Folder { beside } => {
            let config = beside.iter().map(|f| one(f)).collect::<Result<Vec<_>>>()?.swap_remove(0);
            let folder = config.parent().map(PathBuf::from).unwrap_or_default();
            shards(&folder)?.iter().try_for_each(|s| one(s).map(|_| ()))?;
            Ok(folder)
        }
    }
}

/// The path of a file in the cache, after a download if it was not there.
fn download(
    hub: &Hub,
    name: &HubName,
    api: &hf_hub::api::sync::Api,
    repo: &ApiRepo,
    file: &str,
) -> Result<PathBuf> {
    let fail = |e: ApiError| error(hub, name, file, &e);
    let known = api.metadata(&repo.url(file)).map_err(fail)?;
    // These become names of files in the cache.
    if !plain_name(known.etag()) || known.etag().contains('/') || !plain_name(known.commit_hash()) {
        let what = format!("the server's answer for '{file}' has a malformed etag or commit");
        return Err(Error::Io { path: format!("hf:{}", name.repo), what });
    }
    let snapshot = hub.repo(name).join("snapshots").join(known.commit_hash()).join(file);
    let size = |p: &PathBuf| std::fs::metadata(p).map(|m| m.len()).ok();
    if size(&snapshot) == Some(known.size() as u64) {
        return Ok(snapshot);
    }
    let path = repo.download(file).map_err(fail)?;
    match size(&path) {
        Some(n) if n == known.size() as u64 => Ok(path),
        n => {
            // Otherwise the file would be taken for a complete one.
            let blob = hub.repo(name).join("blobs").join(known.etag());
            for p in [&path, &blob] {
                let _ = std::fs::remove_file(p);
            }
            let what = format!(
                "'{file}' has {} bytes, but {} were announced; try again",
                n.unwrap_or(0),
                known.size()
            );
            Err(Error::Io { path: format!("hf:{}", name.repo), what })
        }
    }
}

/// An error with the next step.
fn error(hub: &Hub, name: &HubName, file: &str, e: &ApiError) -> Error {
    let text = e.to_string();
    let place = match file {
        "" => format!("hf:{}@{}", name.repo, name.revision),
        f => format!("hf:{}@{}:{f}", name.repo, name.revision),
    };
    let next = if text.contains("401") || text.contains("403") {
        match hub.token {
            None => "the repository needs a token; set HF_TOKEN and accept its terms on its page",
            Some(_) => "the token (HF_TOKEN) does not give access; accept the terms on the repository's page",
        }
    } else if text.contains("404") {
        "no such repository, revision or file; check the name"
    } else if matches!(e, ApiError::InvalidResume) {
        "a partial download is longer than the file; delete the *.part files of the repository in the cache"
    } else if matches!(e, ApiError::LockAcquisition(_)) {
        "another program downloads this file; wait until it ends"
    } else {
        "check the connection and HF_ENDPOINT, or run with --offline if the files are in the cache"
    };
    Error::Io { path: place, what: format!("{text} from {}: {next}", hub.endpoint) }
}
