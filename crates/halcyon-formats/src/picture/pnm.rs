//! The Netpbm family: PBM, PGM and PPM as text (P1 to P3) and as bytes (P4 to P6), and PAM (P7).
//!
//! Source of the layouts: the manual pages pbm(5), pgm(5), ppm(5) and pam(5) of Netpbm.

use super::{Check, Failure, Header, Image, Samples};

type Result<T> = std::result::Result<T, Failure>;

fn corrupt<T>(what: impl Into<String>) -> Result<T> {
    Err(Failure::Corrupt(format!("PNM: {}", what.into())))
}

/// A reader of a header's words and of samples written as text.
struct Text<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Text<'a> {
    /// Skips white space, and comments from `#` to the end of the line.
    fn skip(&mut self) {
        while let Some(&b) = self.data.get(self.at) {
            if b == b'#' {
                while self.data.get(self.at).is_some_and(|&b| b != b'\n') {
                    self.at += 1;
                }
            } else if b.is_ascii_whitespace() {
                self.at += 1;
            } else {
                break;
            }
        }
    }

    fn word(&mut self) -> &'a [u8] {
        self.skip();
        let from = self.at;
        while self.data.get(self.at).is_some_and(|b| !b.is_ascii_whitespace() && *b != b'#') {
            self.at += 1;
        }
        &self.data[from..self.at]
    }

    fn number(&mut self) -> Result<usize> {
        let word = self.word();
        let n = std::str::from_utf8(word).ok().and_then(|w| w.parse().ok());
        n.map_or_else(|| corrupt(format!("\"{}\" is not a number", word.escape_ascii())), Ok)
    }

    /// Reads a pixel of a PBM file in text form, where no white space is needed between pixels.
    fn bit(&mut self) -> Result<u16> {
        self.skip();
        self.at += 1;
        match self.data.get(self.at - 1) {
            // 1 is black.
            Some(b'0') => Ok(1),
            Some(b'1') => Ok(0),
            _ => corrupt("a pixel is neither 0 nor 1"),
        }
    }
}

/// The contents of the header.
struct PnmHeader {
    width: usize,
    height: usize,
    /// Samples of a pixel.
    depth: usize,
    /// The value of white.
    most: usize,
}

/// Decodes to grey, or to red, green and blue. An alpha channel is left out.
pub(super) fn decode(data: &[u8], check: &mut Check<'_>) -> Result<Image> {
    let mut text = Text { data, at: 2 };
    let kind = data.get(1).copied().unwrap_or(0);
    let form = match kind {
        b'1' | b'4' => PnmHeader { width: text.number()?, height: text.number()?, depth: 1, most: 1 },
        b'2' | b'5' => header(&mut text, 1)?,
        b'3' | b'6' => header(&mut text, 3)?,
        _ => pam(&mut text)?,
    };
    if form.width == 0 || form.height == 0 || form.most == 0 || form.most > 65_535 {
        return corrupt(format!(
            "the size {}x{} or the largest value {} is not in the allowed range",
            form.width, form.height, form.most
        ));
    }
    // One white-space character precedes the pixels; in PAM it is the end of the line.
    let rest = data.get(text.at + 1..).unwrap_or_default();
    let row = form.width.checked_mul(form.depth);
    let row_bytes = match kind {
        b'4' => Some(form.width.div_ceil(8)),
        // In the text formats a sample takes at least one byte. (Samples of more than one bit also need a
        // space between them.)
        b'1'..=b'3' => row,
        _ if form.most > 255 => row.and_then(|n| n.checked_mul(2)),
        _ => row,
    };
    let need = row_bytes.and_then(|n| n.checked_mul(form.height));
    if need.is_none_or(|n| n > rest.len()) {
        return corrupt(format!("{}x{} pixels need more bytes than the file has", form.width, form.height));
    }
    let channels = if form.depth < 3 { 1 } else { 3 };
    let wide = form.most > 255;
    check(Header {
        width: form.width,
        height: form.height,
        // Alpha is decoded too, and then left out.
        channels: form.depth,
        sample_bytes: if wide { 2 } else { 1 },
    })?;
    let values = values(kind, &form, rest, &mut text)?;
    if let Some(v) = values.iter().find(|v| usize::from(**v) > form.most) {
        return corrupt(format!("a sample is {v}, above the header's largest value {}", form.most));
    }
    let keep = values.chunks_exact(form.depth).flat_map(|p| &p[..channels]);
    let most = form.most as u32;
    let scaled = |to: u32| keep.map(move |v| (u32::from(*v) * to + most / 2) / most);
    let samples = match wide {
        true => Samples::U16(scaled(65_535).map(|v| v as u16).collect()),
        false => Samples::U8(scaled(255).map(|v| v as u8).collect()),
    };
    Ok(Image { width: form.width, height: form.height, channels, samples })
}

