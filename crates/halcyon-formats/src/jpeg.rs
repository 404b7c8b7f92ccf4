//! JPEG (ITU-T T.81): Huffman-coded baseline, extended and progressive images of 8 bits with one component
//! (grey) or three.
//!
//! ONNX's ImageDecoder specifies the result: chroma is interpolated with ordered dithering. The inverse DCT
//! is the integer one of Loeffler, Ligtenberg and Moschytz (1989) in the fixed-point arithmetic of the
//! Independent JPEG Group's library. Decoders with the same arithmetic give bit-identical results.

use crate::picture::{Failure, Picture};

/// Limit on the scans of one image, because every scan visits all blocks of its components. Progressive
/// encoders write about ten scans.
const MAX_SCANS: usize = 128;

type Result<T> = std::result::Result<T, Failure>;

fn corrupt<T>(what: &'static str) -> Result<T> {
    Err(Failure::Corrupt(what.into()))
}

/// Row-major position of the n-th coefficient of a block.
#[rustfmt::skip]
const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55,
    62, 63,
];

#[derive(Clone, Default)]
struct Huffman {
    /// For each code length: the end of the range of its codes, and the offset from a code to its index in
    /// `values`.
    end: [i32; 17],
    shift: [i32; 17],
    values: Vec<u8>,
}

impl Huffman {
    fn new(counts: &[u8], values: &[u8]) -> Result<Huffman> {
        let mut t = Huffman { values: values.to_vec(), ..Default::default() };
        let (mut code, mut place) = (0i32, 0i32);
        for len in 1..=16 {
            let n = i32::from(counts[len - 1]);
            t.shift[len] = place - code;
            code += n;
            place += n;
            if code > 1 << len {
                return corrupt("a Huffman table has more codes than fit");
            }
            t.end[len] = code;
            code <<= 1;
        }
        Ok(t)
    }
}

/// Reader of entropy-coded bits up to the next marker.
struct Bits<'a> {
    data: &'a [u8],
    at: usize,
    acc: u64,
    have: u32,
}

