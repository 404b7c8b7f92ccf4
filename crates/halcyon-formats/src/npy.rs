//! NumPy's `.npy`, format versions 1 to 3 (numpy.lib.format).
//!
//! Reads bool, integers of 8 to 64 bits and floats of 16 to 64 bits, in C and Fortran order and both byte
//! orders. The result is row-major and little endian. If no conversion is needed, it is a slice of the file.
//! Writes version 1, C order, little endian. NumPy has no bf16, no floats of 8 or fewer bits and no integers
//! under 8 bits, so writing such a type is an error; cast to [`stand_in`] first, which is exact. Strings have
//! their own reader, [`parse_text`].

use crate::{ConstData, bad};
use bytes::Bytes;
use halcyon_host as host;
use halcyon_ir::dtype::{Class, ROWS};
use halcyon_ir::{DType, Error, Result};
use std::path::Path;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Reads a file. See [`parse`].
pub fn read(path: &Path) -> Result<ConstData> {
    parse(crate::mmap::open(path)?, &path.display().to_string())
}

/// Reads the content of an `.npy` file; `file` names it in errors.
///
/// # Errors
/// [`Error::Format`] for malformed content, [`Error::Unsupported`] for element types that [`DType`] lacks,
/// [`Error::OutOfMemory`] if there is no memory to convert the byte order or the order of the axes.
pub fn parse(data: Bytes, file: &str) -> Result<ConstData> {
    let (dtype, _) = head(&data, data.len() as u64, file)?;
    let (h, body) = parts(&data, file)?;
    let (_, big) = element_type(&h.descr)?;
    let body = if big && dtype.size() > 1 { swap(&body, dtype.size(), file)? } else { body };
    let body = if h.fortran && h.shape.len() > 1 {
        from_fortran(&body, dtype.size(), &h.shape, file)?
    } else {
        body
    };
    crate::data::from_bytes(dtype, &h.shape, body)
}

/// Number of bytes to read from the start of a file if only the header is needed. Headers that NumPy writes
/// have a few hundred bytes.
pub const MAX_HEADER: usize = 1 << 20;

/// Returns the element type and sizes of an `.npy` file of `bytes` bytes in total. `start` must contain the
/// header. The element data is not read, but its length is checked against the sizes.
///
/// # Errors
/// The errors of [`parse`], except [`Error::OutOfMemory`].
pub fn head(start: &[u8], bytes: u64, file: &str) -> Result<(DType, Vec<usize>)> {
    let (h, end) = header(start, file)?;
    let (dtype, _) = element_type(&h.descr)?;
    let want = crate::data::byte_len(dtype, &h.shape)
        .ok_or_else(|| bad(file, format!("shape {:?} is too large to address", h.shape)))?;
    let holds = bytes.saturating_sub(end as u64);
    if holds != want as u64 {
        return Err(bad(
            file,
            format!("{dtype}{:?} takes {want} bytes, but the file holds {holds}", h.shape),
        ));
    }
    Ok((dtype, h.shape))
}

/// Limit on the number of zero-width strings. These strings take no bytes in the file, so the file's length
/// does not bound their number.
const EMPTY: usize = 1 << 16;

