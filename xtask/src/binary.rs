//! Checks the release binary's size and its linked libraries. `bench start` measures its start-up time.

use std::path::Path;

/// Maximum size in bytes of the stripped binary.
const SIZE: u64 = 44_000_000;
/// Libraries that an ELF binary may link: the parts of the C library, the loader and the unwinder. Everything
/// else is loaded at run time.
const LIBRARIES: &[&str] =
    &["libc.", "libm.", "libdl.", "libpthread.", "librt.", "libgcc_s.", "ld-linux", "ld-musl"];

/// Describes the binary's figures in one line.
///
/// # Errors
/// A figure that is over its limit or could not be determined.
pub(crate) fn check(binary: &Path) -> Result<String, String> {
    let file = std::fs::read(binary).map_err(|e| format!("{}: {e}", binary.display()))?;
    let mb = |n: u64| format!("{:.1} MB", n as f64 / 1e6);
    let size = file.len() as u64;
    let mut out = mb(size);
    if size >= SIZE {
        return Err(format!("the binary has {}, but only {} are allowed", mb(size), mb(SIZE)));
    }
    if cfg!(target_os = "linux") {
        let elf = Elf::read(&file).ok_or("the binary is not a 64-bit ELF file")?;
        if elf.symbols {
            return Err("the binary is not stripped".into());
        }
        let of = |n: &str| LIBRARIES.iter().any(|l| n.starts_with(l));
        if let Some(other) = elf.needed.iter().find(|n| !of(n)) {
            return Err(format!("the binary is linked with {other}"));
        }
        out += &format!(", linked with {}", elf.needed.join(" "));
    }
    Ok(out)
}

/// The relevant parts of a 64-bit little-endian ELF file.
#[derive(Debug, PartialEq)]
struct Elf {
    /// Libraries loaded by the dynamic loader.
    needed: Vec<String>,
    /// Whether there is a symbol table that the loader does not need.
    symbols: bool,
}

impl Elf {
    fn read(file: &[u8]) -> Option<Elf> {
        let bytes = |at: usize, n: usize| file.get(at..at.checked_add(n)?);
        let number = |at: usize, n: usize| -> Option<usize> {
            let v = bytes(at, n)?.iter().rev().fold(0u64, |v, b| v << 8 | *b as u64);
            usize::try_from(v).ok()
        };
        if bytes(0, 6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let (table, size, many) = (number(0x28, 8)?, number(0x3A, 2)?, number(0x3C, 2)?);
        // For each section: type, offset, size, and the linked section.
        let section = |i: usize| -> Option<[usize; 4]> {
            let at = table.checked_add(i.checked_mul(size)?)?;
            Some([number(at + 4, 4)?, number(at + 0x18, 8)?, number(at + 0x20, 8)?, number(at + 0x28, 4)?])
        };
        let mut elf = Elf { needed: vec![], symbols: false };
        for i in 0..many {
            let [kind, at, bytes, link] = section(i)?;
            elf.symbols |= kind == 2;
            if kind != 6 {
                continue;
            }
            let names = section(link)?[1];
            for entry in (at..at.checked_add(bytes)?).step_by(16) {
                if number(entry, 8)? == 1 {
                    let name = file.get(names.checked_add(number(entry + 8, 8)?)?..)?;
                    let end = name.iter().position(|b| *b == 0)?;
                    elf.needed.push(String::from_utf8_lossy(&name[..end]).into_owned());
                }
            }
        }
        Some(elf)
    }
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64"))]
mod tests {
    use super::*;

    #[test]
    fn an_elf_file_lists_its_libraries() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let elf = Elf::read(&own).unwrap();
        assert!(elf.needed.iter().any(|n| n.starts_with("libc.")) && elf.symbols, "{elf:?}");
        assert_eq!(Elf::read(b"no ELF"), None);
        assert_eq!(Elf::read(&own[..own.len() / 2]), None, "its table of sections lies at the end");
    }
}
