//! Tests of products and attention on matrix units: results of every tile are compared with the definition,
//! the units are used only for permitted types and levels, and faults are detected.

use super::composite;
use crate::tensor::*;
use halcyon_ir::graph::Graph;
use halcyon_ir::kernel::interp::{Fault, Options, run};
use halcyon_ir::kernel::lower::{choices, lower_op_as};
use halcyon_ir::kernel::{
    BufId, Builder, E, Kernel, Launch, MatrixOp, MatrixType, Part, Reduce, Ty, verify_for,
};
use halcyon_ir::layout::View;
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::ops::Op;
use halcyon_ir::passes::{Level, PassOptions};
use halcyon_ir::plan::StepWork;
use halcyon_ir::render::{MATRIX_CUDA, MATRIX_HIP};
use halcyon_ir::target::{Caps, Declined, LibraryCall, LibraryKernel, MatmulPrecision, Operand, Target};
use halcyon_ir::{DType, Scalar, TensorType};
use halcyon_test_host::drawn;
use std::sync::Arc;

/// Rounds to 10 fraction bits, ties away from zero.
fn tf32(v: f64) -> f64 {
    let step = 2f64.powi(v.abs().log2().floor() as i32 - 10);
    if v == 0.0 { 0.0 } else { (v.abs() / step + 0.5).floor() * step * v.signum() }
}

/// Matrix units with a subgroup size: one of three, drawn for this run, or all of them.
fn units(test: &str) -> Vec<(&'static [MatrixOp], u32)> {
    let all = vec![(&MATRIX_CUDA[..], 32), (&MATRIX_HIP[..], 64), (&MATRIX_HIP[..], 32)];
    drawn(test, all.len()).map_or(all.clone(), |i| vec![all[i]])
}

/// Products of several sizes in several layouts, with the subgroup sizes of NVIDIA and AMD. One size is
/// computed with every tile, the others with the heuristic's choice.
#[test]
fn matmul_on_matrix_units() {
    let mut g = Rng(77);
    // Batch, rows, depth, columns, and the layouts of both operands.
    let sizes: [(&[usize], usize, usize, usize, [usize; 2]); 7] = [
        (&[], 64, 64, 64, [0, 0]),
        (&[], 136, 40, 144, [1, 0]),
        (&[], 70, 33, 65, [0, 1]),
        (&[2, 2], 40, 24, 56, [0, 1]),
        (&[3], 33, 17, 40, [2, 2]),
        (&[], 16, 8, 200, [1, 1]),
        (&[], 129, 72, 130, [2, 0]),
    ];
    let mut seen = 0;
    for (ops, width) in units("matmul_on_matrix_units") {
        let caps = with_matrix_units(ops, width);
        for op in &caps.matrix {
            let d = op.operand.storage();
            for (batch, m, k, n, layouts) in sizes {
                let full = |a: usize, b: usize| [batch, &[a, b]].concat();
                let a = Tensor::random(d, &full(m, k), layouts[0], &mut g);
                let b = Tensor::random(d, &full(k, n), layouts[1], &mut g);
                let value = |t: &Tensor, at: &[usize]| {
                    if op.operand == MatrixType::Tf32 { tf32(t.get(at)) } else { t.get(at) }
                };
                let want: Vec<f64> = indices(&full(m, n))
                    .iter()
                    .map(|i| {
                        let r = i.len();
                        let term = |p: usize| {
                            let (mut x, mut y) = (i.clone(), i.clone());
                            (x[r - 1], y[r - 2]) = (p, p);
                            value(&a, &x) * value(&b, &y)
                        };
                        (0..k).map(term).sum()
                    })
                    .collect();
                // Products of 16-bit types are also stored as f32.
                for out in if d == DType::F32 { vec![d] } else { vec![d, DType::F32] } {
                    let inputs = [a.operand.clone(), b.operand.clone()];
                    let output = [Operand { dtype: out, view: View::dense(&full(m, n)) }];
                    let c = choices(&Op::Matmul, &inputs, &output, &caps).unwrap();
                    assert_eq!(c.default.kernel, "matrix", "{c:?}");
                    let every = (m, k) == (136, 40) && out == d;
                    let all = c.others.iter().filter(|v| every && v.kernel == "matrix").chain([&c.default]);
                    for v in all {
                        let low = lower_op_as(&Op::Matmul, &inputs, &output, &caps, v).unwrap();
                        let (kernel, launch, _) = &low.steps[0];
                        let empty = vec![0xCD; want.len() * out.size()];
                        let mut memory = [a.bytes.clone(), b.bytes.clone(), empty];
                        let o = Options {
                            subgroup: width,
                            seed: Some(seen),
                            sanitize: true,
                            poisoned: vec![BufId(2)],
                            ..Options::default()
                        };
                        let r = run(kernel, launch, &mut memory, &o).unwrap();
                        assert!(r.reports.is_empty(), "{v}: {}", r.reports[0]);
                        let got: Vec<f64> = memory[2]
                            .chunks(out.size())
                            .map(|c| Scalar::from_bytes(out, c).as_f64())
                            .collect();
                        close(&format!("{v} by {width}"), &got, &want, out, 4.0 + k as f64 / 16.0);
                        seen += 1;
                    }
                }
            }
        }
    }
    assert!(seen > 20, "{seen}");
}