/// Reads the content of an `.npy` file of strings (`U` or `S`). Returns the sizes and the strings in
/// row-major order, without trailing NULs.
///
/// # Errors
/// [`Error::Format`] for malformed content and for more than 65,536 strings of width 0,
/// [`Error::Unsupported`] for other element types, [`Error::OutOfMemory`] if there is no memory to convert
/// the order of the axes.
pub fn parse_text(data: Bytes, file: &str) -> Result<(Vec<usize>, Vec<String>)> {
    let (h, body) = parts(&data, file)?;
    let other = || {
        Error::unsupported(
            format!("reading .npy element type '{}' as strings", h.descr),
            "Save the array as str",
        )
    };
    let (big, wide, n) = match h.descr.as_bytes() {
        [b'<' | b'=' | b'|', b'U', ..] => (false, true, &h.descr[2..]),
        [b'>', b'U', ..] => (true, true, &h.descr[2..]),
        [b'<' | b'>' | b'=' | b'|', b'S', ..] => (false, false, &h.descr[2..]),
        _ => return Err(other()),
    };
    let n: usize = n.parse().map_err(|_| other())?;
    let size = if wide { n.checked_mul(4) } else { Some(n) };
    let count = h.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    let (size, count) = size.zip(count).ok_or_else(|| bad(file, "its sizes are too large to address"))?;
    if count.checked_mul(size) != Some(body.len()) {
        return Err(bad(
            file,
            format!("{count} strings of {size} bytes do not fill the {} bytes after the header", body.len()),
        ));
    }
    if size == 0 {
        return match count <= EMPTY {
            true => Ok((h.shape, vec![String::new(); count])),
            false => Err(bad(file, format!("{count} strings of width 0; at most {EMPTY} are supported"))),
        };
    }
    let body = if h.fortran && h.shape.len() > 1 { from_fortran(&body, size, &h.shape, file)? } else { body };
    let word = |b: &[u8]| -> Option<String> {
        if !wide {
            let end = b.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
            return std::str::from_utf8(&b[..end]).ok().map(str::to_string);
        }
        let code = |c: &[u8; 4]| if big { u32::from_be_bytes(*c) } else { u32::from_le_bytes(*c) };
        let codes: Vec<u32> = b.as_chunks::<4>().0.iter().map(code).collect();
        let end = codes.iter().rposition(|c| *c != 0).map_or(0, |i| i + 1);
        codes[..end].iter().map(|c| char::from_u32(*c)).collect()
    };
    let words =
        body.chunks_exact(size).map(|b| word(b).ok_or_else(|| bad(file, "a string is not valid text")));
    Ok((h.shape, words.collect::<Result<_>>()?))
}

/// The header, and the bytes after it.
fn parts(data: &Bytes, file: &str) -> Result<(Header, Bytes)> {
    let (h, end) = header(data, file)?;
    Ok((h, data.slice(end..)))
}

/// The header and the offset of the byte after it.
fn header(data: &[u8], file: &str) -> Result<(Header, usize)> {
    let short = || bad(file, "the .npy header is cut short");
    if !data.starts_with(MAGIC) {
        return Err(bad(file, "not an .npy file: the magic bytes are missing"));
    }
    let byte = |i: usize| data.get(i).copied().map(usize::from).ok_or_else(short);
    let (start, len) = match byte(6)? {
        1 => (10, byte(8)? | byte(9)? << 8),
        2 | 3 => (12, byte(8)? | byte(9)? << 8 | byte(10)? << 16 | byte(11)? << 24),
        v => return Err(bad(file, format!("unknown .npy format version {v}"))),
    };
    let end = start + len;
    let text = data.get(start..end).ok_or_else(short)?;
    let text = std::str::from_utf8(text).map_err(|_| bad(file, "the .npy header is not text"))?;
    let h = Header::parse(text).map_err(|what| bad(file, format!(".npy header: {what}")))?;
    Ok((h, end))
}

/// The dtype to write instead of `d` so that `.npy` holds every value exactly: `d` itself if NumPy has it,
/// else f32 for floats, i8 and u8 for integers.
pub fn stand_in(d: DType) -> DType {
    match d.class() {
        _ if d.row().npy.is_some() => d,
        Class::Float => DType::F32,
        Class::Int => DType::I8,
        _ => DType::U8,
    }
}