impl<'a> Bits<'a> {
    fn new(data: &'a [u8]) -> Bits<'a> {
        Bits { data, at: 0, acc: 0, have: 0 }
    }

    fn fill(&mut self) {
        while self.have <= 48 {
            let byte = match (self.data.get(self.at), self.data.get(self.at + 1)) {
                (Some(0xff), Some(0)) => {
                    self.at += 2;
                    0xff
                }
                (Some(0xff), _) | (None, _) => return,
                (Some(&v), _) => {
                    self.at += 1;
                    v
                }
            };
            self.acc = self.acc << 8 | u64::from(byte);
            self.have += 8;
        }
    }

    fn bits(&mut self, n: u32) -> Result<i32> {
        if n == 0 {
            return Ok(0);
        }
        if self.have < n {
            self.fill();
        }
        if self.have < n {
            return corrupt("the image data ends early");
        }
        self.have -= n;
        Ok((self.acc >> self.have & ((1 << n) - 1)) as i32)
    }

    fn symbol(&mut self, t: &Huffman) -> Result<u8> {
        if self.have < 16 {
            self.fill();
        }
        for len in 1..=16u32 {
            if self.have < len {
                return corrupt("the image data ends early");
            }
            let code = (self.acc >> (self.have - len) & 0xffff & ((1 << len) - 1)) as i32;
            if code < t.end[len as usize] {
                self.have -= len;
                let place = usize::try_from(code + t.shift[len as usize]).ok();
                return match place.and_then(|p| t.values.get(p)) {
                    Some(v) => Ok(*v),
                    None => corrupt("a Huffman code without a value"),
                };
            }
        }
        corrupt("an unknown Huffman code")
    }

    /// Reads an `n`-bit value whose first bit gives the sign (T.81, F.2.2.1).
    fn signed(&mut self, n: u32) -> Result<i32> {
        let v = self.bits(n)?;
        Ok(if n > 0 && v < 1 << (n - 1) { v - (1 << n) + 1 } else { v })
    }

    /// Skips the restart marker, which must follow, and resets the bit reader.
    fn restart(&mut self) -> Result<()> {
        (self.acc, self.have) = (0, 0);
        while self.data.get(self.at) == Some(&0xff) && self.data.get(self.at + 1) == Some(&0xff) {
            self.at += 1;
        }
        match (self.data.get(self.at), self.data.get(self.at + 1)) {
            (Some(0xff), Some(0xd0..=0xd7)) => {
                self.at += 2;
                Ok(())
            }
            _ => corrupt("a restart marker is missing"),
        }
    }
}

#[derive(Clone, Default)]
struct Component {
    id: u8,
    h: usize,
    v: usize,
    table: usize,
    /// Size in samples, without padding.
    width: usize,
    height: usize,
    /// Blocks per row, padded to whole MCUs.
    stride: usize,
    blocks: Vec<[i16; 64]>,
    seen: bool,
    /// Huffman tables of the current scan, and the previous DC value (`last`).
    dc: usize,
    ac: usize,
    last: i32,
}

struct Frame {
    progressive: bool,
    width: usize,
    height: usize,
    h: usize,
    v: usize,
    components: Vec<Component>,
}

/// The range of coefficients and bits that one scan contains.
#[derive(Clone, Copy)]
struct Band {
    first: usize,
    last: usize,
    high: u32,
    low: u32,
}

#[derive(Default)]
struct Decoder {
    quant: [Option<[u16; 64]>; 4],
    dc: [Option<Huffman>; 4],
    ac: [Option<Huffman>; 4],
    frame: Option<Frame>,
    interval: usize,
    jfif: bool,
    adobe: Option<u8>,
}

/// Decodes an image to grey or RGB.
///
/// # Errors
/// [`Failure::Unsupported`] for arithmetic coding, lossless and hierarchical images, samples that do not have
/// 8 bits, a number of components other than 1 and 3, and sampling factors that do not divide the largest
/// one; [`Failure::Corrupt`] for anything else that is not a complete JPEG.
pub fn decode(data: &[u8]) -> Result<Picture> {
    let mut d = Decoder::default();
    let mut at = 2;
    let mut scans = 0;
    if !data.starts_with(&[0xff, 0xd8]) {
        return corrupt("not a JPEG");
    }
    // Bytes between segments that are not a marker are skipped.
    while let Some(n) = data.get(at..).and_then(|d| d.iter().position(|b| *b == 0xff)) {
        at += n;
        let Some(&marker) = data.get(at + 1) else { break };
        at += 1;
        match marker {
            0xff => continue,
            0x00 | 0x01 | 0xd0..=0xd8 => {
                at += 1;
                continue;
            }
            0xd9 => return d.finish(),
            _ => at += 1,
        }
        let len = match data.get(at..at + 2) {
            Some(&[a, b]) => usize::from(a) << 8 | usize::from(b),
            _ => break,
        };
        let Some(body) = data.get(at + 2..at + len.max(2)) else {
            return corrupt("a segment is longer than the file");
        };
        at += len.max(2);
        match marker {
            0xdb => d.quantisation(body)?,
            0xc4 => d.huffman(body)?,
            0xc0..=0xc2 => d.frame(body, marker == 0xc2, data.len())?,
            0xc3 | 0xc5..=0xcf => {
                return Err(Failure::Unsupported(match marker {
                    0xc3 => "lossless JPEG".into(),
                    0xc9..=0xcf => "JPEG with arithmetic coding".into(),
                    _ => "hierarchical JPEG".into(),
                }));
            }
            0xdd => match body {
                [a, b, ..] => d.interval = usize::from(*a) << 8 | usize::from(*b),
                _ => return corrupt("a short restart interval"),
            },
            0xe0 => d.jfif |= body.starts_with(b"JFIF\0"),
            0xee if body.starts_with(b"Adobe") => d.adobe = body.get(11).copied(),
            0xda => {
                scans += 1;
                if scans > MAX_SCANS {
                    return corrupt("too many scans");
                }
                let used = d.scan(body, data.get(at..).unwrap_or(&[]))?;
                at += used;
            }
            _ => {}
        }
    }
    corrupt("the file ends before the image does")
}

impl Decoder {
    fn quantisation(&mut self, mut b: &[u8]) -> Result<()> {
        while let Some((&head, rest)) = b.split_first() {
            let wide = head >> 4 != 0;
            let size = if wide { 128 } else { 64 };
            let (Some(slot), Some(v)) = (self.quant.get_mut(usize::from(head & 15)), rest.get(..size)) else {
                return corrupt("a bad quantisation table");
            };
            let mut t = [0u16; 64];
            for (i, z) in ZIGZAG.iter().enumerate() {
                t[usize::from(*z)] = match wide {
                    true => u16::from(v[2 * i]) << 8 | u16::from(v[2 * i + 1]),
                    false => v[i].into(),
                };
            }
            *slot = Some(t);
            b = &rest[size..];
        }
        Ok(())
    }

