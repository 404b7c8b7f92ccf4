//! Images as model inputs.

use crate::args::{ImageLayout, InputArgs};
use ::image::imageops::{FilterType, resize};
use ::image::{DynamicImage, ImageBuffer, ImageDecoder, Luma, Rgb};
use halcyon::{ConstData, DType, Dim, Error, Result, Shape};
use halcyon_formats::data::from_scalars;
use halcyon_formats::onnx::Port;
use halcyon_ir::{Scalar, host};
use std::io::Cursor;

/// Limits on an image's pixels and decoded bytes. The file's length does not bound them: a blank page
/// compresses to little.
const PIXELS: u64 = 100 << 20;
const MOST: u64 = 512 << 20;

/// The image format that an input expects. `None` where the model does not determine it.
#[derive(Debug, PartialEq)]
struct Want {
    layout: ImageLayout,
    rank: usize,
    channels: Option<usize>,
    height: Option<usize>,
    width: Option<usize>,
}

/// Decodes a PNG or JPEG file for an input. Also returns a short description of the conversion.
///
/// Values are scaled to 0..1, then `(x - mean) / std`. A u8 input gets the bytes unchanged. Transparency is
/// ignored.
///
/// # Errors
/// [`Error::Argument`] if the input cannot be an image or an option does not fit; [`Error::Format`] for a
/// damaged file.
pub fn read(bytes: &[u8], p: &Port, a: &InputArgs, file: &str) -> Result<(ConstData, String)> {
    let want = want(p, a)?;
    let bad = |what: String| Error::Format { file: file.into(), what };
    let mut reader = ::image::ImageReader::new(Cursor::new(bytes))
        .with_guessed_format()
        .map_err(|e| bad(e.to_string()))?;
    let mut limits = ::image::Limits::default();
    limits.max_alloc = Some(MOST);
    reader.limits(limits.clone());
    let mut decoder = reader.into_decoder().map_err(|e| bad(e.to_string()))?;
    let ((w, h), need) = (decoder.dimensions(), decoder.total_bytes());
    if u64::from(w) * u64::from(h) > PIXELS || need > MOST {
        return Err(bad(format!(
            "a picture of {w}x{h}, which takes {need} bytes; at most {PIXELS} pixels and {MOST} bytes are taken"
        )));
    }
    // The decoded image, and its float copy for resizing.
    let floats = u64::from(w) * u64::from(h) * if want.channels == Some(1) { 4 } else { 12 };
    host::room(need + floats, &format!("the picture {file}"))?;
    decoder.set_limits(limits).map_err(|e| bad(e.to_string()))?;
    let decoded = DynamicImage::from_decoder(decoder).map_err(|e| bad(e.to_string()))?;
    let grey = !decoded.color().has_color();
    let channels = want.channels.unwrap_or(if grey { 1 } else { 3 });
    let (width, height) = match &a.image_size {
        Some(s) => size(s)?,
        None => {
            (want.width.unwrap_or(decoded.width() as usize), want.height.unwrap_or(decoded.height() as usize))
        }
    };
    let pixels = pixels(&decoded, channels, width, height)?;
    let values = normalise(pixels, channels, p, a)?;

    let (n, c) = (height * width, channels);
    let ordered: Vec<f64> = match want.layout {
        ImageLayout::Nhwc => values,
        ImageLayout::Nchw => {
            (0..c).flat_map(|k| (0..n).map(move |i| (k, i))).map(|(k, i)| values[i * c + k]).collect()
        }
    };
    let dims: Vec<usize> = match (want.rank, want.layout) {
        (2, _) => vec![height, width],
        (3, ImageLayout::Nchw) => vec![c, height, width],
        (3, ImageLayout::Nhwc) => vec![height, width, c],
        (_, ImageLayout::Nchw) => vec![1, c, height, width],
        (_, ImageLayout::Nhwc) => vec![1, height, width, c],
    };
    let note = format!(
        "{}x{} {}{}",
        decoded.width(),
        decoded.height(),
        if grey { "grey" } else { "colour" },
        match (decoded.width() as usize, decoded.height() as usize) == (width, height) {
            true => String::new(),
            false => format!(", resized to {width}x{height}"),
        }
    );
    Ok((from_scalars(p.dtype()?, &dims, ordered.into_iter().map(Scalar::F))?, note))
}

/// Whether an input is probably an image.
pub fn takes(p: &Port) -> bool {
    let four = p.shape().is_some_and(|s| s.rank() == 4);
    four && p.dtype().is_ok_and(|d| d.is_float() || d == DType::U8) && want(p, &InputArgs::default()).is_ok()
}

fn bad(what: String) -> Error {
    Error::argument("--input", what)
}

