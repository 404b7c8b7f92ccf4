//! Runs structured ops with the element types that they support on the CPU device and compares the results
//! with the reference.

use super::gemm::product_bf16::Bf16Code;
use super::testing::Rng;
use crate::cpu::CpuDevice;
use crate::cpu::sys::Isa;
use crate::library_call::CallForm;
use crate::{BufferRef, Command, Device, LibraryKernel, Options, Tag, Target};
use halcyon_ir::composite::Composite;
use halcyon_ir::layout::View;
use halcyon_ir::ops::{Conv, Op, Pool, PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::target::{LibraryCall, MatmulPrecision, Operand, Work};
use halcyon_ir::{ConstData, DType, Graph, Scalar, TensorType, reference};
use smallvec::smallvec;
use std::sync::Arc;

fn device() -> CpuDevice {
    CpuDevice::new(&Options { threads: Some(2), ..Default::default() }).unwrap()
}

/// A random value: -4 to 8 as an integer, -2 to 2 as a float.
fn value(rng: &mut Rng, d: DType) -> Scalar {
    match d {
        DType::Bool => Scalar::Bool(rng.below(2) == 1),
        d if d.is_float() => Scalar::F(rng.f32() as f64 * 2.0).cast(d),
        d => Scalar::I(rng.below(13) as i64 - 4).cast(d),
    }
}

fn tensor(d: DType, dims: &[usize], v: &[Scalar]) -> ConstData {
    let bytes: Vec<u8> = v.iter().flat_map(|s| s.to_bytes(d)[..d.size()].to_vec()).collect();
    ConstData::new(d, dims, Arc::new(bytes)).unwrap()
}

fn random(rng: &mut Rng, d: DType, dims: &[usize]) -> ConstData {
    let v: Vec<Scalar> = (0..dims.iter().product()).map(|_| value(rng, d)).collect();
    tensor(d, dims, &v)
}

/// Memory layout of a test operand.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lay {
    Dense,
    /// The axes are in reverse order in memory.
    Turned,
    /// Every second element of memory, from index 3.
    Spread,
}

/// Creates the operand's buffer and view.
fn place(dev: &CpuDevice, x: &ConstData, lay: Lay) -> (BufferRef, Operand) {
    let n = x.numel();
    let dims = x.dims.as_slice();
    let view = match lay {
        Lay::Dense => View::dense(dims),
        Lay::Turned => {
            let back: Vec<usize> = (0..dims.len()).rev().collect();
            let turned: Vec<usize> = back.iter().map(|k| dims[*k]).collect();
            View::dense(&turned).permute(&back)
        }
        Lay::Spread => {
            let mut v = View::dense(dims);
            v.strides.iter_mut().for_each(|s| *s *= 2);
            v.offset = 3;
            v
        }
    };
    let size = x.dtype.size();
    let elements = view.range().map_or(0, |r| r.1 as usize + 1).max(n);
    let mut bytes = vec![0xA5u8; elements * size];
    for (i, p) in crate::cpu::chain::tests::points(dims).enumerate() {
        let at = view.at(&p).unwrap() as usize * size;
        bytes[at..at + size].copy_from_slice(&x.bytes()[i * size..(i + 1) * size]);
    }
    let b = dev.alloc(bytes.len(), Tag::Io).unwrap();
    dev.write(&b, 0, &bytes).unwrap();
    (b, Operand { dtype: x.dtype, view })
}

/// Runs an op. If the kernel requires a dense operand, this function passes a dense copy, as lowering does.
fn run(dev: &CpuDevice, op: &Op, x: &[&ConstData], out: &TensorType, lay: Lay) -> Result<ConstData, String> {
    let dims = out.shape.dims().unwrap();
    let output = Operand { dtype: out.dtype, view: View::dense(&dims) };
    let mut placed: Vec<(BufferRef, Operand)> = x.iter().map(|x| place(dev, x, lay)).collect();
    let mut kernel = None;
    for _ in 0..2 {
        let inputs: Vec<Operand> = placed.iter().map(|p| p.1.clone()).collect();
        let call = LibraryCall::new(Work::Op(op), &inputs, std::slice::from_ref(&output));
        match dev.library(&call) {
            Ok(k) => {
                kernel = Some(k);
                break;
            }
            Err(d) if !d.dense.is_empty() => {
                d.dense.iter().for_each(|i| placed[*i] = place(dev, x[*i], Lay::Dense))
            }
            Err(d) => return Err(d.reason),
        }
    }
    let kernel = kernel.ok_or("declined twice")?;
    let mut bufs: Vec<BufferRef> = placed.into_iter().map(|p| p.0).collect();
    let bytes = out.dtype.bytes(dims.iter().product());
    let y = dev.alloc(bytes, Tag::Io).unwrap();
    dev.write(&y, 0, &vec![0x5A; bytes]).unwrap();
    bufs.push(y.clone());
    dev.submit(&[Command::Library { kernel: &kernel, buffers: &bufs, args: &[], fault: 7 }])
        .map_err(|e| e.to_string())?;
    let mut v = vec![0; bytes];
    dev.read(&y, 0, &mut v).unwrap();
    Ok(ConstData::new(out.dtype, &dims, Arc::new(v)).unwrap())
}

