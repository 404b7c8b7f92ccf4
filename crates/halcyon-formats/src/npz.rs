//! NumPy's `.npz`: a zip archive of `.npy` members. Covers the parts of PKWARE APPNOTE 6.3 that NumPy writes:
//! stored and deflated members, zip64 sizes. A stored member is a slice of the file.

use crate::{ConstData, bad, npy};
use bytes::Bytes;
use flate2::Crc;
use halcyon_host as host;
use halcyon_ir::{DType, Error, Result};
use std::io::Read;
use std::path::Path;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const END64_LOCATOR: u32 = 0x0706_4b50;
/// Upper bound of deflate's expansion: 2 bits yield at most 258 bytes, which are 1032 times as many bits.
const MAX_RATIO: u64 = 1032;
/// Bytes unpacked at a time.
const UNPACK_CHUNK: usize = 1 << 18;

/// An open archive.
#[derive(Debug)]
pub struct Npz {
    file: String,
    data: Bytes,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    method: u16,
    crc: u32,
    packed: u64,
    size: u64,
    header: u64,
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    b.get(at..at.checked_add(2)?)?.try_into().ok().map(u16::from_le_bytes)
}
fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    b.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}
fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    b.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_le_bytes)
}

impl Npz {
    /// # Errors
    /// [`Error::Io`], or [`Error::Format`] if the archive's directory is malformed.
    pub fn open(path: &Path) -> Result<Npz> {
        Npz::parse(crate::mmap::open(path)?, &path.display().to_string())
    }

    /// Like [`Npz::open`], for an archive in memory; `file` names it in errors.
    pub fn parse(data: Bytes, file: &str) -> Result<Npz> {
        let members =
            directory(&data).ok_or_else(|| bad(file, "the zip directory is missing or cut short"))?;
        let mut names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        if let Some(w) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(bad(file, format!("two members are called '{}'", w[0])));
        }
        Ok(Npz { file: file.into(), data, members })
    }

    /// Names of the arrays, without `.npy`, in the order of the archive.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|m| m.name.as_str())
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
        npy::parse(self.member(m)?, &self.label(m))
    }

    /// Element type and sizes of one array. Unpacks only the header.
    ///
    /// # Errors
    /// The errors of [`Npz::get`], but damage after the header is not detected.
    pub fn head(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let m = self.find(name)?;
        let packed = self.packed(m)?;
        let mut start = vec![];
        match m.method {
            0 => start.extend_from_slice(&packed[..packed.len().min(npy::MAX_HEADER)]),
            _ => {
                let most = m.size.min(npy::MAX_HEADER as u64);
                let mut unpacked = flate2::read::DeflateDecoder::new(&packed[..]).take(most);
                // A truncated header is rejected below.
                unpacked.read_to_end(&mut start).map_err(|e| self.fail(m, &format!("damaged: {e}")))?;
            }
        }
        npy::head(&start, m.size, &self.label(m))
    }

    fn find(&self, name: &str) -> Result<&Member> {
        self.members.iter().find(|m| m.name == name).ok_or_else(|| {
            let have = self.names().collect::<Vec<_>>().join(", ");
            Error::argument("npz", format!("{} has no array '{name}', only {have}", self.file))
        })
    }

    fn label(&self, m: &Member) -> String {
        format!("{}[{}]", self.file, m.name)
    }

    fn fail(&self, m: &Member, what: &str) -> Error {
        bad(&self.file, format!("member '{}': {what}", m.name))
    }

    /// The packed bytes of a member.
    fn packed(&self, m: &Member) -> Result<Bytes> {
        let fail = |what: &str| self.fail(m, what);
        let local = (|| {
            let at = usize::try_from(m.header).ok()?;
            let head = self.data.get(at..at.checked_add(30)?)?;
            (u32_at(head, 0)? == LOCAL).then_some(())?;
            let flags = u16_at(head, 6)?;
            let skip = 30 + u16_at(head, 26)? as usize + u16_at(head, 28)? as usize;
            let start = at.checked_add(skip)?;
            let end = start.checked_add(usize::try_from(m.packed).ok()?)?;
            (end <= self.data.len()).then(|| (flags, self.data.slice(start..end)))
        })();
        let (flags, packed) = local.ok_or_else(|| fail("its header or data lies outside the file"))?;
        if flags & 1 != 0 {
            return Err(fail("it is encrypted, which is not supported"));
        }
        match m.method {
            0 if m.packed != m.size => {
                Err(fail("it is stored uncompressed, but its packed and unpacked sizes differ"))
            }
            8 if m.size > m.packed.saturating_mul(MAX_RATIO).saturating_add(64) => {
                Err(fail("its declared size is larger than deflate can unpack from its data"))
            }
            0 | 8 => Ok(packed),
            other => Err(fail(&format!("compression method {other} is not supported"))),
        }
    }

    fn member(&self, m: &Member) -> Result<Bytes> {
        let fail = |what: &str| self.fail(m, what);
        let packed = self.packed(m)?;
        let body = if m.method == 0 { packed } else { self.unpack(m, &packed)? };
        if crc(&body) != m.crc {
            return Err(fail("checksum mismatch"));
        }
        Ok(body)
    }
}

