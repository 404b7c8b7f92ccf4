//! The spine probes: a Llama decoded with states, an MLP trained through the gradient pass, on every device.

mod common;
#[path = "../../../examples/02_stories.rs"]
mod stories;
#[path = "../../../examples/03_train_mlp.rs"]
mod train_mlp;

use common::{devices, models, testdata};
use halcyon::prelude::*;
use std::path::Path;

#[test]
fn stories_decode_with_one_plan() {
    let Some(dir) = models("stories_decode_with_one_plan") else {
        return;
    };
    let dir = dir.join("stories260k");
    let text = std::fs::read_to_string(dir.join("expected.json")).unwrap();
    let want: stories::Expected = serde_json::from_str(&text).unwrap();
    for level in [Level::O0, Level::O1] {
        for b in devices("stories_decode_with_one_plan", level) {
            if level == Level::O0 && b.id() != "cpu:0" {
                continue;
            }
            let d = stories::decode(&b, &dir, &want.prompt_ids, want.greedy_ids.len()).unwrap();
            let worst = d
                .logits
                .iter()
                .zip(&want.last_logits)
                .map(|(a, b)| (*a as f64 - b).abs())
                .fold(0.0, f64::max);
            println!(
                "{} {level}: logits within {worst:.2e}, {:?} (plans, kernels, allocations) at the end",
                b.id(),
                d.made.last()
            );
            assert_eq!(d.logits.len(), want.last_logits.len());
            assert!(worst < 1e-3, "{} {level}: {worst}", b.id());
            assert_eq!(d.ids, want.greedy_ids, "{} {level}", b.id());
            // Nothing is planned, compiled or allocated after the second token.
            assert_eq!(d.made[1], *d.made.last().unwrap(), "{} {level}", b.id());
            assert_eq!(b.cache_stats().copies, 0, "a cache was copied instead of updated in place");
        }
    }
}

#[test]
fn mlp_follows_the_float64_run() {
    let name = "mlp_follows_the_float64_run";
    let Some(dir) = testdata(name, "mlp") else { return };
    let read = |f: &str| halcyon_formats::npy::read(&dir.join(f)).unwrap();
    let start = ["w0.npy", "b0.npy", "w1.npy", "b1.npy"].map(read).to_vec();
    let losses = read("losses.npy").to_vec::<f64>();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.npz");
    for b in devices(name, Level::O1) {
        let run = train_mlp::train(&b, &data, &start, 100, 64, 0.1).unwrap();
        let worst = run.losses.iter().zip(&losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{}: losses within {worst:.2e}; {} plans", b.id(), run.plans.last().unwrap());
        assert_eq!(run.losses.len(), losses.len());
        assert!(worst < 1e-4, "{}: {worst}", b.id());
        for (w, f) in run.weights.iter().zip(["final_w0.npy", "final_b0.npy", "final_w1.npy", "final_b1.npy"])
        {
            let want = read(f).to_vec::<f64>();
            let worst = w.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-4, "{} {f}: {worst}", b.id());
        }
        assert_eq!(run.plans[1], *run.plans.last().unwrap(), "a step after the second made a plan");
    }
}
