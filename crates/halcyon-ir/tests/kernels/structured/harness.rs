//! Runs one op through a template and compares it with the reference.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

use halcyon_ir::kernel::interp::{self, Options};
use halcyon_ir::kernel::lower::{Lowered, choices, lower_op_as};
use halcyon_ir::kernel::{BufId, Ty};
use halcyon_ir::layout::View;
use halcyon_ir::reference::eval_f64;
use halcyon_ir::render::{Language, render};
use halcyon_ir::target::{Caps, Declined, Operand};
use halcyon_ir::{ConstData, DType, Graph, NodeId, Op, Result, Scalar, TensorType};
use std::sync::Arc;

pub type Lower = fn(&Op, &[Operand], &[Operand], &Caps) -> std::result::Result<Lowered, Declined>;

/// Xorshift random numbers (Marsaglia 2003).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in [-2, 2), or an integer of the type, at most 100 away from zero.
    fn value(&mut self, d: DType) -> Scalar {
        let u = (self.bits() >> 11) as f64 / (1u64 << 53) as f64;
        if d.is_float() {
            return Scalar::F(u * 4.0 - 2.0).cast(d);
        }
        let (lo, hi) = d.range();
        let (lo, hi) = (lo.max(-100.0), hi.min(100.0));
        Scalar::F((lo + u * (hi - lo)).round()).cast(d)
    }
}

/// A strided operand in its own buffer.
pub struct Input {
    pub operand: Operand,
    pub data: Vec<u8>,
}

impl Input {
    /// Random elements throughout the buffer, also outside of the view.
    pub fn random(rng: &mut Rng, dtype: DType, view: View) -> Input {
        let n = view.range().map_or(0, |(_, hi)| hi as usize + 1);
        let data = (0..n).flat_map(|_| rng.value(dtype).to_bytes(dtype)[..dtype.size()].to_vec()).collect();
        Input { operand: Operand { dtype, view }, data }
    }

