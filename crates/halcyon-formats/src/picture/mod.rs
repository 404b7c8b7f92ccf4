//! Decodes images: JPEG, JPEG 2000, PNG, BMP, TIFF, WebP and the PBM family.
//!
//! Every build decodes JPEG. The other formats need the feature `images` and are [`Failure::Unsupported`]
//! without it. Colour profiles are ignored: samples keep the values that are in the file.
//!
//! A caller learns an image's size before memory is allocated for it, and can refuse the image. [`decode`]
//! refuses images of more than [`MAX_BYTES`], and images that are implausibly large for the length of their
//! file.

#[cfg(feature = "images")]
mod bmp;
#[cfg(feature = "images")]
mod codecs;
#[cfg(feature = "images")]
mod pnm;
mod resize;

pub use resize::resize;

use crate::jpeg;

/// The largest decoded image in bytes.
pub const MAX_BYTES: usize = 1 << 28;
/// The largest ratio of decoded bytes to the file's length. A file of any length may have [`SMALL_BYTES`].
const MAX_RATIO: usize = 4096;
const SMALL_BYTES: usize = 1 << 26;

/// Rows of pixels, with 1 byte (grey) or 3 bytes (red, green, blue) per pixel.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    pub pixels: Vec<u8>,
}

/// A decoded image with the precision of its file.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    pub width: usize,
    pub height: usize,
    /// 1 (grey) or 3 (red, green, blue).
    pub channels: usize,
    /// Row by row, channels innermost.
    pub samples: Samples,
}

/// Samples of an image. White is the largest value of an integer type, and 1 for floats.
#[derive(Clone, Debug, PartialEq)]
pub enum Samples {
    U8(Vec<u8>),
    U16(Vec<u16>),
    F32(Vec<f32>),
}

/// Size of an image, known before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub width: usize,
    pub height: usize,
    /// Samples of a pixel that the decoder produces. Alpha counts if the decoder does not skip it.
    pub channels: usize,
    /// Bytes of a sample.
    pub sample_bytes: usize,
}

/// Accepts or refuses an image by its size, before it is decoded.
pub type Check<'a> = dyn FnMut(Header) -> Result<(), Failure> + 'a;

/// Why there is no picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Not an image, or a damaged one.
    Corrupt(String),
    /// A valid image of a kind that no decoder here supports, or one that is too large.
    Unsupported(String),
}

impl Header {
    /// Bytes of the decoded image.
    pub fn bytes(&self) -> usize {
        self.width.saturating_mul(self.height).saturating_mul(self.channels * self.sample_bytes)
    }
}

impl Samples {
    fn into_u8(self) -> Vec<u8> {
        match self {
            Samples::U8(v) => v,
            // 65535 is 257 * 255, so this rounds to nearest.
            Samples::U16(v) => v.iter().map(|&s| ((u32::from(s) + 128) / 257) as u8).collect(),
            Samples::F32(v) => v.iter().map(|s| (s.clamp(0.0, 1.0) * 255.0).round() as u8).collect(),
        }
    }

    /// Converts integers to the range 0 to 1. Floats stay as they are in the file.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Samples::U8(v) => v.iter().map(|&s| f32::from(s) / 255.0).collect(),
            Samples::U16(v) => v.iter().map(|&s| f32::from(s) / 65_535.0).collect(),
            Samples::F32(v) => v,
        }
    }
}

/// Decodes an image to 8 bits per sample. The first bytes determine the format. Alpha is left out.
///
/// # Errors
/// [`Failure`] for data that is not an image, for a damaged image, and for an image that is too large.
pub fn decode(data: &[u8]) -> Result<Picture, Failure> {
    let limit = data.len().saturating_mul(MAX_RATIO).clamp(SMALL_BYTES, MAX_BYTES);
    let image = decode_samples(data, &mut |h: Header| {
        if h.bytes() <= limit {
            return Ok(());
        }
        let what = format!(
            "an image this large ({}x{}, {} bytes decoded; at most {limit} are allowed)",
            h.width,
            h.height,
            h.bytes()
        );
        Err(Failure::Unsupported(what))
    })?;
    let Image { width, height, channels, samples } = image;
    Ok(Picture { width, height, channels, pixels: samples.into_u8() })
}

