//! Serves measurements of the CPU backend, through the public tensor API, to `cargo xtask bench peers`. The protocol is described
//! at the top of `xtask/src/bench.rs`.

use halcyon::hal::cpu::{peak, sys::Isa, team::Team};
use halcyon::ir::Error;
use halcyon::prelude::*;
use halcyon::{ConstData, OnnxSession, Scalar};
use halcyon_formats::onnx::{Datum, Model, PortType};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Bytes of the arrays that bandwidth is measured on: several times any last-level cache we know.
const STREAM: usize = 512 << 20;

/// Deterministic values, roughly normal (sum of uniforms).
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed | 1;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let u = |sh: u32| ((s >> sh) & 0xffff) as f32 / 65536.0;
            (u(48) + u(32) + u(16) - 1.5) * 2.0
        })
        .collect()
}

type Job = Box<dyn Fn() -> Result<()>>;

fn sizes(text: &str) -> Option<(usize, usize)> {
    let (a, b) = text.split_once('x')?;
    Some((a.parse().ok()?, b.parse().ok()?))
}

fn job(backend: &Backend, item: &str) -> Result<Option<Job>> {
    let tensor =
        |shape: &[usize], seed| Tensor::from_slice(backend, shape, &values(shape.iter().product(), seed));
    let (kind, size) = item.split_once('.').unwrap_or((item, ""));
    Ok(match kind {
        "gemm" => match size.parse::<usize>() {
            Ok(n) => {
                let (a, b) = (tensor(&[n, n], 1)?, tensor(&[n, n], 2)?);
                Some(Box::new(move || a.matmul(&b).eval().map(|_| ())))
            }
            Err(_) => None,
        },
        "gemv" => sizes(size)
            .map(|(r, c)| {
                let (a, x) = (tensor(&[r, c], 1)?, tensor(&[c], 2)?);
                Ok::<Job, Error>(Box::new(move || a.matmul(&x).eval().map(|_| ())))
            })
            .transpose()?,
        "chain" => sizes(size)
            .map(|(r, c)| {
                let (x, w, b) = (tensor(&[r, c], 1)?, tensor(&[c], 2)?, tensor(&[c], 3)?);
                Ok::<Job, Error>(Box::new(move || (x.silu() * &w + &b).eval().map(|_| ())))
            })
            .transpose()?,
        "softmax" => sizes(size)
            .map(|(r, c)| {
                let x = tensor(&[r, c], 1)?;
                Ok::<Job, Error>(Box::new(move || x.softmax(-1).eval().map(|_| ())))
            })
            .transpose()?,
        "layernorm" => sizes(size)
            .map(|(r, c)| {
                let (x, w, b) = (tensor(&[r, c], 1)?, tensor(&[c], 2)?, tensor(&[c], 3)?);
                Ok::<Job, Error>(Box::new(move || x.layer_norm(&w, Some(&b), -1, 1e-5).eval().map(|_| ())))
            })
            .transpose()?,
        "silu" => match size.parse::<usize>() {
            Ok(n) => {
                let x = tensor(&[n], 1)?;
                Some(Box::new(move || x.silu().eval().map(|_| ())))
            }
            Err(_) => None,
        },
        "attention" | "causal" => match numbers(size)[..] {
            [heads, length, width] => {
                let one = |seed| tensor(&[1, heads, length, width], seed);
                let (q, k, v) = (one(1)?, one(2)?, one(3)?);
                let (causal, scale) = (kind == "causal", 1.0 / (width as f64).sqrt());
                Some(Box::new(move || q.attention(&k, &v, None, causal, scale).eval().map(|_| ())))
            }
            _ => None,
        },
        "model" => model(backend, size)?,
        _ => None,
    })
}

fn numbers(text: &str) -> Vec<usize> {
    text.split('x').filter_map(|n| n.parse().ok()).collect()
}

