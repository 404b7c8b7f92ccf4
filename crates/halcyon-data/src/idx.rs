//! IDX files, the format of MNIST and similar datasets (<http://yann.lecun.com/exdb/mnist>). A file has two
//! zero bytes, a byte for the type, a byte for the number of axes, the size of each axis as a big-endian u32,
//! and then the elements, big-endian and row-major. Files may be compressed by gzip.

use crate::bad;
use crate::dataset::{Column, Dataset, DatasetExt};
use crate::{Arrays, ConstData, DType, Error, Result};
use bytes::Bytes;
use halcyon_formats::{data, mmap};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Upper bound of deflate's expansion: 2 compressed bits yield at most 258 bytes, so the factor is 1032.
const MAX_RATIO: usize = 1032;
/// The number of bytes that are unpacked at a time.
const UNPACK_CHUNK: usize = 1 << 18;
/// The number of rows of MNIST's test files that are used for training if there are no other files.
const TRAINED: usize = 8000;
/// The first two bytes of a gzip file (RFC 1952).
pub(crate) const GZIP: &[u8] = &[0x1f, 0x8b];

/// The two parts of MNIST.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`: 60,000 rows.
    Train,
    /// `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`: 10,000 rows.
    Test,
}

/// MNIST's images and labels, ready for training: `image` is f32 `[1, 28, 28]` from 0 to 1, `label` is i32.
/// `dir` has the files under their usual names, with or without `.gz`. The images are kept in the type of the
/// file (u8); a batch converts its rows.
///
/// # Errors
/// Those of [`folder`].
pub fn mnist(dir: &Path, split: Split) -> Result<Arc<dyn Dataset>> {
    ready(folder(dir, split)?, None)
}

/// Like [`mnist`], but accepts a folder that has only the test files. Then the first 8,000 rows of these
/// files are [`Split::Train`], and the others are [`Split::Test`].
///
/// # Errors
/// Those of [`folder`].
pub fn mnist_part(dir: &Path, split: Split) -> Result<Arc<dyn Dataset>> {
    if find(dir, "train-images", 3).is_ok() {
        return mnist(dir, split);
    }
    let all = mnist(dir, Split::Test)?;
    let (n, first) = (all.len(), all.len().min(TRAINED));
    let rows = match split {
        Split::Train => 0..first,
        Split::Test => first..n,
    };
    Ok(all.subset(rows)?.share())
}

/// Converts images to f32 and divides them by `divisor`. The default divisor is 255 for images in u8, and 1
/// for other images. Images `[h, w]` become `[1, h, w]`. Labels become i32.
pub(crate) fn ready(raw: Arrays, divisor: Option<f32>) -> Result<Arc<dyn Dataset>> {
    let Column { dtype, dims, .. } = raw.columns()[0].clone();
    let divisor = divisor.unwrap_or(if dtype == DType::U8 { 255.0 } else { 1.0 });
    let mut data = raw.scale("image", divisor)?.cast("label", DType::I32)?.share();
    if let [h, w] = dims[..] {
        data = data.reshape("image", &[1, h, w])?.share();
    }
    Ok(data)
}

/// The columns `image` and `label` of a folder with MNIST's file names. The dtypes and shapes are those of
/// the files.
///
/// # Errors
/// [`Error::Io`] if a file is missing; those of [`open`].
pub fn folder(dir: &Path, split: Split) -> Result<Arrays> {
    let part = match split {
        Split::Train => "train",
        Split::Test => "t10k",
    };
    open(&find(dir, &format!("{part}-images"), 3)?, &find(dir, &format!("{part}-labels"), 1)?)
}

/// The path of the file `{start}-idx{axes}-ubyte` or `{start}.idx{axes}-ubyte`, each with or without `.gz`.
fn find(dir: &Path, start: &str, axes: usize) -> Result<PathBuf> {
    let names = ["-", "."].map(|dot| format!("{start}{dot}idx{axes}-ubyte"));
    let paths = names.iter().flat_map(|n| [dir.join(n), dir.join(format!("{n}.gz"))]);
    paths.into_iter().find(|p| p.is_file()).ok_or_else(|| Error::Io {
        path: dir.display().to_string(),
        what: format!("there is no file {0} or {0}.gz in this folder", names[0]),
    })
}