/// The accepted relative error: the type's rounding error, times its growth over a few dozen terms.
fn tolerance(d: DType) -> f64 {
    match d {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        DType::F32 => 3e-6,
        DType::F64 => 1e-13,
        _ => 0.0,
    }
}

/// Runs an op in every layout and compares the results with the reference.
fn check(dev: &CpuDevice, op: &Op, x: &[&ConstData], want: Option<TensorType>) {
    let types: Vec<TensorType> = x.iter().map(|x| TensorType::new(x.dtype, &x.dims)).collect();
    let ty = op.infer(&types.iter().collect::<Vec<_>>(), want.as_ref()).unwrap();
    let reference = reference::eval_op(op, x, &ty, &[]).unwrap();
    for lay in [Lay::Dense, Lay::Turned, Lay::Spread] {
        let what = format!("{} {:?} {lay:?}", op.name(), types);
        let got = run(dev, op, x, &ty, lay).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(dev.take_fault().unwrap(), None, "{what}");
        for (i, (g, w)) in got.scalars().zip(reference.scalars()).enumerate() {
            let (a, b) = (g.as_f64(), w.as_f64());
            let same = g == w
                || (a.is_nan() && b.is_nan())
                || (a - b).abs() <= tolerance(ty.dtype) * b.abs().max(4.0);
            assert!(same, "{what}: [{i}] is {g:?}, not {w:?}");
        }
    }
}

fn numbers() -> impl Iterator<Item = DType> {
    DType::native().filter(|d| *d != DType::Bool)
}
fn floats() -> impl Iterator<Item = DType> {
    DType::native().filter(|d| d.is_float())
}
const INDEX: [DType; 8] =
    [DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];

/// Random indices into `n` elements, including negative ones if the type is signed.
fn indices(rng: &mut Rng, d: DType, dims: &[usize], n: usize) -> ConstData {
    let signed = d.range().0 < 0.0;
    let v: Vec<Scalar> = (0..dims.iter().product())
        .map(|_| {
            Scalar::I(rng.below(n) as i64 - if signed && rng.below(3) == 0 { n as i64 } else { 0 }).cast(d)
        })
        .collect();
    tensor(d, dims, &v)
}

#[test]
fn matmul_of_every_number_type() {
    let dev = device();
    let mut rng = Rng::new();
    for d in numbers() {
        for (a, b) in [
            (vec![5, 7], vec![7, 9]),
            (vec![1, 33], vec![33, 40]),
            (vec![40, 33], vec![33, 1]),
            (vec![2, 3, 6, 8], vec![2, 3, 8, 5]),
            (vec![3, 20, 17], vec![3, 17, 24]),
        ] {
            let (x, y) = (random(&mut rng, d, &a), random(&mut rng, d, &b));
            check(&dev, &Op::Matmul, &[&x, &y], None);
        }
    }
}

/// If only the right operand is broadcast over the batch, the whole batch is one product. If the left operand
/// is broadcast, there is one product for each matrix of the batch.
#[test]
fn matmul_of_repeated_operands() {
    let dev = device();
    let mut rng = Rng::new();
    for d in [DType::F32, DType::F64, DType::BF16] {
        for (left, right) in [(false, true), (true, false), (true, true)] {
            let (dims_a, dims_b) = ([2usize, 3, 6, 8], [2usize, 3, 8, 5]);
            let small = |dims: &[usize], repeat: bool| {
                if repeat { vec![dims[2], dims[3]] } else { dims.to_vec() }
            };
            let (x, y) =
                (random(&mut rng, d, &small(&dims_a, left)), random(&mut rng, d, &small(&dims_b, right)));
            let grow = |c: &ConstData, dims: &[usize]| {
                let n = c.numel();
                let v: Vec<Scalar> = (0..dims.iter().product()).map(|i| c.get(i % n).unwrap()).collect();
                tensor(d, dims, &v)
            };
            let (fx, fy) = (grow(&x, &dims_a), grow(&y, &dims_b));
            let ty = TensorType::new(d, &[2usize, 3, 6, 5][..]);
            let want = reference::eval_op(&Op::Matmul, &[&fx, &fy], &ty, &[]).unwrap();
            let ins = [(&x, &dims_a), (&y, &dims_b)]
                .map(|(c, dims)| Operand { dtype: d, view: View::dense(&c.dims).expand(dims) });
            let out = Operand { dtype: d, view: View::dense(&[2, 3, 6, 5]) };
            let call = LibraryCall::new(Work::Op(&Op::Matmul), &ins, std::slice::from_ref(&out));
            let k = dev.library(&call).unwrap();
            let y0 = dev.alloc(d.bytes(180), Tag::Io).unwrap();
            let bufs = [place(&dev, &x, Lay::Dense).0, place(&dev, &y, Lay::Dense).0, y0.clone()];
            dev.submit(&[Command::Library { kernel: &k, buffers: &bufs, args: &[], fault: 1 }]).unwrap();
            let mut got = vec![0; d.bytes(180)];
            dev.read(&y0, 0, &mut got).unwrap();
            let got = ConstData::new(d, &[2, 3, 6, 5], Arc::new(got)).unwrap();
            for (g, w) in got.scalars().zip(want.scalars()) {
                let (g, w) = (g.as_f64(), w.as_f64());
                assert!((g - w).abs() <= tolerance(d) * w.abs().max(4.0), "{d} {left} {right}: {g} {w}");
            }
        }
    }
}

