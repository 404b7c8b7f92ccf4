//! NumPy's `.npz`: a zip archive of `.npy` members (see `zip.rs`).

use crate::zip::{Archive, CENTRAL, END, LOCAL, Member, crc};
use crate::{ConstData, npy};
use bytes::Bytes;
use halcyon_ir::{DType, Error, Result};
use std::path::Path;

/// An open archive.
#[derive(Debug)]
pub struct Npz(Archive);

impl Npz {
    /// # Errors
    /// [`Error::Io`], or [`Error::Format`] if the archive's directory is malformed.
    pub fn open(path: &Path) -> Result<Npz> {
        Npz::parse(crate::mmap::open(path)?, &path.display().to_string())
    }

    /// Like [`Npz::open`], for an archive in memory; `file` names it in errors.
    pub fn parse(data: Bytes, file: &str) -> Result<Npz> {
        Archive::parse(data, file, |name| name.strip_suffix(".npy")).map(Npz)
    }

    /// Names of the arrays, without `.npy`, in the order of the archive.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.members.iter().map(|m| m.name.as_str())
    }

    /// Reads one array.
    ///
    /// # Errors
    /// [`Error::Argument`] if no array has this name, [`Error::Format`] for a member that is damaged or
    /// packed in an unsupported way, [`Error::OutOfMemory`] if its memory cannot be reserved, otherwise the
    /// errors of [`npy::parse`].
    pub fn get(&self, name: &str) -> Result<ConstData> {
        let m = self.find(name)?;
        // Checks the header against the size in the directory before unpacking the member.
        self.head(name)?;
        npy::parse(self.0.member(m)?, &self.label(m))
    }

    /// Element type and sizes of one array. Unpacks only the header.
    ///
    /// # Errors
    /// The errors of [`Npz::get`], but damage after the header is not detected.
    pub fn head(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let m = self.find(name)?;
        npy::head(&self.0.start(m, npy::MAX_HEADER)?, m.size, &self.label(m))
    }

    fn find(&self, name: &str) -> Result<&Member> {
        self.0.members.iter().find(|m| m.name == name).ok_or_else(|| {
            let have = self.names().collect::<Vec<_>>().join(", ");
            Error::argument("npz", format!("{} has no array '{name}', only {have}", self.0.file))
        })
    }

    fn label(&self, m: &Member) -> String {
        format!("{}[{}]", self.0.file, m.name)
    }
}

/// Writes arrays as an archive of stored members, as `numpy.savez` does. The errors are those of
/// [`npy::write`], and [`Error::Unsupported`] for a member or archive above 4 GiB, a name above 64 KiB or
/// more than 65,535 arrays.
pub fn write(path: &Path, arrays: &[(&str, &ConstData)]) -> Result<()> {
    crate::output::write(path, &encode(arrays)?)
}

