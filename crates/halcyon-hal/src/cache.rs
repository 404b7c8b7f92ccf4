//! A cache on disk for compiled programs, packed constants, probe records and measurements. It has one file
//! per key, which is validated when it is read and is replaced atomically. The total size is bounded.
//!
//! Errors here never fail a build: an entry that cannot be read is rebuilt, and a failure to write is logged
//! once.

use crate::Error;
use halcyon_ir::data::Bytes;
use std::fs;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

const MAGIC: &[u8; 8] = b"HLCYPRG1";
const HEADER: usize = 8 + 16 + 16 + 8;
const EXTENSION: &str = "bin";

/// The usual limit on the bytes of one directory. If it has more, the least recently used entries are
/// deleted.
pub const DEFAULT_LIMIT: u64 = 256 << 20;

/// A directory of cache entries.
#[derive(Debug)]
pub struct DiskCache {
    dir: PathBuf,
    limit: u64,
    complained: AtomicBool,
}

/// 128-bit FNV-1a (Fowler, Noll, Vo) over the parts, each with its length, so that the boundaries between
/// parts matter.
pub fn digest(parts: &[&[u8]]) -> u128 {
    let mut h = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    let mut eat = |bytes: &[u8]| {
        for &b in bytes {
            h = (h ^ b as u128).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B);
        }
    };
    for p in parts {
        eat(&(p.len() as u64).to_le_bytes());
        eat(p);
    }
    h
}

/// Environment variable that selects what is kept on disk between runs ([`CachePolicy`]'s text form).
pub const VARIABLE: &str = "HALCYON_CACHE";

/// The data that is kept on disk between runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CachePolicy {
    /// Compiled programs and records of probes, and packed constants if reading them is faster than packing
    /// them again.
    #[default]
    Usual,
    /// Nothing: `off`.
    Nothing,
    /// The same without packed constants: `programs`.
    Programs,
    /// The same with all packed constants, even if packing them again is faster: `packed`.
    Packed,
}

/// The setting of `HALCYON_CACHE`.
///
/// # Errors
/// [`Error::Argument`] for an unknown word.
pub fn policy() -> crate::Result<CachePolicy> {
    let Some(v) = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) else { return Ok(CachePolicy::Usual) };
    let words =
        [("off", CachePolicy::Nothing), ("programs", CachePolicy::Programs), ("packed", CachePolicy::Packed)];
    match words.iter().find(|(w, _)| v.eq_ignore_ascii_case(w)) {
        Some((_, k)) => Ok(*k),
        None => {
            let what = format!(
                "\"{}\" is not a setting of the cache; use off (keep nothing), programs (keep no packed constants) or packed (always keep packed constants), or leave it unset",
                v.to_string_lossy()
            );
            Err(Error::argument(VARIABLE, what))
        }
    }
}

/// The environment variables that locate the cache directory, by priority.
pub fn variables() -> &'static [&'static str] {
    if cfg!(target_os = "windows") {
        &["LOCALAPPDATA"]
    } else if cfg!(target_os = "macos") {
        &["HOME"]
    } else {
        &["XDG_CACHE_HOME", "HOME"]
    }
}

/// The user's cache directory for Halcyon; `None` if the system has none or HALCYON_CACHE is `off` or not
/// valid.
pub fn user_dir() -> Option<PathBuf> {
    // An unknown word is reported when a backend is opened. Until then nothing may be written.
    if !matches!(policy(), Ok(k) if k != CachePolicy::Nothing) {
        return None;
    }
    let below = |n: &str, home: &Path| match n {
        "HOME" if cfg!(target_os = "macos") => home.join("Library/Caches"),
        "HOME" => home.join(".cache"),
        _ => home.to_path_buf(),
    };
    let base = variables().iter().find_map(|n| Some(below(n, &absolute(n)?)));
    base.map(|b| b.join("halcyon"))
}

/// Removes variables that name relative directories from the environment, so that drivers' libraries do not
/// create directories in the working directory either. Does so only if the system reports that no other
/// thread is running, so call it before threads are started. Returns the removed variables.
pub fn ignore_relative() -> Vec<(&'static str, PathBuf)> {
    // Only Linux reports the number of threads.
    if !fs::read_dir("/proc/self/task").is_ok_and(|d| d.count() == 1) {
        return vec![];
    }
    let mut gone = vec![];
    for name in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HOME"] {
        let set = std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        if let Some(path) = set.filter(|p| !p.is_absolute()) {
            // SAFETY: `/proc/self/task` lists one thread, this one, so no other thread accesses the
            // environment.
            unsafe { std::env::remove_var(name) };
            gone.push((name, path));
        }
    }
    gone
}

