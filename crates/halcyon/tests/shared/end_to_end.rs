//! The end-to-end tests (decoding stories, training an MLP) on every device.

use halcyon::prelude::*;
use halcyon_test::devices::devices;
use halcyon_test::{end_to_end, models, root, testdata};

#[test]
fn stories_decode_with_one_plan() {
    let name = "stories_decode_with_one_plan";
    let Some(dir) = models(name, "stories260k") else { return };
    for level in [Level::O0, Level::O1] {
        for b in devices(name, level) {
            if level == Level::O0 && b.id() != "cpu:0" {
                continue;
            }
            println!("{} {level}: {}", b.id(), end_to_end::stories(&b, &dir, end_to_end::ALL).unwrap());
        }
    }
}

#[test]
fn mlp_follows_the_float64_run() {
    let name = "mlp_follows_the_float64_run";
    let Some(dir) = testdata(name, "mlp") else { return };
    let data = root().join("models/digits.npz");
    for b in devices(name, Level::O1) {
        println!("{}: {}", b.id(), end_to_end::mlp(&b, &dir, &data, end_to_end::ALL).unwrap());
    }
}
