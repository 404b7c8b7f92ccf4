//! Files, mostly of text, that are read as a whole: configuration, labels, lists, reports. A size limit
//! prevents an endless device or a wrong file from filling the memory.

use halcyon_ir::{Error, Result};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Default maximum size of a text file in bytes.
pub const TEXT: u64 = 16 << 20;

/// Why a file was not read.
#[derive(Debug)]
pub enum InputError {
    Io(io::Error),
    /// The file has more bytes than this limit.
    Large(u64),
    NotText,
}

impl InputError {
    pub fn error(self, path: &Path) -> Error {
        let file = path.display().to_string();
        match self {
            InputError::Io(e) => Error::Io { path: file, what: e.to_string() },
            InputError::Large(most) => Error::Format {
                file,
                what: format!("more than {most} bytes, which is the limit for files of this kind"),
            },
            InputError::NotText => Error::Format { file, what: "this is not text (not valid UTF-8)".into() },
        }
    }
}

/// Reads a file, a pipe or a device of at most `most` bytes.
///
/// # Errors
/// [`InputError::Io`] and [`InputError::Large`].
pub fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, InputError> {
    let file = File::open(path).map_err(InputError::Io)?;
    if file.metadata().map_err(InputError::Io)?.is_dir() {
        return Err(InputError::Io(io::Error::new(ErrorKind::IsADirectory, "this is a folder")));
    }
    let mut all = vec![];
    file.take(most.saturating_add(1)).read_to_end(&mut all).map_err(InputError::Io)?;
    if all.len() as u64 > most { Err(InputError::Large(most)) } else { Ok(all) }
}

/// Reads a UTF-8 text of at most `most` bytes.
///
/// # Errors
/// The errors of [`bytes`], and [`InputError::NotText`].
pub fn text_of(path: &Path, most: u64) -> Result<String, InputError> {
    String::from_utf8(bytes(path, most)?).map_err(|_| InputError::NotText)
}

/// Reads a text file of at most [`TEXT`] bytes.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] if it is larger or not UTF-8.
pub fn text(path: &Path) -> Result<String> {
    text_of(path, TEXT).map_err(|e| e.error(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_input_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(text_of(&path, 5).unwrap(), "12345");
        assert!(matches!(text_of(&path, 4), Err(InputError::Large(4))));
        std::fs::write(&path, b"\xff").unwrap();
        assert!(matches!(text(&path), Err(Error::Format { .. })));
        assert!(matches!(text(dir.path()), Err(Error::Io { .. })));
        let zero = Path::new("/dev/zero");
        if zero.exists() {
            assert!(matches!(text(zero), Err(Error::Format { .. })));
        }
    }
}