/// The directory that a variable names. A relative one is ignored, as the XDG specification requires: it
/// would differ between working directories.
fn absolute(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)?;
    if !path.is_absolute() {
        tracing::info!(variable, path = %path.display(), "a relative folder is ignored");
        return None;
    }
    Some(path)
}

impl DiskCache {
    /// A cache in `dir`, which the first write creates.
    pub fn new(dir: PathBuf, limit: u64) -> DiskCache {
        DiskCache { dir, limit, complained: AtomicBool::new(false) }
    }

    fn path(&self, key: u128) -> PathBuf {
        self.dir.join(format!("{key:032x}.{EXTENSION}"))
    }

    /// The bytes stored under `key`; `None` if there is no valid entry. A corrupt entry is deleted.
    pub fn get(&self, key: u128) -> Option<Vec<u8>> {
        let path = self.path(key);
        let mut file = fs::read(&path).ok()?;
        let ok = file.len() >= HEADER
            && file[..8] == *MAGIC
            && file[8..24] == key.to_le_bytes()
            && file[40..48] == ((file.len() - HEADER) as u64).to_le_bytes()
            && file[24..40] == digest(&[&file[HEADER..]]).to_le_bytes();
        if !ok {
            tracing::warn!(path = %path.display(), "a damaged entry of the program cache is ignored, and the program is built again");
            self.remove(key);
            return None;
        }
        self.touch(&path);
        tracing::info!(path = %path.display(), "compiled program read from the cache");
        Some(file.split_off(HEADER))
    }

    /// Stores bytes under `key` atomically: readers see the whole entry or none.
    pub fn put(&self, key: u128, data: &[u8]) {
        if let Err(e) = self.write(key, data)
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(dir = %self.dir.display(), %e, "compiled programs cannot be cached");
        }
    }

    fn write(&self, key: u128, data: &[u8]) -> std::io::Result<()> {
        self.replace(key, |f| {
            f.write_all(MAGIC)?;
            f.write_all(&key.to_le_bytes())?;
            f.write_all(&digest(&[data]).to_le_bytes())?;
            f.write_all(&(data.len() as u64).to_le_bytes())?;
            f.write_all(data)
        })
    }

    /// Writes an entry to a temporary file, then renames it.
    fn replace(
        &self,
        key: u128,
        fill: impl FnOnce(&mut fs::File) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.dir)?;
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = self.dir.join(format!("{key:032x}.{}-{n}.tmp", std::process::id()));
        let written = (|| {
            let mut f = fs::File::create_new(&temporary)?;
            fill(&mut f)?;
            drop(f);
            let path = self.path(key);
            fs::rename(&temporary, &path).or_else(|e| {
                // An empty directory at the entry's path is removed as corrupt.
                fs::remove_dir(&path).map_err(|_| e)?;
                fs::rename(&temporary, &path)
            })
        })();
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        self.evict(key);
        written
    }

    /// Marks an entry as used, by setting its modification time. Eviction deletes the entries with the oldest
    /// modification times.
    fn touch(&self, path: &Path) {
        if let Ok(f) = fs::File::options().append(true).open(path) {
            let _ = f.set_modified(SystemTime::now());
        }
    }

    /// Deletes an entry.
    pub fn remove(&self, key: u128) {
        let _ = fs::remove_file(self.path(key));
    }

    /// Deletes temporary files older than an hour, which interrupted writers left. If the limit is exceeded,
    /// it also deletes the oldest entries until a tenth of the limit is free, but never the entry `keep`.
    fn evict(&self, keep: u128) {
        let Ok(dir) = fs::read_dir(&self.dir) else { return };
        let kept = self.path(keep);
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        let mut entries = vec![];
        let mut total = 0;
        for e in dir.flatten() {
            let (path, Ok(m)) = (e.path(), e.metadata()) else {
                continue;
            };
            let time = m.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if has_extension(&path, EXTENSION) {
                total += m.len();
                entries.push((time, m.len(), path));
            } else if has_extension(&path, "tmp") && time < hour_ago {
                let _ = fs::remove_file(path);
            }
        }
        if total <= self.limit {
            return;
        }
        entries.sort();
        for (_, bytes, path) in entries {
            if total <= self.limit - self.limit / 10 {
                break;
            }
            if path != kept && fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
    }
}