    fn huffman(&mut self, mut b: &[u8]) -> Result<()> {
        while let Some((&head, rest)) = b.split_first() {
            let Some(counts) = rest.get(..16) else { return corrupt("a short Huffman table") };
            let n: usize = counts.iter().map(|c| usize::from(*c)).sum();
            let Some(values) = rest.get(16..16 + n) else { return corrupt("a short Huffman table") };
            let tables = if head >> 4 == 0 { &mut self.dc } else { &mut self.ac };
            match tables.get_mut(usize::from(head & 15)) {
                Some(slot) => *slot = Some(Huffman::new(counts, values)?),
                None => return corrupt("a bad Huffman table"),
            }
            b = &rest[16 + n..];
        }
        Ok(())
    }

    fn frame(&mut self, b: &[u8], progressive: bool, file: usize) -> Result<()> {
        let (Some(head), Some(parts)) = (b.get(..6), b.get(6..)) else { return corrupt("a short frame") };
        let n = usize::from(head[5]);
        if self.frame.is_some() || parts.len() < 3 * n {
            return corrupt("a bad frame");
        }
        if head[0] != 8 {
            return Err(Failure::Unsupported(format!("JPEG of {} bits", head[0])));
        }
        if n != 1 && n != 3 {
            return Err(Failure::Unsupported(format!("JPEG of {n} components")));
        }
        let size = |i: usize| usize::from(head[i]) << 8 | usize::from(head[i + 1]);
        let (height, width) = (size(1), size(3));
        let mut components: Vec<Component> = parts[..3 * n]
            .chunks_exact(3)
            .map(|p| Component {
                id: p[0],
                h: usize::from(p[1] >> 4),
                v: usize::from(p[1] & 15),
                table: usize::from(p[2]),
                ..Default::default()
            })
            .collect();
        if let [one] = &mut components[..] {
            // The sampling factors of a single component have no meaning.
            (one.h, one.v) = (1, 1);
        }
        let fits = |n: usize| (1..=4).contains(&n);
        if width == 0 || height == 0 || !components.iter().all(|c| fits(c.h) && fits(c.v) && c.table < 4) {
            return corrupt("a bad frame");
        }
        let h = components.iter().map(|c| c.h).max().unwrap_or(1);
        let v = components.iter().map(|c| c.v).max().unwrap_or(1);
        let (across, down) = (width.div_ceil(8 * h), height.div_ceil(8 * v));
        // Every block takes at least one bit, so the file's length bounds the allocation.
        let blocks: usize = components.iter().map(|c| across * down * c.h * c.v).sum();
        if blocks > file.saturating_mul(8) {
            return corrupt("the image is larger than its data");
        }
        for c in &mut components {
            c.width = (width * c.h).div_ceil(h);
            c.height = (height * c.v).div_ceil(v);
            c.stride = across * c.h;
            c.blocks = vec![[0; 64]; c.stride * down * c.v];
        }
        self.frame = Some(Frame { progressive, width, height, h, v, components });
        Ok(())
    }