/// Runs a product at the given precision. Returns the kernel's name and the result.
fn product(
    dev: &CpuDevice,
    x: &ConstData,
    y: &ConstData,
    out: DType,
    dims: &[usize],
    precision: MatmulPrecision,
    bf16: Option<Bf16Code>,
) -> (String, ConstData) {
    let (x, y) = (place(dev, x, Lay::Turned), place(dev, y, Lay::Dense));
    let output = Operand { dtype: out, view: View::dense(dims) };
    let inputs = [x.1, y.1];
    let call = LibraryCall::new(Work::Op(&Op::Matmul), &inputs, std::slice::from_ref(&output));
    let form = CallForm { precision, ..CallForm::plain(&call) };
    let k = super::gemm::matmul_where(Isa::best(), &form, bf16).unwrap();
    let k: Arc<dyn LibraryKernel> = Arc::new(k);
    let bytes = out.bytes(dims.iter().product());
    let z = dev.alloc(bytes, Tag::Io).unwrap();
    dev.write(&z, 0, &vec![0x5A; bytes]).unwrap();
    let bufs = [x.0, y.0, z.clone()];
    dev.submit(&[Command::Library { kernel: &k, buffers: &bufs, args: &[], fault: 1 }]).unwrap();
    let mut got = vec![0; bytes];
    dev.read(&z, 0, &mut got).unwrap();
    (k.name().into(), ConstData::new(out, dims, Arc::new(got)).unwrap())
}

