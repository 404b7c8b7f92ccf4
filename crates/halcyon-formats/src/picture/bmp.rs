//! BMP: Windows bitmaps with 1 to 32 bits per pixel, palettes, bit masks and run lengths, and OS/2 bitmaps.
//!
//! Source of the layout: Microsoft, "Bitmap Storage" (Windows GDI documentation).

use super::{Check, Failure, Header, Image, Samples};

type Result<T> = std::result::Result<T, Failure>;

/// Bytes of the file header, before the information header.
const FILE_HEADER: usize = 14;

/// The contents of the headers.
struct Info {
    width: usize,
    height: usize,
    /// Whether the first row of the file is the top row of the image.
    top_down: bool,
    bits: usize,
    compression: u32,
    /// Masks of the red, green and blue bits in a pixel of 16 or 32 bits.
    masks: [u32; 3],
    /// Colours (red, green, blue) to which pixels of 1, 4 and 8 bits refer by index.
    palette: Vec<[u8; 3]>,
    /// Offset of the pixels in the file.
    pixels: usize,
}

fn corrupt<T>(what: impl Into<String>) -> Result<T> {
    Err(Failure::Corrupt(format!("BMP: {}", what.into())))
}

fn unsupported<T>(what: impl Into<String>) -> Result<T> {
    Err(Failure::Unsupported(format!("BMP: {}", what.into())))
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N]> {
    let part = data.get(at..).and_then(|d| d.first_chunk::<N>());
    part.copied().map_or_else(|| corrupt("the file ends within its headers"), Ok)
}

fn u16_at(data: &[u8], at: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(bytes(data, at)?))
}

fn u32_at(data: &[u8], at: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(bytes(data, at)?))
}

/// Decodes to red, green and blue. An alpha channel is left out.
pub(super) fn decode(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    let info = info(data)?;
    check(Header { width: info.width, height: info.height, channels: 3, sample_bytes: 1 })?;
    let rows = data.get(info.pixels..).unwrap_or_default();
    let pixels = match info.compression {
        1 | 2 => colours(&info, &run_lengths(rows, &info)?)?,
        _ if info.bits <= 8 => colours(&info, &indices(rows, &info)?)?,
        _ => direct(rows, &info)?,
    };
    Ok(Image { width: info.width, height: info.height, channels: 3, samples: Samples::U8(pixels) })
}

fn info(data: &[u8]) -> Result<Info> {
    let size = u32_at(data, FILE_HEADER)? as usize;
    let at = FILE_HEADER;
    let core = size == 12;
    if !matches!(size, 12 | 40 | 52 | 56 | 64 | 108 | 124) {
        return unsupported(format!("an information header of {size} bytes"));
    }
    let (width, height, bits) = if core {
        let (w, h) = (u16_at(data, at + 4)?, u16_at(data, at + 6)?);
        (i32::from(w), i32::from(h), u16_at(data, at + 10)?)
    } else {
        (u32_at(data, at + 4)?.cast_signed(), u32_at(data, at + 8)?.cast_signed(), u16_at(data, at + 14)?)
    };
    let compression = if core { 0 } else { u32_at(data, at + 16)? };
    if width <= 0 || height == 0 || height == i32::MIN {
        return corrupt(format!("the size {width}x{height} is not valid"));
    }
    let bits = usize::from(bits);
    match (compression, bits) {
        (0, 1 | 4 | 8 | 16 | 24 | 32) | (1, 8) | (2, 4) => {}
        (3 | 6, 16 | 32) if size != 64 => {}
        (0..=3 | 6, _) => {
            return corrupt(format!("compression {compression} does not allow {bits} bits per pixel"));
        }
        _ => return unsupported(format!("compression {compression}")),
    }
    let mut end = at + size;
    let masks = match compression {
        3 | 6 => {
            // The masks come after the first 40 bytes of the header. Longer headers include them; a header of
            // 40 bytes does not.
            let m = [u32_at(data, at + 40)?, u32_at(data, at + 44)?, u32_at(data, at + 48)?];
            if size == 40 {
                end += if compression == 6 { 16 } else { 12 };
            }
            m
        }
        _ if bits == 16 => [0x7c00, 0x3e0, 0x1f],
        _ => [0xff_0000, 0xff00, 0xff],
    };
    let palette = if bits <= 8 { palette(data, at, end, core, bits)? } else { vec![] };
    let info = Info {
        width: width as usize,
        height: height.unsigned_abs() as usize,
        top_down: height < 0,
        bits,
        compression,
        masks,
        palette,
        pixels: u32_at(data, 10)? as usize,
    };
    if info.top_down && matches!(compression, 1 | 2) {
        return corrupt(
            "a compressed image has its rows from top to bottom, which the format does not allow",
        );
    }
    if !matches!(compression, 1 | 2) {
        let need = info.stride().checked_mul(info.height);
        let there = data.len().saturating_sub(info.pixels);
        if need.is_none_or(|n| n > there) {
            return corrupt(format!(
                "{}x{} pixels need more bytes than the file has",
                info.width, info.height
            ));
        }
    }
    Ok(info)
}

