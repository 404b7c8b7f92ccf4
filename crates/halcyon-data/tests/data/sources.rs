//! Datasets of real files: MNIST and the digits of the repository.

use halcyon::Backend;
use halcyon_data::idx::{self, Split};
use halcyon_data::{Arrays, DType, DataLoader, DataSpec, Dataset, LoaderOptions, open};
use halcyon_test_host::{models, root};
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

    // The folder has only the test files.
    let rows = [Split::Train, Split::Test].map(|s| idx::mnist_part(&dir, s).expect("a part").len());
    assert_eq!(rows, [8000, 2000]);
    let all = idx::mnist(&dir, Split::Test).expect("MNIST");
    // Reads one epoch for each number of threads. The time is printed but not checked.
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
