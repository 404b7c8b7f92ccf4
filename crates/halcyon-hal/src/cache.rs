//! Compiled programs on disk: one file per key, checked when read, replaced atomically, bounded in size.
//!
//! Nothing here can fail a build: what cannot be read is compiled again, what cannot be written is logged once.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

const MAGIC: &[u8; 8] = b"HLCYPRG1";
const HEADER: usize = 8 + 16 + 16 + 8;
const EXTENSION: &str = "bin";

/// Bytes that one directory may take before its oldest entries go.
pub const DEFAULT_LIMIT: u64 = 256 << 20;

/// A directory of compiled programs.
#[derive(Debug)]
pub struct DiskCache {
    dir: PathBuf,
    limit: u64,
    complained: AtomicBool,
}

/// 128-bit FNV-1a (Fowler, Noll, Vo) over parts, each with its length, so that their borders matter.
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

/// The user's cache directory for Halcyon, where the system has one and HALCYON_CACHE is not `off`.
pub fn user_dir() -> Option<PathBuf> {
    if std::env::var_os("HALCYON_CACHE").is_some_and(|v| v.eq_ignore_ascii_case("off")) {
        return None;
    }
    let var = |n: &str| std::env::var_os(n).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = if cfg!(target_os = "windows") {
        var("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        var("HOME").map(|h| h.join("Library/Caches"))
    } else {
        var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|h| h.join(".cache")))
    };
    base.map(|b| b.join("halcyon"))
}

impl DiskCache {
    /// A cache in `dir`, which is made on the first write.
    pub fn new(dir: PathBuf, limit: u64) -> DiskCache {
        DiskCache { dir, limit, complained: AtomicBool::new(false) }
    }

    fn path(&self, key: u128) -> PathBuf {
        self.dir.join(format!("{key:032x}.{EXTENSION}"))
    }

    /// The bytes stored under `key`. A damaged entry is deleted.
    pub fn get(&self, key: u128) -> Option<Vec<u8>> {
        let path = self.path(key);
        let mut file = fs::read(&path).ok()?;
        let ok = file.len() >= HEADER
            && file[..8] == *MAGIC
            && file[8..24] == key.to_le_bytes()
            && file[40..48] == ((file.len() - HEADER) as u64).to_le_bytes()
            && file[24..40] == digest(&[&file[HEADER..]]).to_le_bytes();
        if !ok {
            tracing::warn!(path = %path.display(), "a damaged program cache entry is ignored and built again");
            self.remove(key);
            return None;
        }
        // Eviction takes the entries that were used least recently; where the time cannot be set, the oldest.
        if let Ok(f) = fs::File::options().append(true).open(&path) {
            let _ = f.set_modified(SystemTime::now());
        }
        Some(file.split_off(HEADER))
    }

    /// Stores bytes under `key`: readers see the whole entry or none.
    pub fn put(&self, key: u128, data: &[u8]) {
        if let Err(e) = self.write(key, data)
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(dir = %self.dir.display(), %e, "compiled programs cannot be cached");
        }
    }

    fn write(&self, key: u128, data: &[u8]) -> std::io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.dir)?;
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = self.dir.join(format!("{key:032x}.{}-{n}.tmp", std::process::id()));
        let written = (|| {
            let mut f = fs::File::create_new(&temporary)?;
            f.write_all(MAGIC)?;
            f.write_all(&key.to_le_bytes())?;
            f.write_all(&digest(&[data]).to_le_bytes())?;
            f.write_all(&(data.len() as u64).to_le_bytes())?;
            f.write_all(data)?;
            drop(f);
            fs::rename(&temporary, self.path(key))
        })();
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        self.evict(key);
        written
    }

    /// Forgets an entry.
    pub fn remove(&self, key: u128) {
        let _ = fs::remove_file(self.path(key));
    }

    /// Deletes the oldest entries until a tenth of the limit is free, and what interrupted writers left; never the entry `keep`.
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
        // An entry under another name.
        fs::write(c.path(9), &whole).unwrap();
        assert!(c.get(9).is_none());
        // Only entries are left, no temporary file.
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
    fn digests_differ_by_borders() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
    }
}