    /// Decodes a scan and returns the number of bytes consumed.
    fn scan(&mut self, head: &[u8], data: &[u8]) -> Result<usize> {
        let Some(f) = &mut self.frame else { return corrupt("a scan before its frame") };
        let n = usize::from(*head.first().unwrap_or(&0));
        let (Some(list), Some(&[first, last, bits])) =
            (head.get(1..1 + 2 * n), head.get(1 + 2 * n..4 + 2 * n))
        else {
            return corrupt("a short scan");
        };
        let band = match f.progressive {
            true => Band {
                first: first.into(),
                last: last.into(),
                high: (bits >> 4).into(),
                low: (bits & 15).into(),
            },
            false => Band { first: 0, last: 63, high: 0, low: 0 },
        };
        let dc_only = band.first == 0 && band.last == 0;
        let ordered = band.first <= band.last && band.last < 64 && band.low <= 13 && band.high <= 14;
        if !ordered
            || (f.progressive && (band.first == 0) != dc_only)
            || (!dc_only && f.progressive && n != 1)
        {
            return corrupt("a bad scan");
        }
        let mut used = vec![];
        for p in list.chunks_exact(2) {
            let Some(i) = f.components.iter().position(|c| c.id == p[0]) else {
                return corrupt("a scan of an unknown component");
            };
            if used.contains(&i) {
                return corrupt("a component twice in a scan");
            }
            let c = &mut f.components[i];
            (c.dc, c.ac, c.last) = (usize::from(p[1] >> 4), usize::from(p[1] & 15), 0);
            c.seen |= band.first == 0;
            used.push(i);
        }
        if used.is_empty() {
            return corrupt("an empty scan");
        }
        let tables = Tables { dc: &self.dc, ac: &self.ac };
        let mut bits = Bits::new(data);
        let mut run = 0u32;
        let mut left = self.interval;
        let (across, down) = match used[..] {
            [i] => (f.components[i].width.div_ceil(8), f.components[i].height.div_ceil(8)),
            _ => (f.width.div_ceil(8 * f.h), f.height.div_ceil(8 * f.v)),
        };
        for m in 0..across * down {
            if self.interval > 0 {
                if left == 0 {
                    bits.restart()?;
                    used.iter().for_each(|&i| f.components[i].last = 0);
                    (run, left) = (0, self.interval);
                }
                left -= 1;
            }
            let (x, y) = (m % across, m / across);
            for &i in &used {
                let c = &mut f.components[i];
                let (h, v) = if used.len() == 1 { (1, 1) } else { (c.h, c.v) };
                for k in 0..h * v {
                    let place = (y * v + k / h) * c.stride + x * h + k % h;
                    tables.block(c, place, band, f.progressive, &mut bits, &mut run)?;
                }
            }
        }
        Ok(bits.at)
    }

    fn finish(self) -> Result<Picture> {
        let Some(f) = self.frame else { return corrupt("there is no image") };
        if !f.components.iter().all(|c| c.seen) {
            return corrupt("a component has no data");
        }
        let mut planes = Vec::with_capacity(3);
        for c in &f.components {
            let Some(q) = self.quant[c.table] else { return corrupt("a quantisation table is missing") };
            let plane = upsample(&samples(c, &q), c, &f)?;
            planes.push(plane);
        }
        let (width, height) = (f.width, f.height);
        let [y, cb, cr] = match <[Vec<u8>; 3]>::try_from(planes) {
            Ok(p) => p,
            Err(mut p) => {
                return Ok(Picture { width, height, channels: 1, pixels: p.pop().unwrap_or_default() });
            }
        };
        let ids: Vec<u8> = f.components.iter().map(|c| c.id).collect();
        let rgb = !self.jfif && (self.adobe == Some(0) || (self.adobe.is_none() && ids == *b"RGB"));
        let mut pixels = Vec::with_capacity(3 * y.len());
        for ((&y, &b), &r) in y.iter().zip(&cb).zip(&cr) {
            pixels.extend_from_slice(&if rgb { [y, b, r] } else { colour(y, b, r) });
        }
        Ok(Picture { width, height, channels: 3, pixels })
    }
}

struct Tables<'a> {
    dc: &'a [Option<Huffman>; 4],
    ac: &'a [Option<Huffman>; 4],
}

impl Tables<'_> {
    fn get(t: &[Option<Huffman>; 4], i: usize) -> Result<&Huffman> {
        match t.get(i) {
            Some(Some(t)) => Ok(t),
            _ => corrupt("a Huffman table is missing"),
        }
    }

    fn block(
        &self,
        c: &mut Component,
        place: usize,
        band: Band,
        progressive: bool,
        bits: &mut Bits<'_>,
        run: &mut u32,
    ) -> Result<()> {
        let Some(block) = c.blocks.get_mut(place) else { return corrupt("a block outside of the image") };
        if band.first == 0 {
            if band.high > 0 {
                block[0] |= (bits.bits(1)? << band.low) as i16;
                return Ok(());
            }
            let n = bits.symbol(Tables::get(self.dc, c.dc)?)?;
            if n > 15 {
                return corrupt("a DC value out of range");
            }
            c.last = c.last.wrapping_add(bits.signed(n.into())?);
            block[0] = (c.last << band.low) as i16;
            if progressive {
                return Ok(());
            }
        }
        let t = Tables::get(self.ac, c.ac)?;
        if band.high > 0 {
            return refine(block, band, t, bits, run);
        }
        if *run > 0 {
            *run -= 1;
            return Ok(());
        }
        let mut k = band.first.max(1);
        while k <= band.last {
            let s = bits.symbol(t)?;
            let (zeros, n) = (usize::from(s >> 4), u32::from(s & 15));
            if n == 0 {
                if zeros == 15 {
                    k += 16;
                    continue;
                }
                if progressive {
                    *run = (1 << zeros) + bits.bits(zeros as u32)? as u32 - 1;
                }
                break;
            }
            k += zeros;
            let v = bits.signed(n)?;
            match ZIGZAG.get(k) {
                Some(z) if k <= band.last => block[usize::from(*z)] = (v << band.low) as i16,
                _ => return corrupt("a coefficient outside of its block"),
            }
            k += 1;
        }
        Ok(())
    }
}

