//! Products and convolutions by the vendor libraries, compared with sums in f64.

use crate::ALONE;
use crate::common::standin::{self, StandIn};
use crate::common::*;
use halcyon_hal::simt::{Family, SimtDriver};
use halcyon_hal::{
    BackendType, BufferRef, Command, Declined, Device, Driver, Error, LibraryCall, LibraryKernel, Operand,
    Options, Recording, StreamOptions, Tag, cuda, rocm,
};
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out};
use halcyon_ir::layout::View;
use halcyon_ir::ops::{Conv, Op};
use halcyon_ir::passes::bytes;
use halcyon_ir::shape::Shape;
use halcyon_ir::target::{Epilogue, MatmulPrecision, Work};
use halcyon_ir::{DType, Scalar, ScalarOp};
use std::sync::Arc;

/// Numbers of both signs that the type represents exactly.
fn numbers(dtype: DType, n: usize, seed: u64) -> Vec<Scalar> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        s >> 11
    };
    let one = |r: u64| match dtype {
        DType::I8 => Scalar::I((r % 255) as i64 - 127),
        _ => Scalar::F(r as f64 / (1u64 << 52) as f64 - 1.0),
    };
    (0..n).map(|_| Scalar::from_bytes(dtype, &one(next()).to_bytes(dtype)[..dtype.size()])).collect()
}

/// A call with its operands and precision.
pub(crate) struct Call<'a> {
    pub op: &'a Op,
    pub inputs: Vec<Operand>,
    pub output: Operand,
    pub precision: MatmulPrecision,
    pub on_top: Option<&'a Fused>,
    pub seed: u64,
    /// The small float types that the bytes of the first two operands encode.
    pub codes: Option<[DType; 2]>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(op: &'a Op, inputs: &[(DType, View)], output: (DType, &[usize])) -> Call<'a> {
        let operand = |(dtype, view): &(DType, View)| Operand { dtype: *dtype, view: view.clone() };
        Call {
            op,
            inputs: inputs.iter().map(operand).collect(),
            output: Operand { dtype: output.0, view: View::dense(output.1) },
            precision: MatmulPrecision::Highest,
            on_top: None,
            seed: 7,
            codes: None,
        }
    }

    /// The type of an operand's values.
    fn means(&self, i: usize) -> DType {
        self.codes.and_then(|c| c.get(i).copied()).unwrap_or(self.inputs[i].dtype)
    }

    pub(crate) fn kernel(&self, d: &dyn Device) -> Result<Arc<dyn LibraryKernel>, Declined> {
        // The chain's input 0 is the product.
        let more = self.on_top.map_or(0, |f| f.loads.iter().map(|l| l.input as usize).max().unwrap_or(0));
        let (own, inputs) = self.inputs.split_at(self.inputs.len() - more);
        d.as_target().library(&LibraryCall {
            precision: self.precision,
            epilogue: self.on_top.map(|fused| Epilogue { fused, product: 0, inputs, output: &self.output }),
            ..LibraryCall::new(Work::Op(self.op), own, std::slice::from_ref(&self.output))
        })
    }

    /// The values of the operands' buffers.
    pub(crate) fn values(&self) -> Vec<Vec<Scalar>> {
        let size = |o: &Operand| o.view.range().map_or(0, |(_, hi)| hi as usize + 1);
        let each = self.inputs.iter().enumerate();
        each.map(|(i, o)| numbers(self.means(i), size(o), self.seed.wrapping_add(i as u64))).collect()
    }

    /// Runs the kernel on the device's own queue or on a stream; returns its name and the result.
    pub(crate) fn run(&self, d: &dyn Device, stream: bool) -> (String, Vec<f64>) {
        let kernel = self.kernel(d).unwrap_or_else(|e| panic!("{:?}: {e:?}", self.inputs));
        assert_eq!(kernel.applies_epilogue(), self.on_top.is_some(), "{}", kernel.name());
        let buffers = self.buffers(d, &*kernel);
        let commands = [Command::Library { kernel: &kernel, buffers: &buffers, args: &[], fault: 0 }];
        let before = d.counters().library_calls;
        if stream {
            let t = d.create_stream(&StreamOptions::default()).unwrap();
            t.submit(&commands).unwrap();
            t.synchronize().unwrap();
        } else {
            d.submit(&commands).unwrap();
        }
        assert_eq!(d.counters().library_calls, before + 1);
        let out = download(d, &buffers[self.inputs.len()]);
        let got = unpack(self.output.dtype, &out).iter().map(|v| v.as_f64()).collect();
        (kernel.name().to_string(), got)
    }

    pub(crate) fn buffers(&self, d: &dyn Device, kernel: &dyn LibraryKernel) -> Vec<BufferRef> {
        let mut all: Vec<BufferRef> =
            self.values().iter().enumerate().map(|(i, v)| upload(d, &pack(self.means(i), v))).collect();
        all.push(d.alloc(self.output.dtype.bytes(self.output.view.numel()), Tag::Io).unwrap());
        if kernel.workspace() > 0 {
            all.push(d.alloc(kernel.workspace(), Tag::Workspace).unwrap());
        }
        all
    }
}

