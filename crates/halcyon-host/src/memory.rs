//! Host memory: how much the process can still allocate, and how much it uses.
//!
//! A system that overcommits kills the process when it touches memory that does not exist. Large allocations
//! are therefore checked here first.

use halcyon_ir::{Error, Result};
use serde::Serialize;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// `(free, total)` bytes. Each is the smallest of three figures: of the machine's memory, of the limit of the
/// process's control group, and of its address space limit. `None` if the system does not report its memory.
pub fn memory() -> Option<(u64, u64)> {
    let machine = machine(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let inside = group(&groups, Path::new("/sys/fs/cgroup")).map_or(machine, |g| least(machine, g));
    Some(addresses().map_or(inside, |a| least(inside, a)))
}

/// `(free, total)` of the process's address space limit (`ulimit -v`); `None` without a limit.
fn addresses() -> Option<(u64, u64)> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let most: u64 = line.split_whitespace().next()?.parse().ok()?;
    let used = field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmSize")?;
    Some((most.saturating_sub(used), most))
}

/// Amounts up to this size are not checked against the system.
const UNCHECKED_BYTES: u64 = 64 << 20;

/// Checks that the process can allocate `bytes` more. Passes without a check for at most 64 MiB, or if the
/// system does not report its memory. `what` names the purpose in the error.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn check_available(bytes: u64, what: &str) -> Result<()> {
    // Reading the figures takes tens of microseconds, as long as a run of a small model.
    if bytes <= UNCHECKED_BYTES {
        return Ok(());
    }
    match memory() {
        Some((free, total)) if bytes > free => Err(out_of_memory(bytes, what, free, total)),
        _ => Ok(()),
    }
}

fn out_of_memory(bytes: u64, what: &str, free: u64, total: u64) -> Error {
    Error::OutOfMemory {
        device: "the host".into(),
        what: what.into(),
        requested: bytes,
        free,
        total,
        next: "Use smaller inputs".into(),
    }
}

/// Allocates zeroed memory. `what` names the purpose in the error.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn zeros(bytes: usize, what: &str) -> Result<Vec<u8>> {
    // Reserve first, so that a refusal is an error instead of an abort. Then allocate zero pages, which take
    // no memory until they are written.
    reserve(bytes, what).map(drop)?;
    Ok(vec![0; bytes])
}

/// Allocates an empty vector with a capacity of `bytes`. `what` names the purpose in the error.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn reserve(bytes: usize, what: &str) -> Result<Vec<u8>> {
    check_available(bytes as u64, what)?;
    let mut v = vec![];
    let refused = |_| {
        let (free, total) = memory().unwrap_or((0, 0));
        out_of_memory(bytes as u64, what, free, total)
    };
    v.try_reserve_exact(bytes).map_err(refused)?;
    Ok(v)
}

fn least(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0.min(b.0), a.1.min(b.1))
}

/// Parses a line `key: 123 kB`; returns bytes.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn machine(meminfo: &str) -> Option<(u64, u64)> {
    Some((field(meminfo, "MemAvailable")?, field(meminfo, "MemTotal")?))
}

/// Resident anonymous memory of the process in bytes: memory that it allocated and touched. Pages of mapped
/// files (code, weights) are not counted, since the system can drop and reread them. Read on Linux from
/// `RssAnon` in `/proc/self/status`; `None` on other systems.
pub fn anonymous() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/self/status").ok()?, "RssAnon")
}

/// Page faults of all threads of the process so far, including first touches of memory. Does not allocate.
/// Read on Linux from `minflt` and `majflt` in `/proc/self/stat` (proc(5)); `None` on other systems.
pub fn page_faults() -> Option<u64> {
    let mut text = [0u8; 1024];
    let n = std::fs::File::open("/proc/self/stat").ok()?.read(&mut text).ok()?;
    let text = std::str::from_utf8(&text[..n]).ok()?;
    // The command name in parentheses may contain any character, so parse after the last `)`.
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let minor: u64 = fields.nth(7)?.parse().ok()?;
    let major: u64 = fields.nth(1)?.parse().ok()?;
    Some(minor + major)
}

/// The peak of the anonymous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AnonymousPeak {
    /// The largest reading in bytes, a lower bound of the true peak.
    pub bytes: u64,
    pub readings: u64,
}

/// Samples the anonymous memory of the process at intervals. The kernel keeps no maximum of it (`VmHWM`
/// includes file pages), so allocations shorter than the interval can be missed.
#[derive(Debug)]
pub struct MemorySampler {
    seen: Arc<Seen>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Seen {
    bytes: AtomicU64,
    readings: AtomicU64,
    done: AtomicBool,
}

impl Seen {
    fn read(&self) -> bool {
        let Some(now) = anonymous() else { return false };
        self.bytes.fetch_max(now, Ordering::Relaxed);
        self.readings.fetch_add(1, Ordering::Relaxed);
        true
    }
}

impl MemorySampler {
    /// Starts a sampling thread with period `interval`. `None` if the system does not report anonymous
    /// memory.
    pub fn start(interval: Duration) -> Option<MemorySampler> {
        let seen = Arc::new(Seen::default());
        if !seen.read() {
            return None;
        }
        let mine = seen.clone();
        let run = move || {
            while !mine.done.load(Ordering::Acquire) {
                std::thread::park_timeout(interval);
                mine.read();
            }
        };
        // If the thread cannot be started, only explicit readings are taken.
        let thread = std::thread::Builder::new().name("halcyon-memory".into()).spawn(run).ok();
        Some(MemorySampler { seen, thread: Mutex::new(thread) })
    }

