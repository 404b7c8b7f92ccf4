//! Downloads what is missing of a model.

use super::choose::{Wanted, choose};
use super::http::Client;
use super::store::Store;
use super::{Hub, HubName, Progress, needed, plain_name};
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Downloads what is missing of a model, and returns its folder or its first file.
pub(super) fn fetch(hub: &Hub, name: &HubName, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf> {
    let client = Client::new(hub, name)?;
    let listing = client.listing()?;
    // A name that leaves its folder is never asked for.
    let files: BTreeSet<String> = listing.files.into_iter().filter(|n| plain_name(n)).collect();
    let store = Store {
        client: &client,
        root: hub.repo(name),
        locks: hub.cache.join(".locks"),
        commit: listing.commit,
    };
    let mut one = |file: &String| store.download(file, progress);
    let path = match choose(name, &files)? {
        Wanted::File { first, parts } => {
            parts.iter().try_for_each(&mut one)?;
            store.snapshot().join(first)
        }
        Wanted::Folder { beside } => {
            beside.iter().try_for_each(&mut one)?;
            for file in needed::by_folder(&store.snapshot())? {
                match files.contains(&file) {
                    true => one(&file)?,
                    false => {
                        let what = format!("it needs '{file}', which the repository does not have");
                        return Err(Error::Format { file: name.text(), what });
                    }
                }
            }
            store.snapshot()
        }
    };
    // Only now, so that a download that was interrupted does not hide a commit that is complete.
    store.remember(&name.revision)?;
    Ok(path)
}