/// Products of 8-bit integers use their kernel even at the highest precision. The bf16 kernel is used only at
/// medium precision, and for f32 factors only with bf16 instructions and if the result has more than 8 rows
/// and more than 8 columns.
#[test]
fn narrow_matmuls_go_to_their_kernels() {
    let dev = device();
    let mut rng = Rng::new();
    let i32s = |x: &ConstData| tensor(DType::I32, &x.dims, &x.scalars().collect::<Vec<_>>());
    let shapes = [([5, 7], [7, 9]), ([40, 33], [33, 50]), ([2, 33], [33, 40]), ([17, 0], [0, 12])];
    for (a, b) in shapes {
        let dims = [a[0], b[1]];
        for (da, db) in
            [(DType::U8, DType::I8), (DType::I8, DType::I8), (DType::I8, DType::U8), (DType::U8, DType::U8)]
        {
            let (x, y) = (random(&mut rng, da, &a), random(&mut rng, db, &b));
            let ty = TensorType::new(DType::I32, &dims[..]);
            let want = reference::eval_op(&Op::Matmul, &[&i32s(&x), &i32s(&y)], &ty, &[]).unwrap();
            let (name, got) = product(&dev, &x, &y, DType::I32, &dims, MatmulPrecision::Highest, None);
            assert!(name.starts_with("cpu.gemm_i8."), "{name}");
            assert_eq!(got.bytes(), want.bytes(), "{da} {db} {a:?} {b:?}");
        }
        // Test every code path that this machine can run, even if it is not the fastest.
        let codes = [Bf16Code::Tiles, Bf16Code::Pairs, Bf16Code::Wide].into_iter();
        for code in codes.filter(|c| c.runs(Isa::best())).map(Some).chain([None]) {
            for (d, out) in [(DType::BF16, DType::BF16), (DType::F32, DType::F32), (DType::BF16, DType::F32)]
            {
                let (x, y) = (random(&mut rng, d, &a), random(&mut rng, d, &b));
                let round = |x: &ConstData| {
                    let v = x.scalars().map(|v| Scalar::F(half::bf16::from_f64(v.as_f64()).to_f64()));
                    tensor(DType::F64, &x.dims, &v.collect::<Vec<_>>())
                };
                let ty = TensorType::new(DType::F64, &dims[..]);
                let want = reference::eval_op(&Op::Matmul, &[&round(&x), &round(&y)], &ty, &[]).unwrap();
                for precision in [MatmulPrecision::Highest, MatmulPrecision::High, MatmulPrecision::Medium] {
                    // Without bf16 instructions, bf16 factors are multiplied in f32.
                    let possible = d == DType::BF16 || code.is_some();
                    let medium = precision == MatmulPrecision::Medium && possible;
                    if out != d && !medium {
                        continue;
                    }
                    let (name, got) = product(&dev, &x, &y, out, &dims, precision, code);
                    let few = a[0].min(b[1]) <= 8 && d == DType::F32;
                    assert_eq!(name.starts_with("cpu.gemm_bf16."), medium && !few, "{name}");
                    if medium && !few {
                        assert!(name.ends_with(code.unwrap_or(Bf16Code::Wide).name()), "{name}");
                    }
                    for (g, w) in got.scalars().zip(want.scalars()) {
                        let (g, w) = (g.as_f64(), w.as_f64());
                        let tol = if out == DType::F32 && d == DType::BF16 { 1e-4 } else { 1e-2 };
                        assert!(
                            (g - w).abs() <= tol * w.abs().max(a[1] as f64),
                            "{name} {a:?} {b:?}: {g} {w}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn convolutions() {
    let dev = device();
    let mut rng = Rng::new();
    for d in floats() {
        for (x, w, c) in [
            (vec![2, 3, 9], vec![4, 3, 3], Conv { pad: smallvec![(1, 2)], ..Conv::new(1) }),
            (vec![2, 4, 9, 8], vec![6, 2, 3, 2], Conv { groups: 2, stride: smallvec![2, 1], ..Conv::new(2) }),
            (vec![1, 2, 5, 6, 5], vec![3, 2, 2, 2, 2], Conv { dilation: smallvec![1, 2, 1], ..Conv::new(3) }),
            (
                vec![1, 3, 5, 5],
                vec![3, 1, 3, 3],
                Conv { groups: 3, pad: smallvec![(1, 1), (-1, 2)], ..Conv::new(2) },
            ),
            (
                vec![1, 3, 5, 4],
                vec![2, 3, 3, 3],
                Conv { input_dilation: smallvec![2, 3], pad: smallvec![(2, 2), (2, 1)], ..Conv::new(2) },
            ),
        ] {
            let (x, w) = (random(&mut rng, d, &x), random(&mut rng, d, &w));
            check(&dev, &Op::Conv(c), &[&x, &w], None);
        }
    }
}

#[test]
fn pools_and_their_gradients() {
    let dev = device();
    let mut rng = Rng::new();
    let kinds = [
        PoolKind::Max,
        PoolKind::Avg { count_include_pad: true },
        PoolKind::Avg { count_include_pad: false },
    ];
    for d in numbers() {
        for kind in kinds {
            if kind != PoolKind::Max && !d.is_float() {
                continue;
            }
            let p = Pool {
                kind,
                kernel: smallvec![3, 2],
                stride: smallvec![2, 1],
                pad: smallvec![(1, 1), (0, 1)],
                dilation: smallvec![1, 2],
            };
            let x = random(&mut rng, d, &[2, 3, 9, 7]);
            check(&dev, &Op::Pool(p.clone()), &[&x], None);
            if d.is_float() {
                let ty = Op::Pool(p.clone()).infer(&[&TensorType::new(d, &x.dims)], None).unwrap();
                let y = reference::eval_op(&Op::Pool(p.clone()), &[&x], &ty, &[]).unwrap();
                let dy = random(&mut rng, d, &y.dims);
                check(&dev, &Op::PoolGrad(p), &[&x, &y, &dy], None);
            }
        }
    }
}

#[test]
fn gradients_of_separate_windows() {
    let dev = device();
    let mut rng = Rng::new();
    let axes = [(2, 2), (2, 3), (3, 3), (1, 2), (4, 4), (2, 1)];
    for _ in 0..20 {
        let [h, w] = [axes[rng.below(5)], axes[rng.below(6)]];
        let mut pad = |k: usize| (rng.below(k), rng.below(k));
        let p = Pool {
            kind: PoolKind::Max,
            kernel: smallvec![h.0, w.0],
            stride: smallvec![h.1, w.1],
            pad: [h.0, w.0].map(&mut pad).into_iter().collect(),
            dilation: smallvec![1, 1],
        };
        // There are few different values, so that a window has several largest elements.
        let shape = [2, 3, 4 + rng.below(15), 4 + rng.below(40)];
        let x: Vec<Scalar> = (0..shape.iter().product())
            .map(|_| Scalar::F(rng.below(7) as f64 - 3.0).cast(DType::F32))
            .collect();
        let x = tensor(DType::F32, &shape, &x);
        let ty = Op::Pool(p.clone()).infer(&[&TensorType::new(DType::F32, &x.dims)], None).unwrap();
        let y = reference::eval_op(&Op::Pool(p.clone()), &[&x], &ty, &[]).unwrap();
        let dy = random(&mut rng, DType::F32, &y.dims);
        check(&dev, &Op::PoolGrad(p), &[&x, &y, &dy], None);
    }
}

#[test]
fn gathers_of_every_type() {
    let dev = device();
    let mut rng = Rng::new();
    for (n, d) in DType::native().enumerate() {
        let i = INDEX[n % INDEX.len()];
        let x = random(&mut rng, d, &[5, 7, 6]);
        for axis in 0..3 {
            let idx = indices(&mut rng, i, &[2, 3], x.dims[axis]);
            check(&dev, &Op::Gather { axis }, &[&x, &idx], None);
            let mut dims = [4, 6, 5];
            dims[axis] = 9;
            let idx = indices(&mut rng, i, &dims, x.dims[axis]);
            check(&dev, &Op::GatherElements { axis }, &[&x, &idx], None);
        }
        let one = indices(&mut rng, i, &[], 5);
        check(&dev, &Op::Gather { axis: 0 }, &[&x, &one], None);
    }
}

#[test]
fn scatters_of_every_type_and_kind() {
    let dev = device();
    let mut rng = Rng::new();
    for (n, d) in DType::native().enumerate() {
        for kind in [ScatterKind::Set, ScatterKind::Add, ScatterKind::Mul, ScatterKind::Max, ScatterKind::Min]
        {
            if d == DType::Bool && kind != ScatterKind::Set {
                continue;
            }
            let i = INDEX[(n + kind as usize) % INDEX.len()];
            let x = random(&mut rng, d, &[5, 7, 6]);
            for axis in 0..3 {
                let mut dims = [4, 6, 5];
                dims[axis] = 8;
                let idx = indices(&mut rng, i, &dims, x.dims[axis]);
                let u = random(&mut rng, d, &dims);
                check(&dev, &Op::ScatterElements { axis, kind }, &[&x, &idx, &u], None);
                let idx = indices(&mut rng, i, &[3, 2], x.dims[axis]);
                let mut dims = x.dims.to_vec();
                dims.splice(axis..axis + 1, [3, 2]);
                let u = random(&mut rng, d, &dims);
                check(&dev, &Op::ScatterRows { axis, kind }, &[&x, &idx, &u], None);
            }
        }
    }
}

#[test]
fn slices_are_updated() {
    let dev = device();
    let mut rng = Rng::new();
    for (n, d) in DType::native().enumerate() {
        let x = random(&mut rng, d, &[4, 9, 5]);
        for axis in 0..3 {
            let mut dims = [4, 9, 5];
            dims[axis] = 3;
            let u = random(&mut rng, d, &dims);
            let at = tensor(INDEX[n % INDEX.len()], &[], &[Scalar::I(1)]);
            check(&dev, &Op::UpdateSlice { axis }, &[&x, &u, &at], None);
        }
    }
}

/// In place, only the slice is written. A position out of range is clamped and reported as a fault.
#[test]
fn slices_are_updated_in_place() {
    let dev = device();
    let op = Op::UpdateSlice { axis: 0 };
    let base: Vec<f32> = (0..20).map(|i| i as f32).collect();
    let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let view = |dims: &[usize], d| Operand { dtype: d, view: View::dense(dims) };
    let ins = [view(&[10, 2], DType::F32), view(&[3, 2], DType::F32), view(&[], DType::I32)];
    let outs = [view(&[10, 2], DType::F32)];
    let call = LibraryCall { in_place: 1, ..LibraryCall::new(Work::Op(&op), &ins, &outs) };
    let k = dev.library(&call).unwrap();
    for (at, first, fault) in [(4, 4, None), (9, 7, Some(42)), (-1, 0, Some(42))] {
        let bufs: Vec<BufferRef> = [80, 24, 4].iter().map(|n| dev.alloc(*n, Tag::Io).unwrap()).collect();
        dev.write(&bufs[0], 0, &bytes(&base)).unwrap();
        dev.write(&bufs[1], 0, &bytes(&[-1.0; 6])).unwrap();
        dev.write(&bufs[2], 0, &i32::to_le_bytes(at)).unwrap();
        let all = [bufs[0].clone(), bufs[1].clone(), bufs[2].clone(), bufs[0].clone()];
        dev.submit(&[Command::Library { kernel: &k, buffers: &all, args: &[], fault: 42 }]).unwrap();
        let mut got = vec![0; 80];
        dev.read(&bufs[0], 0, &mut got).unwrap();
        let mut want = base.clone();
        want[2 * first..2 * first + 6].fill(-1.0);
        assert_eq!(got, bytes(&want), "{at}");
        assert_eq!(dev.take_fault().unwrap(), fault, "{at}");
        assert_eq!(dev.take_fault().unwrap(), None);
        // An in-place call needs the same buffer as base and as output.
        let two = [bufs[0].clone(), bufs[1].clone(), bufs[2].clone(), dev.alloc(80, Tag::Io).unwrap()];
        assert!(dev.submit(&[Command::Library { kernel: &k, buffers: &two, args: &[], fault: 1 }]).is_err());
    }
}

/// In place, only the rows of the updates are written. The last update of a row counts.
#[test]
fn rows_are_set_in_place() {
    let dev = device();
    let op = Op::ScatterRows { axis: 0, kind: ScatterKind::Set };
    let view = |dims: &[usize], d| Operand { dtype: d, view: View::dense(dims) };
    let ins = [view(&[5, 2], DType::F32), view(&[3], DType::I32), view(&[3, 2], DType::F32)];
    let outs = [view(&[5, 2], DType::F32)];
    let call = LibraryCall { in_place: 1, ..LibraryCall::new(Work::Op(&op), &ins, &outs) };
    let k = dev.library(&call).unwrap();
    let floats = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (index, fault) in [([3, 1, 3], None), ([3, 1, 7], Some(42))] {
        let bufs: Vec<BufferRef> = [40, 12, 24].iter().map(|n| dev.alloc(*n, Tag::Io).unwrap()).collect();
        let mut want: Vec<f32> = (0..10).map(|i| i as f32).collect();
        dev.write(&bufs[0], 0, &floats(&want)).unwrap();
        let bytes: Vec<u8> = index.iter().flat_map(|i: &i32| i.to_le_bytes()).collect();
        dev.write(&bufs[1], 0, &bytes).unwrap();
        dev.write(&bufs[2], 0, &floats(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])).unwrap();
        let all = [bufs[0].clone(), bufs[1].clone(), bufs[2].clone(), bufs[0].clone()];
        dev.submit(&[Command::Library { kernel: &k, buffers: &all, args: &[], fault: 42 }]).unwrap();
        let mut got = vec![0; 40];
        dev.read(&bufs[0], 0, &mut got).unwrap();
        for (row, v) in index.iter().zip([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]) {
            let row = (*row as usize).min(4);
            want[2 * row..2 * row + 2].copy_from_slice(&v);
        }
        assert_eq!(got, floats(&want), "{index:?}");
        assert_eq!(dev.take_fault().unwrap(), fault, "{index:?}");
    }
}

#[test]
fn bad_indices_are_clamped_and_reported() {
    let dev = device();
    let x = tensor(DType::F32, &[3], &[1.0, 2.0, 3.0].map(Scalar::F));
    let u = tensor(DType::F32, &[2], &[8.0, 9.0].map(Scalar::F));
    for (values, want, bad) in
        [([0, -3], [1.0, 1.0], false), ([2, 3], [3.0, 3.0], true), ([-4, 1], [1.0, 2.0], true)]
    {
        let i = tensor(DType::I64, &[2], &values.map(Scalar::I));
        for op in [Op::Gather { axis: 0 }, Op::GatherElements { axis: 0 }] {
            let got =
                run(&dev, &op, &[&x, &i], &TensorType::new(DType::F32, &[2usize][..]), Lay::Dense).unwrap();
            assert_eq!(got.to_vec::<f32>(), want, "{values:?}");
            assert_eq!(dev.take_fault().unwrap(), bad.then_some(7));
        }
        for op in [
            Op::ScatterElements { axis: 0, kind: ScatterKind::Set },
            Op::ScatterRows { axis: 0, kind: ScatterKind::Set },
        ] {
            run(&dev, &op, &[&x, &i, &u], &TensorType::new(DType::F32, &[3usize][..]), Lay::Dense).unwrap();
            assert_eq!(dev.take_fault().unwrap(), bad.then_some(7));
        }
    }
}

/// A tensor with many equal elements, and with NaN for float types.
fn ties(rng: &mut Rng, d: DType, dims: &[usize]) -> ConstData {
    let v: Vec<Scalar> = (0..dims.iter().product())
        .map(|_| {
            if d.is_float() && rng.below(9) == 0 {
                Scalar::F(f64::NAN)
            } else {
                Scalar::I(rng.below(4) as i64)
            }
            .cast(d)
        })
        .collect();
    tensor(d, dims, &v)
}

#[test]
fn orders_of_every_type() {
    let dev = device();
    let mut rng = Rng::new();
    for d in DType::native() {
        for axis in 0..3 {
            let x = ties(&mut rng, d, &[4, 6, 5]);
            for flag in [false, true] {
                for last in [false, true] {
                    check(&dev, &Op::ArgReduce { max: flag, axis, keep: flag, last }, &[&x], None);
                }
                check(&dev, &Op::ArgSort { axis, descending: flag }, &[&x], None);
            }
        }
    }
}

#[test]
fn scans_of_every_type() {
    let dev = device();
    let mut rng = Rng::new();
    for d in numbers() {
        for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
            for axis in 0..2 {
                for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
                    let x = random(&mut rng, d, &[7, 9]);
                    check(&dev, &Op::Scan { kind, axis, exclusive, reverse }, &[&x], None);
                }
            }
        }
    }
}

/// The composite that `build` adds to a graph.
fn composite(
    types: &[TensorType],
    build: impl FnOnce(&mut Graph, &[halcyon_ir::NodeId]) -> halcyon_ir::NodeId,
) -> Arc<Composite> {
    let mut g = Graph::new();
    let ids: Vec<_> = types.iter().enumerate().map(|(i, t)| g.input(&format!("x{i}"), t.clone())).collect();
    let y = build(&mut g, &ids);
    match &g.node(y).op {
        Op::Composite(c) => c.clone(),
        o => panic!("{} is not a composite", o.name()),
    }
}

#[test]
fn composites_of_rows_and_attention() {
    let dev = device();
    let mut rng = Rng::new();
    let ty = |d: DType, dims: &[usize]| TensorType::new(d, dims);
    for d in [DType::F32, DType::F16, DType::BF16] {
        let x = random(&mut rng, d, &[3, 5, 37]);
        let (s, b) = (random(&mut rng, d, &[37]), random(&mut rng, d, &[37]));
        let t = [ty(d, &[3, 5, 37]), ty(d, &[37]), ty(d, &[37])];
        let op = |c| Op::Composite(c);
        check(&dev, &op(composite(&t[..1], |g, x| g.softmax(x[0], 2).unwrap())), &[&x], None);
        check(&dev, &op(composite(&t[..1], |g, x| g.log_softmax(x[0], 2).unwrap())), &[&x], None);
        check(
            &dev,
            &op(composite(&t, |g, x| g.layer_norm(x[0], x[1], Some(x[2]), 2, 1e-5).unwrap())),
            &[&x, &s, &b],
            None,
        );
        check(
            &dev,
            &op(composite(&t[..2], |g, x| g.layer_norm(x[0], x[1], None, 2, 1e-5).unwrap())),
            &[&x, &s],
            None,
        );
        check(&dev, &op(composite(&t[..2], |g, x| g.rms_norm(x[0], x[1], 1e-5).unwrap())), &[&x, &s], None);
    }
    let d = DType::F32;
    for (mask, causal) in
        [(None, false), (None, true), (Some(vec![2, 1, 1, 9]), false), (Some(vec![5, 9]), true)]
    {
        let (q, k, v) = (
            random(&mut rng, d, &[2, 4, 5, 8]),
            random(&mut rng, d, &[2, 2, 9, 8]),
            random(&mut rng, d, &[2, 2, 9, 8]),
        );
        let m = mask.as_ref().map(|s| random(&mut rng, d, s));
        let mut ins = vec![&q, &k, &v];
        ins.extend(m.as_ref());
        let types: Vec<TensorType> = ins.iter().map(|x| ty(d, &x.dims)).collect();
        let c =
            composite(&types, |g, x| g.attention(x[0], x[1], x[2], x.get(3).copied(), causal, 0.35).unwrap());
        check(&dev, &Op::Composite(c), &ins, None);
    }
}

#[test]
fn what_has_no_kernel_is_declined_with_a_reason() {
    let dev = device();
    let x = Operand { dtype: DType::F64, view: View::dense(&[4, 4]) };
    let t = [TensorType::new(DType::F64, &[4usize, 4][..])];
    let soft = Op::Composite(composite(&t, |g, x| g.softmax(x[0], 0).unwrap()));
    let exp = Op::Scalar(halcyon_ir::ScalarOp::Exp);
    for op in [&soft, &exp] {
        let call = LibraryCall::new(Work::Op(op), std::slice::from_ref(&x), std::slice::from_ref(&x));
        let d = dev.library(&call).unwrap_err();
        assert!(!d.reason.is_empty() && d.dense.is_empty(), "{d:?}");
    }
}

/// The device declines a call whose operands contradict the op's type rule, because kernels rely on this
/// rule.
#[test]
fn contradictory_calls_are_declined() {
    let dev = device();
    let (f, i) = (DType::F32, DType::I64);
    let o = |d: DType, dims: &[usize]| Operand { dtype: d, view: View::dense(dims) };
    let conv = || Op::Conv(Conv::new(2));
    let pool = |k: &[usize]| Pool::max(k);
    let softmax = composite(&[TensorType::new(f, [2, 8])], |g, x| g.softmax(x[0], 1).unwrap());
    let types = [TensorType::new(f, [2, 8]), TensorType::new(f, [8])];
    let norm = composite(&types, |g, x| g.rms_norm(x[0], x[1], 1e-5).unwrap());
    let types = [TensorType::new(f, [1, 2, 4, 8]), TensorType::new(f, [1, 2, 6, 8])];
    let types = [types[0].clone(), types[1].clone(), types[1].clone()];
    let attend = composite(&types, |g, x| g.attention(x[0], x[1], x[2], None, false, 0.5).unwrap());
    let scatter = Op::ScatterRows { axis: 0, kind: ScatterKind::Add };
    let scan = Op::Scan { kind: ReduceKind::Sum, axis: 3, exclusive: false, reverse: false };
    let calls: Vec<(Op, Vec<Operand>, Operand)> = vec![
        (Op::Matmul, vec![o(f, &[4, 8]), o(f, &[9, 4])], o(f, &[4, 4])),
        (Op::Matmul, vec![o(f, &[4, 8]), o(f, &[8, 4])], o(f, &[40, 40])),
        (Op::Matmul, vec![o(f, &[8]), o(f, &[8, 4])], o(f, &[4])),
        (Op::Matmul, vec![o(f, &[4, 8])], o(f, &[4, 4])),
        (conv(), vec![o(f, &[1, 3, 8, 8]), o(f, &[4, 2, 3, 3])], o(f, &[1, 4, 6, 6])),
        (conv(), vec![o(f, &[1, 3, 8, 8]), o(f, &[4, 3, 3, 3])], o(f, &[1, 4, 8, 8])),
        (conv(), vec![o(f, &[1, 3, 8, 8]), o(f, &[4, 3, 9, 9])], o(f, &[1, 4, 1, 1])),
        (Op::Pool(pool(&[2, 2])), vec![o(f, &[1, 3, 8, 8])], o(f, &[1, 3, 8, 8])),
        (Op::Pool(pool(&[2, 2])), vec![o(f, &[1, 3, 8])], o(f, &[1, 3, 4])),
        (
            Op::PoolGrad(pool(&[2, 2])),
            vec![o(f, &[1, 3, 8, 8]), o(f, &[1, 3, 4, 4]), o(f, &[1, 3, 9, 9])],
            o(f, &[1, 3, 8, 8]),
        ),
        (Op::Gather { axis: 1 }, vec![o(f, &[4]), o(i, &[2])], o(f, &[2])),
        (Op::Gather { axis: 0 }, vec![o(f, &[4, 5]), o(i, &[2])], o(f, &[2, 50])),
        (Op::GatherElements { axis: 0 }, vec![o(f, &[4, 5]), o(i, &[4, 9])], o(f, &[4, 9])),
        (scatter, vec![o(f, &[4, 5]), o(i, &[2]), o(f, &[9, 5])], o(f, &[4, 5])),
        (Op::UpdateSlice { axis: 0 }, vec![o(f, &[4]), o(f, &[9]), o(i, &[])], o(f, &[4])),
        (Op::ClassIndex { classes: 4.into(), ignore: None }, vec![o(i, &[3])], o(i, &[30])),
        (Op::ArgSort { axis: 2, descending: false }, vec![o(f, &[4, 5])], o(i, &[4, 5])),
        (Op::ArgReduce { max: true, axis: 0, keep: false, last: false }, vec![o(f, &[4, 5])], o(i, &[4])),
        (scan, vec![o(f, &[4])], o(f, &[4])),
        (Op::Composite(softmax), vec![o(f, &[2, 9])], o(f, &[2, 9])),
        (Op::Composite(norm), vec![o(f, &[2, 8]), o(f, &[80])], o(f, &[2, 8])),
        (
            Op::Composite(attend),
            vec![o(f, &[1, 2, 4, 8]), o(f, &[1, 2, 6, 8]), o(f, &[1, 2, 7, 8])],
            o(f, &[1, 2, 4, 8]),
        ),
    ];
    for (op, inputs, output) in &calls {
        let outputs = std::slice::from_ref(output);
        let found = dev.library(&LibraryCall::new(Work::Op(op), inputs, outputs));
        let reason = found.err().unwrap_or_else(|| panic!("{} on {inputs:?} has a kernel", op.name())).reason;
        assert!(!reason.is_empty(), "{}", op.name());
    }
}