/// A model of the folder that `HALCYON_PEER_MODELS` names, as `NAME.SIZES`: the open sizes, in their order.
fn model(backend: &Backend, item: &str) -> Result<Option<Job>> {
    let (Some(dir), Some((name, size))) = (std::env::var_os("HALCYON_PEER_MODELS"), item.split_once('.'))
    else {
        return Ok(None);
    };
    let path = std::path::Path::new(&dir).join(format!("{name}.onnx"));
    if !path.exists() {
        return Ok(None);
    }
    let session = OnnxSession::new(backend, Model::open(&path)?)?;
    let size = numbers(size);
    let mut inputs = vec![];
    for port in session.model().inputs()? {
        let PortType::Tensor { dtype, shape } = &port.ty else { return Ok(None) };
        let mut open = size.iter().copied();
        let dims: Option<Vec<usize>> =
            shape.iter().flat_map(|s| s.iter()).map(|d| d.known().or_else(|| open.next())).collect();
        let Some(dims) = dims else { return Ok(None) };
        inputs.push(Datum::Tensor(match dtype {
            DType::F32 => ConstData::from_slice(&dims, &values(dims.iter().product(), 1))?,
            d => ConstData::splat(*d, &dims, Scalar::I(1))?,
        }));
    }
    Ok(Some(Box::new(move || session.run(&inputs).map(|_| ()))))
}

fn ceiling(team: &Team, kind: &str) -> Option<(f64, f64)> {
    let isa = Isa::best();
    // A rate, answered as the time that a round amount of work takes.
    let (work, rate) = match kind {
        "fma" => (1e9, peak::fma_flops(team, isa)),
        "read" => (STREAM as f64, peak::read_bandwidth(team, isa, STREAM)),
        "copy" => (STREAM as f64, peak::triad_bandwidth(team, isa, STREAM)),
        _ => return None,
    };
    Some((work / rate, work))
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads =
        args.iter().position(|a| a == "--threads").and_then(|i| args.get(i + 1)).and_then(|n| n.parse().ok());
    if !args.iter().any(|a| a == "--serve") {
        println!("usage: spine_bench --serve [--threads N]; see xtask/src/bench.rs for the protocol");
        return Ok(());
    }
    let mut builder = Backend::builder().backend_type(BackendType::Cpu);
    if let Some(n) = threads {
        builder = builder.num_threads(n);
    }
    let backend = builder.build()?;
    let say = |v: Value| {
        let mut out = std::io::stdout().lock();
        // The parent going away ends this process at its next read.
        let _ = writeln!(out, "{v}").and_then(|_| out.flush());
    };
    say(json!({"name": format!("halcyon {}", env!("CARGO_PKG_VERSION"))}));
    let mut current: Option<(String, Job)> = None;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let item = line.trim();
        if let Some(kind) = item.strip_prefix("ceiling.") {
            current = None;
            let team = Team::new(
                threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get())),
            );
            match ceiling(&team, kind) {
                Some((seconds, work)) => say(json!({"seconds": seconds, "work": work})),
                None => say(json!({"unsupported": format!("no ceiling {kind}")})),
            }
            continue;
        }
        if current.as_ref().is_none_or(|(name, _)| name != item) {
            current = None;
            match job(&backend, item) {
                Ok(Some(f)) => {
                    f()?;
                    f()?;
                    current = Some((item.to_string(), f));
                }
                Ok(None) => {
                    say(json!({"unsupported": format!("no item {item}")}));
                    continue;
                }
                Err(e) => {
                    say(json!({"unsupported": e.to_string()}));
                    continue;
                }
            }
        }
        if let Some((_, f)) = &current {
            let (start, mut n) = (Instant::now(), 0u32);
            while n == 0 || start.elapsed().as_millis() < 30 {
                f()?;
                n += 1;
            }
            say(json!({"seconds": start.elapsed().as_secs_f64() / n as f64}));
        }
    }
    Ok(())
}
