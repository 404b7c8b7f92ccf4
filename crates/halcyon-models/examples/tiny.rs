//! Compares the logits of small models with those that another program stored.
//!
//! `cargo run -p halcyon-models --example tiny -- [--backend B] DIR…`, where each DIR is a model's folder
//! with `expected.npz` (`ids`, `logits`, `greedy`), or has `model.gguf` in place of the folder's files.

use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_models::{Decoder, Engine, EngineOptions, Feed, Source, family};
use std::path::Path;
use std::sync::Arc;

fn one(backend: &Backend, dir: &Path) -> Result<(f64, f64, usize, usize)> {
    let file = dir.join("model.gguf");
    let source = Source::open(if file.is_file() { &file } else { dir })?;
    let spec = family::spec(&source)?;
    let stored = Npz::open(&dir.join("expected.npz"))?;
    let get = |name: &str| stored.get(name).ok();
    let (Some(ids), Some(want)) = (get("ids"), get("logits")) else {
        return Err(halcyon::Error::argument("tiny", "expected.npz lacks ids or logits"));
    };
    let ids: Vec<u32> = ids.to_vec::<i64>().iter().map(|v| *v as u32).collect();
    let want: Vec<f64> = want.to_vec::<f64>();
    let greedy: Vec<u32> =
        get("generated").map_or(vec![], |g| g.to_vec::<i64>().iter().map(|v| *v as u32).collect());
    let vocabulary = spec.vocabulary;
    let context = (ids.len() + greedy.len()).next_multiple_of(16);
    let decoder = Arc::new(Decoder::load(backend, &source, spec, context)?);
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    let mut worst = [0f64; 2];
    let mut same = 0;
    for (k, chunk) in [512, 5].into_iter().enumerate() {
        let options = EngineOptions {
            positions: context,
            page: 4,
            cache: DType::F32.into(),
            chunk,
            ..EngineOptions::default()
        };
        let mut engine = Engine::new(decoder.clone(), options)?;
        let got = engine.feed(&[Feed { sequence: 0, tokens: &ids, all: true }])?.remove(0);
        worst[k] = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max) / std;
        if got.len() != want.len() || got.iter().any(|v| v.is_nan()) {
            worst[k] = f64::NAN;
        }
        if k == 1 {
            let mut last = got[got.len() - vocabulary..].to_vec();
            for g in &greedy {
                let best = (0..vocabulary).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap_or(0) as u32;
                if best != *g {
                    break;
                }
                same += 1;
                last = engine.feed(&[Feed { sequence: 0, tokens: &[best], all: false }])?.remove(0);
            }
        }
    }
    Ok((worst[0], worst[1], same, greedy.len()))
}

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut backend = "cpu".to_string();
    if args.first().is_some_and(|a| a == "--backend") {
        args.remove(0);
        backend = args.remove(0);
    }
    let backend = Backend::new(backend.parse()?)?;
    for dir in args {
        let name = Path::new(&dir).file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
        match one(&backend, Path::new(&dir)) {
            Ok((a, b, same, of)) => {
                let verdict = if a < 1e-3 && b < 1e-3 && same == of { "ok" } else { "WRONG" };
                println!("{verdict:6} {name:24} {a:.1e} {b:.1e} {same}/{of}");
            }
            Err(e) => println!("error  {name:24} {e}"),
        }
    }
    Ok(())
}
