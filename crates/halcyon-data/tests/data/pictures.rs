//! Tests with folders of PNG files.

use halcyon_data::{DataLoader, Dataset, DatasetExt, ImageFolder, ImageOptions, LoaderOptions, Result};
use halcyon_test_host::models;
use std::path::Path;

/// Writes a PNG file of one colour, `size` pixels wide and `size + 1` pixels high.
fn write_png(path: &Path, size: u32, rgb: [u8; 3]) {
    let mut out = vec![];
    let mut e = png::Encoder::new(&mut out, size, size + 1);
    e.set_color(png::ColorType::Rgb);
    let pixels = rgb.repeat((size * (size + 1)) as usize);
    e.write_header().and_then(|mut w| w.write_image_data(&pixels)).expect("a picture");
    std::fs::write(path, out).expect("the file is written");
}

#[test]
fn folders_of_png_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let colours = [("blue", [0, 0, 255]), ("green", [0, 255, 0]), ("red", [255, 0, 0])];
    for (name, rgb) in colours.iter().rev() {
        std::fs::create_dir(dir.path().join(name)).expect("a folder");
        (1..6).for_each(|k| write_png(&dir.path().join(name).join(format!("{k}.png")), 3 * k, *rgb));
    }
    let data = ImageFolder::open(dir.path(), ImageOptions::new(8, 6)).expect("images");
    assert_eq!(data.columns()[1].classes[..], ["blue", "green", "red"]);
    let mut loader =
        DataLoader::new(data.clone(), LoaderOptions::new(4).shuffle(5).workers(3)).expect("a loader");
    let mut seen = 0;
    for batch in loader.epoch() {
        let batch = batch.expect("a batch");
        let (x, y) = (batch.arrays[0].to_vec::<f32>(), batch.arrays[1].to_vec::<i32>());
        for (k, class) in y.iter().enumerate() {
            let name = data.file(batch.rows[k]).and_then(|p| p.parent()?.file_name()?.to_str());
            assert_eq!(name, Some(colours[*class as usize].0));
            for channel in 0..3 {
                let want = f32::from(colours[*class as usize].1[channel]) / 255.0;
                let got = &x[(k * 3 + channel) * 48..][..48];
                assert!(got.iter().all(|v| (v - want).abs() < 1e-6), "{name:?}, {channel}: {got:?}");
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 15);
    // The loader names the file that is damaged.
    let file = dir.path().join("green/4.png");
    let bytes = std::fs::read(&file).expect("the file");
    std::fs::write(&file, &bytes[..bytes.len() / 2]).expect("the file is written");
    let mut loader = DataLoader::new(data, LoaderOptions::new(4).workers(2)).expect("a loader");
    let e = loader.epoch().find_map(Result::err).expect("a damaged file").to_string();
    assert!(e.contains("green/4.png"), "{e}");
}

#[test]
fn pictures_of_digits_are_as_in_their_arrays() {
    let Some(dir) = models("pictures_of_digits_are_as_in_their_arrays", "mnist") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    for digit in ["3", "8"] {
        std::fs::create_dir(folder.path().join(digit)).expect("a folder");
        let name = format!("digit-{digit}.png");
        std::fs::copy(dir.join(&name), folder.path().join(digit).join(&name)).expect("a copy");
    }
    // The arrays hold images that are normalised for the model, so the pictures are normalised too.
    let data = ImageFolder::open(folder.path(), ImageOptions::new(28, 28).grey()).expect("images");
    let data = data.normalise("image", &[0.1307], &[0.3081]).expect("a column");
    for (row, digit) in ["3", "8"].iter().enumerate() {
        let want = halcyon_formats::npy::read(&dir.join(format!("digit-{digit}.npy"))).expect("an array");
        let got = data.row(row).expect("a row");
        assert_eq!(got[0].dims[..], [1, 28, 28]);
        let (got, want) = (got[0].to_vec::<f32>(), want.to_vec::<f32>());
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{digit}");
    }
}