/// Attention for prompts on matrix units, with the subgroup sizes of NVIDIA and AMD, against the definition.
/// Two calls are computed with every tile, the others with the heuristic's choice.
#[test]
fn attention_on_matrix_units() {
    // Batch, query heads, key heads, queries, keys and row length.
    type Case = [usize; 6];
    struct Call {
        case: Case,
        causal: bool,
        scale: f64,
        /// Sizes of the mask's axes, last axis first; 0 stands for the full size.
        mask: &'static [usize],
        /// In memory, positions vary slower than heads.
        heads_inside: bool,
        /// f32 mask and scale, as under mixed precision.
        mixed: bool,
    }
    let call =
        |case, causal, mask| Call { case, causal, scale: 0.3, mask, heads_inside: false, mixed: false };
    let calls = [
        // Tested with every tile.
        call([1, 2, 1, 40, 70, 32], true, &[][..]),
        call([1, 4, 2, 33, 65, 20], false, &[0, 0]),
        // Tested with the heuristic's choice.
        call([2, 2, 2, 64, 64, 64], true, &[]),
        call([1, 1, 1, 100, 130, 64], true, &[]),
        call([1, 6, 2, 7, 130, 24], true, &[0, 0, 0, 0]),
        call([2, 2, 1, 20, 37, 80], false, &[0, 1, 1]),
        call([1, 2, 1, 50, 20, 128], true, &[1, 0]),
        call([1, 1, 1, 16, 1, 1], false, &[]),
        Call { scale: -0.4, ..call([1, 2, 2, 17, 40, 9], true, &[]) },
        Call { heads_inside: true, ..call([2, 2, 1, 24, 33, 48], false, &[]) },
        Call { mixed: true, ..call([1, 2, 1, 40, 33, 48], false, &[0, 0]) },
        Call { mixed: true, scale: -0.4, ..call([1, 2, 2, 17, 70, 24], true, &[0]) },
    ];
    let mut g = Rng(78);
    let mut seen = 0;
    for (ops, width) in units("attention_on_matrix_units") {
        let caps = with_matrix_units(ops, width);
        for (op, (i, c)) in caps.matrix.iter().flat_map(|o| calls.iter().enumerate().map(move |c| (o, c))) {
            let (d, [b, h, hk, sq, sk, w]) = (op.operand.storage(), c.case);
            let mut operand = |heads: usize, n: usize| {
                if c.heads_inside {
                    let mut t = Tensor::random(d, &[b, n, heads, w], 0, &mut g);
                    t.operand.view = t.operand.view.permute(&[0, 2, 1, 3]);
                    let at = |i: &[usize]| linear(&[b, n, heads, w], &[i[0], i[2], i[1], i[3]]);
                    t.values = indices(&[b, heads, n, w]).iter().map(|i| t.values[at(i)]).collect();
                    t
                } else {
                    Tensor::random(d, &[b, heads, n, w], 0, &mut g)
                }
            };
            let [q, k, v] = [operand(h, sq), operand(hk, sk), operand(hk, sk)];
            let full = [sk, sq, h, b];
            let shape: Vec<usize> =
                c.mask.iter().zip(full).rev().map(|(m, f)| if *m == 0 { f } else { *m }).collect();
            // The mask's first row hides all keys by -inf. Its second row hides them as exporters do, by the
            // lowest finite number, which adding a score does not change.
            let md = if c.mixed { DType::F32 } else { d };
            let lowest = match md {
                DType::BF16 => -f64::from(half::bf16::MAX),
                _ => -f64::from(f32::MAX),
            };
            let mask = Tensor::new(md, &shape, 0, |i| match i / sk {
                0 if sk > 1 && shape.len() > 1 => f64::NEG_INFINITY,
                1 if md != DType::F16 => lowest,
                _ if i % 5 == 2 => f64::NEG_INFINITY,
                _ => (i % 7) as f64 / 4.0,
            });
            let mut x = vec![&q, &k, &v];
            x.extend((!c.mask.is_empty()).then_some(&mask));
            // Under mixed precision the composite computes in f32 for all operand types.
            let types: Vec<Tensor> = x.iter().map(|t| (*t).clone()).collect();
            let f32s = |t: &Tensor| Tensor {
                operand: Operand { dtype: DType::F32, ..t.operand.clone() },
                ..t.clone()
            };
            let types: Vec<Tensor> = if c.mixed { types.iter().map(f32s).collect() } else { types };
            let op = composite(&types.iter().collect::<Vec<_>>(), |g, i| {
                g.attention(i[0], i[1], i[2], i.get(3).copied(), c.causal, c.scale).unwrap()
            });
            let scale = if c.mixed { c.scale } else { Scalar::F(c.scale).cast(d).as_f64() };
            let mut want = vec![];
            for o in indices(&[b, h, sq]) {
                let head = o[1] / (h / hk);
                let score = |j: usize| {
                    if c.causal && j + sq > o[2] + sk {
                        return f64::NEG_INFINITY;
                    }
                    let dot = |l: usize| q.get(&[o[0], o[1], o[2], l]) * k.get(&[o[0], head, j, l]);
                    let at = [o[0], o[1], o[2], j];
                    let at: Vec<usize> = shape
                        .iter()
                        .zip(&at[4 - shape.len()..])
                        .map(|(n, i)| if *n == 1 { 0 } else { *i })
                        .collect();
                    let hidden = if c.mask.is_empty() { 0.0 } else { mask.get(&at) };
                    (0..w).map(dot).sum::<f64>() * scale + hidden
                };
                let scores: Vec<f64> = (0..sk).map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let value =
                    |l: usize| (0..sk).map(|j| weights[j] / sum * v.get(&[o[0], head, j, l])).sum::<f64>();
                want.extend((0..w).map(value));
            }
            assert!(c.mask.len() < 2 || want.iter().any(|v| v.is_nan()), "no query without a key");
            let inputs: Vec<Operand> = x.iter().map(|t| t.operand.clone()).collect();
            let output = [Operand { dtype: d, view: View::dense(&[b, h, sq, w]) }];
            let all = choices(&op, &inputs, &output, &caps).unwrap();
            assert_eq!(all.default.kernel, "matrix", "{all:?}");
            let others = all.others.iter().filter(|v| i < 2 && v.kernel == "matrix");
            for variant in others.chain([&all.default]) {
                let low = lower_op_as(&op, &inputs, &output, &caps, variant).unwrap();
                let (kernel, launch, _) = &low.steps[0];
                let mut memory: Vec<Vec<u8>> = x.iter().map(|t| t.bytes.clone()).collect();
                memory.push(vec![0xCD; want.len() * d.size()]);
                let o = Options {
                    subgroup: width,
                    seed: Some(seen),
                    sanitize: true,
                    poisoned: vec![BufId(x.len() as u32)],
                    ..Options::default()
                };
                let r = run(kernel, launch, &mut memory, &o).unwrap();
                let what = format!("{variant} by {width} of {:?}", c.case);
                assert!(r.reports.is_empty(), "{what}: {}", r.reports[0]);
                let got: Vec<f64> =
                    memory[x.len()].chunks(d.size()).map(|c| Scalar::from_bytes(d, c).as_f64()).collect();
                // Scores of TF32 products have the rounding error of the operands; weights of 16-bit types
                // are rounded.
                close(&what, &got, &want, if d == DType::F32 { DType::F16 } else { d }, 4.0);
                seen += 1;
            }
        }
    }
    assert!(seen > 20, "{seen}");
}