/// Large entries that are mapped into memory: packed constants. The caller's key need not cover the whole
/// source content, so that it is cheap to compute. An entry therefore also stores a digest of that content,
/// which `map` compares.
impl DiskCache {
    /// Whether an entry exists; its content is not checked.
    pub fn has(&self, key: u128) -> bool {
        self.path(key).is_file()
    }

    /// Maps the `bytes` bytes that [`DiskCache::put_large`] stored for this key and content. A corrupt entry
    /// or one with other content is deleted with a warning.
    ///
    /// An entry must not be truncated or written in place while it is mapped. The operating system ends a
    /// process that reads missing pages, and changed bytes are not detected. All processes of this program
    /// only replace and delete whole files, which leaves existing maps unchanged. By default the directory
    /// belongs to the user.
    pub fn map(&self, key: u128, content: u128, bytes: usize) -> Option<Arc<dyn Bytes>> {
        let path = self.path(key);
        let why = match self.map_checked(&path, key, content, bytes) {
            Ok(map) => {
                self.touch(&path);
                tracing::info!(path = %path.display(), bytes, "packed constants mapped from the cache");
                return Some(Arc::new(map));
            }
            Err(why) => why,
        };
        if path.exists() {
            tracing::warn!(path = %path.display(), why, "an entry of the cache of packed constants is ignored and made again");
            self.remove(key);
        }
        None
    }

    fn map_checked(
        &self,
        path: &Path,
        key: u128,
        content: u128,
        bytes: usize,
    ) -> Result<Mapped, &'static str> {
        let mut file = fs::File::open(path).map_err(|_| "it cannot be opened")?;
        let mut head = [0; LARGE_HEAD];
        file.read_exact(&mut head).map_err(|_| "it is too short")?;
        let len = file.metadata().map_err(|_| "its size is not known")?.len();
        if head[..8] != *LARGE_MAGIC
            || head[8..24] != key.to_le_bytes()
            || len != (LARGE_START + bytes) as u64
        {
            return Err("it is damaged or of another version");
        }
        if head[24..40] != content.to_le_bytes() {
            return Err("it was made from other values");
        }
        // SAFETY: the map is read-only and private to this process, and its bytes are only ever read as plain
        // integers and floats, for which every bit pattern is valid. Entries are written under another name
        // and then renamed, and deleted as whole files, so no process that runs this program changes a mapped
        // file. No mapping can guard against changes by other programs; the documentation of `DiskCache::map`
        // says so.
        let map = unsafe {
            memmap2::MmapOptions::new().offset(LARGE_START as u64).len(bytes).populate().map(&file)
        };
        let map = Mapped(map.map_err(|_| "it cannot be mapped")?);
        // The digest covers all mapped bytes.
        if head[40..56] != content_digest(&[map.as_ref()]).to_le_bytes() {
            return Err("its bytes are not those that were written");
        }
        Ok(map)
    }

    /// Stores `bytes` bytes, which `read` provides in stripes (offset, destination). Does nothing if they
    /// exceed half of the cache's limit.
    pub fn put_large<E>(
        &self,
        key: u128,
        content: u128,
        bytes: usize,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if bytes as u64 > self.limit / 2 {
            return Ok(());
        }
        let mut failed = None;
        let stored = self.replace(key, |f| {
            f.write_all(&[0; LARGE_START])?;
            let mut stripes = StripeDigests::default();
            let mut room = vec![0; STRIPE.min(bytes)];
            for at in (0..bytes).step_by(STRIPE) {
                let room = &mut room[..STRIPE.min(bytes - at)];
                if let Err(e) = read(at, room) {
                    failed = Some(e);
                    return Err(std::io::ErrorKind::Other.into());
                }
                stripes.0.push(stripe_digest(room));
                f.write_all(room)?;
            }
            let whole = stripes.digest(&[bytes]);
            f.seek(std::io::SeekFrom::Start(0))?;
            f.write_all(LARGE_MAGIC)?;
            f.write_all(&key.to_le_bytes())?;
            f.write_all(&content.to_le_bytes())?;
            f.write_all(&whole.to_le_bytes())
        });
        match (stored, failed) {
            (_, Some(e)) => return Err(e),
            (Err(e), None) if !self.complained.swap(true, Ordering::Relaxed) => {
                tracing::warn!(dir = %self.dir.display(), %e, "packed constants cannot be cached");
            }
            _ => {}
        }
        Ok(())
    }
}