    pub fn dense(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Input {
        Input::random(rng, dtype, View::dense(shape))
    }

    /// Overwrites element `i` of the buffer.
    pub fn set(&mut self, i: usize, v: f64) {
        let d = self.operand.dtype;
        let at = i * d.size();
        self.data[at..at + d.size()].copy_from_slice(&Scalar::F(v).to_bytes(d)[..d.size()]);
    }

    /// The view's elements in row-major order.
    fn gathered(&self) -> ConstData {
        let (v, d) = (&self.operand.view, self.operand.dtype);
        let mut out = vec![];
        for i in 0..v.numel() {
            let (mut r, mut idx) = (i, vec![0; v.rank()]);
            for k in (0..v.rank()).rev() {
                idx[k] = r % v.shape[k];
                r /= v.shape[k];
            }
            let at = v.at(&idx).unwrap() as usize * d.size();
            out.extend_from_slice(&self.data[at..at + d.size()]);
        }
        ConstData::new(d, &v.shape, Arc::new(out)).unwrap()
    }
}

/// Devices to lower for: GPU-like, CPU-like, and one with workgroups of at most four work-items and almost no
/// workgroup memory.
pub fn devices() -> Vec<Caps> {
    let gpu = Caps::generous();
    let cpu = Caps { is_cpu: true, ..gpu.clone() };
    let tiny = Caps { max_workgroup: 4, workgroup_memory: 64, max_groups: 97, ..gpu.clone() };
    vec![gpu, cpu, tiny]
}

/// Lowers the single op that `build` adds to a graph for all [`devices`], runs it and compares the results.
/// The tolerance is `tol` epsilons of the compute type, relative to the largest result, plus the rounding to
/// the storage type. Returns the names of the kernels used.
pub fn check(
    lower: Lower,
    inputs: &[Input],
    tol: f64,
    build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId>,
) -> Vec<String> {
    check_on(&devices(), lower, inputs, tol, build)
}

pub fn check_on(
    devices: &[Caps],
    lower: Lower,
    inputs: &[Input],
    tol: f64,
    build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId>,
) -> Vec<String> {
    let (op, ty, want) = reference(inputs, build);
    let operands: Vec<Operand> = inputs.iter().map(|i| i.operand.clone()).collect();
    let dims = ty.shape.known().unwrap();
    let out = Operand { dtype: ty.dtype, view: View::dense(&dims) };
    let mut names = vec![];
    for caps in devices {
        let low = lower(&op, &operands, std::slice::from_ref(&out), caps)
            .unwrap_or_else(|d| panic!("{}: declined: {}", op.name(), d.reason));
        for (i, subgroup) in [1, 4, 32, 64].into_iter().enumerate() {
            let got = run(&low, inputs, &out, subgroup, i as u64 + 1);
            let what = format!("{} {} on {caps:?}", op.name(), low.steps[0].0.name);
            compare(ty.dtype, &got, &want, tol, &what);
        }
        for (k, ..) in &low.steps {
            for l in Language::ALL {
                if l == Language::Metal && k.uses_ty(Ty::F64) {
                    continue;
                }
                render(k, l).unwrap();
            }
            names.push(k.name.clone());
        }
        // All variants that tuning may choose compute the same results.
        let outs = std::slice::from_ref(&out);
        let variants = choices(&op, &operands, outs, caps).map(|c| c.others).unwrap_or_default();
        // Tests a few variants per call; which ones depends on the call.
        for (i, v) in variants.iter().enumerate().skip(inputs[0].data.len() / 4 % 4).step_by(4) {
            let low =
                lower_op_as(&op, &operands, outs, caps, v).unwrap_or_else(|d| panic!("{v}: {}", d.reason));
            let got = run(&low, inputs, &out, [1, 4, 32, 64][i / 4 % 4], i as u64 + 7);
            compare(ty.dtype, &got, &want, tol, &format!("{} as {v} on {caps:?}", op.name()));
        }
    }
    names
}

pub fn reference(
    inputs: &[Input],
    build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId>,
) -> (Op, TensorType, ConstData) {
    let mut g = Graph::new();
    let ids: Vec<NodeId> = inputs
        .iter()
        .enumerate()
        .map(|(i, x)| g.input(&format!("x{i}"), TensorType::new(x.operand.dtype, &x.operand.view.shape)))
        .collect();
    let y = build(&mut g, &ids).unwrap();
    g.output("y", y);
    let data: Vec<ConstData> = inputs.iter().map(|i| i.gathered()).collect();
    let want = eval_f64(&g, &data, &[]).unwrap().remove(0);
    (g.node(y).op.clone(), g.ty(y).clone(), want)
}

/// Runs kernels, which must not set the fault word, and returns the result.
pub fn run(low: &Lowered, inputs: &[Input], out: &Operand, subgroup: u32, seed: u64) -> Vec<u8> {
    let (got, fault) = run_with_fault(low, inputs, out, subgroup, seed);
    assert!(!fault, "{} set the fault word", low.steps[0].0.name);
    got
}

/// Runs kernels and returns the result, and whether the fault word was set.
pub fn run_with_fault(
    low: &Lowered,
    inputs: &[Input],
    out: &Operand,
    subgroup: u32,
    seed: u64,
) -> (Vec<u8>, bool) {
    let mut memory: Vec<Vec<u8>> = inputs.iter().map(|i| i.data.clone()).collect();
    memory.push(vec![0xA5; out.dtype.bytes(out.view.numel())]);
    memory.extend(low.temps.iter().map(|&n| vec![0xA5; n]));
    let mut fault = vec![0; 4];
    for (k, launch, places) in &low.steps {
        let mut bufs: Vec<Vec<u8>> = places.iter().map(|&p| memory[p].clone()).collect();
        let poisoned = (0..places.len()).filter(|&i| k.buffers[i].write).map(|i| BufId(i as u32)).collect();
        let o = Options { subgroup, seed: Some(seed), sanitize: true, poisoned, ..Options::default() };
        let faults = bufs.len() < k.buffers.len();
        if faults {
            bufs.push(fault.clone());
        }
        let mut launch = launch.clone();
        for (p, v) in k.params.iter().zip(&mut launch.params).filter(|(p, _)| p.name == "fault") {
            *v = Scalar::U(7).cast(p.ty.dtype());
        }
        let r = interp::run(k, &launch, &mut bufs, &o).unwrap();
        assert_eq!(r.faults, 0, "{}: {}", k.name, r.reports[0]);
        if faults {
            fault = bufs.pop().unwrap();
        }
        for (b, &p) in bufs.into_iter().zip(places) {
            memory[p] = b;
        }
    }
    (memory.swap_remove(inputs.len()), fault[0] == 7)
}

pub fn compare(d: DType, got: &[u8], want: &ConstData, tol: f64, what: &str) {
    let got: Vec<Scalar> = got.chunks(d.size()).map(|b| Scalar::from_bytes(d, b)).collect();
    let want: Vec<Scalar> = want.scalars().collect();
    assert_eq!(got.len(), want.len());
    if !d.is_float() {
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert_eq!(g, w, "{what}: element {i}");
        }
        return;
    }
    let largest = want.iter().map(|w| w.as_f64().abs()).filter(|w| w.is_finite()).fold(0.0, f64::max);
    let compute = if d == DType::F64 { f64::EPSILON } else { f32::EPSILON as f64 };
    let storage = match d {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => compute,
    };
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let (g, w) = (g.as_f64(), w.as_f64());
        let rounding = if d == DType::F16 { w.abs().max(2f64.powi(-14)) } else { w.abs() };
        let ok = g == w
            || (g.is_nan() && w.is_nan())
            || (g - w).abs() <= tol * compute * largest + storage * rounding;
        assert!(ok, "{what}: element {i} is {g}, expected {w} (largest {largest})");
    }
}