/// 16-bit types use matrix units at every level; f32 does from O2 on, and only if the call's precision allows
/// TF32.
#[test]
fn levels_and_precision_choose_matrix_units() {
    #[derive(Debug)]
    struct Gpu(Caps);
    impl Target for Gpu {
        fn caps(&self) -> &Caps {
            &self.0
        }
        fn library(&self, _: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
            Err(Declined::because("it has no library"))
        }
    }
    let gpu = Gpu(with_matrix_units(&MATRIX_CUDA, 32));
    let kernel = |d: DType, level: Level, precision: MatmulPrecision, attention: bool| {
        let mut g = Graph::new();
        if attention {
            let [q, k, v] = [(); 3].map(|_| g.input("x", TensorType::new(d, &[1usize, 2, 64, 64][..])));
            let y = g.attention(q, k, v, None, true, 0.125).unwrap();
            g.output("y", y);
        } else {
            let x = g.input("x", TensorType::new(d, &[128usize, 96][..]));
            let w = g.input("w", TensorType::new(d, &[96usize, 64][..]));
            let y = g.matmul(x, w).unwrap();
            g.output("y", y);
        }
        let passes = PassOptions { level, ..PassOptions::default() };
        let o = LowerOptions { passes, precision, ..LowerOptions::default() };
        let plan = lower(&g, &gpu, &o).unwrap();
        match &plan.steps[0].work {
            StepWork::Kernel { kernel, .. } => kernel.name.clone(),
            w => panic!("{w:?}"),
        }
    };
    use MatmulPrecision::{High, Highest, Medium};
    for (level, precision) in
        [(Level::O0, Highest), (Level::O1, High), (Level::O2, Highest), (Level::O2, Medium)]
    {
        assert_eq!(kernel(DType::F16, level, precision, false), "matmul_matrix");
        assert_eq!(kernel(DType::BF16, level, precision, false), "matmul_matrix");
        let f32s = if level == Level::O2 && precision != Highest { "matmul_matrix" } else { "matmul_tiled" };
        assert_eq!(kernel(DType::F32, level, precision, false), f32s, "{level:?} {precision:?}");
        assert_eq!(kernel(DType::F64, level, precision, false), "matmul_tiled");
        // At O0 attention is replaced by its body.
        if level > Level::O0 {
            assert_eq!(kernel(DType::F16, level, precision, true), "attention_matrix");
            assert_eq!(kernel(DType::BF16, level, precision, true), "attention_matrix");
            let f32s = f32s.replace("matmul", "attention");
            assert_eq!(kernel(DType::F32, level, precision, true), f32s, "{level:?} {precision:?}");
        }
    }
}

