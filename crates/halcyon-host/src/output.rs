//! Files that this project writes. Every result file is written through [`Output`].
//!
//! - A regular file is replaced as a whole: the bytes go to a new file in the same folder, which is renamed
//!   when it is complete. After a failure (a full disk, a signal) the old file is unchanged; if there was no
//!   file, none appears. A signal may leave the new file behind under its temporary name, `.halcyon-*.tmp`.
//! - Symbolic links are followed: the link stays, and the file that it names is replaced. The new file has
//!   the permissions of the old file, and its owner if the system permits. Other hard links to the old file
//!   keep the old bytes.
//! - Devices, pipes and file descriptors (`/dev/stdout`, `/dev/fd/3`) are written in place. `-` is standard
//!   output.
//! - A folder is an error.
//!
//! Caches must not replace files of other programs; they check that before they use this module
//! (`halcyon_hal::tune`).

use halcyon_ir::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{MAIN_SEPARATOR, Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A path that leads through this many symbolic links is an error.
const LINKS: usize = 40;

/// A file being written. Dropping it without [`Output::finish`] leaves a regular file unchanged.
#[derive(Debug)]
pub struct Output {
    /// The path given by the user, for messages.
    path: PathBuf,
    to: Destination,
    bytes: u64,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Destination::Stream { .. } => f.write_str("a stream"),
            Destination::File { part, .. } => write!(f, "{}", part.display()),
            Destination::Done => f.write_str("done"),
        }
    }
}

enum Destination {
    /// Written in place.
    Stream {
        writer: Box<dyn Write>,
        /// The reader has closed the pipe. This is not an error: the reader needs no more output.
        gone: bool,
    },
    /// A new file that replaces `target`.
    File {
        writer: BufWriter<File>,
        part: PathBuf,
        target: PathBuf,
    },
    Done,
}

/// One of the process's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standard {
    Out,
    Err,
}

type Streams = fn(Standard) -> Box<dyn Write>;

static STREAMS: OnceLock<Streams> = OnceLock::new();

/// Sets the streams that `-`, `/dev/stdout` and `/dev/stderr` mean from now on, for a program that has
/// redirected its standard file descriptors (`halcyon_hal::driver_output`). Only the first call has an
/// effect.
pub fn set_standard(streams: Streams) {
    let _ = STREAMS.set(streams);
}

fn standard(which: Standard) -> Box<dyn Write> {
    match (STREAMS.get(), which) {
        (Some(f), _) => f(which),
        (None, Standard::Out) => Box::new(io::stdout()),
        (None, Standard::Err) => Box::new(io::stderr()),
    }
}

/// What a path refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Stdout,
    Stderr,
    /// Another open file of a process, by its path in the system's list of descriptors.
    Descriptor(PathBuf),
    /// A device, a pipe or a socket.
    Device(PathBuf),
    /// An existing regular file.
    File(PathBuf),
    Folder(PathBuf),
    /// No file exists at this path yet.
    New(PathBuf),
}

/// Follows links and returns what `path` refers to.
///
/// # Errors
/// Errors of the system; 40 links or more.
pub fn place(path: &Path) -> io::Result<Place> {
    if path == Path::new("-") {
        return Ok(Place::Stdout);
    }
    if is_device_name(path) {
        return Ok(Place::Device(path.into()));
    }
    let mut p = path.to_path_buf();
    for _ in 0..LINKS {
        if let Some(d) = descriptor(&p) {
            return Ok(d);
        }
        let kind = match fs::symlink_metadata(&p) {
            Ok(m) => m.file_type(),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Place::New(p)),
            Err(e) => return Err(e),
        };
        if !kind.is_symlink() {
            return Ok(match (kind.is_file(), kind.is_dir()) {
                (true, _) => Place::File(p),
                (_, true) => Place::Folder(p),
                _ => Place::Device(p),
            });
        }
        p = folder(&p).join(fs::read_link(&p)?);
    }
    Err(io::Error::other("it leads to too many symbolic links"))
}

