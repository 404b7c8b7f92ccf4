//! Small encoders of every family against the vectors that transformers computes in float64.

use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_models::{Encoder, EncoderEngine, EncoderSpec, Source};
use halcyon_test::devices;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FAMILIES: [&str; 3] = ["bert", "xlm-roberta", "modernbert"];

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/embed/data").join(name)
}

fn engine(b: &Backend, dir: &Path) -> EncoderEngine {
    let source = Source::open(dir).expect("the model opens");
    let spec = EncoderSpec::of(&source).expect("the configuration is valid").expect("an encoder");
    EncoderEngine::new(Arc::new(Encoder::load(b, &source, spec, None).expect("the weights are loaded")))
}

struct Stored(Npz);

impl Stored {
    fn open(dir: &Path) -> Stored {
        Stored(Npz::open(&dir.join("expected.npz")).expect("the expected values"))
    }
    fn ids(&self, name: &str) -> Vec<u32> {
        self.0.get(name).expect("ids").to_vec::<i64>().iter().map(|v| *v as u32).collect()
    }
    fn values(&self, name: &str) -> Vec<f64> {
        self.0.get(name).expect("values").to_vec::<f64>()
    }
    /// The two texts of the batch, without their padding.
    fn batch(&self) -> [Vec<u32>; 2] {
        let (ids, mask) = (self.ids("padded_ids"), self.ids("padded_mask"));
        let width = ids.len() / 2;
        [0, 1].map(|t| {
            let row = t * width..(t + 1) * width;
            ids[row.clone()].iter().zip(&mask[row]).filter(|(_, m)| **m == 1).map(|(i, _)| *i).collect()
        })
    }
}

fn close(who: &str, got: &[f32], want: &[f64], std: f64) {
    assert_eq!(got.len(), want.len(), "{who}");
    let far = |(g, w): (&f32, &f64)| g.is_nan() || (f64::from(*g) - w).abs() > 5e-5 * std;
    if let Some(at) = got.iter().zip(want).position(far) {
        panic!("{who}: element {at} is {}, expected {}, deviation {std}", got[at], want[at]);
    }
}

fn case(b: &Backend, name: &str) {
    let dir = folder(name);
    let (stored, e) = (Stored::open(&dir), engine(b, &dir));
    let want = stored.values("hidden");
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    let who = format!("{name} on {}", b.id());
    let ids = stored.ids("ids");
    close(&who, &e.hidden(&[&ids]).expect("one text")[0], &want, std);
    let [long, short] = stored.batch();
    let want = stored.values("padded_hidden");
    let made = e.hidden(&[&long, &short]).expect("two texts");
    close(&who, &made[0], &want[..want.len() / 2], std);
    close(&who, &made[1], &want[want.len() / 2..][..made[1].len()], std);
}

#[test]
fn every_family_computes_the_stored_vectors() {
    let name = "every_family_computes_the_stored_vectors";
    for b in devices::devices(name, Level::O2) {
        for family in FAMILIES {
            case(&b, family);
        }
    }
}

/// The steps of a batch have other numbers of rows, texts and pages than a text alone.
#[test]
fn a_text_has_the_same_bits_alone_and_in_any_batch() {
    let name = "a_text_has_the_same_bits_alone_and_in_any_batch";
    let mut rng = halcyon_test::Rng::fresh(name);
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    for family in FAMILIES {
        let e = engine(&cpu, &folder(family));
        let (context, vocabulary) = (e.encoder().context(), e.encoder().spec.body.vocabulary);
        let texts: Vec<Vec<u32>> = (0..33)
            .map(|i| {
                let n = if i == 0 { context } else { 1 + rng.below(context) };
                (0..n).map(|_| rng.below(vocabulary) as u32).collect()
            })
            .collect();
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let bits = |v: &[f32]| -> Vec<u32> {
            assert!(v.iter().all(|v| v.is_finite()));
            v.iter().map(|v| v.to_bits()).collect()
        };
        let solo: Vec<Vec<u32>> = texts.iter().map(|t| bits(&e.hidden(&[t]).expect("a text")[0])).collect();
        for size in [2, 7, 33] {
            let of = |part: &[&[u32]]| e.hidden(part).expect("a batch");
            let made: Vec<Vec<u32>> = texts.chunks(size).flat_map(of).map(|v| bits(&v)).collect();
            assert!(made == solo, "{family}, batches of {size}");
        }
    }
}
