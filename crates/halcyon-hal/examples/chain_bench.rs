//! Fused chains on the CPU compared with the machine's memory bandwidth.
//!
//! `cargo run --release -p halcyon-hal --example chain_bench [threads]`. Each line shows the best time of
//! many interleaved runs, the rate at which the necessary bytes moved, and this rate divided by the rate of
//! the best plain copy. The copy reads and writes every byte once. The last column is the lowest processor
//! time per thread, which other load disturbs less.

use halcyon_hal::cpu::CpuDevice;
use halcyon_hal::{BufferRef, Command, Device, Options, Result, Tag, Target};
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out};
use halcyon_ir::layout::View;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::target::{LibraryCall, LibraryKernel, Operand, Work};
use halcyon_ir::{DType, Error, ScalarOp};
use std::sync::Arc;
use std::time::Instant;

struct Case {
    name: &'static str,
    kernel: Arc<dyn LibraryKernel>,
    buffers: Vec<BufferRef>,
    bytes: u64,
    best: f64,
    cpu: f64,
}

fn chain(loads: Vec<(DType, View)>, ops: &[(InstrKind, DType, &[u32])], out: Out, reduced: usize) -> Fused {
    let mut body: Vec<Instr> = loads
        .iter()
        .enumerate()
        .map(|(i, l)| Instr { kind: InstrKind::Load(i as u32), dtype: l.0, args: Default::default() })
        .collect();
    body.extend(ops.iter().map(|o| Instr { kind: o.0.clone(), dtype: o.1, args: o.2.into() }));
    let space = loads[0].1.shape.clone();
    let loads = loads
        .into_iter()
        .enumerate()
        .map(|(i, (dtype, view))| Load { input: i as u32, dtype, view, fill: None })
        .collect();
    Fused { space, reduced, loads, params: vec![], body, outs: vec![out] }
}

fn case(dev: &CpuDevice, name: &'static str, f: &Fused, sizes: &[usize]) -> Result<Case> {
    let flat = |d: DType, n: usize| Operand { dtype: d, view: View::dense(&[n]) };
    let ins: Vec<Operand> = f.loads.iter().zip(sizes).map(|(l, n)| flat(l.dtype, *n)).collect();
    let outs = [flat(f.outs[0].dtype, f.outs[0].view.numel())];
    let call = LibraryCall::new(Work::Fused(f), &ins, &outs);
    let kernel = dev.library(&call).map_err(|d| Error::unsupported(name, d.reason))?;
    let mut buffers = vec![];
    for o in ins.iter().chain(&outs) {
        let b = dev.alloc(o.dtype.bytes(o.view.numel()), Tag::Io)?;
        let one = halcyon_ir::Scalar::F(0.5).to_bytes(o.dtype);
        dev.write(&b, 0, &one[..o.dtype.size()].repeat(o.view.numel()))?;
        buffers.push(b);
    }
    Ok(Case { name, kernel, buffers, bytes: f.bytes(), best: f64::INFINITY, cpu: f64::INFINITY })
}

