//! Reads the part of the zip format (PKWARE APPNOTE 6.3) that NumPy and PyTorch write: stored and deflated
//! members, and zip64 sizes. A stored member is a slice of the file.

use crate::bad;
use bytes::Bytes;
use flate2::Crc;
use halcyon_host as host;
use halcyon_ir::{Error, Result};
use std::io::Read;

pub(crate) const LOCAL: u32 = 0x0403_4b50;
pub(crate) const CENTRAL: u32 = 0x0201_4b50;
pub(crate) const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const END64_LOCATOR: u32 = 0x0706_4b50;
/// Upper bound of deflate's expansion: 2 compressed bits yield at most 258 bytes, so the factor is 1032.
const MAX_RATIO: u64 = 1032;
/// Bytes unpacked at a time.
const UNPACK_CHUNK: usize = 1 << 18;

/// An open archive.
#[derive(Debug)]
pub(crate) struct Archive {
    pub(crate) file: String,
    data: Bytes,
    pub(crate) members: Vec<Member>,
}

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    method: u16,
    pub(crate) crc: u32,
    packed: u64,
    pub(crate) size: u64,
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

impl Archive {
    /// Reads the directory of an archive in memory; `file` names it in errors. Members that `name` maps to
    /// `None` are left out, the others get the name that it returns.
    ///
    /// # Errors
    /// [`Error::Format`] if the directory is malformed or has a name twice.
    pub(crate) fn parse(data: Bytes, file: &str, name: fn(&str) -> Option<&str>) -> Result<Archive> {
        let all = directory(&data).ok_or_else(|| bad(file, "the zip directory is missing or cut short"))?;
        let named = |m: Member| Some(Member { name: name(&m.name)?.to_string(), ..m });
        let members: Vec<Member> = all.into_iter().filter_map(named).collect();
        let mut names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        if let Some(w) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(bad(file, format!("two members are called '{}'", w[0])));
        }
        Ok(Archive { file: file.into(), data, members })
    }

    pub(crate) fn fail(&self, m: &Member, what: &str) -> Error {
        bad(&self.file, format!("member '{}': {what}", m.name))
    }

    /// The first bytes of a member, at most `most`. Damage after them is not detected.
    pub(crate) fn start(&self, m: &Member, most: usize) -> Result<Vec<u8>> {
        let packed = self.packed(m)?;
        let mut start = vec![];
        match m.method {
            0 => start.extend_from_slice(&packed[..packed.len().min(most)]),
            _ => {
                let most = m.size.min(most as u64);
                let mut unpacked = flate2::read::DeflateDecoder::new(&packed[..]).take(most);
                // The caller rejects a start that is cut short.
                unpacked.read_to_end(&mut start).map_err(|e| self.fail(m, &format!("damaged: {e}")))?;
            }
        }
        Ok(start)
    }

    /// The packed bytes of a member.
    pub(crate) fn packed(&self, m: &Member) -> Result<Bytes> {
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

    /// The unpacked bytes of a member. Fails if they do not have the member's checksum.
    pub(crate) fn member(&self, m: &Member) -> Result<Bytes> {
        let body = self.body(m)?;
        match crc(&body) == m.crc {
            true => Ok(body),
            false => Err(self.fail(m, "checksum mismatch")),
        }
    }

    /// The unpacked bytes of a member. The checksum is not compared.
    pub(crate) fn body(&self, m: &Member) -> Result<Bytes> {
        let packed = self.packed(m)?;
        if m.method == 0 { Ok(packed) } else { self.unpack(m, &packed) }
    }

    /// Unpacks a member into memory reserved for its declared size. Pages are committed only as bytes arrive.
    fn unpack(&self, m: &Member, packed: &[u8]) -> Result<Bytes> {
        let size = usize::try_from(m.size).map_err(|_| self.fail(m, "too large to address"))?;
        let mut out = host::reserve(size, &format!("{}[{}]", self.file, m.name))?;
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

pub(crate) fn crc(b: &[u8]) -> u32 {
    let mut c = Crc::new();
    c.update(b);
    c.sum()
}

/// Reads the central directory; `None` if any part of it is malformed or lies outside the file.
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
    // Each entry takes at least 46 bytes, so the loop stops at the end of the file even if the count is
    // forged.
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
        members.push(m);
    }
    Some(members)
}

/// Replaces the sizes and the offset that did not fit 32 bits by those in the zip64 extra field.
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