fn palette(data: &[u8], at: usize, end: usize, core: bool, bits: usize) -> Result<Vec<[u8; 3]>> {
    let most = 1usize << bits;
    let used = if core { 0 } else { u32_at(data, at + 32)? as usize };
    let (count, entry) = (if used == 0 { most } else { used.min(most) }, if core { 3 } else { 4 });
    let read = |k: usize| bytes::<3>(data, end + k * entry).map(|[b, g, r]| [r, g, b]);
    (0..count).map(read).collect()
}

impl Info {
    /// Bytes of a row, padded to a multiple of four.
    fn stride(&self) -> usize {
        (self.width * self.bits).div_ceil(32) * 4
    }

    /// The rows of the file, from the top of the image.
    fn rows<'a>(&self, data: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let (stride, height, top_down) = (self.stride(), self.height, self.top_down);
        (0..height).map(move |y| {
            let row = if top_down { y } else { height - 1 - y };
            // `info` checked that all rows are there.
            data.get(row * stride..(row + 1) * stride).unwrap_or_default()
        })
    }
}

/// Palette indices of rows of 1, 4 or 8 bits per pixel.
fn indices(data: &[u8], info: &Info) -> Result<Vec<u8>> {
    let per_byte = 8 / info.bits;
    let mask = ((1u16 << info.bits) - 1) as u8;
    let mut out = Vec::with_capacity(info.width * info.height);
    for row in info.rows(data) {
        let pixel = |x: usize| row[x / per_byte] >> (8 - info.bits - x % per_byte * info.bits) & mask;
        out.extend((0..info.width).map(pixel));
    }
    Ok(out)
}

/// Palette indices of a run-length encoded image. Pixels that the encoding skips have index 0.
fn run_lengths(data: &[u8], info: &Info) -> Result<Vec<u8>> {
    let (w, h) = (info.width, info.height);
    let mut out = vec![0u8; w * h];
    let (mut x, mut y, mut at) = (0usize, 0usize, 0usize);
    let four = info.compression == 2;
    loop {
        let Some(&[count, value]) = data.get(at..at + 2).and_then(|d| d.first_chunk::<2>()) else {
            return corrupt("the file ends within its pixels");
        };
        at += 2;
        let nibble = |byte: u8, k: usize| if k.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
        // Pixels outside of the image are left out.
        let mut put = |x: usize, v: u8| {
            if x < w && y < h {
                out[(h - 1 - y) * w + x] = v;
            }
        };
        match (count, value) {
            (0, 0) => (x, y) = (0, y + 1),
            (0, 1) => return Ok(out),
            (0, 2) => {
                let [dx, dy] = bytes::<2>(data, at)?;
                at += 2;
                (x, y) = (x + usize::from(dx), y + usize::from(dy));
            }
            (0, n) => {
                let n = usize::from(n);
                let length = if four { n.div_ceil(2) } else { n };
                let Some(part) = data.get(at..at + length) else {
                    return corrupt("the file ends within its pixels");
                };
                for k in 0..n {
                    put(x + k, if four { nibble(part[k / 2], k) } else { part[k] });
                }
                x += n;
                // Literal pixels are padded to an even number of bytes.
                at += length.next_multiple_of(2);
            }
            (n, v) => {
                let n = usize::from(n);
                (0..n).for_each(|k| put(x + k, if four { nibble(v, k) } else { v }));
                x += n;
            }
        }
        if y > h {
            return corrupt(format!("the pixels have more than {h} rows"));
        }
    }
}

