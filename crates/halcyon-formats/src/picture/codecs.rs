//! Decodes PNG, TIFF, WebP and JPEG 2000, with crates for these formats.

use super::{Check, Failure, Header, Image, MAX_BYTES, Samples};
use std::io::Cursor;

type Result<T> = std::result::Result<T, Failure>;

fn corrupt(format: &str, e: impl std::fmt::Display) -> Failure {
    Failure::Corrupt(format!("{format}: {e}"))
}

fn unsupported(format: &str, what: impl std::fmt::Display) -> Failure {
    Failure::Unsupported(format!("{format}: {what}"))
}

/// An image without its alpha channel: keeps the first one or three of the `all` samples of a pixel.
fn image(size: (usize, usize), all: usize, samples: Samples) -> Image {
    fn keep<T: Copy>(v: Vec<T>, all: usize, kept: usize) -> Vec<T> {
        if all == kept { v } else { v.chunks_exact(all).flat_map(|p| p[..kept].iter().copied()).collect() }
    }
    let channels = if all < 3 { 1 } else { 3 };
    let samples = match samples {
        Samples::U8(v) => Samples::U8(keep(v, all, channels)),
        Samples::U16(v) => Samples::U16(keep(v, all, channels)),
        Samples::F32(v) => Samples::F32(keep(v, all, channels)),
    };
    Image { width: size.0, height: size.1, channels, samples }
}

pub(super) fn png(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    let failure = |e: png::DecodingError| match e {
        png::DecodingError::LimitsExceeded => unsupported("PNG", e),
        e => corrupt("PNG", e),
    };
    let limits = png::Limits { bytes: MAX_BYTES };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(data), limits);
    // Palettes become colours, fewer than 8 bits become 8, a transparent colour becomes alpha.
    decoder.set_transformations(png::Transformations::EXPAND);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(failure)?;
    let (width, height) = reader.info().size();
    let size = (width as usize, height as usize);
    let (colour, depth) = reader.output_color_type();
    let (channels, wide) = (colour.samples(), depth == png::BitDepth::Sixteen);
    check(Header { width: size.0, height: size.1, channels, sample_bytes: if wide { 2 } else { 1 } })?;
    let Some(bytes) = reader.output_buffer_size() else {
        return Err(unsupported("PNG", format!("{width}x{height} pixels")));
    };
    let mut pixels = vec![0; bytes];
    let frame = reader.next_frame(&mut pixels).map_err(failure)?;
    pixels.truncate(frame.buffer_size());
    let samples = match wide {
        true => Samples::U16(pixels.chunks_exact(2).map(|b| u16::from_be_bytes([b[0], b[1]])).collect()),
        false => Samples::U8(pixels),
    };
    Ok(image(size, channels, samples))
}

pub(super) fn webp(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    let failure = |e: image_webp::DecodingError| match e {
        image_webp::DecodingError::MemoryLimitExceeded
        | image_webp::DecodingError::ImageTooLarge
        | image_webp::DecodingError::UnsupportedFeature(_) => unsupported("WebP", e),
        e => corrupt("WebP", e),
    };
    let mut decoder = image_webp::WebPDecoder::new(Cursor::new(data)).map_err(failure)?;
    decoder.set_memory_limit(MAX_BYTES);
    let (width, height) = decoder.dimensions();
    let size = (width as usize, height as usize);
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    check(Header { width: size.0, height: size.1, channels, sample_bytes: 1 })?;
    let Some(bytes) = decoder.output_buffer_size() else {
        return Err(unsupported("WebP", format!("{width}x{height} pixels")));
    };
    let mut pixels = vec![0; bytes];
    decoder.read_image(&mut pixels).map_err(failure)?;
    Ok(image(size, channels, Samples::U8(pixels)))
}