pub(crate) fn at(values: &[Scalar], v: &View, index: &[usize]) -> f64 {
    values[v.at(index).unwrap() as usize].as_f64()
}

/// Every index of a shape.
pub(crate) fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..shape.iter().product::<usize>()).map(|mut i| {
        let mut x = vec![0; shape.len()];
        for k in (0..shape.len()).rev() {
            (x[k], i) = (i % shape[k], i / shape[k]);
        }
        x
    })
}

fn product(call: &Call<'_>) -> Vec<f64> {
    let (values, rank) = (call.values(), call.inputs[0].view.rank());
    let a = &call.inputs[0].view;
    let mut b = call.inputs[1].view.clone();
    let mut scale = 1.0;
    if call.codes.is_some() {
        b.shape.swap(rank - 2, rank - 1);
        b.strides.swap(rank - 2, rank - 1);
        scale = call.inputs.get(2).map_or(1.0, |o| at(&values[2], &o.view, &[0]));
    }
    let sum = |i: Vec<usize>| -> f64 {
        let one = |l: usize| {
            let (mut x, mut y) = (i.clone(), i.clone());
            (x[rank - 1], y[rank - 2]) = (l, l);
            at(&values[0], a, &x) * at(&values[1], &b, &y)
        };
        scale * (0..a.shape[rank - 1]).map(one).sum::<f64>()
    };
    indices(&call.output.view.shape).map(sum).collect()
}

/// The largest difference, relative to the largest number.
pub(crate) fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let most = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    got.iter().zip(want).fold(0f64, |m, (g, w)| if g.is_nan() { f64::NAN } else { m.max((g - w).abs()) })
        / most
}

/// Relative error of rounding a sum to the type.
pub(crate) fn tolerance(d: DType) -> f64 {
    match d {
        DType::F64 | DType::I32 => 1e-14,
        DType::F32 => 2e-7,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

const TYPES: [(DType, DType); 6] = [
    (DType::F32, DType::F32),
    (DType::F64, DType::F64),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::I8, DType::I32),
];

/// Views of the factors of 32 by 96 by 48 products, some with a batch.
fn factors() -> Vec<(&'static str, View, View)> {
    let (m, k, n) = (32, 96, 48);
    let turned = |rows: usize, cols: usize| View::dense(&[cols, rows]).permute(&[1, 0]);
    let heads = |rows: usize, cols: usize| View::dense(&[2, rows, 3, cols]).permute(&[0, 2, 1, 3]);
    vec![
        ("plain", View::dense(&[m, k]), View::dense(&[k, n])),
        ("right turned", View::dense(&[m, k]), turned(k, n)),
        ("left turned", turned(m, k), View::dense(&[k, n])),
        ("both turned", turned(m, k), turned(k, n)),
        ("window", View::dense(&[m + 5, k + 12]).slice(&[3, 4], &[1, 1], &[m, k]), turned(k, n)),
        ("odd window", View::dense(&[m + 1, k + 3]).slice(&[1, 3], &[1, 1], &[m, k]), View::dense(&[k, n])),
        ("batch", View::dense(&[5, m, k]), View::dense(&[5, n, k]).permute(&[0, 2, 1])),
        ("one right factor", View::dense(&[5, m, k]), turned(k, n).expand(&[5, k, n])),
        ("one left factor", View::dense(&[m, k]).expand(&[5, m, k]), View::dense(&[5, k, n])),
        ("heads", heads(m, k), heads(n, k).permute(&[0, 1, 3, 2])),
    ]
}

fn family(s: &StandIn) -> &'static Family {
    if s.driver.kind() == BackendType::Cuda { &cuda::CUDA } else { &rocm::ROCM }
}