fn want(p: &Port, a: &InputArgs) -> Result<Want> {
    let open = Shape::from(["n", "c", "h", "w"]);
    let s = p.shape().unwrap_or(&open);
    let colours = |d: Dim| matches!(d.known(), Some(1 | 3));
    let (layout, c, h, w) = match s.rank() {
        2 => (ImageLayout::Nhwc, Some(Dim::from(1)), s[0], s[1]),
        r @ (3 | 4) => {
            let o = r - 3;
            // Channels come first unless only the last axis can be the channels.
            let layout = a.image_layout.unwrap_or(if !colours(s[o]) && colours(s[o + 2]) {
                ImageLayout::Nhwc
            } else {
                ImageLayout::Nchw
            });
            match layout {
                ImageLayout::Nchw => (layout, Some(s[o]), s[o + 1], s[o + 2]),
                ImageLayout::Nhwc => (layout, Some(s[o + 2]), s[o], s[o + 1]),
            }
        }
        _ => {
            return Err(bad(format!("input '{}' is {}, which no picture fits: give an .npy", p.name, p.ty)));
        }
    };
    if s.rank() == 4 && s[0].known().is_some_and(|n| n != 1) {
        return Err(bad(format!("input '{}' takes a batch of {} pictures: give an .npy", p.name, s[0])));
    }
    let channels = c.and_then(Dim::known);
    if let Some(n) = channels
        && n != 1
        && n != 3
    {
        return Err(bad(format!(
            "input '{}' is {} with {n} channels; a picture gives 1 or 3 (is --image-layout right?)",
            p.name, p.ty
        )));
    }
    Ok(Want { layout, rank: s.rank(), channels, height: h.known(), width: w.known() })
}

/// Parses `WxH`.
fn size(s: &str) -> Result<(usize, usize)> {
    let parts =
        s.split_once('x').and_then(|(w, h)| Some((w.parse::<usize>().ok()?, h.parse::<usize>().ok()?)));
    parts.filter(|(w, h)| (1..=16384).contains(w) && (1..=16384).contains(h)).ok_or_else(|| {
        Error::argument("--image-size", format!("\"{s}\" is no size of a picture; write 224x224"))
    })
}

/// Values in 0..1 in row-major order, channels innermost.
fn pixels(d: &DynamicImage, channels: usize, width: usize, height: usize) -> Result<Vec<f32>> {
    let bad = |n: usize| bad(format!("{n} is no size of a picture"));
    let w = u32::try_from(width).ok().filter(|n| (1..=16384).contains(n)).ok_or_else(|| bad(width))?;
    let h = u32::try_from(height).ok().filter(|n| (1..=16384).contains(n)).ok_or_else(|| bad(height))?;
    let same = d.width() == w && d.height() == h;
    Ok(if channels == 1 {
        let b: ImageBuffer<Luma<f32>, Vec<f32>> = d.to_luma32f();
        if same { b.into_raw() } else { resize(&b, w, h, FilterType::Triangle).into_raw() }
    } else {
        let b: ImageBuffer<Rgb<f32>, Vec<f32>> = d.to_rgb32f();
        if same { b.into_raw() } else { resize(&b, w, h, FilterType::Triangle).into_raw() }
    })
}