    /// Takes a reading now, for example at the end of a phase.
    pub fn read(&self) {
        self.seen.read();
    }

    /// Stops the thread. After this only [`MemorySampler::read`] takes readings.
    pub fn stop(&self) {
        self.seen.done.store(true, Ordering::Release);
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(t) = thread {
            t.thread().unpark();
            // The thread only reads a file and should not panic. If it did, its readings remain valid.
            let _ = t.join();
        }
    }

    /// The largest reading so far, and the number of readings.
    pub fn peak(&self) -> AnonymousPeak {
        let of = |a: &AtomicU64| a.load(Ordering::Relaxed);
        AnonymousPeak { bytes: of(&self.seen.bytes), readings: of(&self.seen.readings) }
    }
}

impl Drop for MemorySampler {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The tightest memory limit between the process's control group and the root, for version 1 or 2 of the
/// interface (cgroups(7)).
fn group(groups: &str, root: &Path) -> Option<(u64, u64)> {
    let number = |p: &Path| std::fs::read_to_string(p).ok()?.trim().parse::<u64>().ok();
    let mut found = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(kind), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (base, limit, used) = match kind {
            "" => (root.to_path_buf(), "memory.max", "memory.current"),
            k if k.split(',').any(|k| k == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        // In a container, the container's own group may be at the root, regardless of the path, so every
        // ancestor is tried.
        let below = path.trim_start_matches('/');
        for dir in Path::new(below).ancestors().map(|p| base.join(p)) {
            let (Some(max), Some(used)) = (number(&dir.join(limit)), number(&dir.join(used))) else {
                continue;
            };
            // The page cache counts as used, but the system reclaims it on demand.
            let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
            let of = |key: &str| {
                stat.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.parse::<u64>().ok())
            };
            let files = of("inactive_file").unwrap_or(0).saturating_add(of("active_file").unwrap_or(0));
            let one = (max.saturating_sub(used.saturating_sub(files)), max);
            found = Some(found.map_or(one, |f| least(f, one)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_reports_memory() {
        let text = "MemTotal:       24684084 kB\nMemFree: 1 kB\nMemAvailable:   24196144 kB\n";
        assert_eq!(machine(text), Some((24196144 << 10, 24684084 << 10)));
        assert_eq!(machine("MemTotal: 5 kB"), None);
        if cfg!(target_os = "linux") {
            let (free, total) = memory().unwrap();
            assert!(0 < free && free <= total);
        }
    }

    #[test]
    fn freed_memory_is_part_of_the_measured_peak() {
        assert_eq!(field("VmHWM:\t 3 kB\nRssAnon:\t      12 kB\n", "RssAnon"), Some(12 << 10));
        let Some(w) = MemorySampler::start(Duration::from_millis(1)) else {
            assert_ne!(std::env::consts::OS, "linux");
            return;
        };
        const BYTES: usize = 96 << 20;
        let v = vec![1u8; BYTES];
        w.read();
        assert!(std::hint::black_box(&v).iter().step_by(4096).all(|b| *b == 1));
        drop(v);
        let p = w.peak();
        assert!(p.bytes >= BYTES as u64, "{p:?}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(w.peak().readings > p.readings, "the thread reads too");
        w.stop();
        let stopped = w.peak().readings;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(w.peak().readings, stopped);
    }

    #[test]
    fn first_touches_are_faults() {
        let Some(before) = page_faults() else {
            assert_ne!(std::env::consts::OS, "linux");
            return;
        };
        let v = vec![1u8; 32 << 20];
        std::hint::black_box(&v);
        // Pages are 4 KiB, or 2 MiB if the system uses transparent huge pages.
        assert!(page_faults().unwrap() >= before + 8);
    }

    #[test]
    fn allocations_above_the_free_memory_are_errors() {
        assert_eq!(zeros(100, "t").unwrap(), [0; 100]);
        let e = zeros(isize::MAX as usize, "a thing").unwrap_err();
        assert_eq!(e.exit_code(), 5);
        assert!(e.to_string().contains("a thing"), "{e}");
        check_available(1, "t").unwrap();
    }

    #[test]
    fn the_smallest_group_on_the_way_counts_in_both_versions() {
        let name = format!("halcyon-groups-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let put = |path: &str, text: &str| {
            let p = dir.as_path().join(path);
            std::fs::create_dir_all(p.parent().unwrap()).unwrap();
            std::fs::write(p, text).unwrap();
        };
        put("a/b/memory.max", "max\n");
        put("a/b/memory.current", "10\n");
        put("a/memory.max", "1000\n");
        put("a/memory.current", "300\n");
        put("a/memory.stat", "anon 5\ninactive_file 100\nactive_file 50\n");
        put("memory/x/memory.limit_in_bytes", "700\n");
        put("memory/x/memory.usage_in_bytes", "600\n");
        assert_eq!(group("0::/a/b\n", dir.as_path()), Some((850, 1000)));
        assert_eq!(group("4:cpu,memory:/x\n0::/a/b\n", dir.as_path()), Some((100, 700)));
        assert_eq!(group("1:cpu:/x\n", dir.as_path()), None);
        assert_eq!(group("nonsense", dir.as_path()), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