fn products(s: &StandIn, d: &dyn Device, only: Option<&str>) {
    let kind = s.driver.kind();
    for (factor, result) in TYPES {
        for (i, (what, a, b)) in factors().into_iter().enumerate() {
            let rank = a.rank();
            let shape = [&a.shape[..rank - 1], &b.shape[rank - 1..]].concat();
            let call = Call::new(&Op::Matmul, &[(factor, a.clone()), (factor, b.clone())], (result, &shape));
            let rows = a.strides[rank - 1] == 1;
            let columns = b.strides[rank - 1] != 1;
            // The kernels for bytes support one layout only.
            if kind == BackendType::Cuda && factor == DType::I8 && (!rows || !columns) {
                let d = call.kernel(d).unwrap_err();
                assert!(d.reason.contains("products of 8-bit integers need"), "{what}: {d:?}");
                continue;
            }
            let (name, got) = call.run(d, i % 2 == 1);
            let narrow = a.offset * factor.size() as isize % 16 != 0;
            let library = match (kind, only) {
                (BackendType::Cuda, _) => "cublaslt.",
                // hipBLASLt has no f64 and requires aligned operands.
                (_, None) if factor != DType::F64 && !narrow => "hipblaslt.",
                _ => "rocblas.",
            };
            assert!(name.starts_with(library), "{kind}: {name}");
            let e = error(&got, &product(&call));
            assert!(e <= tolerance(result), "{kind}, {factor} into {result}, {what}: {e}");
        }
    }
    // At these precisions NVIDIA's library multiplies in TF32, which is visible in the results. AMD's
    // libraries multiply in f32.
    for (what, a, b) in factors() {
        let rank = a.rank();
        let shape = [&a.shape[..rank - 1], &b.shape[rank - 1..]].concat();
        let mut call = Call::new(&Op::Matmul, &[(DType::F32, a), (DType::F32, b)], (DType::F32, &shape));
        for precision in [MatmulPrecision::High, MatmulPrecision::Medium] {
            call.precision = precision;
            let (name, got) = call.run(d, false);
            let e = error(&got, &product(&call));
            match kind {
                BackendType::Cuda => {
                    assert!(name == "cublaslt.tf32" && (2e-6..2e-3).contains(&e), "{name}, {what}: {e}")
                }
                _ => assert!(name.ends_with(".f32") && e < 2e-7, "{name}, {what}: {e}"),
            }
        }
    }
}

/// A product of 8-bit floats, `[batch…, m, k]` by `[batch…, n, k]`.
fn of_eight_bits(types: [DType; 2], a: &View, b: &View, scaled: bool, result: DType) -> Op {
    let shapes = [a, b].map(|v| Shape::from(&v.shape[..]));
    Op::Composite(bytes::operation(types, shapes, scaled, result).unwrap())
}