const LARGE_MAGIC: &[u8; 8] = b"HLCYPAK1";
const LARGE_HEAD: usize = 8 + 16 + 16 + 16;
/// Offset of the bytes in a large entry: a page, so that the mapped bytes are page-aligned.
const LARGE_START: usize = 4096;
/// Bytes per independently computed digest, so that threads can share the work.
const STRIPE: usize = 1 << 20;

struct Mapped(memmap2::Mmap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[derive(Default)]
struct StripeDigests(Vec<u128>);

impl StripeDigests {
    fn digest(&self, lengths: &[usize]) -> u128 {
        let stripes: Vec<u8> = self.0.iter().flat_map(|d| d.to_le_bytes()).collect();
        let lengths: Vec<u8> = lengths.iter().flat_map(|n| (*n as u64).to_le_bytes()).collect();
        digest(&[&lengths, &stripes])
    }
}

/// Digest of a stripe, computed at memory bandwidth. It has eight 64-bit accumulators, which are updated by
/// xor, multiplication by an odd number and rotation. Each update is a bijection of the accumulator, so a
/// change of one word changes the result. [`digest`] combines the accumulators. It detects corruption, not
/// forgery.
fn stripe_digest(bytes: &[u8]) -> u128 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut accumulators: [u64; 8] = std::array::from_fn(|i| ODD.rotate_left(i as u32 * 8));
    let mut step = |block: &[u8; 64]| {
        for (accumulator, word) in accumulators.iter_mut().zip(block.as_chunks::<8>().0) {
            *accumulator = (*accumulator ^ u64::from_le_bytes(*word)).wrapping_mul(ODD).rotate_left(29);
        }
    };
    let (blocks, rest) = bytes.as_chunks::<64>();
    blocks.iter().for_each(&mut step);
    let mut last = [0; 64];
    last[..rest.len()].copy_from_slice(rest);
    step(&last);
    let accumulators: Vec<u8> = accumulators.iter().flat_map(|l| l.to_le_bytes()).collect();
    digest(&[&(bytes.len() as u64).to_le_bytes(), &accumulators])
}

/// Digest of large parts, including their boundaries, computed by up to eight threads.
pub fn content_digest(parts: &[&[u8]]) -> u128 {
    let stripes: Vec<&[u8]> = parts.iter().flat_map(|p| p.chunks(STRIPE)).collect();
    let lengths: Vec<usize> = parts.iter().map(|p| p.len()).collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(stripes.len() / 4).min(8);
    if threads < 2 {
        return StripeDigests(stripes.iter().map(|p| stripe_digest(p)).collect()).digest(&lengths);
    }
    let digests: Vec<Mutex<u128>> = stripes.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((p, d)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            stripes.get(i).zip(digests.get(i))
        } {
            *d.lock().unwrap_or_else(|e| e.into_inner()) = stripe_digest(p);
        }
    };
    std::thread::scope(|s| {
        // If a thread cannot be started, the others do its share.
        let others: Vec<_> =
            (1..threads).filter_map(|_| std::thread::Builder::new().spawn_scoped(s, work).ok()).collect();
        work();
        drop(others);
    });
    StripeDigests(digests.into_iter().map(|d| d.into_inner().unwrap_or_else(|e| e.into_inner())).collect())
        .digest(&lengths)
}

