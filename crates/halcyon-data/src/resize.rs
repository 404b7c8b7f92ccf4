//! Converts colours and sizes of images as `halcyon run --input` does, so that a model gets the same values
//! in training and when `halcyon run` runs the model on an image.

use halcyon_formats::picture::{Image, Samples, resize};
use halcyon_ir::Result;

/// The values of an image, from 0 to 1, as `[channels, height, width]` with 1 or 3 channels.
///
/// # Errors
/// `Error::Format` for a sample that is NaN, and the errors of [`resize`].
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

#[cfg(test)]
mod tests {
    use super::*;

    fn image(width: usize, height: usize, channels: usize, samples: Samples) -> Image {
        Image { width, height, channels, samples }
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