fn eight_bits(s: &StandIn, d: &dyn Device) {
    let cuda = s.driver.kind() == BackendType::Cuda;
    let (m, k, n) = (24, 96, 48);
    let (long, wide) = match cuda {
        true => (DType::F8E4M3FN, DType::F8E5M2),
        false => (DType::F8E4M3FNUZ, DType::F8E5M2FNUZ),
    };
    let layouts = [
        ("plain", View::dense(&[m, k]), View::dense(&[n, k])),
        ("window", View::dense(&[m + 2, k + 32]).slice(&[1, 16], &[1, 1], &[m, k]), View::dense(&[n, k])),
        ("batch", View::dense(&[3, m, k]), View::dense(&[3, n, k])),
        ("one right factor", View::dense(&[3, m, k]), View::dense(&[n, k]).expand(&[3, n, k])),
        (
            "heads",
            View::dense(&[2, m, 3, k]).permute(&[0, 2, 1, 3]),
            View::dense(&[2, n, 3, k]).permute(&[0, 2, 1, 3]),
        ),
    ];
    for types in [[long, long], [long, wide], [wide, long]] {
        for result in [DType::F32, DType::F16, DType::BF16] {
            for (i, (what, a, b)) in layouts.iter().enumerate() {
                let scaled = i % 2 == 0;
                let op = of_eight_bits(types, a, b, scaled, result);
                let rank = a.rank();
                let shape = [&a.shape[..rank - 1], &[n]].concat();
                let mut inputs = vec![(DType::U8, a.clone()), (DType::U8, b.clone())];
                // The scale is the second of two numbers in its buffer.
                let one = View::dense(&[2]).slice(&[1], &[1], &[1]);
                inputs.extend(scaled.then_some((DType::F32, one)));
                let mut call = Call::new(&op, &inputs, (result, &shape));
                call.codes = Some(types);
                if result == DType::F32 {
                    let reason = call.kernel(d).unwrap_err().reason;
                    assert!(reason.contains("fewer digits than f32"), "{reason}");
                    call.precision = MatmulPrecision::High;
                }
                let (name, got) = call.run(d, i % 2 == 1);
                let of = if cuda { "cublaslt." } else { "hipblaslt." };
                assert_eq!(name, format!("{of}{}", types[0].name()));
                let e = error(&got, &product(&call));
                assert!(e <= tolerance(result), "{what}, {types:?} into {result}: {e}");
            }
        }
    }
    // A bias and an activation as the epilogue of a 16-bit result.
    let (a, b) = (View::dense(&[m, k]), View::dense(&[n, k]));
    for scaled in [false, true] {
        for result in [DType::BF16, DType::F32] {
            let op = of_eight_bits([long, long], &a, &b, scaled, result);
            let f = epilogue(result, &[m, n], 1, true, Some(ScalarOp::Relu));
            let mut inputs = vec![(DType::U8, a.clone()), (DType::U8, b.clone())];
            inputs.extend(scaled.then(|| (DType::F32, View::dense(&[1]))));
            let own = inputs.len();
            inputs.push((result, View::dense(&[n])));
            let mut call = Call::new(&op, &inputs, (result, &[m, n]));
            (call.codes, call.on_top, call.precision) = (Some([long, long]), Some(&f), MatmulPrecision::High);
            if result == DType::F32 {
                // For products of 8-bit floats, the library adds a bias only to results in f16 and bf16.
                assert!(!call.kernel(d).unwrap().applies_epilogue());
                continue;
            }
            let biases = call.values()[own].clone();
            let (name, got) = call.run(d, false);
            let mut plain = Call::new(&op, &inputs[..own], (result, &[m, n]));
            plain.codes = Some([long, long]);
            let value =
                |(i, v): (usize, &f64)| on_top(*v, Some(biases[i % n].as_f64()), Some(ScalarOp::Relu));
            let want: Vec<f64> = product(&plain).iter().enumerate().map(value).collect();
            assert!(name.ends_with(".relu") && error(&got, &want) <= tolerance(result), "{name}");
        }
    }
    let declined = |types: [DType; 2], a: View, b: View| {
        let op = of_eight_bits(types, &a, &b, false, DType::BF16);
        let shape = [a.shape[0], b.shape[0]];
        Call::new(&op, &[(DType::U8, a), (DType::U8, b)], (DType::BF16, &shape)).kernel(d).unwrap_err()
    };
    // Sizes that the matrix units do not support, and types that the vendor lacks.
    let why = declined([long, long], View::dense(&[m, 40]), View::dense(&[n, 40])).reason;
    assert!(why.contains("in multiples of 16"), "{why}");
    if cuda {
        let why = declined([DType::F8E4M3FNUZ; 2], a.clone(), b.clone()).reason;
        assert!(why.contains("it has no element type f8e4m3fnuz"), "{why}");
        let why = declined([wide, wide], a.clone(), b.clone()).reason;
        assert!(why.contains("no algorithm"), "{why}");
    }
    // Other layouts must be copied first.
    let turned = View::dense(&[k, m]).permute(&[1, 0]);
    assert_eq!(declined([long, long], turned.clone(), b.clone()).dense, [0]);
    assert_eq!(declined([long, long], a.clone(), View::dense(&[k, n]).permute(&[1, 0])).dense, [1]);
    let odd = View::dense(&[m, k + 16]).slice(&[0, 3], &[1, 1], &[m, k]);
    assert_eq!(declined([long, long], odd, b).dense, [0]);
}

