//! Decodes images: JPEG, JPEG 2000, PNG, BMP, TIFF, WebP and the PBM family.
//!
//! JPEG is decoded by this crate. The other formats need the feature `images`; without it they are
//! [`Failure::Unsupported`].
//!
//! The size of a decoded image is bounded by [`MOST_BYTES`] and by a multiple of the file's length.

use crate::jpeg;

/// Upper bound of a decoded image in bytes.
pub const MOST_BYTES: usize = 1 << 28;
/// A decoded image may have at most this many times the bytes of its file, or [`SMALL_BYTES`] if that is
/// more.
#[cfg(feature = "images")]
const MOST_RATIO: usize = 4096;
#[cfg(feature = "images")]
const SMALL_BYTES: usize = 1 << 26;

/// Rows of pixels, with 1 byte (grey) or 3 bytes (red, green, blue) per pixel.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    pub pixels: Vec<u8>,
}

/// Why an image could not be decoded.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Not an image, or a damaged one.
    Corrupt(String),
    /// An image that is too large or has a format without a decoder in this build.
    Unsupported(String),
}

/// Decodes an image, recognising the format by its first bytes. The alpha channel is dropped.
pub fn decode(data: &[u8]) -> Result<Picture, Failure> {
    match kind(data) {
        Some("JPEG") => jpeg::decode(data),
        Some(name) => other(name, data),
        None => Err(Failure::Corrupt("the first bytes are those of no image format".into())),
    }
}

/// The format according to the first bytes.
fn kind(data: &[u8]) -> Option<&'static str> {
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
fn other(name: &str, _data: &[u8]) -> Result<Picture, Failure> {
    let what =
        format!("a {name} image in a build without the feature \"images\" (build with --features images)");
    Err(Failure::Unsupported(what))
}

#[cfg(feature = "images")]
fn other(name: &str, data: &[u8]) -> Result<Picture, Failure> {
    use image::{ImageFormat, ImageReader, Limits};
    let limit = data.len().saturating_mul(MOST_RATIO).clamp(SMALL_BYTES, MOST_BYTES);
    if name == "JPEG 2000" {
        return jpeg_2000(data, limit);
    }
    let format = image::guess_format(data).map_err(|e| Failure::Corrupt(e.to_string()))?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(limit as u64);
    let mut reader = ImageReader::with_format(std::io::Cursor::new(data), format);
    reader.limits(limits);
    let image = reader.decode().map_err(|e| match (e, format) {
        (image::ImageError::Limits(e), _) => Failure::Unsupported(format!("an image this large ({e})")),
        (image::ImageError::Unsupported(e), ImageFormat::Tiff | ImageFormat::Bmp | ImageFormat::Pnm) => {
            Failure::Unsupported(e.to_string())
        }
        (e, _) => Failure::Corrupt(e.to_string()),
    })?;
    let (width, height) = (image.width() as usize, image.height() as usize);
    if image.color().has_color() {
        Ok(Picture { width, height, channels: 3, pixels: image.into_rgb8().into_raw() })
    } else {
        Ok(Picture { width, height, channels: 1, pixels: image.into_luma8().into_raw() })
    }
}

#[cfg(feature = "images")]
fn jpeg_2000(data: &[u8], limit: usize) -> Result<Picture, Failure> {
    use hayro_jpeg2000::{ColorSpace, DecodeSettings, DecoderContext, Image};
    let corrupt = |e: hayro_jpeg2000::DecodeError| Failure::Corrupt(format!("JPEG 2000: {e}"));
    let settings = DecodeSettings { strict: true, ..DecodeSettings::default() };
    let image = Image::new(data, &settings).map_err(corrupt)?;
    let (width, height) = (image.width() as usize, image.height() as usize);
    let channels = usize::from(image.color_space().num_channels());
    let all = channels + usize::from(image.has_alpha());
    // The decoder uses 4-byte floats.
    let bytes = width.checked_mul(height).and_then(|n| n.checked_mul(4 * all));
    if bytes.is_none_or(|n| n > limit) {
        return Err(Failure::Unsupported(format!("a JPEG 2000 image of {width} × {height} × {all}")));
    }
    let keep = match (image.color_space(), channels) {
        (ColorSpace::Gray, _) | (_, 1) => 1,
        (ColorSpace::RGB | ColorSpace::Icc { .. } | ColorSpace::Unknown { .. }, 3) => 3,
        _ => return Err(Failure::Unsupported(format!("JPEG 2000 of {channels} channels"))),
    };
    let mut context = DecoderContext::default();
    let pixels = image.decode(&mut context).map_err(corrupt)?.data_u8();
    if pixels.len() != width * height * all {
        return Err(Failure::Corrupt("JPEG 2000: components of different sizes".into()));
    }
    let pixels = pixels.chunks_exact(all).flat_map(|p| p[..keep].iter().copied()).collect();
    Ok(Picture { width, height, channels: keep, pixels })
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
            ($name, include_bytes!(concat!("../tests/images/", $name, ".jpg")), [$w, $h, $c], $hash)
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
        d[at + 5..at + 9].fill(0xff);
        assert!(matches!(decode(&d), Err(Failure::Corrupt(w)) if w.contains("larger than its data")));
        // The header declares tens of gigabytes.
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
    fn formats_are_told_by_their_first_bytes() {
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
            assert_eq!(kind(bytes), name, "{bytes:?}");
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
