//! The file of a tuning cache: classification of existing content and the lock for writing.

use super::{Document, FORMAT, MAX_BYTES, Table, io};
use crate::{Error, Result};
use halcyon_host::input;
use halcyon_host::output::{Place, place};
use serde_json::Value;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process waits for another one's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of corrupt files kept.
const MAX_KEPT: usize = 100;

/// The kind of file that exists at a path.
pub(super) enum FileState {
    Nothing,
    /// A file without content, which may be overwritten.
    Empty,
    Table(Table),
    /// Written by this program, but truncated or changed.
    Damaged(Error),
    /// Another kind of file, a device, or a cache of another version.
    NotOurs(Error),
}

/// Reads and classifies the file at a path. Changes nothing.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read.
pub(super) fn classify(path: &Path) -> Result<FileState> {
    let not = |what: &str| {
        let what = format!(
            "{what}, not a tuning cache of this version; it is left as it is. Name another file in HALCYON_TUNING_CACHE, or set it to off"
        );
        Ok(FileState::NotOurs(Error::Format { file: path.display().to_string(), what }))
    };
    let target = match place(path).map_err(|e| io(path, e))? {
        Place::New(_) => return Ok(FileState::Nothing),
        Place::File(p) => p,
        Place::Folder(_) => return not("a folder"),
        _ => return not("a device or a pipe"),
    };
    let bytes = match input::bytes(&target, 8 * MAX_BYTES as u64) {
        Ok(b) => b,
        Err(input::InputError::Io(e)) => return Err(io(path, e)),
        Err(_) => return not("a large file"),
    };
    Ok(match sort(&bytes) {
        Ok(None) => FileState::Empty,
        Ok(Some(t)) => FileState::Table(t),
        Err((true, what)) => FileState::Damaged(Error::Format {
            file: path.display().to_string(),
            what: format!("a damaged tuning cache ({what})"),
        }),
        Err((false, what)) => return not(&what),
    })
}

/// The table, or `None` for a file that is empty or contains only white space. The error has two parts:
/// whether Halcyon wrote the file, and what is wrong with it.
fn sort(bytes: &[u8]) -> std::result::Result<Option<Table>, (bool, String)> {
    if bytes.iter().all(|b| b.is_ascii_whitespace()) {
        return Ok(None);
    }
    // Zeros remain if the system crashed before the data was written.
    if bytes.iter().all(|b| *b == 0) {
        return Err((true, "zeros".into()));
    }
    let Ok(v) = serde_json::from_slice::<Value>(bytes) else {
        let text = std::str::from_utf8(bytes);
        let why = match text.map(serde_json::from_str::<Value>) {
            Ok(Err(e)) => e.to_string(),
            _ => "not text".into(),
        };
        return Err(match (has_cache_header(bytes), text) {
            (true, _) => (true, why),
            (_, Ok(_)) => (false, "a text file".into()),
            (_, Err(_)) => (false, "a binary file".into()),
        });
    };
    let ours = v.get("entries").is_some_and(Value::is_array);
    match v.get("format").and_then(Value::as_u64).filter(|_| ours) {
        None => Err((false, "JSON of another kind".into())),
        Some(n) if n != u64::from(FORMAT) => {
            Err((false, format!("a tuning cache of format {n} where this version reads {FORMAT}")))
        }
        Some(_) => match serde_json::from_value::<Document>(v) {
            Ok(d) => Ok(Some(Table::of(&d))),
            Err(e) => Err((true, e.to_string())),
        },
    }
}

/// Whether the bytes begin like the output of [`Table::render`], or are a part of this beginning. White space
/// is ignored.
fn has_cache_header(bytes: &[u8]) -> bool {
    let start = format!("{{\"format\":{FORMAT},\"entries\":[");
    let mut have = bytes.iter().filter(|b| !b.is_ascii_whitespace());
    start.bytes().all(|want| have.next().is_none_or(|b| *b == want))
}

/// Follows the links of a path to the file of a tuning cache. The file is a cache of this version (perhaps
/// damaged) or empty, or it does not exist yet.
///
/// # Errors
/// [`Error::Format`] for anything else; [`Error::Io`].
pub(super) fn resolve(path: &Path) -> Result<PathBuf> {
    if let FileState::NotOurs(e) = classify(path)? {
        return Err(e);
    }
    match place(path).map_err(|e| io(path, e))? {
        Place::File(p) | Place::New(p) => Ok(p),
        _ => Err(io(path, "another program changed it meanwhile")),
    }
}

/// Renames a corrupt file to a free name; returns that name.
pub(super) fn rename_corrupt(path: &Path) -> Result<PathBuf> {
    let names = (0..MAX_KEPT).map(|n| if n == 0 { ".bad".into() } else { format!(".bad.{n}") });
    let free = names.map(|n| with_suffix(path, &n)).find(|to| fs::symlink_metadata(to).is_err());
    let Some(to) = free else {
        return Err(io(
            path,
            format!("damaged, and {MAX_KEPT} damaged ones are kept beside it; remove those"),
        ));
    };
    fs::rename(path, &to).map_err(|e| io(path, format!("damaged, and it cannot be renamed: {e}")))?;
    Ok(to)
}

/// The lock for writing a cache's file. The lock file is never deleted, because another process may hold a
/// lock on it.
pub(super) struct FileLock(File);

impl FileLock {
    pub(super) fn new(path: &Path) -> Result<FileLock> {
        let lock = with_suffix(path, ".lock");
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|e| io(folder, e))?;
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock)
            .map_err(|e| io(&lock, format!("{e}; the tuning cache cannot be written")))?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(FileLock(file)),
                Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(io(
                        &lock,
                        format!("another process has held the lock for more than {LOCK_TIMEOUT:?}"),
                    ));
                }
                Err(TryLockError::Error(e)) => return Err(io(&lock, e)),
            }
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