/// Decodes one more bit of the AC coefficients of a block (T.81, G.1.2.3).
fn refine(block: &mut [i16; 64], band: Band, t: &Huffman, bits: &mut Bits<'_>, run: &mut u32) -> Result<()> {
    let one = 1i16 << band.low;
    let mut k = band.first;
    let more = |v: &mut i16, bits: &mut Bits<'_>| -> Result<()> {
        if bits.bits(1)? == 1 && *v & one == 0 {
            *v = v.wrapping_add(if *v > 0 { one } else { -one });
        }
        Ok(())
    };
    if *run == 0 {
        while k <= band.last {
            let s = bits.symbol(t)?;
            let (mut zeros, n) = (s >> 4, s & 15);
            let mut new = 0;
            match n {
                0 if zeros < 15 => {
                    *run = (1 << zeros) + bits.bits(zeros.into())? as u32;
                    break;
                }
                0 => {}
                1 => new = if bits.bits(1)? == 1 { one } else { -one },
                _ => return corrupt("a refinement of more than a bit"),
            }
            while k <= band.last {
                let v = &mut block[usize::from(ZIGZAG[k])];
                k += 1;
                if *v != 0 {
                    more(v, bits)?;
                } else if zeros == 0 {
                    *v = new;
                    break;
                } else {
                    zeros -= 1;
                }
            }
        }
    }
    if *run > 0 {
        while k <= band.last {
            let v = &mut block[usize::from(ZIGZAG[k])];
            if *v != 0 {
                more(v, bits)?;
            }
            k += 1;
        }
        *run -= 1;
    }
    Ok(())
}

/// Inverse-transforms a component to samples, without the padding of its blocks.
fn samples(c: &Component, q: &[u16; 64]) -> Vec<u8> {
    let mut out = vec![0u8; c.width * c.height];
    for by in 0..c.height.div_ceil(8) {
        for bx in 0..c.width.div_ceil(8) {
            let block = idct(&c.blocks[by * c.stride + bx], q);
            let w = (c.width - 8 * bx).min(8);
            for (dy, line) in block.chunks_exact(8).enumerate().take(c.height - 8 * by) {
                let at = (8 * by + dy) * c.width + 8 * bx;
                out[at..at + w].copy_from_slice(&line[..w]);
            }
        }
    }
    out
}

fn descale(v: i64, bits: u32) -> i64 {
    (v + (1 << (bits - 1))) >> bits
}

/// One-dimensional inverse DCT of eight values, scaled by 2^13.
fn idct8(v: [i64; 8]) -> [i64; 8] {
    let z1 = (v[2] + v[6]) * 4433;
    let (t2, t3) = (z1 - v[6] * 15137, z1 + v[2] * 6270);
    let (t0, t1) = ((v[0] + v[4]) << 13, (v[0] - v[4]) << 13);
    let even = [t0 + t3, t1 + t2, t1 - t2, t0 - t3];
    let (z1, z2, z3, z4) = (v[7] + v[1], v[5] + v[3], v[7] + v[3], v[5] + v[1]);
    let z5 = (z3 + z4) * 9633;
    let (z1, z2, z3, z4) = (-z1 * 7373, -z2 * 20995, z5 - z3 * 16069, z5 - z4 * 3196);
    let odd = [v[1] * 12299 + z1 + z4, v[3] * 25172 + z2 + z3, v[5] * 16819 + z2 + z4, v[7] * 2446 + z1 + z3];
    std::array::from_fn(|i| if i < 4 { even[i] + odd[i] } else { even[7 - i] - odd[7 - i] })
}