/// Returns the content of the `.npy` file of a tensor.
///
/// # Errors
/// [`Error::Unsupported`] for element types NumPy lacks, [`Error::Shape`] for more dimensions than a header
/// of 64 KiB can list.
pub fn encode(t: &ConstData) -> Result<Vec<u8>> {
    let Some(descr) = t.dtype.row().npy else {
        return Err(Error::unsupported(
            format!("writing {} as .npy: NumPy has no such type", t.dtype),
            format!("Cast it to {} first", stand_in(t.dtype)),
        ));
    };
    let mut shape = t.dims.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", ");
    if t.dims.len() == 1 {
        shape.push(',');
    }
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    // NumPy aligns the data to 64 bytes.
    let total = (MAGIC.len() + 4 + head.len() + 1).next_multiple_of(64);
    head.push_str(&" ".repeat(total - MAGIC.len() - 4 - head.len() - 1));
    head.push('\n');
    let len = u16::try_from(head.len())
        .map_err(|_| Error::shape(".npy", format!("{} dimensions do not fit a header", t.dims.len())))?;
    let mut out = Vec::with_capacity(total + t.bytes().len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[1, 0]);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(t.bytes());
    Ok(out)
}

/// Writes a file. Same errors as [`encode`]; also [`Error::Io`].
pub fn write(path: &Path, t: &ConstData) -> Result<()> {
    crate::output::write(path, &encode(t)?)
}

/// Element type of an array-protocol type string, and whether it is big endian.
fn element_type(descr: &str) -> Result<(DType, bool)> {
    let unsupported = || {
        Error::unsupported(
            format!(".npy element type '{descr}'"),
            "Save the array as bool, int8-64, uint8-64 or float16-64",
        )
    };
    let (order, kind) = match descr.as_bytes().first() {
        Some(b'<' | b'>' | b'|' | b'=') => descr.split_at(1),
        _ => return Err(unsupported()),
    };
    let row = ROWS.iter().find(|r| r.npy.is_some_and(|n| &n[1..] == kind)).ok_or_else(unsupported)?;
    // '=' is the native byte order of the machine.
    Ok((row.dtype, order == ">" || order == "=" && cfg!(target_endian = "big")))
}

fn swap(b: &[u8], size: usize, file: &str) -> Result<Bytes> {
    let mut v = host::reserve(b.len(), file)?;
    v.extend_from_slice(b);
    v.chunks_exact_mut(size).for_each(|e| e.reverse());
    Ok(v.into())
}