fn has_extension(p: &Path, e: &str) -> bool {
    p.extension().is_some_and(|x| x == e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let c = DiskCache::new(dir.path().join("a/b"), DEFAULT_LIMIT);
        assert!(c.get(7).is_none());
        c.put(7, b"program");
        c.put(8, b"");
        assert_eq!(c.get(7).unwrap(), b"program");
        assert_eq!(c.get(8).unwrap(), b"");
        let path = c.path(7);
        let whole = fs::read(&path).unwrap();
        for at in [0, 9, 30, 45, whole.len() - 1] {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(c.get(7).is_none(), "byte {at} changed");
            assert!(!path.exists());
        }
        fs::write(&path, &whole[..20]).unwrap();
        assert!(c.get(7).is_none(), "a short file");
        // An entry copied to another key is invalid.
        fs::write(c.path(9), &whole).unwrap();
        assert!(c.get(9).is_none());
        // Only entries remain, no temporary files.
        assert!(
            fs::read_dir(dir.path().join("a/b"))
                .unwrap()
                .flatten()
                .all(|e| has_extension(&e.path(), EXTENSION))
        );
    }

    #[test]
    fn size_is_bounded_and_the_oldest_go_first() {
        let dir = tempfile::tempdir().unwrap();
        let c = DiskCache::new(dir.path().into(), 10_000);
        for k in 0..30u128 {
            c.put(k, &[k as u8; 1000]);
            let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + k as u64);
            fs::File::options().append(true).open(c.path(k)).unwrap().set_modified(old).unwrap();
        }
        let total: u64 =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(total <= 10_000 && total > 5_000, "{total}");
        assert!(c.get(29).is_some() && c.get(0).is_none());
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let c = DiskCache::new(file, DEFAULT_LIMIT);
        c.put(1, b"x");
        assert!(c.get(1).is_none());
    }

    #[test]
    fn concurrent_writers_leave_a_whole_entry() {
        let dir = tempfile::tempdir().unwrap();
        let c = DiskCache::new(dir.path().into(), DEFAULT_LIMIT);
        std::thread::scope(|s| {
            for t in 0..4u8 {
                let c = &c;
                s.spawn(move || {
                    for _ in 0..20 {
                        c.put(3, &vec![t; 50_000]);
                        if let Some(v) = c.get(3) {
                            assert!(v.len() == 50_000 && v.iter().all(|b| *b == v[0]));
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn large_entries_are_mapped_and_checked_whole() {
        let dir = tempfile::tempdir().unwrap();
        let c = DiskCache::new(dir.path().into(), DEFAULT_LIMIT);
        let data: Vec<u8> =
            (0..(5 << 20) + 77).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
        let put = |content| {
            let read = |at: usize, room: &mut [u8]| -> Result<(), ()> {
                room.copy_from_slice(&data[at..at + room.len()]);
                Ok(())
            };
            c.put_large(1, content, data.len(), read).unwrap();
        };
        assert!(c.map(1, 5, data.len()).is_none() && !c.has(1));
        put(5);
        let map = c.map(1, 5, data.len()).unwrap();
        assert_eq!(map.bytes(), data);
        assert_eq!(map.bytes().as_ptr() as usize % 64, 0);
        // A mapped entry stays valid when its file is replaced or deleted.
        put(6);
        assert!(c.map(1, 5, data.len()).is_none(), "made from other values");
        assert!(!c.has(1));
        assert_eq!(map.bytes(), data);
        put(5);
        let path = c.path(1);
        let whole = fs::read(&path).unwrap();
        for at in [0, 9, 30, 45, LARGE_START, LARGE_START + STRIPE + 1234, whole.len() - 1] {
            let mut bad = whole.clone();
            bad[at] ^= 4;
            fs::write(&path, &bad).unwrap();
            assert!(c.map(1, 5, data.len()).is_none(), "byte {at} changed");
            assert!(!path.exists());
        }
        for len in [0, 20, LARGE_START, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert!(c.map(1, 5, data.len()).is_none(), "{len} bytes");
        }
        // Nothing is stored if the source fails or the entry is too large.
        assert_eq!(c.put_large(2, 0, 100, |_, _| Err("no")), Err("no"));
        let small = DiskCache::new(dir.path().into(), 1000);
        small.put_large(3, 0, 600, |_, _| Err("not read")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn content_digests_depend_on_every_word_and_boundary() {
        let mut v = vec![3u8; 9 * STRIPE + 100];
        let whole = content_digest(&[&v]);
        assert_eq!(whole, content_digest(&[&v]), "the threads must not matter");
        assert_eq!(stripe_digest(&v[..100]), stripe_digest(&v[1..101]));
        for at in [0, 63, 64, STRIPE - 1, STRIPE, 9 * STRIPE + 99] {
            v[at] ^= 1;
            assert_ne!(content_digest(&[&v]), whole, "{at}");
            v[at] ^= 1;
        }
        assert_ne!(content_digest(&[&v[..STRIPE], &v[STRIPE..]]), whole);
        assert_ne!(content_digest(&[&v[..64]]), content_digest(&[&v[..65]]));
        assert_ne!(content_digest(&[&[0]]), content_digest(&[&[0, 0]]));
    }

    #[test]
    fn digests_depend_on_part_boundaries() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
    }
}