pub(super) fn tiff(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    use tiff::decoder::{Decoder, DecodingResult, Limits};
    use tiff::{ColorType, TiffError};
    let failure = |e: TiffError| match e {
        TiffError::UnsupportedError(_) | TiffError::LimitsExceeded => unsupported("TIFF", e),
        e => corrupt("TIFF", e),
    };
    let mut limits = Limits::default();
    (limits.decoding_buffer_size, limits.intermediate_buffer_size) = (2 * MAX_BYTES, MAX_BYTES);
    let mut decoder = Decoder::new(Cursor::new(data)).map_err(failure)?.with_limits(limits);
    let (width, height) = decoder.dimensions().map_err(failure)?;
    let size = (width as usize, height as usize);
    let kind = decoder.colortype().map_err(failure)?;
    let (channels, bits) = match kind {
        ColorType::Gray(bits @ (1 | 8 | 16 | 32)) => (1, bits),
        ColorType::GrayA(bits @ (8 | 16)) => (2, bits),
        ColorType::RGB(bits @ (8 | 16 | 32)) => (3, bits),
        ColorType::RGBA(bits @ (8 | 16 | 32)) | ColorType::CMYK(bits @ (8 | 16)) => (4, bits),
        other => return Err(unsupported("TIFF", format!("pixels of the kind {other:?}"))),
    };
    check(Header { width: size.0, height: size.1, channels, sample_bytes: usize::from(bits).div_ceil(8) })?;
    if decoder.image_buffer_layout().map_err(failure)?.planes > 1 {
        return Err(unsupported("TIFF", "channels in separate planes"));
    }
    let samples = match decoder.read_image().map_err(failure)? {
        DecodingResult::U8(v) if bits == 1 => Samples::U8(expand_bits(&v, size)),
        DecodingResult::U8(v) => Samples::U8(v),
        DecodingResult::U16(v) => Samples::U16(v),
        DecodingResult::F32(v) => Samples::F32(v),
        _ => return Err(unsupported("TIFF", format!("samples of the kind {kind:?} that are not floats"))),
    };
    let count = match &samples {
        Samples::U8(v) => v.len(),
        Samples::U16(v) => v.len(),
        Samples::F32(v) => v.len(),
    };
    if count != size.0 * size.1 * channels {
        return Err(corrupt("TIFF", format!("{count} samples for {width}x{height} pixels")));
    }
    let samples = match (kind, samples) {
        (ColorType::CMYK(_), Samples::U8(v)) => return Ok(image(size, 3, Samples::U8(ink(&v, u8::MAX)))),
        (ColorType::CMYK(_), Samples::U16(v)) => return Ok(image(size, 3, Samples::U16(ink(&v, u16::MAX)))),
        (_, samples) => samples,
    };
    Ok(image(size, channels, samples))
}

/// Expands one bit per pixel to one byte. Rows are padded to whole bytes, and 1 is white.
fn expand_bits(packed: &[u8], (width, height): (usize, usize)) -> Vec<u8> {
    let rows = packed.chunks_exact(width.div_ceil(8)).take(height);
    rows.flat_map(|r| (0..width).map(|x| if r[x / 8] >> (7 - x % 8) & 1 == 1 { 255 } else { 0 })).collect()
}

/// Cyan, magenta, yellow and black as red, green and blue: `(1 - c) (1 - k)`, without colour management.
fn ink<T: Copy + Into<u32> + TryFrom<u32>>(pixels: &[T], most: T) -> Vec<T> {
    let most: u32 = most.into();
    let of = |c: T, k: T| {
        let product = u64::from(most - c.into()) * u64::from(most - k.into());
        // `v` is at most `most`, so it fits in a `T`.
        let v = ((product + u64::from(most) / 2) / u64::from(most)) as u32;
        T::try_from(v).unwrap_or(c)
    };
    pixels.chunks_exact(4).flat_map(|p| [of(p[0], p[3]), of(p[1], p[3]), of(p[2], p[3])]).collect()
}

