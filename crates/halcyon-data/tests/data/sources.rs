//! Datasets of real files: MNIST, the digits of the repository, and folders of PNG files.

use halcyon::Backend;
use halcyon_data::idx::{self, Split};
use halcyon_data::{
    Arrays, DType, DataLoader, DataSpec, Dataset, DatasetExt, ImageFolder, ImageOptions, LoaderOptions, open,
};
use halcyon_test_host::{models, root};
use std::path::Path;
use std::time::Instant;

#[test]
fn mnist_has_the_images_that_its_pictures_show() {
    let Some(dir) = models("mnist_has_the_images_that_its_pictures_show", "mnist") else { return };
    let raw = idx::folder(&dir, Split::Test).expect("MNIST");
    assert_eq!((raw.len(), raw.columns()[0].dims.as_slice()), (10_000, &[28, 28][..]));
    // Known properties of the test images: the count of each digit, and the mean of all pixels.
    let labels = raw.array("label").expect("labels").to_vec::<u8>();
    assert_eq!(labels[..10], [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]);
    let count: Vec<usize> = (0..10).map(|d| labels.iter().filter(|l| **l == d).count()).collect();
    assert_eq!(count, [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]);
    let pixels = raw.array("image").expect("images").bytes();
    let mean = pixels.iter().map(|p| f64::from(*p)).sum::<f64>() / pixels.len() as f64 / 255.0;
    assert!((mean - 0.1325).abs() < 1e-4, "{mean}");

    let spec =
        format!("kind = \"idx\"\npath = {dir:?}\nsplit = \"test\"\nsubset = {{ rows = [8000, 10000] }}");
    let spec: DataSpec = toml::from_str(&spec).expect("a description");
    let data = open(&spec).expect("MNIST");
    assert_eq!(data.len(), 2000);
    let batch = data.batch(&[0, 1999]).expect("a batch");
    assert_eq!((batch[0].dtype, batch[0].dims.as_slice()), (DType::F32, &[2, 1, 28, 28][..]));
    let want: Vec<f32> = pixels[8000 * 784..][..784].iter().map(|p| f32::from(*p) / 255.0).collect();
    assert_eq!(batch[0].to_vec::<f32>()[..784], want);
    assert_eq!(batch[1].to_vec::<i32>(), [labels[8000], labels[9999]].map(i32::from));

    // An epoch, and how long it takes, which is reported only.
    let all = idx::mnist(&dir, Split::Test).expect("MNIST");
    for workers in [0, 2] {
        let o = LoaderOptions::new(64).shuffle(1).workers(workers);
        let mut loader = DataLoader::new(all.clone(), o).expect("a loader");
        let start = Instant::now();
        let rows: usize = loader.epoch().map(|b| b.expect("a batch").rows.len()).sum();
        println!("{workers} threads: {:.0} images/s", rows as f64 / start.elapsed().as_secs_f64());
        assert_eq!(rows, 10_000);
    }
}

#[test]
fn digits_reach_a_device() {
    let path = root().join("models/digits.npz");
    let text = format!(
        "kind = \"npz\"\npath = {path:?}\ncolumns = [\"train_images\", \"train_labels\"]\n\
         scale = 16.0\nshape = [1, 8, 8]"
    );
    let data = open(&toml::from_str(&text).expect("a description")).expect("digits");
    let raw = Arrays::npz(&path, &["train_images", "train_labels"]).expect("digits");
    let b = Backend::cpu().expect("the CPU");
    let mut loader = DataLoader::new(data, LoaderOptions::new(100).shuffle(7)).expect("a loader");
    assert_eq!(loader.batches(), 15);
    let (mut sum, mut labels) = (0.0, [0; 10]);
    for batch in loader.epoch() {
        let batch = batch.expect("a batch");
        let t = batch.to(&b).expect("tensors");
        assert_eq!(t[0].dims().expect("a shape")[..], [batch.rows.len(), 1, 8, 8]);
        assert_eq!(t[0].to_vec::<f32>().expect("values"), batch.arrays[0].to_vec::<f32>());
        sum += t[0].sum(..).item::<f64>().expect("a sum");
        t[1].to_vec::<i32>().expect("labels").iter().for_each(|l| labels[*l as usize] += 1);
    }
    let want: f64 = raw.array("train_images").expect("images").bytes().iter().map(|p| f64::from(*p)).sum();
    assert!((sum - want / 16.0).abs() < 1e-3 * want, "{sum} {want}");
    let mut count = [0; 10];
    raw.array("train_labels").expect("labels").bytes().iter().for_each(|l| count[usize::from(*l)] += 1);
    assert_eq!(labels, count);
}

/// Writes a PNG file of one colour, with a size of its own.
fn write_png(path: &Path, size: u32, rgb: [u8; 3]) {
    let mut out = vec![];
    let mut e = png::Encoder::new(&mut out, size, size + 1);
    e.set_color(png::ColorType::Rgb);
    let pixels = rgb.repeat((size * (size + 1)) as usize);
    e.write_header().and_then(|mut w| w.write_image_data(&pixels)).expect("a picture");
    std::fs::write(path, out).expect("the file is written");
}

#[test]
#[cfg(feature = "images")]
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
#[cfg(feature = "images")]
fn pictures_of_digits_are_as_in_their_arrays() {
    let Some(dir) = models("pictures_of_digits_are_as_in_their_arrays", "mnist") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    for digit in ["3", "8"] {
        std::fs::create_dir(folder.path().join(digit)).expect("a folder");
        let name = format!("digit-{digit}.png");
        std::fs::copy(dir.join(&name), folder.path().join(digit).join(&name)).expect("a copy");
    }
    // The arrays are normalised as the model that reads them was trained.
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