impl Npz {
    /// Unpacks a member into memory reserved for its declared size. Pages are committed only as bytes arrive.
    fn unpack(&self, m: &Member, packed: &[u8]) -> Result<Bytes> {
        let size = usize::try_from(m.size).map_err(|_| self.fail(m, "too large to address"))?;
        let mut out = host::reserve(size, &format!("the array {}", self.label(m)))?;
        let mut unpacked = flate2::read::DeflateDecoder::new(packed);
        let mut part = vec![0; UNPACK_CHUNK.min(size.saturating_add(1))];
        loop {
            let n = unpacked.read(&mut part).map_err(|e| self.fail(m, &format!("damaged: {e}")))?;
            if n == 0 {
                break;
            }
            if n > size - out.len() {
                return Err(self.fail(m, "its data unpacks to more than its declared size"));
            }
            out.extend_from_slice(&part[..n]);
        }
        if out.len() != size {
            return Err(self.fail(m, "its data unpacks to less than its declared size"));
        }
        Ok(Bytes::from(out))
    }
}

fn crc(b: &[u8]) -> u32 {
    let mut c = Crc::new();
    c.update(b);
    c.sum()
}

/// Reads the central directory; `None` if any part of it lies outside the file.
fn directory(b: &[u8]) -> Option<Vec<Member>> {
    // The end record is the last 22 bytes, unless an archive comment of up to 65,535 bytes follows it.
    let last = b.len().checked_sub(22)?;
    let end = (last.saturating_sub(65_535)..=last)
        .rev()
        .find(|&at| u32_at(b, at) == Some(END) && u16_at(b, at + 20) == Some((last - at) as u16))?;
    let mut count = u16_at(b, end + 10)? as u64;
    let mut at = u32_at(b, end + 16)? as u64;
    if let Some(locator) = end.checked_sub(20)
        && u32_at(b, locator)? == END64_LOCATOR
    {
        let end64 = usize::try_from(u64_at(b, locator + 8)?).ok()?;
        (u32_at(b, end64)? == END64).then_some(())?;
        count = u64_at(b, end64.checked_add(32)?)?;
        at = u64_at(b, end64.checked_add(48)?)?;
    }
    let mut at = usize::try_from(at).ok()?;
    // Each entry takes at least 46 bytes, so a forged count ends the loop at the end of the file.
    let mut members = Vec::new();
    for _ in 0..count {
        let e = b.get(at..)?;
        (u32_at(e, 0)? == CENTRAL).then_some(())?;
        let (name, extra, comment) =
            (u16_at(e, 28)? as usize, u16_at(e, 30)? as usize, u16_at(e, 32)? as usize);
        let mut m = Member {
            name: std::str::from_utf8(e.get(46..46 + name)?).ok()?.to_string(),
            method: u16_at(e, 10)?,
            crc: u32_at(e, 16)?,
            packed: u32_at(e, 20)? as u64,
            size: u32_at(e, 24)? as u64,
            header: u32_at(e, 42)? as u64,
        };
        zip64(e.get(46 + name..46 + name + extra)?, &mut m)?;
        at = at.checked_add(46 + name + extra + comment)?;
        if let Some(array) = m.name.strip_suffix(".npy") {
            m.name = array.to_string();
            members.push(m);
        }
    }
    Some(members)
}

/// Replaces the sizes that did not fit 32 bits by the sizes in the zip64 extra field.
fn zip64(mut extra: &[u8], m: &mut Member) -> Option<()> {
    while extra.len() >= 4 {
        let (id, len) = (u16_at(extra, 0)?, u16_at(extra, 2)? as usize);
        let body = extra.get(4..4 + len)?;
        if id == 1 {
            let mut at = 0;
            for v in [&mut m.size, &mut m.packed, &mut m.header] {
                if *v == u32::MAX as u64 {
                    *v = u64_at(body, at)?;
                    at += 8;
                }
            }
        }
        extra = &extra[4 + len..];
    }
    Some(())
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