pub(super) fn jpeg_2000(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    use hayro_jpeg2000::{ColorSpace, DecodeSettings, DecoderContext, Image as Jpeg2000};
    let failure = |e: hayro_jpeg2000::DecodeError| corrupt("JPEG 2000", e);
    let settings = DecodeSettings { strict: true, ..DecodeSettings::default() };
    let decoder = Jpeg2000::new(data, &settings).map_err(failure)?;
    let (width, height) = (decoder.width() as usize, decoder.height() as usize);
    let channels = usize::from(decoder.color_space().num_channels());
    let all = channels + usize::from(decoder.has_alpha());
    // The decoder needs 4 bytes for each sample, because it works in floats.
    check(Header { width, height, channels: all, sample_bytes: 4 })?;
    match (decoder.color_space(), channels) {
        (ColorSpace::Gray, _) | (_, 1) => {}
        (ColorSpace::RGB | ColorSpace::Icc { .. } | ColorSpace::Unknown { .. }, 3) => {}
        _ => return Err(unsupported("JPEG 2000", format!("{channels} channels"))),
    }
    let mut context = DecoderContext::default();
    let pixels = decoder.decode(&mut context).map_err(failure)?.data_u8();
    if pixels.len() != width * height * all {
        return Err(corrupt("JPEG 2000", "components of different sizes"));
    }
    Ok(image((width, height), all, Samples::U8(pixels)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::{Picture, decode, decode_samples};

    fn all(_: Header) -> Result<()> {
        Ok(())
    }

    fn png_of(w: u32, h: u32, colour: png::ColorType, depth: png::BitDepth, data: &[u8]) -> Vec<u8> {
        let mut out = vec![];
        let mut e = png::Encoder::new(&mut out, w, h);
        e.set_color(colour);
        e.set_depth(depth);
        if colour == png::ColorType::Indexed {
            e.set_palette(vec![1, 2, 3, 4, 5, 6]);
        }
        let mut w = e.write_header().unwrap();
        w.write_image_data(data).unwrap();
        w.finish().unwrap();
        out
    }

    #[test]
    fn png_of_each_kind() {
        use png::{BitDepth as B, ColorType as C};
        let cases: [(C, B, &[u8], usize, Samples); 7] = [
            (C::Grayscale, B::Eight, &[7, 9], 1, Samples::U8(vec![7, 9])),
            (C::Grayscale, B::One, &[0b0100_0000], 1, Samples::U8(vec![0, 255])),
            (C::Grayscale, B::Sixteen, &[1, 2, 3, 4], 1, Samples::U16(vec![0x102, 0x304])),
            (C::GrayscaleAlpha, B::Eight, &[7, 0, 9, 255], 1, Samples::U8(vec![7, 9])),
            (C::Rgb, B::Eight, &[1, 2, 3, 4, 5, 6], 3, Samples::U8(vec![1, 2, 3, 4, 5, 6])),
            (C::Rgba, B::Eight, &[1, 2, 3, 0, 4, 5, 6, 9], 3, Samples::U8(vec![1, 2, 3, 4, 5, 6])),
            (C::Indexed, B::Four, &[0x10], 3, Samples::U8(vec![4, 5, 6, 1, 2, 3])),
        ];
        for (colour, depth, data, channels, want) in cases {
            let d = png_of(2, 1, colour, depth, data);
            let p = decode_samples(&d, &mut all).unwrap();
            assert_eq!((p.width, p.height, p.channels, p.samples), (2, 1, channels, want), "{colour:?}");
            for n in 8..d.len() - 12 {
                assert!(decode_samples(&d[..n], &mut all).is_err(), "{colour:?} cut to {n}");
            }
        }
    }

    #[test]
    fn the_size_is_checked_before_pixels_are_read() {
        let d = png_of(2, 1, png::ColorType::Rgb, png::BitDepth::Sixteen, &[0; 12]);
        let mut seen = None;
        let refused = decode_samples(&d, &mut |h| {
            seen = Some(h);
            Err(Failure::Unsupported("too large".into()))
        });
        assert_eq!(refused, Err(Failure::Unsupported("too large".into())));
        assert_eq!(seen, Some(Header { width: 2, height: 1, channels: 3, sample_bytes: 2 }));
        // A blank page of 400 million pixels is a small file, but `decode` rejects it. It accepts a smaller
        // page.
        let blank = |side: u32| {
            let data = vec![255; (side * side) as usize];
            png_of(side, side, png::ColorType::Grayscale, png::BitDepth::Eight, &data)
        };
        assert!(matches!(decode(&blank(20_000)), Err(Failure::Unsupported(w)) if w.contains("20000x20000")));
        assert!(decode(&blank(4_000)).is_ok());
    }

    fn tiff_of<C: tiff::encoder::colortype::ColorType>(w: u32, h: u32, data: &[C::Inner]) -> Vec<u8>
    where
        [C::Inner]: tiff::encoder::TiffValue,
    {
        let mut out = Cursor::new(vec![]);
        tiff::encoder::TiffEncoder::new(&mut out).unwrap().write_image::<C>(w, h, data).unwrap();
        out.into_inner()
    }

    #[test]
    fn tiff_of_each_kind() {
        use tiff::encoder::colortype as c;
        let grey = tiff_of::<c::Gray8>(2, 1, &[7, 9]);
        let wide = tiff_of::<c::RGB16>(1, 1, &[1, 2, 65_535]);
        let floats = tiff_of::<c::RGB32Float>(1, 1, &[0.0, 0.5, 1.0]);
        let ink = tiff_of::<c::CMYK8>(2, 1, &[0, 128, 255, 0, 0, 0, 0, 255]);
        let alpha = tiff_of::<c::RGBA8>(1, 1, &[1, 2, 3, 4]);
        let read = |d: &[u8]| decode_samples(d, &mut all).map(|p| (p.channels, p.samples));
        assert_eq!(read(&grey), Ok((1, Samples::U8(vec![7, 9]))));
        assert_eq!(read(&wide), Ok((3, Samples::U16(vec![1, 2, 65_535]))));
        assert_eq!(read(&floats), Ok((3, Samples::F32(vec![0.0, 0.5, 1.0]))));
        assert_eq!(read(&ink), Ok((3, Samples::U8(vec![255, 127, 0, 0, 0, 0]))));
        assert_eq!(read(&alpha), Ok((3, Samples::U8(vec![1, 2, 3]))));
        let p = decode(&wide).unwrap();
        assert_eq!(p, Picture { width: 1, height: 1, channels: 3, pixels: vec![0, 0, 255] });
        for n in 4..grey.len() - 1 {
            assert!(read(&grey[..n]).is_err(), "cut to {n}");
        }
        let large = tiff_of::<c::Gray64>(1, 1, &[1]);
        assert!(matches!(read(&large), Err(Failure::Unsupported(w)) if w.contains("Gray(64)")));
    }

    #[test]
    fn webp_is_lossless_where_it_says_so() {
        let pixels: Vec<u8> = (0..5 * 3 * 3).map(|k| (k * 37) as u8).collect();
        let mut out = vec![];
        image_webp::WebPEncoder::new(&mut out).encode(&pixels, 5, 3, image_webp::ColorType::Rgb8).unwrap();
        let p = decode_samples(&out, &mut all).unwrap();
        assert_eq!((p.width, p.height, p.channels, p.samples), (5, 3, 3, Samples::U8(pixels)));
        for n in 12..out.len() - 1 {
            assert!(decode_samples(&out[..n], &mut all).is_err(), "cut to {n}");
        }
    }
}
