//! Recognises files that users often pass as a model or an input by mistake, and gives advice about them.

use halcyon_ir::Error;
use std::fmt;

/// A kind of file that this crate does not read as a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A Git LFS pointer: the text file that stands for a large file in a Git repository.
    GitLfs,
    Html,
    Xml,
    SafeTensors,
    Gguf,
    /// A PyTorch checkpoint or TorchScript archive: a zip file, or a pickle if written before version 1.6.
    PyTorch,
    /// A Python pickle of unknown content.
    Pickle,
    Npy,
    Npz,
    Zip,
    Gzip,
    Tar,
    /// Keras and others.
    Hdf5,
    TfLite,
    /// ONNX Runtime's own format.
    Ort,
    OnnxTensor,
    Picture,
    Pdf,
    Json,
    Text,
    Empty,
}

impl Foreign {
    /// Advice for a user who passed such a file as a model.
    pub fn advice(self) -> &'static str {
        match self {
            Foreign::GitLfs => {
                "Fetch the file itself with `git lfs pull`, or download it from the page of the model"
            }
            Foreign::Html => {
                "A web page was saved instead of the model: use the download link (on Hugging Face its address has \"resolve\" in place of \"blob\"), or sign in if the model requires it"
            }
            Foreign::Gguf => {
                "`halcyon inspect` shows what it holds. A command that takes an ONNX model needs the model's ONNX export (Hugging Face models with `optimum-cli export onnx`)"
            }
            Foreign::SafeTensors => {
                "It holds weights without a graph: export the model to ONNX (Hugging Face models with `optimum-cli export onnx`)"
            }
            Foreign::PyTorch | Foreign::Pickle => {
                "Load it in PyTorch and export it with torch.onnx.export. Halcyon reads the weights of such a file, but not its model, which is code"
            }
            Foreign::Zip | Foreign::Gzip | Foreign::Tar => "Unpack it and give the .onnx file that is in it",
            Foreign::Npy | Foreign::Npz | Foreign::OnnxTensor | Foreign::Picture => {
                "It is data for a model: give the .onnx file first, and this with --input"
            }
            Foreign::Hdf5 | Foreign::TfLite => "Convert it to ONNX with tf2onnx",
            Foreign::Ort => "Give the .onnx file that it was made from",
            Foreign::Xml => "If it describes an OpenVINO model, give the ONNX file that it was made from",
            Foreign::Json | Foreign::Text | Foreign::Pdf => "Give the .onnx file of the model",
            Foreign::Empty => "Its download or export has failed: make the file again",
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Foreign::GitLfs => "a Git LFS pointer, which stands for a file that was not fetched",
            Foreign::Html => "an HTML page",
            Foreign::Xml => "an XML document",
            Foreign::SafeTensors => "a safetensors file",
            Foreign::Gguf => "a GGUF file",
            Foreign::PyTorch => "a PyTorch file",
            Foreign::Pickle => "a Python pickle",
            Foreign::Npy => "a NumPy array (.npy)",
            Foreign::Npz => "a NumPy archive (.npz)",
            Foreign::Zip => "a zip archive",
            Foreign::Gzip => "a gzip file",
            Foreign::Tar => "a tar archive",
            Foreign::Hdf5 => "an HDF5 file (as Keras writes)",
            Foreign::TfLite => "a TensorFlow Lite model",
            Foreign::Ort => "a model in ONNX Runtime's own format",
            Foreign::OnnxTensor => "an ONNX tensor",
            Foreign::Picture => "a picture",
            Foreign::Pdf => "a PDF document",
            Foreign::Json => "a JSON document",
            Foreign::Text => "a text file",
            Foreign::Empty => "an empty file",
        })
    }
}

/// The error for a file that was passed as a model and failed to decode with `e`. Names the file's real kind
/// if its content shows it.
pub fn not_a_model(data: &[u8], file: &str, e: Error) -> Error {
    match (&e, kind(data)) {
        (Error::Format { .. }, Some(k)) => Error::Format {
            file: file.into(),
            what: format!("not an ONNX model: this is {k}. {}", k.advice()),
        },
        _ => e,
    }
}

const MAGIC: &[(usize, &[u8], Foreign)] = &[
    (0, b"version https://git-lfs.github.com/spec/", Foreign::GitLfs),
    (0, b"version https://hawser.github.com/spec/", Foreign::GitLfs),
    (0, b"GGUF", Foreign::Gguf),
    (0, b"\x93NUMPY", Foreign::Npy),
    (0, b"\x1f\x8b", Foreign::Gzip),
    (257, b"ustar", Foreign::Tar),
    (0, b"\x89HDF\r\n\x1a\n", Foreign::Hdf5),
    (4, b"TFL3", Foreign::TfLite),
    (4, b"ORTM", Foreign::Ort),
    (0, b"\x89PNG\r\n\x1a\n", Foreign::Picture),
    (0, b"\xff\xd8\xff", Foreign::Picture),
    (0, b"GIF8", Foreign::Picture),
    (0, b"BM", Foreign::Picture),
    (8, b"WEBP", Foreign::Picture),
    (0, b"%PDF-", Foreign::Pdf),
];

/// The magic number at the start of PyTorch files from before version 1.6, in pickle encoding.
const OLD_TORCH: &[u8] = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.";
/// Number of bytes at the start of a file that are checked for being text, and at both ends of an archive
/// that are searched for member names.
const HEAD: usize = 1 << 16;

