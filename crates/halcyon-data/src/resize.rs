//! Sizes and colours of images, by the rules of `halcyon run --input`, so that a model sees the same values
//! in training and when the command runs it on a picture.

use halcyon_formats::picture::{Image, Samples};
use halcyon_ir::{Error, Result};

/// The values of an image from 0 to 1, one channel after another (`[channels, height, width]`), with 1 or 3
/// channels.
///
/// # Errors
/// [`Error::Format`] for samples that are not numbers, [`Error::OutOfMemory`].
pub(crate) fn planes(image: Image, channels: usize, to: (usize, usize), file: &str) -> Result<Vec<f32>> {
    let (from, stored) = ((image.width, image.height), image.channels);
    let floats = matches!(image.samples, Samples::F32(_));
    let mut values = image.samples.into_f32();
    if floats {
        if values.iter().any(|v| v.is_nan()) {
            return Err(crate::bad(file, "a sample of the image is not a number"));
        }
        values.iter_mut().for_each(|v| *v = v.clamp(0.0, 1.0));
    }
    let values = match (stored, channels) {
        // The luminance of Rec. 709 primaries.
        (3, 1) => {
            values.as_chunks::<3>().0.iter().map(|p| 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]).collect()
        }
        (1, 3) => values.iter().flat_map(|&v| [v; 3]).collect(),
        _ => values,
    };
    let values = if from == to { values } else { resize(&values, channels, from, to, file)? };
    let n = to.0 * to.1;
    Ok((0..channels)
        .flat_map(|c| (0..n).map(move |i| (c, i)))
        .map(|(c, i)| values[i * channels + c])
        .collect())
}

/// Resizes an image, first its height, then its width, both by a triangle filter that is widened if the image
/// shrinks (bilinear with antialiasing, as in Pillow and torchvision). Channels are innermost.
fn resize(
    values: &[f32],
    channels: usize,
    (w, h): (usize, usize),
    (to_w, to_h): (usize, usize),
    file: &str,
) -> Result<Vec<f32>> {
    if w == 0 || h == 0 {
        return Err(crate::bad(file, "the image has no pixels"));
    }
    let between = w.checked_mul(to_h).and_then(|n| n.checked_mul(4 * channels));
    let between = between.ok_or_else(|| Error::argument("images", format!("{to_w}x{to_h} is too large")))?;
    halcyon_host::check_available(between as u64, &format!("resizing the image {file}"))?;
    let row = w * channels;
    let mut rows = vec![0f32; row * to_h];
    for (out, (first, weights)) in rows.chunks_exact_mut(row).zip(triangle(h, to_h)) {
        for (k, weight) in weights.iter().enumerate() {
            let from = &values[(first + k) * row..][..row];
            out.iter_mut().zip(from).for_each(|(o, v)| *o += weight * v);
        }
    }
    let columns = triangle(w, to_w);
    let mut out = Vec::with_capacity(to_w * to_h * channels);
    for row in rows.chunks_exact(row) {
        for (first, weights) in &columns {
            for c in 0..channels {
                let term = |(k, weight): (usize, &f32)| weight * row[(first + k) * channels + c];
                out.push(weights.iter().enumerate().map(term).sum());
            }
        }
    }
    Ok(out)
}

/// For each of `to` new samples: the index of the first of the `from` old samples that contribute, and their
/// weights, whose sum is 1.
fn triangle(from: usize, to: usize) -> Vec<(usize, Vec<f32>)> {
    let ratio = from as f64 / to as f64;
    let scale = ratio.max(1.0);
    let at = |k: usize| {
        let centre = (k as f64 + 0.5) * ratio;
        let first = (centre - scale).floor().clamp(0.0, from as f64 - 1.0) as usize;
        let last = ((centre + scale).ceil() as usize).clamp(first + 1, from);
        let weight = |i: usize| (1.0 - ((i as f64 + 0.5 - centre) / scale).abs()).max(0.0);
        let all: f64 = (first..last).map(weight).sum();
        (first, (first..last).map(|i| (weight(i) / all) as f32).collect())
    };
    (0..to).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(width: usize, height: usize, channels: usize, samples: Samples) -> Image {
        Image { width, height, channels, samples }
    }

    #[test]
    fn sizes_change_by_a_triangle_filter() {
        // Larger: the two nearest samples, by their distances from the pixel's centre.
        assert_eq!(resize(&[0.0, 1.0], 1, (2, 1), (4, 1), "t").unwrap(), [0.0, 0.25, 0.75, 1.0]);
        // Smaller: the filter is as wide as two new pixels, cut at the border: weights 3, 3, 1 of 7.
        let narrow = resize(&[0.0, 1.0, 2.0, 3.0], 1, (4, 1), (2, 1), "t").unwrap();
        for (got, want) in narrow.iter().zip([5.0 / 7.0, 16.0 / 7.0]) {
            assert!((got - want).abs() < 1e-6, "{narrow:?}");
        }
        // In height, with two channels that stay separate.
        let tall = resize(&[1.0, 10.0, 3.0, 30.0], 2, (1, 2), (1, 4), "t").unwrap();
        assert_eq!(tall, [1.0, 10.0, 1.5, 15.0, 2.5, 25.0, 3.0, 30.0]);
        assert!(resize(&[], 1, (0, 1), (1, 1), "t").is_err());
    }

    #[test]
    fn channels_become_planes() {
        let rgb = image(2, 1, 3, Samples::U8(vec![255, 0, 51, 0, 255, 102]));
        assert_eq!(planes(rgb.clone(), 3, (2, 1), "t").unwrap(), [1.0, 0.0, 0.0, 1.0, 0.2, 0.4]);
        let grey = planes(rgb, 1, (2, 1), "t").unwrap();
        for (got, want) in grey.iter().zip([0.2126 + 0.0722 * 0.2, 0.7152 + 0.0722 * 0.4]) {
            assert!((got - want).abs() < 1e-6, "{grey:?}");
        }
        let deep = image(1, 1, 1, Samples::U16(vec![65535]));
        assert_eq!(planes(deep, 3, (1, 1), "t").unwrap(), [1.0; 3]);
        let floats = image(2, 1, 1, Samples::F32(vec![-0.5, 7.0]));
        assert_eq!(planes(floats, 1, (2, 1), "t").unwrap(), [0.0, 1.0]);
        assert!(planes(image(1, 1, 1, Samples::F32(vec![f32::NAN])), 1, (1, 1), "t").is_err());
    }
}
