//! Files in the cache, in the layout of Hugging Face's programs: `blobs/ETAG` has the content, and
//! `snapshots/COMMIT/FILE` is a link to it.

use super::Progress;
use super::http::{Client, Known};
use graviola::hashing::sha2::Sha256Context;
use halcyon::ir::error::{Error, Result};
use sha1_smol::Sha1;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// How often in a row a broken connection is tried again.
const RETRIES: usize = 4;
/// A connection that brought this many bytes is not counted as broken.
const ENOUGH: u64 = 16 << 20;
/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// The cache of one repository at one commit.
pub(super) struct Store<'a> {
    pub client: &'a Client<'a>,
    /// The folder of the repository.
    pub root: PathBuf,
    /// The folder of locks of the cache.
    pub locks: PathBuf,
    pub commit: String,
}

/// The hash that an etag states, if it is one.
enum Hash {
    Sha256(Box<Sha256Context>),
    Git(Sha1),
    None,
}

impl Hash {
    fn of(known: &Known) -> Hash {
        let hex = known.etag.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        match known.etag.len() {
            64 if hex => Hash::Sha256(Box::new(Sha256Context::new())),
            40 if hex => Hash::Git(Sha1::from(format!("blob {}\0", known.size))),
            _ => Hash::None,
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hash::Sha256(h) => h.update(bytes),
            Hash::Git(h) => h.update(bytes),
            Hash::None => {}
        }
    }

    /// The hash as text; `None` if the etag is not one.
    fn finish(self) -> Option<String> {
        match self {
            Hash::Sha256(h) => Some(h.finish().iter().map(|b| format!("{b:02x}")).collect()),
            Hash::Git(h) => Some(h.digest().to_string()),
            Hash::None => None,
        }
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    |e| Error::Io { path: path.display().to_string(), what: e.to_string() }
}

/// Makes the folder of a file.
fn folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(failed(folder))
}

impl Store<'_> {
    /// The folder of the commit's files.
    pub(super) fn snapshot(&self) -> PathBuf {
        self.root.join("snapshots").join(&self.commit)
    }

    /// Brings a file into the snapshot, unless it is there.
    pub(super) fn download(&self, file: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
        let link = self.snapshot().join(file);
        if link.is_file() {
            return Ok(());
        }
        let known = self.client.head(&self.commit, file)?;
        let blob = self.root.join("blobs").join(&known.etag);
        folder_of(&blob)?;
        let _lock = self.lock(&known)?;
        if fs::metadata(&blob).map(|m| m.len()).ok() != Some(known.size) {
            let partial = blob.with_file_name(format!("{}.incomplete", known.etag));
            self.transfer(file, &known, &partial, progress)?;
            fs::rename(&partial, &blob).map_err(failed(&blob))?;
        }
        self.link(file, &blob, &link)
    }

    /// Keeps other programs from writing the same file. Waits until they are done.
    fn lock(&self, known: &Known) -> Result<File> {
        let name = self.root.file_name().unwrap_or_default();
        let path = self.locks.join(name).join(format!("{}.lock", known.etag));
        folder_of(&path)?;
        let file = File::create(&path).map_err(failed(&path))?;
        match file.lock() {
            // Some file systems have no locks.
            Err(e) if e.kind() != ErrorKind::Unsupported => Err(failed(&path)(e)),
            _ => Ok(file),
        }
    }

    /// Fills `partial`, which may have the beginning of the file.
    fn transfer(
        &self,
        file: &str,
        known: &Known,
        partial: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<()> {
        let disk = failed(partial);
        let size = known.size;
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(partial);
        let mut out = open.map_err(&disk)?;
        let mut have = out.metadata().map_err(&disk)?.len();
        let mut hash = Hash::of(known);
        let mut buffer = vec![0; PIECE];
        if have > size {
            out.set_len(0).map_err(&disk)?;
            have = 0;
        }
        // The hash is that of the whole file.
        while out.stream_position().map_err(&disk)? < have {
            match out.read(&mut buffer).map_err(&disk)? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
        let mut tries = 0;
        progress(Progress { file, done: have, size });
        while have < size {
            let (at, mut body) = self.client.bytes(&self.commit, file, have, size)?;
            if at != have {
                out.set_len(0).and_then(|()| out.rewind()).map_err(&disk)?;
                (have, hash) = (0, Hash::of(known));
            }
            let start = have;
            let why = loop {
                // What comes after the last byte is not read.
                let most = usize::try_from(size - have).unwrap_or(PIECE).min(PIECE);
                match body.read(&mut buffer[..most]) {
                    _ if most == 0 => break None,
                    Ok(0) => break Some("the connection ended".to_string()),
                    Ok(n) => {
                        out.write_all(&buffer[..n]).map_err(&disk)?;
                        hash.update(&buffer[..n]);
                        have += n as u64;
                        progress(Progress { file, done: have, size });
                    }
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) => break Some(e.to_string()),
                }
            };
            tries = if have - start >= ENOUGH { 0 } else { tries + 1 };
            if let Some(why) = why.filter(|_| tries > RETRIES) {
                let what = format!("{why} after {have} of {size} bytes; run again to go on from there");
                return Err(self.client.error(file, what));
            }
        }
        out.sync_all().map_err(&disk)?;
        if hash.finish().is_some_and(|h| h != known.etag) {
            let _ = fs::remove_file(partial);
            let what = "the bytes that came do not have the hash that the server states; try again";
            return Err(self.client.error(file, what));
        }
        Ok(())
    }

    /// Makes the snapshot's link to a blob. Where links are not possible, the blob moves to its place.
    fn link(&self, file: &str, blob: &Path, link: &Path) -> Result<()> {
        folder_of(link)?;
        let up = "../".repeat(2 + file.matches('/').count());
        let target = format!("{up}blobs/{}", blob.file_name().unwrap_or_default().to_string_lossy());
        // A link to a file that was deleted.
        if link.is_symlink() {
            fs::remove_file(link).map_err(failed(link))?;
        }
        match symlink(&target, link) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && link.is_file() => Ok(()),
            Err(_) => fs::rename(blob, link).map_err(failed(link)),
            Ok(()) => Ok(()),
        }
    }

    /// Notes that the revision is this commit.
    pub(super) fn remember(&self, revision: &str) -> Result<()> {
        if revision == self.commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(revision);
        folder_of(&path)?;
        fs::write(&path, &self.commit).map_err(failed(&path))
    }
}

#[cfg(unix)]
fn symlink(target: &str, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &str, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target.replace('/', "\\"), link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &str, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}