/// The columns `image` and `label` of two files. Labels have one axis and are integers.
///
/// # Errors
/// Those of [`read`]; [`Error::Format`] if the labels are not class numbers, or the numbers of labels and
/// images differ.
pub fn open(images: &Path, labels: &Path) -> Result<Arrays> {
    pair(read(images)?, read(labels)?, &labels.display().to_string())
}

/// Makes a dataset of images and labels. `file` is the name of the labels' file in errors.
pub(crate) fn pair(images: ConstData, labels: ConstData, file: &str) -> Result<Arrays> {
    if labels.dims.len() != 1 || !labels.dtype.is_int() {
        return Err(bad(
            file,
            format!("labels are integers with one axis, but the file has {}", kind(&labels)),
        ));
    }
    if images.dims.first() != labels.dims.first() {
        let what = format!("the labels are {}, but the images are {}", kind(&labels), kind(&images));
        return Err(bad(file, what));
    }
    Arrays::new([("image", images), ("label", labels)])
}

fn kind(x: &ConstData) -> String {
    format!("{}{:?}", x.dtype, x.dims.as_slice())
}

/// Reads a file. See [`parse`].
///
/// # Errors
/// [`Error::Io`], and those of [`parse`].
pub fn read(path: &Path) -> Result<ConstData> {
    parse(mmap::open(path)?, &path.display().to_string())
}

/// Reads the content of a file, which may be compressed by gzip. `file` is the name of the file in errors.
/// Uncompressed content is copied only if its elements have more than one byte, to change the byte order.
///
/// # Errors
/// [`Error::Format`] if the content is damaged, or its length does not match the sizes in its header;
/// [`Error::OutOfMemory`].
pub fn parse(content: Bytes, file: &str) -> Result<ConstData> {
    let content = if content.starts_with(GZIP) { unpack(&content, file)? } else { content };
    let header = Header::parse(&content, file)?;
    let total = header.total(file)?;
    if content.len() != total {
        let what = format!("{} takes {total} bytes, but the file has {}", header.kind(), content.len());
        return Err(bad(file, what));
    }
    let size = header.dtype.size();
    let mut body = content.slice(header.bytes..);
    if size > 1 {
        let mut v = halcyon_host::reserve(body.len(), file)?;
        v.extend_from_slice(&body);
        v.chunks_exact_mut(size).for_each(<[u8]>::reverse);
        body = v.into();
    }
    data::from_bytes(header.dtype, &header.dims, body)
}

struct Header {
    dtype: DType,
    dims: Vec<usize>,
    /// Length of the header.
    bytes: usize,
}

impl Header {
    fn parse(start: &[u8], file: &str) -> Result<Header> {
        let Some(&[zero, zero2, code, axes]) = start.first_chunk::<4>() else {
            return Err(bad(file, "the IDX header is cut short"));
        };
        let dtype = match (zero, zero2, code) {
            (0, 0, 0x08) => DType::U8,
            (0, 0, 0x09) => DType::I8,
            (0, 0, 0x0b) => DType::I16,
            (0, 0, 0x0c) => DType::I32,
            (0, 0, 0x0d) => DType::F32,
            (0, 0, 0x0e) => DType::F64,
            (0, 0, code) => return Err(bad(file, format!("IDX has no element type {code:#04x}"))),
            _ => return Err(bad(file, "not an IDX file: it does not begin with two zero bytes")),
        };
        let bytes = 4 + 4 * usize::from(axes);
        let sizes = start.get(4..bytes).ok_or_else(|| bad(file, "the IDX header is cut short"))?;
        // A u32 fits into a usize on every platform that Halcyon supports.
        let dims: Vec<usize> =
            sizes.as_chunks::<4>().0.iter().map(|b| u32::from_be_bytes(*b) as usize).collect();
        if dims.is_empty() {
            return Err(bad(file, "the IDX header has no axes"));
        }
        Ok(Header { dtype, dims, bytes })
    }

    fn kind(&self) -> String {
        format!("{}{:?}", self.dtype, self.dims)
    }

    /// Length of the whole file in bytes.
    fn total(&self, file: &str) -> Result<usize> {
        data::byte_len(self.dtype, &self.dims)
            .and_then(|n| n.checked_add(self.bytes))
            .ok_or_else(|| bad(file, format!("{} is too large to address", self.kind())))
    }
}