/// An epilogue of a bias and an activation, as lowering passes it.
fn epilogue(dtype: DType, shape: &[usize], axis: usize, bias: bool, activation: Option<ScalarOp>) -> Fused {
    let along = View::dense(&[shape[axis]]);
    let mut strides = vec![0; shape.len()];
    strides[axis] = 1;
    let along = View { shape: shape.into(), strides: strides.into(), ..along };
    let instr = |kind, args: &[u32]| Instr { kind, dtype, args: args.into() };
    let mut body = vec![instr(InstrKind::Load(0), &[])];
    let mut loads = vec![Load { input: 0, dtype, view: View::dense(shape), fill: None }];
    if bias {
        loads.push(Load { input: 1, dtype, view: along, fill: None });
        body.push(instr(InstrKind::Load(1), &[]));
        body.push(instr(InstrKind::Op(ScalarOp::Add), &[0, 1]));
    }
    if let Some(op) = activation {
        body.push(instr(InstrKind::Op(op), &[body.len() as u32 - 1]));
    }
    let out = Out { value: body.len() as u32 - 1, dtype, reduce: None, view: View::dense(shape) };
    Fused { space: shape.into(), reduced: 0, loads, params: vec![], body, outs: vec![out] }
}

fn on_top(values: f64, bias: Option<f64>, activation: Option<ScalarOp>) -> f64 {
    let v = values + bias.unwrap_or(0.0);
    activation.map_or(v, |op| (op.row().float.unwrap())(v, 0.0, 0.0))
}

fn epilogues(s: &StandIn, d: &dyn Device) {
    let (kind, shape) = (s.driver.kind(), [64, 48]);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for bias in [false, true] {
            for activation in [None, Some(ScalarOp::Relu), Some(ScalarOp::GeluTanh)] {
                let f = epilogue(dtype, &shape, 1, bias, activation);
                let mut inputs = vec![(dtype, View::dense(&[64, 80])), (dtype, View::dense(&[80, 48]))];
                inputs.extend(bias.then(|| (dtype, View::dense(&[48]))));
                let mut call = Call::new(&Op::Matmul, &inputs, (dtype, &shape));
                let plain = product(&call);
                let biases = call.values().get(2).cloned();
                call.on_top = Some(&f);
                let before = s.get("epilogues");
                let (name, got) = call.run(d, false);
                assert_eq!(s.get("epilogues") - before, i64::from(bias || activation.is_some()), "{name}");
                let value = |(i, v): (usize, &f64)| {
                    on_top(*v, biases.as_ref().map(|b| b[i % 48].as_f64()), activation)
                };
                let want: Vec<f64> = plain.iter().enumerate().map(value).collect();
                let e = error(&got, &want);
                assert!(e <= tolerance(dtype), "{kind}, {dtype}, {bias} {activation:?}: {e}");
            }
        }
    }
    // Epilogues that the library computes differently or not at all are separate kernels.
    let matrices = [(DType::F32, View::dense(&[64, 80])), (DType::F32, View::dense(&[80, 48]))];
    let declined = |f: &Fused, more: Option<View>| {
        let inputs: Vec<_> = matrices.iter().cloned().chain(more.map(|v| (DType::F32, v))).collect();
        let mut call = Call::new(&Op::Matmul, &inputs, (DType::F32, &shape));
        call.on_top = Some(f);
        let k = call.kernel(d).unwrap();
        assert!(!k.applies_epilogue(), "{kind}: {}", k.name());
    };
    // The library's gelu is the tanh approximation.
    declined(&epilogue(DType::F32, &shape, 1, false, Some(ScalarOp::Gelu)), None);
    declined(&epilogue(DType::F32, &shape, 1, false, Some(ScalarOp::Exp)), None);
    // The library's bias has one value for each column: values for rows, or too few values, are not a bias.
    declined(&epilogue(DType::F32, &shape, 0, true, None), Some(View::dense(&[64])));
    declined(&epilogue(DType::F32, &shape, 1, true, None), Some(View::dense(&[40])));
}

pub(crate) fn conv_of(stride: &[usize], pad: &[i64], dilation: &[usize], groups: usize) -> Op {
    Op::Conv(Conv {
        stride: stride.into(),
        pad: pad.iter().map(|p| (*p, *p)).collect(),
        dilation: dilation.into(),
        groups,
        ..Conv::new(stride.len())
    })
}

