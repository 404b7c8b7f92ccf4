//! Encoded images: JPEG, JPEG 2000, PNG, BMP, TIFF, WebP and the PBM family.
//!
//! What is decoded is bounded: no decoder is asked for more than [`MOST_BYTES`], or for more than a file of that length can mean.

use crate::jpeg;
use image::{ImageFormat, ImageReader, Limits};
use std::io::Cursor;

/// Most bytes of a decoded image.
pub const MOST_BYTES: usize = 1 << 28;
/// A file may stand for so many times its length, and a small file for [`SMALL_BYTES`].
const MOST_RATIO: usize = 4096;
const SMALL_BYTES: usize = 1 << 26;

/// Rows of pixels of 1 (grey) or 3 (red, green, blue) bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    pub pixels: Vec<u8>,
}

/// Why there is no picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Not an image, or a broken one.
    Corrupt(String),
    /// An image of a kind that no decoder here takes, or one that is too large.
    Unsupported(String),
}

/// Decodes an image of any format that is known by its first bytes. Transparency is left out.
pub fn decode(data: &[u8]) -> Result<Picture, Failure> {
    let limit = data.len().saturating_mul(MOST_RATIO).clamp(SMALL_BYTES, MOST_BYTES);
    if data.starts_with(&[0xff, 0xd8]) {
        return jpeg::decode(data);
    }
    if data.starts_with(&[0, 0, 0, 12, b'j', b'P']) || data.starts_with(&[0xff, 0x4f, 0xff, 0x51]) {
        return jpeg_2000(data, limit);
    }
    let format = image::guess_format(data).map_err(|e| Failure::Corrupt(e.to_string()))?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(limit as u64);
    let mut reader = ImageReader::with_format(Cursor::new(data), format);
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

fn jpeg_2000(data: &[u8], limit: usize) -> Result<Picture, Failure> {
    use hayro_jpeg2000::{ColorSpace, DecodeSettings, DecoderContext, Image};
    let corrupt = |e: hayro_jpeg2000::DecodeError| Failure::Corrupt(format!("JPEG 2000: {e}"));
    let settings = DecodeSettings { strict: true, ..DecodeSettings::default() };
    let image = Image::new(data, &settings).map_err(corrupt)?;
    let (width, height) = (image.width() as usize, image.height() as usize);
    let channels = usize::from(image.color_space().num_channels());
    let all = channels + usize::from(image.has_alpha());
    // The decoder works in floats.
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