/// Encodes the archive that [`write()`] writes.
pub fn encode(arrays: &[(&str, &ConstData)]) -> Result<Vec<u8>> {
    let big = || Error::unsupported("an .npz archive past 4 GiB", "Write each array as its own .npy");
    let mut out = Vec::new();
    let mut central = Vec::new();
    for (name, t) in arrays {
        let body = npy::encode(t)?;
        let name = format!("{name}.npy");
        let header = u32::try_from(out.len()).map_err(|_| big())?;
        let size = u32::try_from(body.len()).map_err(|_| big())?;
        // The fields that both headers share: version, flags (UTF-8 name), method, time, date, checksum,
        // sizes, name length, extra length.
        let mut common = Vec::new();
        common.extend(20u16.to_le_bytes());
        common.extend(0x0800u16.to_le_bytes());
        common.extend(0u16.to_le_bytes());
        // MS-DOS time 00:00, date 1980-01-01: a fixed time makes equal content give equal files.
        common.extend([0, 0, 0x21, 0]);
        common.extend(crc(&body).to_le_bytes());
        common.extend(size.to_le_bytes());
        common.extend(size.to_le_bytes());
        common.extend(u16::try_from(name.len()).map_err(|_| big())?.to_le_bytes());
        common.extend(0u16.to_le_bytes());
        out.extend(LOCAL.to_le_bytes());
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(body);
        central.extend(CENTRAL.to_le_bytes());
        central.extend(20u16.to_le_bytes());
        central.extend(&common);
        // Comment length, disk, internal and external attributes.
        central.extend([0; 10]);
        central.extend(header.to_le_bytes());
        central.extend(name.as_bytes());
    }
    let at = u32::try_from(out.len()).map_err(|_| big())?;
    let len = u32::try_from(central.len()).map_err(|_| big())?;
    let count = u16::try_from(arrays.len()).map_err(|_| big())?;
    out.extend(&central);
    out.extend(END.to_le_bytes());
    out.extend([0; 4]);
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(len.to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0; 2]);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn sample() -> (ConstData, ConstData) {
        let a = ConstData::from_slice(&[2, 2], &[1f32, 2.0, 3.0, 4.0]).unwrap();
        let b = ConstData::from_slice(&[1000], &[7i64; 1000]).unwrap();
        (a, b)
    }

    /// An archive with the array `t` as the deflated member `b`.
    fn deflated(t: &ConstData) -> Vec<u8> {
        let body = npy::encode(t).unwrap();
        let mut z = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
        z.write_all(&body).unwrap();
        let packed = z.finish().unwrap();
        let stored = encode(&[("b", t)]).unwrap();
        let head = 30 + "b.npy".len();
        let mut out = stored[..head].to_vec();
        out[8] = 8;
        out[18..22].copy_from_slice(&(packed.len() as u32).to_le_bytes());
        out.extend(&packed);
        let at = out.len() as u32;
        let mut tail = stored[head + body.len()..].to_vec();
        tail[10] = 8;
        tail[20..24].copy_from_slice(&(packed.len() as u32).to_le_bytes());
        let n = tail.len();
        tail[n - 6..n - 2].copy_from_slice(&at.to_le_bytes());
        out.extend(tail);
        out
    }

    #[test]
    fn stored_round_trip_without_a_copy() {
        let (a, b) = sample();
        let f = Bytes::from(encode(&[("a", &a), ("b", &b)]).unwrap());
        let z = Npz::parse(f.clone(), "t").unwrap();
        assert_eq!(z.names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(z.get("a").unwrap(), a);
        assert_eq!(z.get("b").unwrap(), b);
        assert!(f.as_ptr_range().contains(&z.get("b").unwrap().bytes().as_ptr()));
        assert!(matches!(z.get("c"), Err(Error::Argument { .. })));
        assert_eq!(Npz::parse(encode(&[]).unwrap().into(), "t").unwrap().names().count(), 0);
    }

    #[test]
    fn deflated_members_are_read() {
        let (_, b) = sample();
        assert_eq!(Npz::parse(deflated(&b).into(), "t").unwrap().get("b").unwrap(), b);
    }

    #[test]
    fn attacks_are_typed_errors() {
        let (a, b) = sample();
        let ok = Bytes::from(encode(&[("a", &a)]).unwrap());
        for n in 0..ok.len() {
            assert!(Npz::parse(ok.slice(..n), "t").is_err(), "cut at {n}");
        }
        let refused = |v: Vec<u8>, name: &str| {
            let r = Npz::parse(v.into(), "t").and_then(|z| z.get(name));
            assert!(matches!(r, Err(Error::Format { .. })), "{r:?}");
        };
        let central = ok.windows(4).position(|w| w == CENTRAL.to_le_bytes()).unwrap();
        let edit = |at: usize, with: &[u8]| {
            let mut v = ok.to_vec();
            v[at..at + with.len()].copy_from_slice(with);
            v
        };
        // Sizes and offsets past the end, a wrong checksum, an unknown method, an encrypted member.
        refused(edit(central + 20, &[0xfe; 8]), "a");
        refused(edit(central + 42, &[0xfe; 4]), "a");
        refused(edit(central + 16, &[1, 2, 3, 4]), "a");
        refused(edit(central + 10, &[99, 0]), "a");
        refused(edit(6, &[1]), "a");
        // A directory outside the file, and more entries than it has.
        refused(edit(ok.len() - 6, &[0xff; 4]), "a");
        refused(edit(ok.len() - 12, &[0xff; 2]), "a");
        // A deflated member that claims too much, and one that holds more than it claims.
        let z = deflated(&b);
        let at = z.windows(4).position(|w| w == CENTRAL.to_le_bytes()).unwrap();
        let mut bomb = z.clone();
        bomb[at + 24..at + 28].copy_from_slice(&0xf000_0000u32.to_le_bytes());
        refused(bomb, "b");
        let mut long = z.clone();
        long[at + 24..at + 28].copy_from_slice(&100u32.to_le_bytes());
        refused(long, "b");
        // Two members of one name.
        assert!(Npz::parse(encode(&[("a", &a), ("a", &a)]).unwrap().into(), "t").is_err());
    }

    proptest::proptest! {
        #[test]
        fn flipped_bytes_never_panic(at in 0usize..400, with in 0u8..) {
            let (a, b) = sample();
            let mut v = encode(&[("a", &a)]).unwrap();
            let n = v.len();
            v[at % n] = with;
            let _ = Npz::parse(v.into(), "t").and_then(|z| z.get("a"));
            let mut v = deflated(&b);
            let n = v.len();
            v[at % n] = with;
            let _ = Npz::parse(v.into(), "t").and_then(|z| z.get("b"));
        }
    }
}