/// The kind of a file with this content. `None` for unknown content and for models: only the decoder decides
/// whether a file is a model.
pub fn kind(data: &[u8]) -> Option<Foreign> {
    if data.is_empty() {
        return Some(Foreign::Empty);
    }
    let head = &data[..data.len().min(HEAD)];
    if data.starts_with(b"PK\x03\x04") || data.starts_with(b"PK\x05\x06") {
        return Some(archive(data));
    }
    let magic = |(at, m, _): &&(usize, &[u8], Foreign)| data.get(*at..).is_some_and(|d| d.starts_with(m));
    if let Some((_, m, k)) = MAGIC.iter().find(magic)
        && (*m != b"BM" || bitmap(data))
    {
        return Some(*k);
    }
    if let [0x80, 2..=5, ..] = data {
        let torch = find(head, OLD_TORCH) || find(head, b"torch");
        return Some(if torch { Foreign::PyTorch } else { Foreign::Pickle });
    }
    match crate::sniff::kind(data) {
        Some(crate::sniff::Kind::SafeTensors) => return Some(Foreign::SafeTensors),
        Some(crate::sniff::Kind::OnnxTensor) => return Some(Foreign::OnnxTensor),
        _ => {}
    }
    text(head)
}

/// Classifies a zip archive by its member names. They are stored before each member and in the directory at
/// the end of the file.
fn archive(data: &[u8]) -> Foreign {
    let head = &data[..data.len().min(HEAD)];
    let tail = &data[data.len().saturating_sub(HEAD)..];
    let has = |name: &[u8]| find(head, name) || find(tail, name);
    if has(b"/data.pkl") || has(b"/constants.pkl") || has(b"data.pkl") {
        Foreign::PyTorch
    } else if has(b".npy") {
        Foreign::Npz
    } else {
        Foreign::Zip
    }
}

/// Whether the size field of a bitmap header equals the file's length. Another file could also begin with the
/// two magic letters.
fn bitmap(data: &[u8]) -> bool {
    let size = data.get(2..6).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    size.is_some_and(|n| n as usize == data.len())
}

fn text(head: &[u8]) -> Option<Foreign> {
    // The head may end inside a multi-byte character.
    let s = match std::str::from_utf8(head) {
        Ok(s) => s,
        Err(e) if head.len() == HEAD && e.valid_up_to() + 4 > HEAD => {
            std::str::from_utf8(&head[..e.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    if s.chars().any(|c| c.is_control() && !c.is_whitespace()) {
        return None;
    }
    let start = s.trim_start_matches('\u{feff}').trim_start();
    let lower: String = start.chars().take(512).collect::<String>().to_ascii_lowercase();
    if lower.starts_with("<!doctype html") || lower.contains("<html") || lower.contains("<head") {
        return Some(Foreign::Html);
    }
    if lower.starts_with("<?xml") {
        return Some(Foreign::Xml);
    }
    Some(if start.starts_with(['{', '[']) { Foreign::Json } else { Foreign::Text })
}

fn find(data: &[u8], part: &[u8]) -> bool {
    data.windows(part.len()).any(|w| w == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::{GraphProto, ModelProto};
    use prost::Message;

    #[test]
    fn kinds_by_content() {
        let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90405214\n";
        let mut bmp = b"BM\x46\0\0\0".to_vec();
        bmp.resize(0x46, 0);
        let mut torch = b"PK\x03\x04\0\0\0\0".to_vec();
        torch.extend(b"archive/data.pkl");
        let mut zip = b"PK\x03\x04\0\0\0\0".to_vec();
        zip.extend(b"model.onnx");
        let mut old = b"\x80\x02".to_vec();
        old.extend(OLD_TORCH);
        for (content, want) in [
            (&lfs[..], Some(Foreign::GitLfs)),
            (b"\n<!DOCTYPE html><html>", Some(Foreign::Html)),
            (b"<?xml version=\"1.0\"?><net>", Some(Foreign::Xml)),
            (b"\x02\0\0\0\0\0\0\0{}", Some(Foreign::SafeTensors)),
            (b"GGUF\x03\0\0\0", Some(Foreign::Gguf)),
            (&torch, Some(Foreign::PyTorch)),
            (&old, Some(Foreign::PyTorch)),
            (b"\x80\x04\x95\x10", Some(Foreign::Pickle)),
            (&zip, Some(Foreign::Zip)),
            (b"\x1f\x8b\x08", Some(Foreign::Gzip)),
            (b"\x1c\0\0\0TFL3", Some(Foreign::TfLite)),
            (&bmp, Some(Foreign::Picture)),
            (b"{\"a\": 1}", Some(Foreign::Json)),
            (b"# A readme", Some(Foreign::Text)),
            (b"", Some(Foreign::Empty)),
            (b"\x08\x08\x12\x01p\xff\xff", None),
        ] {
            assert_eq!(kind(content), want, "{:?}", String::from_utf8_lossy(content));
        }
        let m = ModelProto { ir_version: 8, graph: Some(GraphProto::default()), ..Default::default() };
        assert_eq!(kind(&m.encode_to_vec()), None);
        let npz =
            crate::npz::encode(&[("a", &crate::ConstData::from_slice(&[1], &[1f32]).unwrap())]).unwrap();
        assert_eq!(kind(&npz), Some(Foreign::Npz));
    }

    proptest::proptest! {
        #[test]
        fn random_bytes_never_panic(v in proptest::collection::vec(0u8.., 0..400)) {
            let _ = kind(&v);
        }
    }
}