/// Decodes an image with the precision of the file. The first bytes determine the format. `check` is called
/// with the size before anything is decoded. Alpha is left out.
///
/// # Errors
/// [`Failure`] for data that is not an image, and for a damaged image; the errors of `check`.
pub fn decode_samples(data: &[u8], check: &mut Check<'_>) -> Result<Image, Failure> {
    match format(data) {
        Some("JPEG") => {
            // A file without a frame header fails in the decoder, which gives the reason.
            if let Some(h) = jpeg_header(data) {
                check(h)?;
            }
            let Picture { width, height, channels, pixels } = jpeg::decode(data)?;
            Ok(Image { width, height, channels, samples: Samples::U8(pixels) })
        }
        Some(name) => other(name, data, check),
        None => Err(Failure::Corrupt("the first bytes are those of no image format".into())),
    }
}

/// Size in the frame header (ITU-T T.81, B.2.2).
fn jpeg_header(data: &[u8]) -> Option<Header> {
    let mut at = 2;
    loop {
        // Markers may be padded with 0xff.
        let &[a, marker] = data.get(at..)?.first_chunk::<2>()?;
        if a != 0xff {
            return None;
        }
        if marker == 0xff {
            at += 1;
            continue;
        }
        at += 2;
        if matches!(marker, 0x01 | 0xd0..=0xd8) {
            continue;
        }
        let part = data.get(at..)?;
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            let &[_, _, bits, h1, h0, w1, w0, channels] = part.first_chunk::<8>()?;
            let [height, width] = [[h1, h0], [w1, w0]].map(|b| usize::from(u16::from_be_bytes(b)));
            let sample_bytes = if bits > 8 { 2 } else { 1 };
            return Some(Header { width, height, channels: channels.into(), sample_bytes });
        }
        at += usize::from(u16::from_be_bytes(*part.first_chunk::<2>()?)).max(2);
    }
}

/// The name of the image format that starts with these bytes; `None` if no known format does.
pub fn format(data: &[u8]) -> Option<&'static str> {
    let starts: [(&[u8], &str); 8] = [
        (&[0xff, 0xd8], "JPEG"),
        (&[0, 0, 0, 12, b'j', b'P'], "JPEG 2000"),
        (&[0xff, 0x4f, 0xff, 0x51], "JPEG 2000"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"BM", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"RIFF", "WebP"),
    ];
    let pbm = data.len() > 1 && data[0] == b'P' && (b'1'..=b'7').contains(&data[1]);
    let found = starts.iter().find(|(start, _)| data.starts_with(start)).map(|(_, name)| *name);
    match found {
        Some("WebP") if data.get(8..12) != Some(b"WEBP") => None,
        None if pbm => Some("PBM"),
        found => found,
    }
}

#[cfg(not(feature = "images"))]
fn other(name: &str, _data: &[u8], _check: &mut Check<'_>) -> Result<Image, Failure> {
    let what =
        format!("a {name} image in a build without the feature \"images\" (build with --features images)");
    Err(Failure::Unsupported(what))
}