/// Processor time of this process's threads in seconds; 0 if the system does not report it.
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let on = |t: std::fs::DirEntry| -> Option<f64> {
        std::fs::read_to_string(t.path().join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    tasks.flatten().filter_map(on).sum::<f64>() * 1e-9
}

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).and_then(|t| t.parse().ok());
    let dev = CpuDevice::new(&Options { threads, ..Default::default() })?;
    let (rows, cols) = (4096, 4096);
    let n = rows * cols;
    let full = || View::dense(&[rows, cols]);
    let row = || View::dense(&[cols]).expand(&[rows, cols]);
    let f32s = DType::F32;
    let op = |o: ScalarOp| InstrKind::Op(o);
    let plain = |value: u32, d: DType, shape: &[usize]| Out {
        value,
        dtype: d,
        reduce: None,
        view: View::dense(shape),
    };
    let sum = |value: u32, shape: &[usize]| Out {
        value,
        dtype: f32s,
        reduce: Some(ReduceKind::Sum),
        view: View::dense(shape),
    };
    let silu_d = |d: DType| {
        let ops: &[(InstrKind, DType, &[u32])] = &[
            (op(ScalarOp::Silu), d, &[0]),
            (op(ScalarOp::Mul), d, &[3, 1]),
            (op(ScalarOp::Add), d, &[4, 2]),
        ];
        chain(vec![(d, full()), (d, row()), (d, row())], ops, plain(5, d, &[rows, cols]), 0)
    };
    let gelu =
        chain(vec![(f32s, full())], &[(op(ScalarOp::Gelu), f32s, &[0])], plain(1, f32s, &[rows, cols]), 0);
    let add = chain(
        vec![(f32s, full()), (f32s, full())],
        &[(op(ScalarOp::Add), f32s, &[0, 1])],
        plain(2, f32s, &[rows, cols]),
        0,
    );
    let turn = chain(vec![(f32s, full().permute(&[1, 0]))], &[], plain(0, f32s, &[cols, rows]), 0);
    let small_in = 64 << 10;
    let small = chain(
        vec![(f32s, View::dense(&[small_in])), (f32s, View::dense(&[small_in]))],
        &[(op(ScalarOp::Silu), f32s, &[0]), (op(ScalarOp::Mul), f32s, &[2, 1])],
        plain(3, f32s, &[small_in]),
        0,
    );
    let by_row = chain(vec![(f32s, full())], &[], sum(0, &[rows]), 1);
    let by_col = chain(vec![(f32s, full().permute(&[1, 0]))], &[], sum(0, &[cols]), 1);
    let all = chain(vec![(f32s, View::dense(&[n]))], &[], sum(0, &[]), 1);
    let mut cases = vec![
        case(&dev, "silu(x)*w+b f32", &silu_d(f32s), &[n, cols, cols])?,
        case(&dev, "silu(x)*w+b bf16", &silu_d(DType::BF16), &[n, cols, cols])?,
        case(&dev, "silu(x)*w+b f16", &silu_d(DType::F16), &[n, cols, cols])?,
        case(&dev, "gelu(x)", &gelu, &[n])?,
        case(&dev, "x+y", &add, &[n, n])?,
        case(&dev, "transpose", &turn, &[n])?,
        case(&dev, "sum of rows", &by_row, &[n])?,
        case(&dev, "sum of columns", &by_col, &[n])?,
        case(&dev, "sum of all", &all, &[n])?,
        case(&dev, "silu(x)*y, 64Ki in cache", &small, &[small_in, small_in])?,
    ];
    let (src, dst) = (dev.alloc(n * 4, Tag::Io)?, dev.alloc(n * 4, Tag::Io)?);
    dev.write(&src, 0, &vec![1; n * 4])?;
    let mut copy = f64::INFINITY;
    for _ in 0..40 {
        let t = Instant::now();
        dev.submit(&[Command::Copy { src: &src, src_offset: 0, dst: &dst, dst_offset: 0, bytes: n * 4 }])?;
        copy = copy.min(t.elapsed().as_secs_f64());
        for c in &mut cases {
            let (t, used) = (Instant::now(), cpu_seconds());
            dev.submit(&[Command::Library { kernel: &c.kernel, buffers: &c.buffers, args: &[], fault: 1 }])?;
            c.best = c.best.min(t.elapsed().as_secs_f64());
            c.cpu = c.cpu.min((cpu_seconds() - used) / dev.threads() as f64);
        }
    }
    let peak = (2 * n * 4) as f64 / copy / 1e9;
    println!("{} threads, copy {peak:.1} GB/s ({:.2} ms)", dev.threads(), copy * 1e3);
    for c in &cases {
        let rate = c.bytes as f64 / c.best / 1e9;
        let share = 100.0 * rate / peak;
        println!(
            "{:26} {:8.3} ms {rate:7.1} GB/s {share:4.0} %  {:8.3} ms",
            c.name,
            c.best * 1e3,
            c.cpu * 1e3
        );
    }
    Ok(())
}