/// Unpacks a gzip file of one or more members: at most the bytes that the IDX header claims. A claim that
/// deflate cannot reach from a file of this length is an error, so a small file cannot fill the memory.
fn unpack(packed: &[u8], file: &str) -> Result<Bytes> {
    let mut from = flate2::bufread::MultiGzDecoder::new(packed);
    let damaged = |e: std::io::Error| bad(file, format!("damaged gzip data: {e}"));
    let mut start = vec![];
    from.by_ref().take(4).read_to_end(&mut start).map_err(damaged)?;
    let axes = start.get(3).copied().unwrap_or(0);
    from.by_ref().take(4 * u64::from(axes)).read_to_end(&mut start).map_err(damaged)?;
    let header = Header::parse(&start, file)?;
    let total = header.total(file)?;
    if total > packed.len().saturating_mul(MAX_RATIO) {
        let what =
            format!("{} takes {total} bytes, more than gzip can unpack from {}", header.kind(), packed.len());
        return Err(bad(file, what));
    }
    let mut out = halcyon_host::reserve(total, file)?;
    out.extend_from_slice(&start);
    let mut part = vec![0; UNPACK_CHUNK.min(total + 1)];
    loop {
        match from.read(&mut part).map_err(damaged)? {
            0 => return Ok(out.into()),
            n if n > total - out.len() => {
                return Err(bad(
                    file,
                    format!("{} takes {total} bytes, but the file unpacks to more", header.kind()),
                ));
            }
            n => out.extend_from_slice(&part[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn file(code: u8, dims: &[u32], body: &[u8]) -> Vec<u8> {
        let mut v = vec![0, 0, code, dims.len() as u8];
        dims.iter().for_each(|d| v.extend(d.to_be_bytes()));
        v.extend(body);
        v
    }

    fn gz(b: &[u8]) -> Vec<u8> {
        let mut e = GzEncoder::new(vec![], Compression::default());
        e.write_all(b).unwrap();
        e.finish().unwrap()
    }

    fn of(v: Vec<u8>) -> Result<ConstData> {
        parse(v.into(), "t")
    }

    #[test]
    fn every_element_type_is_read_plain_and_compressed() {
        let cases = [
            (0x08, DType::U8, vec![1, 0xff], [1.0, 255.0]),
            (0x09, DType::I8, vec![1, 0xff], [1.0, -1.0]),
            (0x0b, DType::I16, vec![1, 2, 0xff, 0xfe], [258.0, -2.0]),
            (0x0c, DType::I32, [1i32.to_be_bytes(), (-70_000i32).to_be_bytes()].concat(), [1.0, -70_000.0]),
            (0x0d, DType::F32, [1.5f32.to_be_bytes(), (-2.0f32).to_be_bytes()].concat(), [1.5, -2.0]),
            (0x0e, DType::F64, [0.1f64.to_be_bytes(), 1e300f64.to_be_bytes()].concat(), [0.1, 1e300]),
        ];
        for (code, dtype, body, want) in cases {
            let plain = file(code, &[1, 2], &body);
            let x = of(plain.clone()).unwrap();
            assert_eq!((x.dtype, x.dims.as_slice(), x.to_vec::<f64>()), (dtype, &[1, 2][..], want.to_vec()));
            assert_eq!(of(gz(&plain)).unwrap(), x);
            // A gzip file may have several members.
            assert_eq!(of([gz(&plain[..5]), gz(&plain[5..])].concat()).unwrap(), x);
            for n in 0..plain.len() {
                assert!(matches!(of(plain[..n].to_vec()), Err(Error::Format { .. })), "{dtype} cut to {n}");
                assert!(
                    matches!(of(gz(&plain[..n])), Err(Error::Format { .. })),
                    "{dtype} cut to {n}, packed"
                );
            }
            let packed = gz(&plain);
            for n in 0..packed.len() {
                assert!(
                    matches!(of(packed[..n].to_vec()), Err(Error::Format { .. })),
                    "{dtype} packed, cut to {n}"
                );
            }
        }
        assert_eq!(of(file(8, &[0, 28, 28], &[])).unwrap().dims[..], [0, 28, 28]);
    }

    #[test]
    fn bytes_are_not_copied() {
        let f = Bytes::from(file(8, &[3], &[1, 2, 3]));
        assert_eq!(parse(f.clone(), "t").unwrap().bytes().as_ptr(), f[8..].as_ptr());
    }

    #[test]
    fn attacks_are_typed_errors() {
        let text = |v: Vec<u8>| match of(v) {
            Err(e @ Error::Format { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        };
        assert!(text(file(8, &[], &[])).contains("no axes"));
        assert!(text(file(0x0a, &[1], &[0])).contains("no element type 0x0a"));
        assert!(text(vec![1, 0, 8, 1, 0, 0, 0, 0]).contains("not an IDX file"));
        assert!(text(file(8, &[2], &[1, 2, 3])).contains("u8[2] takes 10 bytes, but the file has 11"));
        assert!(text(gz(&file(8, &[2], &[1, 2, 3]))).contains("unpacks to more"));
        assert!(text(file(14, &[u32::MAX; 3], &[])).contains("too large to address"));
        assert!(text(file(8, &[0, u32::MAX, u32::MAX, u32::MAX], &[])).contains("too large to address"));
        assert!(text(gz(&file(14, &[u32::MAX; 3], &[]))).contains("too large to address"));
        // A small file whose header claims gigabytes, and a file that unpacks to more than its header claims.
        assert!(text(gz(&file(8, &[1 << 31], &[0; 64]))).contains("more than gzip can unpack"));
        assert!(text(gz(&file(8, &[16], &vec![0; 1 << 24]))).contains("unpacks to more"));
        // Bytes after the last member.
        let mut tail = gz(&file(8, &[1], &[1]));
        tail.extend(b"tail");
        assert!(text(tail).contains("damaged gzip data"));
        // A wrong checksum.
        let mut wrong = gz(&file(8, &[1], &[1]));
        let at = wrong.len() - 6;
        wrong[at] ^= 1;
        assert!(text(wrong).contains("damaged gzip data"));
        assert!(of(file(8, &vec![1; 255], &[7])).is_ok_and(|x| x.dims.len() == 255));
    }

    #[test]
    fn folders_are_searched_for_both_names() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
        let missing = folder(dir.path(), Split::Test).unwrap_err();
        assert!(
            matches!(missing, Error::Io { .. }) && missing.to_string().contains("t10k-images-idx3-ubyte.gz")
        );
        put("t10k-images-idx3-ubyte", &file(8, &[2, 1, 3], &[0, 51, 255, 1, 2, 3]));
        put("t10k-labels-idx1-ubyte.gz", &gz(&file(8, &[2], &[7, 9])));
        let raw = folder(dir.path(), Split::Test).unwrap();
        assert_eq!(
            (raw.len(), raw.columns()[0].dtype, raw.columns()[0].dims[..].to_vec()),
            (2, DType::U8, vec![1, 3])
        );
        let data = mnist(dir.path(), Split::Test).unwrap();
        let row = data.row(0).unwrap();
        assert_eq!((row[0].dims.as_slice(), row[0].to_vec::<f32>()), (&[1, 1, 3][..], vec![0.0, 0.2, 1.0]));
        assert_eq!((row[1].dtype, row[1].to_vec::<i32>()), (DType::I32, vec![7]));

        put("train-images.idx3-ubyte", &file(8, &[1, 1, 1], &[5]));
        put("train-labels.idx1-ubyte", &file(8, &[2], &[7, 9]));
        let text = folder(dir.path(), Split::Train).unwrap_err().to_string();
        assert!(text.contains("the labels are u8[2], but the images are u8[1, 1, 1]"), "{text}");
        put("train-labels.idx1-ubyte", &file(0x0d, &[1], &[0; 4]));
        assert!(folder(dir.path(), Split::Train).unwrap_err().to_string().contains("labels are integers"));
        put("train-labels.idx1-ubyte", &file(8, &[1], &[0]));
        put("train-images.idx3-ubyte", &file(8, &[1, 4], &[5; 4]));
        let row = mnist(dir.path(), Split::Train).unwrap().row(0).unwrap();
        assert_eq!((row[0].dtype, row[0].dims.as_slice()), (DType::F32, &[4][..]));
    }
}