/// Whether `path` is standard output. If so, the program must print its own messages elsewhere.
pub fn is_stdout(path: &Path) -> bool {
    matches!(place(path), Ok(Place::Stdout))
}

/// The folder that contains a file.
fn folder(p: &Path) -> &Path {
    match p.parent() {
        Some(f) if !f.as_os_str().is_empty() => f,
        _ => Path::new("."),
    }
}

/// Recognises `/dev/fd/N` and its Linux form `/proc/.../fd/N`. Such a path looks like a link to a file but
/// means the open descriptor.
fn descriptor(p: &Path) -> Option<Place> {
    let number: u32 =
        p.file_name()?.to_str().filter(|n| n.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()?;
    let list = fs::canonicalize(folder(p)).ok()?;
    let own = Path::new("/proc").join(std::process::id().to_string());
    let is_own = list == Path::new("/dev/fd") || list.starts_with(&own) && list.ends_with("fd");
    let other = list.starts_with("/proc") && list.ends_with("fd");
    match (is_own, number) {
        (true, 1) => Some(Place::Stdout),
        (true, 2) => Some(Place::Stderr),
        _ => (is_own || other).then(|| Place::Descriptor(p.into())),
    }
}

/// Windows reserves these names for devices in every folder.
fn is_device_name(p: &Path) -> bool {
    if !cfg!(windows) {
        return false;
    }
    let text = p.to_string_lossy();
    let stem = p.file_stem().map(|s| s.to_string_lossy().to_ascii_uppercase()).unwrap_or_default();
    let port =
        |s: &str| matches!(s.as_bytes(), [b'C', b'O', b'M', b'1'..=b'9'] | [b'L', b'P', b'T', b'1'..=b'9']);
    text.starts_with(r"\\.\") || ["NUL", "CON", "PRN", "AUX"].contains(&stem.as_str()) || port(&stem)
}

impl Output {
    /// Opens `path` for writing.
    ///
    /// # Errors
    /// [`Error::Io`] for a folder, a file without write permission, or a folder in which no file can be
    /// created.
    pub fn create(path: &Path) -> Result<Output> {
        let to = Destination::open(path).map_err(|e| failed(path, &e))?;
        Ok(Output { path: path.into(), to, bytes: 0 })
    }

    /// Whether bytes are written directly, to something that is not a regular file.
    pub fn is_stream(&self) -> bool {
        matches!(self.to, Destination::Stream { .. })
    }

    /// Moves the complete file to its final name, or flushes a stream. Returns the number of bytes written.
    ///
    /// # Errors
    /// [`Error::Io`]; the old file is then unchanged.
    pub fn finish(mut self) -> Result<u64> {
        self.commit().map_err(|e| failed(&self.path, &e))?;
        Ok(self.bytes)
    }

    /// Converts an I/O error into an error that names the file.
    pub fn failed(&self, e: &io::Error) -> Error {
        failed(&self.path, e)
    }

    /// Writes buffered bytes to the disk. For files that belong together, call this on each before finishing
    /// the first, so that a full disk leaves all of them unchanged.
    ///
    /// # Errors
    /// [`Error::Io`]
    pub fn flush_to_disk(&mut self) -> Result<()> {
        self.sync().map_err(|e| failed(&self.path, &e))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        if let Destination::File { writer, .. } = &self.to {
            // A full disk may be reported only here. Some file systems do not support this call.
            match writer.get_ref().sync_all() {
                Err(e) if !matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
                    return Err(e);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> io::Result<()> {
        self.sync()?;
        if let Destination::File { part, target, .. } = &self.to {
            fs::rename(part, target)?;
            self.to = Destination::Done;
        }
        Ok(())
    }
}

impl Destination {
    fn open(path: &Path) -> io::Result<Destination> {
        let stream = |w: Box<dyn Write>| Destination::Stream { writer: w, gone: false };
        let in_place = |o: &mut OpenOptions, p: &Path| Ok(stream(Box::new(BufWriter::new(o.open(p)?))));
        match place(path)? {
            Place::Stdout => Ok(stream(Box::new(BufWriter::new(standard(Standard::Out))))),
            Place::Stderr => Ok(stream(Box::new(BufWriter::new(standard(Standard::Err))))),
            // The shell has opened the file for writing or for appending. Append mode suits both: in the
            // first case the position is the end of the file, in the second the content must be kept.
            Place::Descriptor(p) => in_place(OpenOptions::new().append(true), &p),
            Place::Device(p) => in_place(OpenOptions::new().write(true), &p),
            Place::Folder(_) => Err(io::Error::other("this is a folder; name a file in it")),
            Place::New(p) => {
                if p.file_name().is_none() || p.as_os_str().to_string_lossy().ends_with(['/', MAIN_SEPARATOR])
                {
                    return Err(io::Error::other("this names a folder; name a file in it"));
                }
                Ok(Destination::temporary_for(p, None)?)
            }
            Place::File(p) => {
                // A file without write permission is not replaced.
                let old = OpenOptions::new().write(true).open(&p)?.metadata()?;
                Ok(Destination::temporary_for(p, Some(old))?)
            }
        }
    }

    /// Creates a new file in the folder of `target`, with the permissions of the old file if there is one.
    fn temporary_for(target: PathBuf, old: Option<fs::Metadata>) -> io::Result<Destination> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = folder(&target);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        if old.is_some() {
            // Until the old file's permissions are set, only the owner may read the new file.
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        let (file, part) = loop {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let part = folder.join(format!(".halcyon-{}-{n}.tmp", std::process::id()));
            match options.open(&part) {
                Ok(f) => break (f, part),
                // Left over by an earlier process with the same process id.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => {
                    let what = format!("no file can be created in its folder {}: {e}", folder.display());
                    return Err(io::Error::new(e.kind(), what));
                }
            }
        };
        let to = Destination::File { writer: BufWriter::with_capacity(1 << 16, file), part, target };
        if let (Destination::File { writer, .. }, Some(old)) = (&to, old) {
            let file = writer.get_ref();
            #[cfg(unix)]
            {
                use std::os::unix::fs::{MetadataExt, fchown};
                // Only a privileged process can change the owner. Otherwise the file belongs to this
                // process's user.
                let _ = fchown(file, Some(old.uid()), Some(old.gid()));
            }
            file.set_permissions(old.permissions())?;
        }
        Ok(to)
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Destination::File { part, .. } = self {
            let _ = fs::remove_file(part);
        }
    }
}

impl Write for Output {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = match &mut self.to {
            Destination::Stream { gone: true, .. } => buf.len(),
            Destination::Stream { writer, gone } => forgive(writer.write(buf), gone, buf.len())?,
            Destination::File { writer, .. } => writer.write(buf)?,
            Destination::Done => return Err(io::Error::other("the file is complete")),
        };
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            Destination::Stream { gone: true, .. } | Destination::Done => Ok(()),
            Destination::Stream { writer, gone } => forgive(writer.flush(), gone, ()),
            Destination::File { writer, .. } => writer.flush(),
        }
    }
}

fn forgive<T>(r: io::Result<T>, gone: &mut bool, instead: T) -> io::Result<T> {
    match r {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => {
            *gone = true;
            Ok(instead)
        }
        r => r,
    }
}

fn failed(path: &Path, e: &io::Error) -> Error {
    let what = match e.kind() {
        ErrorKind::NotFound => format!("{e}; make the folder first"),
        _ => e.to_string(),
    };
    Error::Io { path: path.display().to_string(), what }
}

/// Writes a whole file.
///
/// # Errors
/// The errors of [`Output::create`] and [`Output::finish`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |o| o.write_all(bytes)).map(drop)
}

/// Writes a file in pieces. Returns its size in bytes.
///
/// # Errors
/// The errors of [`write()`].
pub fn write_with(path: &Path, fill: impl FnOnce(&mut Output) -> io::Result<()>) -> Result<u64> {
    let mut o = Output::create(path)?;
    fill(&mut o).map_err(|e| o.failed(&e))?;
    o.finish()
}

#[cfg(all(test, unix))]
#[path = "output_tests.rs"]
mod tests;