fn normalise(pixels: Vec<f32>, channels: usize, p: &Port, a: &InputArgs) -> Result<Vec<f64>> {
    let per_channel = |name: &str, v: &[f64], default: f64| -> Result<Vec<f64>> {
        match v.len() {
            0 => Ok(vec![default; channels]),
            1 => Ok(vec![v[0]; channels]),
            n if n == channels => Ok(v.to_vec()),
            n => Err(Error::argument(name, format!("{n} numbers for {channels} channels"))),
        }
    };
    let mean = per_channel("--image-mean", &a.image_mean, 0.0)?;
    let std = per_channel("--image-std", &a.image_std, 1.0)?;
    if let Some(m) = mean.iter().find(|m| !m.is_finite()) {
        return Err(Error::argument("--image-mean", format!("{m} is no finite number")));
    }
    if let Some(s) = std.iter().find(|s| **s == 0.0 || !s.is_finite()) {
        return Err(Error::argument(
            "--image-std",
            format!("{s} is no divisor; numbers must be finite and not zero"),
        ));
    }
    let dtype = p.dtype()?;
    if dtype.is_float() {
        // The division by 255 has rounded to f32; the following steps are exact enough to add no rounding
        // before the cast.
        return Ok(pixels
            .iter()
            .enumerate()
            .map(|(i, v)| (f64::from(*v) - mean[i % channels]) / std[i % channels])
            .collect());
    }
    if dtype == DType::U8 && a.image_mean.is_empty() && a.image_std.is_empty() {
        return Ok(pixels.iter().map(|v| f64::from((v * 255.0).round().clamp(0.0, 255.0))).collect());
    }
    Err(bad(format!(
        "input '{}' is {}; pictures go to float inputs, or unscaled to u8 inputs without --image-mean and --image-std",
        p.name, p.ty
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use halcyon_formats::onnx::PortType;

    #[derive(Parser, Debug)]
    struct Args {
        #[command(flatten)]
        input: InputArgs,
    }

    fn args(words: &[&str]) -> InputArgs {
        Args::try_parse_from(["x"].iter().chain(words)).unwrap().input
    }

    fn port(shape: impl Into<Shape>, dtype: DType) -> Port {
        Port { name: "x".into(), ty: PortType::Tensor { dtype, shape: Some(shape.into()) } }
    }

    /// An image 3 wide and 2 high. Its red is 50 times the column, its green 50 times the row.
    fn png() -> Vec<u8> {
        let b: ImageBuffer<Rgb<u8>, Vec<u8>> =
            ImageBuffer::from_fn(3, 2, |x, y| Rgb([x as u8 * 50, y as u8 * 50, 255]));
        let mut out = Cursor::new(vec![]);
        DynamicImage::ImageRgb8(b).write_to(&mut out, ::image::ImageFormat::Png).unwrap();
        out.into_inner()
    }

    #[test]
    fn layouts_and_normalisation() {
        let (x, note) = read(&png(), &port(["n", "c", "h", "w"], DType::F32), &args(&[]), "t").unwrap();
        assert_eq!((x.dims.as_slice(), note.as_str()), (&[1, 3, 2, 3][..], "3x2 colour"));
        let unit = |v: f32| v / 255.0;
        let v = x.to_vec::<f32>();
        assert_eq!(v[..6], [0.0, 50.0, 100.0, 0.0, 50.0, 100.0].map(unit));
        assert_eq!(v[6..12], [0.0, 0.0, 0.0, 50.0, 50.0, 50.0].map(unit));

        let a = args(&["--image-mean", "0.5,0,-1", "--image-std", "2"]);
        let (y, _) =
            read(&png(), &port([1, 2, 3, 3], DType::F32), &args(&["--image-layout", "nhwc"]), "t").unwrap();
        assert_eq!(y.to_vec::<f32>()[3..6], [50.0 / 255.0, 0.0, 1.0]);
        let (z, _) = read(&png(), &port([3, 2, 3], DType::F64), &a, "t").unwrap();
        assert_eq!(
            (z.dims.as_slice(), z.to_vec::<f64>()[0], z.to_vec::<f64>()[12]),
            (&[3, 2, 3][..], -0.25, 1.0)
        );
        let (b, _) = read(&png(), &port([2, 3, 3], DType::U8), &args(&[]), "t").unwrap();
        assert_eq!(b.to_vec::<u8>()[3..6], [50, 0, 255]);
    }

    #[test]
    fn grey_and_size_follow_the_model() {
        let (x, note) = read(&png(), &port([1, 1, 4, 6], DType::F32), &args(&[]), "t").unwrap();
        assert_eq!(x.dims.as_slice(), [1, 1, 4, 6]);
        assert!(note.contains("resized to 6x4"), "{note}");
        let (y, _) =
            read(&png(), &port(["h", "w"], DType::F32), &args(&["--image-size", "5x4"]), "t").unwrap();
        assert_eq!(y.dims.as_slice(), [4, 5]);
    }

    #[test]
    fn what_does_not_fit_says_so() {
        let e = |p: Port, words: &[&str]| read(&png(), &p, &args(words), "t").unwrap_err().to_string();
        assert!(e(port([2, 3, 4, 4], DType::F32), &[]).contains("batch of 2"));
        assert!(e(port([1, 5, 4, 4], DType::F32), &[]).contains("5 channels"));
        assert!(e(port([7], DType::F32), &[]).contains("no picture"));
        assert!(e(port([1, 3, 4, 4], DType::I64), &[]).contains("float inputs"));
        assert!(
            e(port([1, 3, 4, 4], DType::F32), &["--image-mean", "1,2"]).contains("2 numbers for 3 channels")
        );
        assert!(e(port([1, 3, 4, 4], DType::F32), &["--image-std", "0"]).contains("not zero"));
        let nan = e(port([1, 3, 4, 4], DType::F32), &["--image-mean", "nan"]);
        assert!(nan.starts_with("--image-mean: NaN"), "{nan}");
        assert!(e(port([1, 3, 4, 4], DType::F32), &["--image-size", "0x9"]).contains("no size"));
        let broken = read(&png()[..40], &port([1, 3, 4, 4], DType::F32), &args(&[]), "t").unwrap_err();
        assert!(matches!(broken, Error::Format { .. }), "{broken}");
    }
}
