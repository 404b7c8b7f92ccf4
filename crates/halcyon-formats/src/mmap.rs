//! Memory-maps files.

use bytes::Bytes;
use halcyon_ir::{Error, Result};
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

/// Maps a whole file read-only. Slices of the result share the map, which is unmapped when the last of them
/// is dropped.
///
/// The file must not be truncated while it is mapped: reading a missing page kills the process (SIGBUS on
/// Unix). If another process modifies the file, its changes may become visible.
///
/// # Errors
/// [`Error::Io`] if the file cannot be opened or mapped, or is not a regular file (a device or pipe has no
/// end).
#[allow(unsafe_code)]
pub fn open(path: &Path) -> Result<Bytes> {
    let err = |e| crate::io(path, e);
    // Checked before opening, because opening a pipe blocks until it has a writer.
    let meta = std::fs::metadata(path).map_err(err)?;
    if !meta.is_file() {
        return Err(Error::Io { path: path.display().to_string(), what: "not a regular file".into() });
    }
    let file = File::open(path).map_err(err)?;
    if meta.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: `Mmap::map` requires that the file is not truncated or modified while mapped. This process does
    // neither, because the map is read-only. A modification by another process only changes values: the bytes
    // are only read as integers and floats, for which every bit pattern is valid. Truncation by another
    // process cannot be prevented; the documentation of this function forbids it.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| match e.kind() {
        ErrorKind::OutOfMemory => no_addresses(path, meta.len()),
        _ => err(e),
    })?;
    Ok(Bytes::from_owner(map))
}

/// The error for a file that does not fit the free address space of the process.
fn no_addresses(path: &Path, requested: u64) -> Error {
    let (free, total) = halcyon_host::memory().unwrap_or((0, 0));
    Error::OutOfMemory {
        device: "the host".into(),
        what: format!("the file {}", path.display()),
        requested,
        free,
        total,
        next: "Raise the limit on the address space (ulimit -v)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_content_and_keeps_it_after_the_path_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        std::fs::write(&p, b"hello").unwrap();
        let b = open(&p).unwrap();
        let tail = b.slice(1..);
        drop(b);
        std::fs::remove_file(&p).unwrap();
        assert_eq!(&tail[..], b"ello");
    }

    #[test]
    fn empty_missing_and_irregular_files() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        std::fs::write(&p, b"").unwrap();
        assert!(open(&p).unwrap().is_empty());
        assert!(matches!(open(&dir.path().join("none")), Err(Error::Io { .. })));
        assert!(matches!(open(dir.path()), Err(Error::Io { .. })));
    }
}