fn convolution(call: &Call<'_>) -> Vec<f64> {
    let Op::Conv(c) = call.op else { panic!() };
    let (values, x, w) = (call.values(), &call.inputs[0].view, &call.inputs[1].view);
    let per = w.shape[0] / c.groups;
    let sum = |i: Vec<usize>| -> f64 {
        let one = |k: Vec<usize>| {
            let mut from = vec![i[0], i[1] / per * w.shape[1] + k[0]];
            for s in 0..c.stride.len() {
                let p = (i[2 + s] * c.stride[s] + k[1 + s] * c.dilation[s]) as i64 - c.pad[s].0;
                if p < 0 || p >= x.shape[2 + s] as i64 {
                    return 0.0;
                }
                from.push(p as usize);
            }
            at(&values[0], x, &from) * at(&values[1], w, &[&[i[1]], &k[..]].concat())
        };
        indices(&w.shape[1..]).map(one).sum()
    };
    indices(&call.output.view.shape).map(sum).collect()
}

fn convolutions(s: &StandIn, d: &dyn Device) {
    let cases: [(&[usize], &[usize], Op, &[usize]); 5] = [
        (&[2, 8, 40], &[16, 8, 5], conv_of(&[1], &[2], &[1], 1), &[2, 16, 40]),
        (&[2, 6, 16, 15], &[12, 6, 3, 3], conv_of(&[1, 1], &[1, 1], &[1, 1], 1), &[2, 12, 16, 15]),
        (&[1, 8, 21, 19], &[16, 4, 3, 2], conv_of(&[2, 1], &[1, 0], &[1, 3], 2), &[1, 16, 11, 16]),
        (&[2, 16, 18, 18], &[16, 1, 5, 5], conv_of(&[1, 1], &[2, 2], &[1, 1], 16), &[2, 16, 18, 18]),
        (
            &[1, 3, 7, 8, 9],
            &[8, 3, 3, 3, 3],
            conv_of(&[1, 2, 1], &[1, 1, 0], &[1, 1, 1], 1),
            &[1, 8, 7, 4, 7],
        ),
    ];
    for (i, (x, w, op, y)) in cases.iter().enumerate() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let inputs = [(dtype, View::dense(x)), (dtype, View::dense(w))];
            let mut call = Call::new(op, &inputs, (dtype, y));
            let transformed = s.get("winograds");
            let (name, got) = call.run(d, i % 2 == 0);
            let want = convolution(&call);
            // Winograd transforms lose precision of the sums, which are f32 for 16-bit floats too. They are
            // used only for f32, at a precision that permits rounding.
            assert_eq!(s.get("winograds"), transformed, "{name}");
            let e = error(&got, &want);
            assert!(name.starts_with("cudnn.conv.") && e <= tolerance(dtype), "{name}, {w:?}: {e}");
            if dtype == DType::F32 {
                call.precision = MatmulPrecision::High;
                let (name, got) = call.run(d, false);
                let e = error(&got, &want);
                assert!(name.contains("tf32") && (1e-6..1e-2).contains(&e), "{name}, {w:?}: {e}");
                let three = w[2..] == [3, 3];
                assert_eq!(s.get("winograds") > transformed, three, "{name}, {w:?}");
            }
            for activation in [None, Some(ScalarOp::Relu)] {
                let f = epilogue(dtype, y, 1, true, activation);
                let inputs: Vec<_> = inputs.iter().cloned().chain([(dtype, View::dense(&[w[0]]))]).collect();
                let mut call = Call::new(op, &inputs, (dtype, y));
                call.on_top = Some(&f);
                if ![DType::F32, DType::F16].contains(&dtype) {
                    // cuDNN supports epilogues only for f32 and f16.
                    assert!(!call.kernel(d).unwrap().applies_epilogue());
                    continue;
                }
                let biases = call.values()[2].clone();
                let before = s.get("epilogues");
                let (name, got) = call.run(d, false);
                assert_eq!(s.get("epilogues"), before + 1, "{name}");
                let inner: usize = y[2..].iter().product();
                let value =
                    |(i, v): (usize, &f64)| on_top(*v, Some(biases[i / inner % y[1]].as_f64()), activation);
                let want: Vec<f64> = want.iter().enumerate().map(value).collect();
                let e = error(&got, &want);
                assert!(e <= tolerance(dtype), "{name}, {w:?}: {e}");
            }
        }
    }
    let image = |op: &Op, y: &[usize], why: &str| {
        let inputs = [(DType::F32, View::dense(&[2, 6, 16, 15])), (DType::F32, View::dense(&[12, 6, 3, 3]))];
        let d = Call::new(op, &inputs, (DType::F32, y)).kernel(d).unwrap_err();
        assert!(d.reason.contains(why), "{d:?}");
    };
    let Op::Conv(plain) = conv_of(&[1, 1], &[1, 1], &[1, 1], 1) else { panic!() };
    let uneven = Conv { pad: [(0, 2), (1, 1)].into_iter().collect(), ..plain.clone() };
    image(&Op::Conv(uneven), &[2, 12, 16, 15], "at both ends");
    let transposed = Conv { input_dilation: [2, 2].into_iter().collect(), ..plain };
    image(&Op::Conv(transposed), &[2, 12, 31, 29], "transposed");
}

