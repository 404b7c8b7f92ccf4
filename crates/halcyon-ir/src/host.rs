//! Memory of the machine that the process may still take.
//!
//! A system that hands out more memory than it has ends the process when the memory is touched, so whoever is about to take
//! much asks here first.

use crate::error::{Error, Result};
use std::path::Path;

/// `(free, total)` bytes: of the machine, or of the control group that the process runs in where that has less. `None` where the
/// system does not tell.
pub fn memory() -> Option<(u64, u64)> {
    let machine = machine(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group(&groups, Path::new("/sys/fs/cgroup")).map_or(machine, |g| least(machine, g)))
}

/// Amounts that are not worth a look at the system.
const SMALL: u64 = 64 << 20;

/// Whether the process may take so many bytes more, for `what`.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn room(bytes: u64, what: &str) -> Result<()> {
    match memory() {
        Some((free, total)) if bytes > SMALL && bytes > free => Err(none(bytes, what, free, total)),
        _ => Ok(()),
    }
}

fn none(bytes: u64, what: &str, free: u64, total: u64) -> Error {
    Error::OutOfMemory {
        device: "the host".into(),
        what: what.into(),
        requested: bytes,
        free,
        total,
        next: "Use smaller inputs".into(),
    }
}

/// Zeroed memory, or an error where there is none. `what` says what for.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn zeros(bytes: usize, what: &str) -> Result<Vec<u8>> {
    if bytes as u64 > SMALL {
        room(bytes as u64, what)?;
    }
    // Asked for once so that a refusal is an error, and then as zero pages, which cost nothing until they are written.
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| none(bytes as u64, what, 0, 0))?;
    Ok(vec![0; bytes])
}

fn least(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0.min(b.0), a.1.min(b.1))
}

fn machine(meminfo: &str) -> Option<(u64, u64)> {
    let of = |key: &str| {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((of("MemAvailable")?, of("MemTotal")?))
}

/// The smallest limit on the way from the process's group to the root, in either version of the interface (cgroups(7)).
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
        // A container may see its own group at the root, whatever the path says.
        let below = path.trim_start_matches('/');
        for dir in Path::new(below).ancestors().map(|p| base.join(p)) {
            let (Some(max), Some(used)) = (number(&dir.join(limit)), number(&dir.join(used))) else {
                continue;
            };
            // Files that were read count as used until someone needs the room.
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
    fn the_machine_tells() {
        let text = "MemTotal:       24684084 kB\nMemFree: 1 kB\nMemAvailable:   24196144 kB\n";
        assert_eq!(machine(text), Some((24196144 << 10, 24684084 << 10)));
        assert_eq!(machine("MemTotal: 5 kB"), None);
        if cfg!(target_os = "linux") {
            let (free, total) = memory().unwrap();
            assert!(0 < free && free <= total);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(zeros(100, "t").unwrap(), [0; 100]);
        let e = zeros(isize::MAX as usize, "a thing").unwrap_err();
        assert_eq!(e.exit_code(), 5);
        assert!(e.to_string().contains("a thing"), "{e}");
        room(1, "t").unwrap();
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
