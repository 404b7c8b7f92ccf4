//! Images as model inputs.

use crate::args::{ImageLayout, InputArgs};
use halcyon::{ConstData, DType, Dim, Error, Result, Shape};
use halcyon_formats::data::from_scalars;
use halcyon_formats::onnx::Port;
use halcyon_formats::picture::{self, Failure, Image};
use halcyon_host as host;
use halcyon_ir::Scalar;

/// Limits on an image's pixels and decoded bytes. The file's length does not bound them: a blank page
/// compresses to little.
const MAX_PIXELS: usize = 100 << 20;
const MAX_BYTES: usize = 512 << 20;

/// The image format that an input expects. A field is `None` if the model does not determine it.
#[derive(Debug, PartialEq)]
struct ImageFormat {
    layout: ImageLayout,
    rank: usize,
    channels: Option<usize>,
    height: Option<usize>,
    width: Option<usize>,
}

/// Decodes an image file for an input. Also returns a short description of the conversion.
///
/// Values are scaled to 0..1, then replaced by `(x - mean) / std`. A u8 input gets values from 0 to 255
/// instead. Transparency is ignored.
///
/// # Errors
/// [`Error::Argument`] if the input cannot be an image or an option does not fit; [`Error::Format`] for a
/// file that is damaged, unsupported or too large; [`Error::OutOfMemory`].
pub(crate) fn read(bytes: &[u8], p: &Port, a: &InputArgs, file: &str) -> Result<(ConstData, String)> {
    let want = want(p, a)?;
    let bad = |what: String| Error::Format { file: file.into(), what };
    // If memory is short, the error is of another kind than the decoder's errors.
    let mut lacking = None;
    let decoded = picture::decode_samples(bytes, &mut |h| {
        let (pixels, need) = (h.width.saturating_mul(h.height), h.bytes());
        if pixels > MAX_PIXELS || need > MAX_BYTES {
            return Err(Failure::Unsupported(format!(
                "a picture of {}x{}, which takes {need} bytes; the limits are {MAX_PIXELS} pixels and {MAX_BYTES} bytes",
                h.width, h.height
            )));
        }
        // The decoded image, and float copies for resizing: of the colours, and of their grey value.
        let colours = if want.channels == Some(1) && h.channels < 3 { 0 } else { 12 };
        let grey = if want.channels == Some(1) { 4 } else { 0 };
        let floats = pixels as u64 * (colours + grey);
        host::check_available(need as u64 + floats, &format!("the picture {file}")).map_err(|e| {
            lacking = Some(e);
            Failure::Unsupported("too little memory".into())
        })
    });
    if let Some(e) = lacking {
        return Err(e);
    }
    let decoded = decoded.map_err(|e| match e {
        Failure::Corrupt(what) | Failure::Unsupported(what) => bad(what),
    })?;
    let (stored_width, stored_height) = (decoded.width, decoded.height);
    let grey = decoded.channels == 1;
    let channels = want.channels.unwrap_or(if grey { 1 } else { 3 });
    let (width, height) = match &a.image_size {
        Some(s) => size(s)?,
        None => (want.width.unwrap_or(stored_width), want.height.unwrap_or(stored_height)),
    };
    let pixels = pixels(decoded, channels, width, height, file)?;
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
        "{stored_width}x{stored_height} {}{}",
        if grey { "grey" } else { "colour" },
        match (stored_width, stored_height) == (width, height) {
            true => String::new(),
            false => format!(", resized to {width}x{height}"),
        }
    );
    Ok((from_scalars(p.dtype()?, &dims, ordered.into_iter().map(Scalar::F))?, note))
}

/// Whether an input is probably an image.
pub(crate) fn takes(p: &Port) -> bool {
    let four = p.shape().is_some_and(|s| s.rank() == 4);
    four && p.dtype().is_ok_and(|d| d.is_float() || d == DType::U8) && want(p, &InputArgs::default()).is_ok()
}

fn bad(what: String) -> Error {
    Error::argument("--input", what)
}

