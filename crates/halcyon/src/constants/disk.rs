//! Disk cache of packed constants.
//!
//! Packing reads all constants once. Loading a cached file also reads them once, to compare their digest with
//! the digest of the constants from which the file was made, and it reads the file to check it. Which is
//! faster depends on the packing and on the machine. So the packing is timed, the time of loading is
//! estimated from the digest of a sample, and a file is written only if loading would be clearly faster, or
//! if the user requests that all packed constants are cached.

use halcyon_hal::cache::{self, DiskCache};
use halcyon_hal::{BufferRef, Device};
use halcyon_ir::error::Result;
use halcyon_ir::plan::PackedConst;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Maximum bytes of packed constants on disk, of all models. If there are more, the oldest files are deleted.
const LIMIT: u64 = 2 << 30;
/// Constants that are packed in less time are cached only if the user requests it.
const MIN_PACKING_TIME: Duration = Duration::from_millis(20);
/// Number of bytes whose digest is computed to measure how fast the machine computes digests.
const SAMPLE: usize = 8 << 20;
/// Minimum ratio of packing time to estimated loading time, because the first start also pays for writing the
/// file.
const MIN_RATIO: f64 = 1.5;

/// The cache directory of packed constants.
#[derive(Debug)]
pub(crate) struct PackedCache {
    disk: DiskCache,
    /// Whether to cache constants even if packing them again is faster.
    always: bool,
}

impl PackedCache {
    pub(crate) fn new(dir: PathBuf, always: bool) -> PackedCache {
        PackedCache { disk: DiskCache::new(dir.join("packed"), LIMIT), always }
    }

    /// The cache in the given directory, or, if none is given, in the user's cache directory. If
    /// `HALCYON_CACHE` is `off`, only a given directory is used. With the value `programs`, no packed
    /// constants are cached. With `packed`, they are always cached.
    pub(crate) fn open(asked: Option<PathBuf>) -> Option<PackedCache> {
        // An unknown value was rejected before the device was opened.
        let kept = cache::policy().unwrap_or(cache::CachePolicy::Nothing);
        let dir = match kept {
            cache::CachePolicy::Programs => None,
            _ => asked.or_else(cache::user_dir),
        };
        dir.map(|d| PackedCache::new(d, kept == cache::CachePolicy::Packed))
    }
}

/// Constants that are packed into one block of `bytes` bytes.
pub(super) struct Block<'a> {
    device: &'a dyn Device,
    cache: &'a PackedCache,
    constants: &'a [&'a PackedConst],
    key: u128,
    bytes: usize,
}

impl<'a> Block<'a> {
    pub(super) fn new(
        device: &'a dyn Device,
        cache: &'a PackedCache,
        constants: &'a [&'a PackedConst],
        bytes: usize,
    ) -> Block<'a> {
        let info = device.info();
        let mut parts = vec![env!("CARGO_PKG_VERSION").to_string(), info.id.clone(), info.name.clone()];
        parts.extend(
            ["architecture", "simd", "instruction_set", "features"]
                .map(|k| format!("{k} {:?}", info.properties.get(k))),
        );
        let mut text: Vec<u8> = parts.join("\n").into_bytes();
        for c in constants {
            // The key covers only the ends of each constant, which differ between most models. When an entry
            // is found, a digest of the whole content is compared.
            let b = c.data.bytes();
            let ends = [&b[..b.len().min(64)], &b[b.len() - b.len().min(64)..]].concat();
            text.extend(format!("{:?} {:?} {} ", c.kernel.packing(), c.data.dtype, b.len()).into_bytes());
            text.extend(ends);
        }
        Block { device, cache, constants, key: cache::digest(&[&text]), bytes }
    }

    fn source(&self) -> Vec<&[u8]> {
        self.constants.iter().map(|c| c.data.bytes()).collect()
    }

    /// Loads the block from disk, if it is cached and intact.
    pub(super) fn load(&self) -> Option<BufferRef> {
        if !self.cache.disk.has(self.key) {
            return None;
        }
        let map = self.cache.disk.map(self.key, cache::content_digest(&self.source()), self.bytes)?;
        self.device.import(map)
    }

    /// Caches a block that took `took` to pack, if loading it would be faster or if all blocks are cached.
    pub(super) fn save_if_slow(&self, block: &BufferRef, took: Duration) -> Result<()> {
        let source = self.source();
        if !self.cache.always
            && (took < MIN_PACKING_TIME || took.as_secs_f64() < MIN_RATIO * self.promise(&source))
        {
            return Ok(());
        }
        let content = cache::content_digest(&source);
        self.cache.disk.put_large(self.key, content, self.bytes, |at, room| self.device.read(block, at, room))
    }

    /// Estimated seconds that loading would take, from a sample.
    fn promise(&self, source: &[&[u8]]) -> f64 {
        let total: usize = source.iter().map(|s| s.len()).sum();
        let Some(largest) = source.iter().max_by_key(|s| s.len()) else { return 0.0 };
        let sample = &largest[..largest.len().min(SAMPLE)];
        let start = Instant::now();
        std::hint::black_box(cache::content_digest(&[sample]));
        start.elapsed().as_secs_f64() / sample.len().max(1) as f64 * (total + self.bytes) as f64
    }
}
