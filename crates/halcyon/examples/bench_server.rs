//! Runs measurements of the CPU backend through the public API for `cargo xtask bench peers`.
//! `xtask/src/bench.rs` describes the protocol.

use halcyon::hal::cpu::{peak, sys::Isa, team::Team};
use halcyon::hal::{Command, LibraryCall, Operand, Tag};
use halcyon::ir::Error;
use halcyon::ir::composite::CompositeKind;
use halcyon::ir::layout::View;
use halcyon::ir::ops::Op;
use halcyon::ir::target::Work;
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, Attention, ConstData, OnnxSession, Scalar, Session};
use halcyon_formats::onnx::{Datum, Model, PortType};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Bytes of the arrays used to measure bandwidth: several times the last-level cache of most processors.
const STREAM: usize = 512 << 20;

/// Deterministic, roughly normal values (sums of uniforms).
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

fn job(backend: &Backend, low: &Backend, item: &str) -> Result<Option<Job>> {
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
        "gemm16" => match size.parse::<usize>() {
            Ok(n) => Some(product16(low, [n, n], n)?),
            Err(_) => None,
        },
        "gemv16" => match sizes(size) {
            // A product as in a decoder: one row times a weight.
            Some((r, c)) => Some(product16(low, [1, c], r)?),
            None => None,
        },
        "igemm" => match size.parse::<usize>() {
            Ok(n) => Some(bytes(backend, n)?),
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
        k if k == CompositeKind::Softmax.name() => sizes(size)
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
        k if k == "causal" || k == CompositeKind::Attention.name() => match numbers(size)[..] {
            [heads, length, width] => {
                let one = |seed| tensor(&[1, heads, length, width], seed);
                let (q, k, v) = (one(1)?, one(2)?, one(3)?);
                let options = Attention { causal: kind == "causal", ..Attention::default() };
                Some(Box::new(move || q.attention(&k, &v, options).eval().map(|_| ())))
            }
            _ => None,
        },
        "model" => model(backend, size)?,
        "model16" => model(low, size)?,
        _ => None,
    })
}

/// A bf16 matrix of these dimensions times a weight with `n` columns, with a bf16 result.
fn product16(backend: &Backend, dims: [usize; 2], n: usize) -> Result<Job> {
    let data = |dims: [usize; 2], seed| {
        let v = values(dims[0] * dims[1], seed).into_iter().map(|v| Scalar::F(v.into()));
        ConstData::from_scalars(DType::BF16, &dims, v)
    };
    let mut g = Graph::new();
    let a = g.input("a", TensorType::new(DType::BF16, dims));
    let b = g.constant(data([dims[1], n], 2)?);
    let y = g.matmul(a, b)?;
    g.output("y", y);
    let run = Session::new(backend, g).capture(&[data(dims, 1)?])?;
    Ok(Box::new(move || run.launch()))
}

/// A product of unsigned and signed bytes with a result in i32. It runs the device's library kernel, with the
/// right factor packed if the kernel takes packed factors.
fn bytes(backend: &Backend, n: usize) -> Result<Job> {
    let device = backend.device().clone();
    let operand = |dtype| Operand { dtype, view: View::dense(&[n, n]) };
    let (inputs, outputs) = ([operand(DType::U8), operand(DType::I8)], [operand(DType::I32)]);
    let call = LibraryCall { constants: &[1], ..LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs) };
    let kernel =
        device.as_target().library(&call).map_err(|d| Error::unsupported("a product of bytes", d.reason))?;
    let data = |seed| values(n * n, seed).iter().map(|v| (v * 40.0) as i8 as u8).collect::<Vec<u8>>();
    let filled = |seed| {
        let b = device.alloc(n * n, Tag::Io)?;
        device.write(&b, 0, &data(seed)).map(|()| b)
    };
    let (a, mut b) = (filled(1)?, filled(2)?);
    if let Some(p) = kernel.packing() {
        let to = device.alloc(p.bytes, Tag::Weights)?;
        device.pack(&*kernel, &b, &to)?;
        b = to;
    }
    let mut buffers = vec![a, b, device.alloc(4 * n * n, Tag::Io)?];
    if kernel.workspace() > 0 {
        buffers.push(device.alloc(kernel.workspace(), Tag::Workspace)?);
    }
    Ok(Box::new(move || {
        device.submit(&[Command::Library { kernel: &kernel, buffers: &buffers, args: &[], fault: 0 }])?;
        device.synchronize()
    }))
}

fn numbers(text: &str) -> Vec<usize> {
    text.split('x').filter_map(|n| n.parse().ok()).collect()
}

/// A model in the folder that `HALCYON_PEER_MODELS` names. `item` is `NAME.SIZES`, where `SIZES` are the
/// values of the symbolic dimensions of each input, in order.
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
    Ok(Some(Box::new(move || session.run_data(&inputs).map(|_| ()))))
}

fn peak(team: &Team, kind: &str) -> Option<(f64, f64)> {
    let isa = Isa::best();
    // A rate is reported as an amount of work and the time for it.
    let best = |kind| {
        let rates = peak::multiply_add(team, isa, kind).ok()?;
        Some(rates.into_iter().fold(0.0, f64::max)).filter(|r| *r > 0.0)
    };
    let (work, rate) = match kind {
        "bf16" => (1e9, best(peak::MulAdd::Bf16)?),
        "int8" => (1e9, best(peak::MulAdd::Int8)?),
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
        println!("usage: bench_server --serve [--threads N]; see xtask/src/bench.rs for the protocol");
        return Ok(());
    }
    let open = |amp: AmpPolicy| {
        let b = Backend::builder().backend_type(BackendType::Cpu).amp(amp).force_amp(amp != AmpPolicy::None);
        threads.into_iter().fold(b, |b, n| b.num_threads(n)).build()
    };
    let backend = open(AmpPolicy::None)?;
    // This backend is created on demand, so that its threads do not idle beside those of the first backend.
    let mut low = None;
    let say = |v: Value| {
        let mut out = std::io::stdout().lock();
        // If the parent has exited, this process ends at its next read.
        let _ = writeln!(out, "{v}").and_then(|_| out.flush());
    };
    say(json!({"name": format!("halcyon {}", env!("CARGO_PKG_VERSION"))}));
    let mut current: Option<(String, Job)> = None;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let item = line.trim();
        if let Some(kind) = item.strip_prefix("peak.") {
            current = None;
            let team = Team::new(
                threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get())),
            );
            match peak(&team, kind) {
                Some((seconds, work)) => say(json!({"seconds": seconds, "work": work})),
                None => say(json!({"unsupported": format!("there is no peak {kind}")})),
            }
            continue;
        }
        if current.as_ref().is_none_or(|(name, _)| name != item) {
            current = None;
            if item.split('.').next().is_some_and(|k| k.ends_with("16")) && low.is_none() {
                low = Some(open(AmpPolicy::Bf16)?);
            }
            match job(&backend, low.as_ref().unwrap_or(&backend), item) {
                Ok(Some(f)) => {
                    f()?;
                    f()?;
                    current = Some((item.to_string(), f));
                }
                Ok(None) => {
                    say(json!({"unsupported": format!("there is no item {item}")}));
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