/// Converts column-major bytes to row-major.
fn from_fortran(b: &[u8], size: usize, dims: &[usize], file: &str) -> Result<Bytes> {
    let mut out = host::reserve(b.len(), file)?;
    let mut strides = Vec::with_capacity(dims.len());
    let mut s = 1;
    for d in dims {
        strides.push(s);
        s *= d;
    }
    let mut index = vec![0; dims.len()];
    for _ in 0..b.len() / size {
        let at: usize = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        out.extend_from_slice(&b[at * size..][..size]);
        for d in (0..dims.len()).rev() {
            index[d] += 1;
            if index[d] < dims[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Ok(out.into())
}

/// The three keys of the header. The text is a Python dict literal; only these keys are accepted, in any
/// order, with values in the form that NumPy writes.
struct Header {
    descr: String,
    fortran: bool,
    shape: Vec<usize>,
}

struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    fn eat(&mut self, token: &str) -> bool {
        self.0 = self.0.trim_start();
        match self.0.strip_prefix(token) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn need(&mut self, token: &str) -> Result<(), String> {
        match self.eat(token) {
            true => Ok(()),
            false => {
                Err(format!("'{token}' expected before '{}'", self.0.chars().take(20).collect::<String>()))
            }
        }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = if self.eat("'") {
            '\''
        } else {
            self.need("\"")?;
            '"'
        };
        let (s, rest) = self.0.split_once(quote).ok_or("a string does not end")?;
        self.0 = rest;
        Ok(s)
    }

    fn size(&mut self) -> Result<usize, String> {
        self.0 = self.0.trim_start();
        let n = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(n);
        self.0 = rest;
        // Python 2 appended `L` to long integers.
        self.eat("L");
        digits
            .parse()
            .map_err(|_| format!("'{digits}{}' is not a size", rest.chars().take(8).collect::<String>()))
    }
}

impl Header {
    fn parse(text: &str) -> Result<Header, String> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        let mut t = Text(text);
        t.need("{")?;
        while !t.eat("}") {
            let key = t.string()?;
            t.need(":")?;
            match key {
                "descr" => {
                    if t.eat("[") {
                        return Err("structured element types are not supported".into());
                    }
                    descr = Some(t.string()?.to_string());
                }
                "fortran_order" => {
                    let yes = t.eat("True");
                    if !yes {
                        t.need("False")?;
                    }
                    fortran = Some(yes);
                }
                "shape" => {
                    t.need("(")?;
                    let mut dims = Vec::new();
                    while !t.eat(")") {
                        dims.push(t.size()?);
                        if !t.eat(",") {
                            t.need(")")?;
                            break;
                        }
                    }
                    shape = Some(dims);
                }
                other => return Err(format!("unknown key '{other}'")),
            }
            if !t.eat(",") {
                t.need("}")?;
                break;
            }
        }
        if !t.0.trim().is_empty() {
            return Err("text after the dict".into());
        }
        Ok(Header {
            descr: descr.ok_or("'descr' is missing")?,
            fortran: fortran.ok_or("'fortran_order' is missing")?,
            shape: shape.ok_or("'shape' is missing")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::Dims;

    #[test]
    fn strings_of_both_kinds_and_orders() {
        let wide = |big: bool, words: &[&str], n: usize| -> Vec<u8> {
            let code = |c: u32| if big { c.to_be_bytes() } else { c.to_le_bytes() };
            let pad = |w: &&str| {
                let mut v: Vec<u32> = w.chars().map(u32::from).collect();
                v.resize(n, 0);
                v
            };
            words.iter().flat_map(pad).flat_map(code).collect()
        };
        let words = ["a", "", "éß", "x"];
        let head =
            |d: &str, f: &str| format!("{{'descr': '{d}', 'fortran_order': {f}, 'shape': (2, 2), }}\n");
        let read = |h: String, b: &[u8]| parse_text(file(1, &h, b), "f");
        for (d, big) in [("<U2", false), (">U2", true)] {
            let (dims, got) = read(head(d, "False"), &wide(big, &words, 2)).unwrap();
            assert_eq!((dims, got), (vec![2, 2], words.map(String::from).to_vec()));
        }
        let (_, got) = read(head("<U2", "True"), &wide(false, &words, 2)).unwrap();
        assert_eq!(got, ["a", "éß", "", "x"]);
        let (_, got) = read(head("|S2", "False"), b"ab\0\0c\0\xc3\xa9").unwrap();
        assert_eq!(got, ["ab", "", "c", "é"]);
        for (h, b) in [
            ("<U2", &[0u8; 31][..]),
            ("|S1", b"abc\xff"),
            ("<U1", &[0, 0, 0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ] {
            assert!(matches!(read(head(h, "False"), b), Err(Error::Format { .. })), "{h}");
        }
        assert!(matches!(read(head("<f4", "False"), &[0; 16]), Err(Error::Unsupported { .. })));
        let many = "{'descr': '<U0', 'fortran_order': False, 'shape': (99999999999,), }\n";
        assert!(read(many.into(), b"").is_err());
        let few = many.replace("99999999999", "65537");
        let e = read(few, b"").unwrap_err().to_string();
        assert!(e.contains("65537 strings of width 0"), "{e}");
        assert!(
            read(many.replace("99999999999", "4294967296, 4294967296").replace("U0", "U9"), b"").is_err()
        );
    }

    fn file(version: u8, head: &str, body: &[u8]) -> Bytes {
        let mut v = MAGIC.to_vec();
        v.extend([version, 0]);
        match version {
            1 => v.extend((head.len() as u16).to_le_bytes()),
            _ => v.extend((head.len() as u32).to_le_bytes()),
        }
        v.extend(head.as_bytes());
        v.extend(body);
        v.into()
    }

    fn head(descr: &str, fortran: &str, shape: &str) -> String {
        format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n")
    }

    #[test]
    fn every_numpy_type_round_trips() {
        for d in DType::all() {
            for dims in [vec![], vec![3], vec![2, 3], vec![0, 4]] {
                let n = dims.iter().product::<usize>();
                let t = crate::data::from_scalars(d, &dims, (0..n).map(|i| (i as f64 - 1.0).into())).unwrap();
                match encode(&t) {
                    Ok(b) => {
                        assert_eq!(parse(b.clone().into(), "t").unwrap(), t);
                        assert_eq!((b.len() - t.bytes().len()) % 64, 0);
                    }
                    Err(Error::Unsupported { .. }) => {
                        assert!(d.row().npy.is_none(), "{d}");
                        let wide = crate::data::cast(&t, stand_in(d)).unwrap();
                        let back = parse(encode(&wide).unwrap().into(), "t").unwrap();
                        assert_eq!(crate::data::cast(&back, d).unwrap(), t, "{d}");
                    }
                    Err(e) => panic!("{e}"),
                }
            }
        }
    }

    #[test]
    fn versions_orders_and_endianness() {
        // Column-major [[0, 1, 2], [3, 4, 5]].
        let body: Vec<u8> = [0i16, 3, 1, 4, 2, 5].iter().flat_map(|v| v.to_be_bytes()).collect();
        for version in [1, 2, 3] {
            let t = parse(file(version, &head(">i2", "True", "(2, 3)"), &body), "t").unwrap();
            assert_eq!(t.to_vec::<i16>(), [0, 1, 2, 3, 4, 5]);
        }
        let t = parse(file(1, "{\"shape\": (1,), 'fortran_order':False,'descr':'|u1'}", &[7]), "t").unwrap();
        assert_eq!((t.dims.as_slice(), t.to_vec::<u8>()), (&[1][..], vec![7]));
        assert_eq!(parse(file(1, &head("<f8", "False", "()"), &[0; 8]), "t").unwrap().dims, Dims::new());
    }

    #[test]
    fn row_major_little_endian_data_is_not_copied() {
        let f = file(1, &head("<f4", "False", "(2,)"), &[0; 8]);
        let t = parse(f.clone(), "t").unwrap();
        assert_eq!(t.bytes().as_ptr(), f[f.len() - 8..].as_ptr());
    }

    #[test]
    fn attacks_are_typed_errors() {
        let ok = file(1, &head("<f4", "False", "(2,)"), &[0; 8]);
        for n in 0..ok.len() {
            assert!(matches!(parse(ok.slice(..n), "t"), Err(Error::Format { .. })), "cut at {n}");
        }
        let bad_heads = [
            head("<f4", "False", "(18446744073709551615, 2)"),
            head("<f4", "False", "(4611686018427387904,)"),
            head("<f4", "False", "(99999999999999999999999,)"),
            head("<f4", "False", "(0, 4611686018427387904, 64)"),
            head("<f4", "False", "(-2,)"),
            head("<f4", "False", "(3,)"),
            head("<f4", "False", "(2"),
            head("<f4", "Maybe", "(2,)"),
            head("<f4", "False", "(2,)") + "x",
            "{'descr': '<f4', 'shape': (2,)}".into(),
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}".into(),
            "{'descr': '<f4".into(),
            "[".repeat(60_000),
            String::new(),
        ];
        for h in bad_heads {
            assert!(matches!(parse(file(1, &h, &[0; 8]), "t"), Err(Error::Format { .. })), "{h}");
        }
        for d in ["<f16", "<c8", "|O", "<U4", "|V2", "", "f4"] {
            assert!(
                matches!(
                    parse(file(1, &head(d, "False", "(2,)"), &[0; 8]), "t"),
                    Err(Error::Unsupported { .. })
                ),
                "{d}"
            );
        }
        // A header length past the end of the file.
        let mut v = MAGIC.to_vec();
        v.extend([2, 0, 0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(parse(v.into(), "t"), Err(Error::Format { .. })));
    }

    proptest::proptest! {
        #[test]
        fn random_bytes_never_panic(v in proptest::collection::vec(0u8.., 0..200)) {
            let mut f = MAGIC.to_vec();
            f.extend(v);
            let _ = parse(f.into(), "t");
        }
    }
}