fn want(p: &Port, a: &InputArgs) -> Result<ImageFormat> {
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
            return Err(bad(format!(
                "input '{}' is {}, which a picture cannot fill: give an .npy",
                p.name, p.ty
            )));
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
    Ok(ImageFormat { layout, rank: s.rank(), channels, height: h.known(), width: w.known() })
}

/// Parses `WxH`.
fn size(s: &str) -> Result<(usize, usize)> {
    let parts =
        s.split_once('x').and_then(|(w, h)| Some((w.parse::<usize>().ok()?, h.parse::<usize>().ok()?)));
    parts.filter(|(w, h)| (1..=16384).contains(w) && (1..=16384).contains(h)).ok_or_else(|| {
        Error::argument("--image-size", format!("\"{s}\" is not a size; write WIDTHxHEIGHT, such as 224x224"))
    })
}

/// Values in 0..1, row by row, channels innermost.
fn pixels(d: Image, channels: usize, width: usize, height: usize, file: &str) -> Result<Vec<f32>> {
    if let Some(n) = [width, height].into_iter().find(|n| !(1..=16384).contains(n)) {
        return Err(bad(format!("{n} is not a size of a picture")));
    }
    let (from, stored) = ((d.width, d.height), d.channels);
    let values = d.samples.into_f32();
    let values = match (stored, channels) {
        // The luminance of Rec. 709 primaries.
        (3, 1) => values.chunks_exact(3).map(|p| 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]).collect(),
        (1, 3) => values.iter().flat_map(|&v| [v; 3]).collect(),
        _ => values,
    };
    if from == (width, height) {
        return Ok(values);
    }
    picture::resize(&values, channels, from, (width, height), file)
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
        return Err(Error::argument("--image-mean", format!("{m} is not a finite number")));
    }
    if let Some(s) = std.iter().find(|s| **s == 0.0 || !s.is_finite()) {
        return Err(Error::argument(
            "--image-std",
            format!("{s} is not a divisor; numbers must be finite and not zero"),
        ));
    }
    let dtype = p.dtype()?;
    if dtype.is_float() {
        // Scaling to 0..1 has already rounded to f32. The next steps are in f64, so their rounding is
        // negligible.
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
        let pixels: Vec<u8> = (0..2).flat_map(|y| (0..3).flat_map(move |x| [x * 50, y * 50, 255])).collect();
        let mut out = vec![];
        let mut e = png::Encoder::new(&mut out, 3, 2);
        e.set_color(png::ColorType::Rgb);
        e.write_header().unwrap().write_image_data(&pixels).unwrap();
        out
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
    fn pictures_that_do_not_fit_are_errors() {
        let e = |p: Port, words: &[&str]| read(&png(), &p, &args(words), "t").unwrap_err().to_string();
        assert!(e(port([2, 3, 4, 4], DType::F32), &[]).contains("batch of 2"));
        assert!(e(port([1, 5, 4, 4], DType::F32), &[]).contains("5 channels"));
        assert!(e(port([7], DType::F32), &[]).contains("a picture cannot fill"));
        assert!(e(port([1, 3, 4, 4], DType::I64), &[]).contains("float inputs"));
        assert!(
            e(port([1, 3, 4, 4], DType::F32), &["--image-mean", "1,2"]).contains("2 numbers for 3 channels")
        );
        assert!(e(port([1, 3, 4, 4], DType::F32), &["--image-std", "0"]).contains("not zero"));
        let nan = e(port([1, 3, 4, 4], DType::F32), &["--image-mean", "nan"]);
        assert!(nan.starts_with("--image-mean: NaN"), "{nan}");
        assert!(e(port([1, 3, 4, 4], DType::F32), &["--image-size", "0x9"]).contains("not a size"));
        let broken = read(&png()[..40], &port([1, 3, 4, 4], DType::F32), &args(&[]), "t").unwrap_err();
        assert!(matches!(broken, Error::Format { .. }), "{broken}");
    }
}
