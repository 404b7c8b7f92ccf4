//! Resizes images.

use halcyon_ir::{Error, Result};

/// Resizes an image, first its height, then its width, both by a triangle filter that is widened if the image
/// shrinks (bilinear with antialiasing, as in Pillow and torchvision). Sizes are width and height; channels
/// are innermost. `file` is the image's name in errors.
///
/// # Errors
/// [`Error::Format`] for an image without pixels, [`Error::Argument`] for a size that overflows,
/// [`Error::OutOfMemory`].
pub fn resize(
    values: &[f32],
    channels: usize,
    (w, h): (usize, usize),
    (to_w, to_h): (usize, usize),
    file: &str,
) -> Result<Vec<f32>> {
    if w == 0 || h == 0 {
        return Err(crate::bad(file, "the image has no pixels"));
    }
    let bytes = |w: usize, h: usize| w.checked_mul(h)?.checked_mul(channels)?.checked_mul(4);
    // The weights of a row or column take at least 32 bytes.
    let weights = to_w.checked_add(to_h).and_then(|n| n.checked_mul(32));
    let all = [bytes(w, to_h), bytes(to_w, to_h), weights];
    let between = all.into_iter().try_fold(0usize, |sum, n| sum.checked_add(n?));
    let between = between
        .filter(|n| *n <= isize::MAX as usize)
        .ok_or_else(|| Error::argument("resize", format!("{to_w}x{to_h} is too large")))?;
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
        for huge in [(usize::MAX / 2, 1), (1, usize::MAX / 2), (usize::MAX / 64, 3), (1 << 60, 1)] {
            let e = resize(&[0.0], 1, (1, 1), huge, "t").unwrap_err();
            assert!(matches!(e, Error::Argument { .. } | Error::OutOfMemory { .. }), "{huge:?}: {e}");
        }
    }
}