#[cfg(feature = "images")]
fn other(name: &str, data: &[u8], check: &mut Check<'_>) -> Result<Image, Failure> {
    match name {
        "JPEG 2000" => codecs::jpeg_2000(data, check),
        "PNG" => codecs::png(data, check),
        "TIFF" => codecs::tiff(data, check),
        "WebP" => codecs::webp(data, check),
        "BMP" => bmp::decode(data, check),
        _ => pnm::decode(data, check),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a.
    fn hash(b: &[u8]) -> u64 {
        b.iter().fold(0xcbf2_9ce4_8422_2325, |h, &v| (h ^ u64::from(v)).wrapping_mul(0x100_0000_01b3))
    }

    macro_rules! image {
        ($name:literal, $w:literal, $h:literal, $c:literal, $hash:literal) => {
            ($name, include_bytes!(concat!("../../tests/images/", $name, ".jpg")), [$w, $h, $c], $hash)
        };
    }

    /// Images written by Pillow. The hashes are of the pixels that libjpeg-turbo 3 decodes.
    const IMAGES: &[(&str, &[u8], [usize; 3], u64)] = &[
        image!("420", 19, 13, 3, 0x583dfa9d387cc9fd),
        image!("422", 21, 10, 3, 0x57ee7d7bddee2555),
        image!("440", 16, 16, 3, 0x384daef73a1419ab),
        image!("444", 9, 17, 3, 0x34afa09cae473fd9),
        image!("grey", 17, 11, 1, 0x35c4e4889aeb15ab),
        image!("low", 26, 26, 3, 0x3675329a6858b7c5),
        image!("narrow", 3, 5, 3, 0x9341f5ec989fc1d),
        image!("progressive", 35, 27, 3, 0x2c1d61f971e5114f),
        image!("restart", 40, 25, 3, 0x59f9a50cc336e6b6),
    ];

    #[test]
    fn jpeg_is_exact() {
        for (name, data, size, want) in IMAGES {
            let p = decode(data).unwrap();
            assert_eq!([p.width, p.height, p.channels], *size, "{name}");
            assert_eq!(hash(&p.pixels), *want, "{name}");
        }
    }

    #[test]
    fn damaged_jpegs_are_errors_or_pictures() {
        for (name, data, ..) in IMAGES {
            for n in 0..data.len() - 2 {
                assert!(decode(&data[..n]).is_err() || n + 2 >= data.len() - 2, "{name} cut to {n}");
            }
            for i in 0..data.len() {
                for v in [0, 0x7f, 0xff, data[i] ^ 1, data[i] ^ 0x80] {
                    let mut d = data.to_vec();
                    d[i] = v;
                    if let Ok(p) = decode(&d) {
                        assert_eq!(p.pixels.len(), p.width * p.height * p.channels, "{name}: {v} at {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_that_the_file_cannot_mean() {
        let mut d = IMAGES[0].1.to_vec();
        let at = d.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
        d[at + 5..at + 9].copy_from_slice(&[0x10, 0, 0x10, 0]);
        assert!(matches!(decode(&d), Err(Failure::Corrupt(w)) if w.contains("larger than its data")));
        d[at + 5..at + 9].fill(0xff);
        assert!(matches!(decode(&d), Err(Failure::Unsupported(w)) if w.contains("65535x65535")));
        // A header that requests tens of gigabytes.
        assert!(matches!(
            decode(b"P6 99999 99999 255\nx"),
            Err(Failure::Unsupported(_) | Failure::Corrupt(_))
        ));
        let mut bmp = b"BM".to_vec();
        bmp.extend([0; 12]);
        bmp.extend(40u32.to_le_bytes());
        bmp.extend(65_535i32.to_le_bytes());
        bmp.extend(65_535i32.to_le_bytes());
        bmp.extend([1, 0, 24, 0]);
        bmp.extend([0; 24]);
        assert!(decode(&bmp).is_err());
    }

    #[test]
    fn formats_are_recognised_by_their_first_bytes() {
        for (bytes, name) in [
            (&b"\x89PNG\r\n\x1a\n"[..], Some("PNG")),
            (b"RIFF\0\0\0\0WEBPVP8 ", Some("WebP")),
            (b"RIFF\0\0\0\0WAVE", None),
            (b"P4 1 1", Some("PBM")),
            (b"P8 1 1", None),
            (b"PK\x03\x04", None),
            (b"MM\0*", Some("TIFF")),
            (b"", None),
        ] {
            assert_eq!(format(bytes), name, "{bytes:?}");
        }
        // In any build, each recognised format is either decoded or rejected with its name.
        for (bytes, name) in [(&b"P5 2 1 255\nab"[..], "PBM"), (b"BM", "BMP"), (b"MM\0*", "TIFF")] {
            match decode(bytes) {
                Err(Failure::Unsupported(w)) if cfg!(not(feature = "images")) => {
                    assert!(w.contains(name) && w.contains("--features images"), "{w}");
                }
                _ if cfg!(not(feature = "images")) => panic!("{name} has no decoder here"),
                Ok(p) => assert_eq!((name, p.pixels), ("PBM", b"ab".to_vec())),
                Err(e) => assert!(matches!(e, Failure::Corrupt(_)), "{e:?}"),
            }
        }
    }

    #[test]
    #[cfg(feature = "images")]
    fn other_formats() {
        let p = decode(b"P6 2 1 255\nabcdef").unwrap();
        assert_eq!((p.width, p.height, p.channels, &p.pixels[..]), (2, 1, 3, &b"abcdef"[..]));
        let p = decode(b"P5 2 1 255\nab").unwrap();
        assert_eq!((p.channels, &p.pixels[..]), (1, &b"ab"[..]));
        assert!(matches!(decode(b"P5 2 2 255\nab"), Err(Failure::Corrupt(_))));
        assert!(matches!(decode(b""), Err(Failure::Corrupt(_))));
        assert!(matches!(decode(b"\x00\x00\x00\x0cjP  \r\n\x87\nxx"), Err(Failure::Corrupt(_))));
    }
}