/// An f32 product that every library supports.
fn some<'a>() -> Call<'a> {
    let inputs = [(DType::F32, View::dense(&[64, 64])), (DType::F32, View::dense(&[64, 64]))];
    Call::new(&Op::Matmul, &inputs, (DType::F32, &[64, 64]))
}

/// A captured graph runs the library's kernels, even if other streams have used the library's handle since
/// the capture. Queries that are forbidden during a capture are made before it.
fn captured(s: &StandIn, d: &dyn Device, library: &str) {
    let call = some();
    let kernel = call.kernel(d).unwrap();
    assert!(kernel.name().starts_with(library), "{}", kernel.name());
    let want = product(&call);
    for round in 0..2 {
        let buffers = call.buffers(d, &*kernel);
        let used: Vec<&BufferRef> = buffers.iter().collect();
        let commands = [Command::Library { kernel: &kernel, buffers: &buffers, args: &[], fault: 0 }];
        let recording = Recording { commands: &commands, buffers: &used, variables: &[] };
        let r = d.capture(&recording).unwrap_or_else(|e| panic!("{library}, {round}: {e}"));
        d.submit(&commands).unwrap();
        d.write(&buffers[2], 0, &vec![0; 64 * 64 * 4]).unwrap();
        let calls = s.get("library calls");
        assert!(d.launch_capture(&*r, &used, &[]).unwrap());
        assert_eq!(s.get("library calls"), calls, "a graph runs what was enqueued");
        let got: Vec<f64> =
            unpack(DType::F32, &download(d, &buffers[2])).iter().map(|v| v.as_f64()).collect();
        assert!(error(&got, &want) < 2e-7, "{library}, {round}");
    }
}

fn faults(s: &StandIn, d: &dyn Device) {
    let call = some();
    let kernel = call.kernel(d).unwrap();
    let buffers = call.buffers(d, &*kernel);
    let submit = |buffers: &[BufferRef]| {
        d.submit(&[Command::Library { kernel: &kernel, buffers, args: &[], fault: 0 }])
    };
    // A failing call is an error that names it, and the next call works.
    s.set("fail library", 1);
    submit(&buffers).unwrap();
    let e = submit(&buffers).unwrap_err();
    assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("a product of "), "{e}");
    assert!(error(&call.run(d, false).1, &product(&call)) < 2e-7);
    // Buffers are validated before the library is called.
    let calls = s.get("library calls");
    for (bad, why) in [
        (buffers[..3].to_vec(), "3 buffers were bound"),
        ([&buffers[..2], &[upload(d, &[0; 64])], &buffers[3..]].concat(), "64 bytes, 16384 are needed"),
        ([&buffers[..2], &buffers[..1], &buffers[3..]].concat(), "overlaps another buffer"),
    ] {
        let e = submit(&bad).unwrap_err();
        assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains(why), "{e}");
    }
    let other = s.driver.open(0, &Options::default()).unwrap();
    let e = other
        .submit(&[Command::Library { kernel: &kernel, buffers: &buffers, args: &[], fault: 0 }])
        .unwrap_err();
    assert!(e.to_string().contains("library kernel of another device"), "{e}");
    assert_eq!(s.get("library calls"), calls);
}