/// The wrong uses of fragments that the verifier and the interpreter detect.
#[test]
fn faults_of_matrices_are_found() {
    let (op, other) = (MATRIX_CUDA[0], MATRIX_CUDA[1]);
    let kernel = |f: &dyn Fn(&Builder)| {
        let b = Builder::new("matrices", [64, 1, 1]);
        f(&b);
        b.finish()
    };
    let launch = Launch { groups: [1, 1, 1], params: vec![] };
    let found = |k: &Kernel| {
        let o = Options { sanitize: true, ..Options::default() };
        run(k, &launch, &mut [], &o).unwrap().reports.first().map(|r| r.fault)
    };
    // Work-items write an array of 128 vectors, from which two subgroups load a fragment at an offset and
    // with a stride.
    let loads = |barrier: bool, at: &dyn for<'a> Fn(&'a Builder) -> [E<'a>; 2]| {
        let k = kernel(&|b| {
            let l = b.local(Ty::U32x4, 128);
            for i in 0..2 {
                l.store(b.local_id(0) + i * 64, b.words([b.constant(Ty::U32, 0); 4]));
            }
            if barrier {
                b.barrier();
            }
            let x = b.fragment(op, Part::A);
            let [offset, stride] = at(b);
            b.load_fragment(x, l, offset, stride, false);
        });
        found(&k.unwrap())
    };
    assert_eq!(loads(true, &|b| [b.index(0), b.index(16)]), None);
    assert_eq!(loads(true, &|b| [b.local_id(0).idiv(32) * 256, b.index(16)]), None);
    assert_eq!(loads(false, &|b| [b.index(0), b.index(16)]), Some(Fault::Race));
    assert_eq!(loads(true, &|b| [b.local_id(0).idiv(16) * 16, b.index(16)]), Some(Fault::Divergent));
    assert_eq!(loads(true, &|b| [b.index(4), b.index(16)]), Some(Fault::Misaligned));
    assert_eq!(loads(true, &|b| [b.index(0), b.index(20)]), Some(Fault::Misaligned));
    assert_eq!(loads(true, &|b| [b.index(0), b.index(80)]), Some(Fault::OutOfBounds));
    // A sum that was never set, and subgroups of the wrong size.
    let unset = kernel(&|b| {
        let (x, y, s) = (b.fragment(op, Part::A), b.fragment(op, Part::B), b.fragment(op, Part::Sum));
        b.mma(s, x, y);
    });
    assert_eq!(found(unset.as_ref().unwrap()), Some(Fault::Uninitialised));
    let wide = Options { subgroup: 64, ..Options::default() };
    assert!(run(unset.as_ref().unwrap(), &launch, &mut [], &wide).is_err());
    let unset_rows = kernel(&|b| {
        let (s, r) = (b.fragment(op, Part::Sum), b.fragment(op, Part::Rows));
        b.fill_fragment(s, 0.0);
        b.map_fragment(s, |_, _| b.set_element(s, b.element(r)));
    });
    assert_eq!(found(&unset_rows.unwrap()), Some(Fault::Uninitialised));
    // Scratch memory of conversions: each subgroup needs its own, and a conversion destroys its contents.
    let converts = |own: i64, pitch: i64, reads: bool| {
        let k = kernel(&|b| {
            let l = b.local(Ty::U32x4, 128);
            l.store(b.local_id(0), b.words([b.constant(Ty::U32, 0); 4]));
            l.store(b.local_id(0) + 64, b.words([b.constant(Ty::U32, 0); 4]));
            b.barrier();
            let (s, x) = (b.fragment(op, Part::Sum), b.fragment(op, Part::A));
            b.fill_fragment(s, 0.0);
            b.convert_fragment(x, (s, 0), l, b.local_id(0).idiv(32) * own, pitch);
            b.barrier();
            if reads {
                b.load_fragment(x, l, 0, 16, false);
            }
        });
        found(&k.unwrap())
    };
    assert_eq!(converts(256, 16, false), None);
    assert_eq!(converts(0, 16, false), Some(Fault::Race));
    assert_eq!(converts(256, 8, false), Some(Fault::Race));
    assert_eq!(converts(256, 16, true), Some(Fault::Uninitialised));
    // The device must support the matrix op.
    assert!(verify_for(unset.as_ref().unwrap(), &with_matrix_units(&MATRIX_CUDA, 32)).is_ok());
    let error = verify_for(unset.as_ref().unwrap(), &caps()).unwrap_err();
    assert!(error.to_string().contains("16×16×16 in f16"), "{error}");
    // Combinations that the verifier rejects.
    let refused: [&dyn Fn(&Builder); 10] = [
        &|b| {
            let s = b.fragment(op, Part::Sum);
            b.if_(b.local_id(0).lt(32), || b.fill_fragment(s, 0.0));
        },
        &|b| {
            let (x, y, s) = (b.fragment(op, Part::A), b.fragment(other, Part::B), b.fragment(op, Part::Sum));
            b.mma(s, x, y);
        },
        &|b| {
            let s = b.fragment(op, Part::Sum);
            b.load_fragment(s, b.local(Ty::U32x4, 128), 0, 16, false);
        },
        &|b| {
            let x = b.fragment(op, Part::A);
            b.load_fragment(x, b.local(Ty::F32, 512), 0, 16, false);
        },
        // An element that is read outside of a map, an element of a fragment of another shape, and a row
        // element that is set in a map over sums.
        &|b| {
            b.element(b.fragment(op, Part::Sum));
        },
        &|b| {
            let (s, t) = (b.fragment(op, Part::Sum), b.fragment(other, Part::Sum));
            b.map_fragment(s, |_, _| b.set_element(s, b.element(t)));
        },
        &|b| {
            let (s, r) = (b.fragment(op, Part::Sum), b.fragment(op, Part::Rows));
            b.map_fragment(s, |_, _| b.set_element(r, b.element(s)));
        },
        // A map that does more than set elements, a reduction of rows by multiplication, and a conversion of
        // columns that start within a matrix.
        &|b| {
            let (s, l) = (b.fragment(op, Part::Sum), b.local(Ty::F32, 64));
            b.map_fragment(s, |row, _| l.store(row, b.element(s)));
        },
        &|b| b.reduce_fragment(Reduce::Mul, b.fragment(op, Part::Rows), b.fragment(op, Part::Sum)),
        &|b| {
            let (s, x) = (b.fragment(op, Part::Sum), b.fragment(op, Part::A));
            b.convert_fragment(x, (s, 8), b.local(Ty::U32x4, 128), 0, 16);
        },
    ];
    for (i, f) in refused.into_iter().enumerate() {
        assert!(kernel(f).is_err(), "{i}");
    }
}