/// Two-dimensional inverse DCT: columns, then rows. Two extra bits of precision are kept between the two
/// passes.
fn idct(block: &[i16; 64], q: &[u16; 64]) -> [u8; 64] {
    let mut mid = [0i64; 64];
    for x in 0..8 {
        let col = std::array::from_fn(|y| i64::from(block[8 * y + x]) * i64::from(q[8 * y + x]));
        for (y, v) in idct8(col).into_iter().enumerate() {
            mid[8 * y + x] = descale(v, 11);
        }
    }
    let mut out = [0u8; 64];
    for (from, to) in mid.chunks_exact(8).zip(out.chunks_exact_mut(8)) {
        let row = idct8(std::array::from_fn(|x| from[x]));
        for (v, o) in row.into_iter().zip(to) {
            *o = (descale(v, 18) + 128).clamp(0, 255) as u8;
        }
    }
    out
}

/// Scales a component to the size of the image. An axis that is doubled is interpolated: 3/4 of the nearest
/// sample plus 1/4 of its neighbour, with alternating rounding. Samples are repeated instead if a factor is
/// larger than 2, or if the width is doubled and the component has at most two columns.
fn upsample(plane: &[u8], c: &Component, f: &Frame) -> Result<Vec<u8>> {
    if !f.h.is_multiple_of(c.h) || !f.v.is_multiple_of(c.v) {
        return Err(Failure::Unsupported("JPEG with fractional sampling".into()));
    }
    let (sx, sy) = (f.h / c.h, f.v / c.v);
    if (sx, sy) == (1, 1) {
        return Ok(plane.to_vec());
    }
    let mut out = Vec::with_capacity(f.width * f.height);
    let line = |y: usize| &plane[y * c.width..(y + 1) * c.width];
    let smooth = c.width > 2;
    for y in 0..f.height {
        let (here, odd) = (y / sy, y % sy == 1);
        // The nearer neighbouring line; at the edge, the line itself.
        let other = if odd { (here + 1).min(c.height - 1) } else { here.saturating_sub(1) };
        let (a, b) = (line(here), line(other));
        let from = out.len();
        match (sx, sy) {
            (2, 1) if smooth => {
                out.extend((0..f.width).map(|x| {
                    let (at, next) = neighbour(x, c.width);
                    let v = 3 * u16::from(a[at]) + u16::from(a[next]);
                    ((v + if x % 2 == 0 { 1 } else { 2 }) >> 2) as u8
                }));
            }
            (1, 2) => {
                let bias = if odd { 2 } else { 1 };
                out.extend(
                    a.iter().zip(b).map(|(a, b)| ((3 * u16::from(*a) + u16::from(*b) + bias) >> 2) as u8),
                );
            }
            (2, 2) if smooth => {
                let sum = |x: usize| 3 * u16::from(a[x]) + u16::from(b[x]);
                out.extend((0..f.width).map(|x| {
                    let (at, next) = neighbour(x, c.width);
                    let v = 3 * sum(at) + sum(next);
                    ((v + if x % 2 == 0 { 8 } else { 7 }) >> 4) as u8
                }));
            }
            _ => out.extend((0..f.width).map(|x| a[x / sx])),
        }
        out.resize(from + f.width, 0);
    }
    Ok(out)
}

/// The index of the sample that covers position `x` of the doubled row, and the index of the sample on the
/// nearer side of that position (at the edge, the same index).
fn neighbour(x: usize, n: usize) -> (usize, usize) {
    let at = x / 2;
    (at, if x.is_multiple_of(2) { at.saturating_sub(1) } else { (at + 1).min(n - 1) })
}

/// Converts to RGB by the equations of JFIF, in fixed point with 16 fractional bits.
fn colour(y: u8, cb: u8, cr: u8) -> [u8; 3] {
    let (y, b, r) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
    let half = 1 << 15;
    let clamp = |v: i32| v.clamp(0, 255) as u8;
    [
        clamp(y + ((91_881 * r + half) >> 16)),
        clamp(y + ((-22_554 * b - 46_802 * r + half) >> 16)),
        clamp(y + ((116_130 * b + half) >> 16)),
    ]
}