#[test]
fn products_and_convolutions_are_the_libraries() {
    if halcyon_test_host::left_out("products_and_convolutions_are_the_libraries") {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let held = |s: &StandIn| ["handles", "descriptions", "memory"].map(|n| s.get(n));
        let before = held(&s);
        let d = s.driver.open(0, &Options::default()).unwrap();
        assert_eq!(s.get("handles"), before[0], "opening a device loads no library");
        products(&s, &*d, None);
        eight_bits(&s, &*d);
        epilogues(&s, &*d);
        faults(&s, &*d);
        captured(&s, &*d, "");
        let found = d.kernel_libraries();
        let names: Vec<&str> = found.iter().map(|f| f.0.as_str()).collect();
        match s.driver.kind() {
            BackendType::Cuda => {
                convolutions(&s, &*d);
                assert_eq!(names, ["cuBLASLt", "cuDNN", "run-time compiler"]);
                assert!(found[0].1.ends_with(" 12.9.3") && found[1].1.contains(" 9.10.2, "), "{found:?}");
            }
            _ => {
                assert_eq!(names, ["hipBLASLt", "rocBLAS", "run-time compiler"]);
                assert!(found[0].1.ends_with(" 0.11.0") && found[1].1.contains(" 4.4.0"), "{found:?}");
                // Without hipBLASLt, rocBLAS computes the products.
                s.set("hide products", 1);
                let alone = s.driver.open(0, &Options::default()).unwrap();
                products(&s, &*alone, Some("rocblas"));
                captured(&s, &*alone, "rocblas.f32");
                assert!(alone.kernel_libraries()[0].1.contains("not initialised"));
                s.set("hide products", 0);
            }
        }
        drop(d);
        assert_eq!(held(&s), before, "{}", s.driver.kind());
    }
}

#[test]
fn libraries_that_are_missing_are_reasons() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let f = family(&s);
        let over = |kernels: Option<&str>| {
            // SAFETY: the stand-in has the vendor's functions. The other libraries here are stand-ins too, do
            // not exist, or are the C library, which has none of the functions.
            let driver = unsafe {
                let plain = SimtDriver::over(f, &s.path, &s.path);
                match kernels {
                    Some(k) => plain.with_kernels(k),
                    None => plain,
                }
            };
            let d = driver.open(0, &Options::default()).unwrap();
            let reason = some().kernel(&*d).unwrap_err().reason;
            assert!(!d.as_target().has_epilogues());
            (reason, d.kernel_libraries())
        };
        let title = f.products.title;
        assert!(over(None).0.contains(&format!("{title} is not used: this driver was opened without")));
        let (reason, found) = over(Some("/nowhere/lib.so"));
        assert!(reason.contains("/nowhere/lib.so: "), "{reason}");
        let of_kernels = &found[..found.len() - 1];
        assert!(of_kernels.iter().all(|(_, text)| text.contains("/nowhere/lib.so: ")), "{found:?}");
        // AMD's libraries find no kernel files beside this copy. Without the driver's check, rocBLAS would
        // terminate the process.
        if s.driver.kind() == BackendType::Rocm {
            let bare = standin::copy(&s, "librocblas.so.4");
            let (reason, found) = over(Some(&bare.path));
            for (text, library) in [(&found[0].1, "hipBLASLt"), (&found[1].1, "rocBLAS")] {
                let why = format!("{library} on rocm:0: it has no kernels for gfx90a in ");
                assert!(text.contains(&why) && reason.contains(&why), "{reason}\n{found:?}");
            }
            let unknown: &'static Family =
                Box::leak(Box::new(Family { architecture: |_| None, ..rocm::ROCM }));
            let copy = standin::copy(&s, "libamdhip64.so.5");
            // SAFETY: the paths are those of stand-ins, which have the vendor's functions.
            let driver = unsafe { SimtDriver::over(unknown, &copy.path, &copy.path).with_kernels(&s.path) };
            let d = driver.open(0, &Options::default()).unwrap();
            assert!(some().kernel(&*d).unwrap_err().reason.contains("architecture is not known"));
        }
        let (reason, _) = over(Some("libc.so.6"));
        assert!(reason.contains("libc.so.6: it has no function"), "{reason}");
    }
}