fn colours(info: &Info, indices: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(indices.len() * 3);
    for &i in indices {
        match info.palette.get(usize::from(i)) {
            Some(rgb) => out.extend(rgb),
            None => {
                let all = info.palette.len();
                return corrupt(format!("a pixel has index {i}, but the palette has {all} colours"));
            }
        }
    }
    Ok(out)
}

/// Rows of 16, 24 or 32 bits per pixel.
fn direct(data: &[u8], info: &Info) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(info.width * info.height * 3);
    for row in info.rows(data) {
        let row = &row[..info.width * info.bits / 8];
        match info.bits {
            16 => out.extend(row.chunks_exact(2).flat_map(|p| {
                let pixel = u32::from(u16::from_le_bytes([p[0], p[1]]));
                info.masks.map(|m| channel(pixel, m))
            })),
            24 => out.extend(row.chunks_exact(3).flat_map(|p| [p[2], p[1], p[0]])),
            _ => out.extend(row.chunks_exact(4).flat_map(|p| {
                let pixel = u32::from_le_bytes([p[0], p[1], p[2], p[3]]);
                info.masks.map(|m| channel(pixel, m))
            })),
        }
    }
    Ok(out)
}

/// The bits of `pixel` that `mask` selects, scaled to 8 bits.
fn channel(pixel: u32, mask: u32) -> u8 {
    if mask == 0 {
        return 0;
    }
    let shift = mask.trailing_zeros();
    let (value, most) = (u64::from((pixel & mask) >> shift), u64::from(mask >> shift));
    ((value * 255 + most / 2) / most) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::decode_samples;

    /// A bitmap with a header of 40 bytes.
    fn bmp(w: i32, h: i32, bits: u16, compression: u32, extra: &[u8], pixels: &[u8]) -> Vec<u8> {
        let mut d = b"BM".to_vec();
        d.extend([0; 8]);
        d.extend((54 + extra.len() as u32).to_le_bytes());
        d.extend(40u32.to_le_bytes());
        d.extend(w.to_le_bytes());
        d.extend(h.to_le_bytes());
        d.extend(1u16.to_le_bytes());
        d.extend(bits.to_le_bytes());
        d.extend(compression.to_le_bytes());
        d.extend([0; 12]);
        // Number of colours of the palette; 0 without a palette.
        d.extend((if bits <= 8 { extra.len() as u32 / 4 } else { 0 }).to_le_bytes());
        d.extend([0; 4]);
        d.extend(extra);
        d.extend(pixels);
        d
    }

    fn rgb(d: &[u8]) -> Vec<u8> {
        match decode_samples(d, &mut |_| Ok(())).map(|i| i.samples) {
            Ok(Samples::U8(v)) => v,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_depth_gives_its_colours() {
        // 2x2 pixels: rows from the bottom, each padded to a multiple of 4 bytes.
        let d = bmp(2, 2, 24, 0, &[], &[1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0]);
        assert_eq!(rgb(&d), [9, 8, 7, 12, 11, 10, 3, 2, 1, 6, 5, 4]);
        let d = bmp(2, -2, 24, 0, &[], &[1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0]);
        assert_eq!(rgb(&d), [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10]);
        assert_eq!(rgb(&bmp(1, 1, 32, 0, &[], &[1, 2, 3, 0])), [3, 2, 1]);
        // 5 bits per colour: 31 becomes 255, and 16 becomes 132.
        let pixel = (31u16 << 10 | 16 << 5).to_le_bytes();
        assert_eq!(rgb(&bmp(1, 1, 16, 0, &[], &[pixel[0], pixel[1], 0, 0])), [255, 132, 0]);
        // Masks of 5, 6 and 5 bits.
        let masks: Vec<u8> = [0xf800u32, 0x7e0, 0x1f].iter().flat_map(|m| m.to_le_bytes()).collect();
        let pixel = (63u16 << 5).to_le_bytes();
        assert_eq!(rgb(&bmp(1, 1, 16, 3, &masks, &[pixel[0], pixel[1], 0, 0])), [0, 255, 0]);
        let two = [3, 2, 1, 0, 6, 5, 4, 0];
        assert_eq!(rgb(&bmp(3, 1, 1, 0, &two, &[0b0100_0000, 0, 0, 0])), [1, 2, 3, 4, 5, 6, 1, 2, 3]);
        assert_eq!(rgb(&bmp(2, 1, 4, 0, &two, &[0x10, 0, 0, 0])), [4, 5, 6, 1, 2, 3]);
        assert_eq!(rgb(&bmp(2, 1, 8, 0, &two, &[0, 1, 0, 0])), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn run_lengths_follow_the_commands() {
        let two = [3, 2, 1, 0, 6, 5, 4, 0];
        let of = |v: &[u8]| -> Vec<u8> {
            v.iter().flat_map(|i| if *i == 0 { [1, 2, 3] } else { [4, 5, 6] }).collect()
        };
        // Three pixels of index 1, end of the row, skip one pixel, one pixel of index 1, one of index 0, end.
        let d = bmp(3, 2, 8, 1, &two, &[3, 1, 0, 0, 0, 2, 1, 0, 1, 1, 1, 0, 0, 1]);
        assert_eq!(rgb(&d), of(&[0, 1, 0, 1, 1, 1]));
        let d = bmp(5, 1, 4, 2, &two, &[2, 0x10, 0, 3, 0x11, 0x00, 0, 1]);
        assert_eq!(rgb(&d), of(&[1, 0, 1, 1, 0]));
        for cut in [&[3, 1][..], &[3], &[0, 2, 1], &[0, 3, 1, 1]] {
            assert!(decode_samples(&bmp(3, 2, 8, 1, &two, cut), &mut |_| Ok(())).is_err(), "{cut:?}");
        }
    }

    #[test]
    fn broken_headers_are_errors() {
        let good = bmp(2, 1, 8, 0, &[3, 2, 1, 0, 6, 5, 4, 0], &[0, 1, 0, 0]);
        for n in 2..good.len() {
            assert!(decode_samples(&good[..n], &mut |_| Ok(())).is_err(), "cut to {n}");
        }
        for i in 2..good.len() {
            for v in [0, 1, 0x7f, 0x80, 0xff] {
                let mut d = good.clone();
                d[i] = v;
                // The changed byte can be part of the size, so refuse large images.
                if let Ok(p) =
                    decode_samples(&d, &mut |h| if h.bytes() < 1 << 20 { Ok(()) } else { corrupt("large") })
                {
                    assert!(matches!(&p.samples, Samples::U8(v) if v.len() == p.width * p.height * 3));
                }
            }
        }
        let index = bmp(1, 1, 8, 0, &[3, 2, 1, 0], &[1, 0, 0, 0]);
        assert!(
            matches!(decode_samples(&index, &mut |_| Ok(())), Err(Failure::Corrupt(w)) if w.contains("palette"))
        );
    }
}