/// Tuning compares kernels that round f32 factors to TF32 with kernels that do not. It must accept both,
/// whichever is the default. For this, the tolerance includes `rounding`; without `rounding`, tuning would
/// reject one of the two.
#[test]
fn tuning_allows_for_the_rounding_of_factors() {
    let caps = with_matrix_units(&MATRIX_CUDA, 32);
    let mut g = Rng(79);
    let plain = |shape: &[usize], g: &mut Rng| Tensor::random(DType::F32, shape, 0, g);
    let product = [plain(&[70, 200], &mut g), plain(&[200, 65], &mut g)];
    let prompt = [(); 3].map(|_| plain(&[1, 2, 40, 32], &mut g));
    let refs: Vec<&Tensor> = prompt.iter().collect();
    let attention = composite(&refs, |g, i| g.attention(i[0], i[1], i[2], None, true, 0.3).unwrap());
    for (op, x, shape) in [
        (Op::Matmul, product.iter().collect::<Vec<_>>(), vec![70, 65]),
        (attention, refs.clone(), vec![1, 2, 40, 32]),
    ] {
        let inputs: Vec<Operand> = x.iter().map(|t| t.operand.clone()).collect();
        let output = [Operand { dtype: DType::F32, view: View::dense(&shape) }];
        let mut all = choices(&op, &inputs, &output, &caps).unwrap();
        assert_eq!((&*all.default.kernel, all.rounding), ("matrix", 2f64.powi(-11)));
        let result = |v: &_, magnitudes: bool| {
            let low = lower_op_as(&op, &inputs, &output, &caps, v).unwrap();
            let (kernel, launch, _) = &low.steps[0];
            let operand = |t: &&Tensor| match magnitudes {
                true => t.bytes.chunks(4).flat_map(|c| [c[0], c[1], c[2], c[3] & 0x7f]).collect(),
                false => t.bytes.clone(),
            };
            let mut memory: Vec<Vec<u8>> = x.iter().map(operand).collect();
            memory.push(vec![0; 4 * shape.iter().product::<usize>()]);
            let o = Options { subgroup: 32, ..Options::default() };
            run(kernel, launch, &mut memory, &o).unwrap();
            let y = memory.pop().unwrap();
            y.chunks(4).map(|c| Scalar::from_bytes(DType::F32, c).as_f64()).collect::<Vec<f64>>()
        };
        let want = result(&all.default, false);
        let top = want.iter().fold(0f64, |t, v| t.max(v.abs()));
        let scale = match op {
            Op::Matmul => result(&all.default, true),
            _ => vec![top; want.len()],
        };
        let mut kernels = vec![];
        for v in &all.others.clone() {
            if kernels.contains(&v.kernel) {
                continue;
            }
            kernels.push(v.kernel.clone());
            let got = result(v, false);
            let off = || got.iter().zip(&want).zip(&scale).map(|((g, w), s)| (g - w).abs() / s);
            let worst = off().fold(0f64, f64::max);
            assert!(worst < all.share(DType::F32), "{v}: {worst:e}");
            if v.kernel != "matrix" {
                let rounding = std::mem::take(&mut all.rounding);
                assert!(worst > all.share(DType::F32), "{v}: {worst:e} would pass as f32");
                all.rounding = rounding;
            }
        }
        assert!(kernels.len() > 2, "{kernels:?}");
    }
}