/// The samples of all pixels, in 0 to `form.most`.
fn values(kind: u8, form: &PnmHeader, rest: &[u8], text: &mut Text<'_>) -> Result<Vec<u16>> {
    let n = form.width * form.height * form.depth;
    Ok(match kind {
        b'1' => (0..n).map(|_| text.bit()).collect::<Result<_>>()?,
        b'2' | b'3' => {
            let value = |_| text.number().map(|v| u16::try_from(v).unwrap_or(u16::MAX));
            (0..n).map(value).collect::<Result<_>>()?
        }
        b'4' => {
            let rows = rest.chunks_exact(form.width.div_ceil(8)).take(form.height);
            rows.flat_map(|r| (0..form.width).map(|x| u16::from(r[x / 8] >> (7 - x % 8) & 1 == 0))).collect()
        }
        _ if form.most > 255 => {
            rest.chunks_exact(2).take(n).map(|b| u16::from_be_bytes([b[0], b[1]])).collect()
        }
        _ => rest[..n].iter().map(|&b| u16::from(b)).collect(),
    })
}

fn header(text: &mut Text<'_>, depth: usize) -> Result<PnmHeader> {
    Ok(PnmHeader { width: text.number()?, height: text.number()?, depth, most: text.number()? })
}

/// The header of a PAM file. Each line has a name and a value; the line `ENDHDR` ends the header.
fn pam(text: &mut Text<'_>) -> Result<PnmHeader> {
    let mut f = PnmHeader { width: 0, height: 0, depth: 0, most: 0 };
    loop {
        match text.word() {
            b"WIDTH" => f.width = text.number()?,
            b"HEIGHT" => f.height = text.number()?,
            b"DEPTH" => f.depth = text.number()?,
            b"MAXVAL" => f.most = text.number()?,
            // Skip the kind of tuple: `DEPTH` gives the number of channels.
            b"TUPLTYPE" => _ = text.word(),
            b"ENDHDR" => break,
            w => return corrupt(format!("the header has the unknown word \"{}\"", w.escape_ascii())),
        }
    }
    match f.depth {
        1..=4 => Ok(f),
        n => Err(Failure::Unsupported(format!("PAM: {n} channels"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::decode_samples;

    fn read(d: &[u8]) -> Result<Image> {
        decode_samples(d, &mut |_| Ok(()))
    }

    fn is(d: &[u8], size: [usize; 3], want: Samples) {
        let p = read(d).unwrap();
        assert_eq!(([p.width, p.height, p.channels], p.samples), (size, want), "{}", d.escape_ascii());
    }

    #[test]
    fn each_kind_gives_its_pixels() {
        is(b"P1 # black is 1\n3 2\n101\n0 1 0", [3, 2, 1], Samples::U8(vec![0, 255, 0, 255, 0, 255]));
        is(b"P4 3 2\n\xa0\x40", [3, 2, 1], Samples::U8(vec![0, 255, 0, 255, 0, 255]));
        is(b"P2 2 1 4\n1 4", [2, 1, 1], Samples::U8(vec![64, 255]));
        is(b"P5 2 1 255\nab", [2, 1, 1], Samples::U8(b"ab".to_vec()));
        is(b"P5 1 1 1000\n\x01\xf4", [1, 1, 1], Samples::U16(vec![32_768]));
        is(b"P3 1 1 255 1 2 3", [1, 1, 3], Samples::U8(vec![1, 2, 3]));
        is(b"P6 1 1 65535\n\0\x01\0\x02\0\x03", [1, 1, 3], Samples::U16(vec![1, 2, 3]));
        let pam = b"P7\nWIDTH 1\nHEIGHT 1\nDEPTH 4\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\nabcd";
        is(pam, [1, 1, 3], Samples::U8(b"abc".to_vec()));
        // Alpha is decoded too, so the limit of an image's size counts it.
        let mut checked = 0;
        let decoded = decode_samples(pam, &mut |h| {
            checked = h.channels;
            Ok(())
        });
        assert_eq!((decoded.is_ok(), checked), (true, 4));
        let grey = b"P7\nWIDTH 1\nHEIGHT 1\nDEPTH 2\nMAXVAL 1\nENDHDR\n\x01\0";
        is(grey, [1, 1, 1], Samples::U8(vec![255]));
    }

    #[test]
    fn broken_files_are_errors() {
        for d in [
            &b"P1 2 1\n12"[..],
            b"P2 1 1 255",
            b"P2 1 1 10 11",
            b"P2 1 1 0 0",
            b"P2 x 1 255 0",
            b"P4 9 1\n\xff",
            b"P5 2 2 255\nab",
            b"P5 2 2 99999\nabcdefgh",
            b"P6 99999 99999 255\nx",
            b"P6 18446744073709551615 18446744073709551615 255\nx",
            b"P7\nWIDTH 1\nHEIGHT 1\nMAXVAL 255\nENDHDR\na",
            b"P7\nSIZE 1\n",
            b"P7",
        ] {
            assert!(read(d).is_err(), "{}", d.escape_ascii());
        }
    }
}
