//! Every template through the interpreter: all subgroup sizes, random order, poisoned outputs, strided operands, against
//! references written from the definitions in f64.

#[path = "common/tensor.rs"]
mod tensor;

use halcyon_ir::graph::Graph;
use halcyon_ir::kernel::interp::{Fault, Options, run};
use halcyon_ir::kernel::lower::{choices, lower_op, lower_op_as};
use halcyon_ir::kernel::{BufId, Builder, E, Kernel, Launch, MatrixType, Part, Reduce, Ty, verify_for};
use halcyon_ir::layout::View;
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::op::{Conv, Op, Pool, PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::passes::{Level, PassOptions};
use halcyon_ir::plan::StepWork;
use halcyon_ir::render::{MATRIX_CUDA, MATRIX_HIP};
use halcyon_ir::target::{Caps, Declined, LibraryCall, LibraryKernel, MatmulPrecision, Operand, Target};
use halcyon_ir::{DType, Scalar, TensorType};
use std::sync::Arc;
use tensor::*;

/// Runs the kernels of an op at every subgroup size; gives the result's elements and whether the fault word was set.
fn execute(
    op: &Op,
    x: &[&Tensor],
    d: DType,
    shape: &[usize],
    in_place: bool,
    caps: &Caps,
) -> (Vec<f64>, bool) {
    let out = Operand { dtype: d, view: View::dense(shape) };
    let inputs: Vec<Operand> = x.iter().map(|t| t.operand.clone()).collect();
    let low = match lower_op(op, &inputs, std::slice::from_ref(&out), in_place, caps) {
        Ok(low) => low,
        // The caller copies what the kernels want dense.
        Err(e) if !e.dense.is_empty() => {
            let mut copies: Vec<Tensor> = x.iter().map(|&t| t.clone()).collect();
            for i in e.dense {
                assert!(!copies[i].operand.view.is_dense(), "{}: input {i} is dense", op.name());
                copies[i] = copies[i].dense();
            }
            return execute(op, &copies.iter().collect::<Vec<_>>(), d, shape, in_place, caps);
        }
        Err(e) => panic!("{}: {}", op.name(), e.reason),
    };
    let bytes = out.view.numel() * d.size();
    let mut first: Option<(Vec<u8>, bool)> = None;
    for (n, subgroup) in [1, 4, 32, 64].into_iter().enumerate() {
        let mut all: Vec<Vec<u8>> = x.iter().map(|t| t.bytes.clone()).collect();
        all.push(if in_place { x[0].bytes.clone() } else { vec![0xCD; bytes] });
        let mut written = in_place;
        let mut fault = vec![0; 4];
        for (k, l, binding) in &low.steps {
            let mut mem: Vec<Vec<u8>> = binding.iter().map(|&b| std::mem::take(&mut all[b])).collect();
            let faults = mem.len() < k.buffers.len();
            if faults {
                mem.push(std::mem::take(&mut fault));
            }
            let mut l = l.clone();
            for (p, v) in k.params.iter().zip(&mut l.params) {
                if p.name == "fault" {
                    *v = Scalar::U(7);
                }
            }
            // Concatenations and updates write one result in several steps, of which only the first finds it untouched.
            let poisoned = if written { vec![] } else { vec![BufId(binding.len() as u32 - 1)] };
            let o = Options {
                subgroup,
                seed: Some(n as u64 * 31 + 5),
                sanitize: true,
                poisoned,
                ..Options::default()
            };
            let r = run(k, &l, &mut mem, &o).unwrap();
            assert!(r.reports.is_empty(), "{}: {}", op.name(), r.reports[0]);
            written = true;
            if faults {
                fault = mem.pop().unwrap();
            }
            for (&b, m) in binding.iter().zip(mem) {
                all[b] = m;
            }
        }
        let got = (all.pop().unwrap(), fault[0] == 7);
        match &first {
            Some(f) => assert!(*f == got, "{} depends on order or subgroup size", op.name()),
            None => first = Some(got),
        }
    }
    let (b, fault) = first.unwrap();
    (b.chunks(d.size()).map(|c| Scalar::from_bytes(d, c).as_f64()).collect(), fault)
}

#[test]
fn matmul() {
    let mut g = Rng(1);
    let sizes = [
        (1, 1, 1),
        (3, 5, 7),
        (17, 33, 20),
        (70, 65, 35),
        (1, 40, 300),
        (64, 64, 16),
        (2, 3, 0),
        (4, 72, 96),
        (96, 1, 72),
    ];
    for (n, (m, c, k)) in sizes.into_iter().enumerate() {
        for (j, d) in [DType::F32, DType::F64, DType::BF16, DType::I32, DType::U8].into_iter().enumerate() {
            for batch in [&[][..], &[2, 3][..]] {
                if batch.len() == 2 && (m > 20 || d != DType::F32) {
                    continue;
                }
                let full = |a: usize, b: usize| [batch, &[a, b]].concat();
                let a = Tensor::random(d, &full(m, k), n + j, &mut g);
                let b = Tensor::random(d, &full(k, c), n + j + 1, &mut g);
                let (got, _) = execute(&Op::Matmul, &[&a, &b], d, &full(m, c), false, &caps());
                let want: Vec<f64> = indices(&full(m, c))
                    .iter()
                    .map(|i| {
                        let r = i.len();
                        let s: f64 = (0..k)
                            .map(|p| {
                                let (mut x, mut y) = (i.clone(), i.clone());
                                (x[r - 1], y[r - 2]) = (p, p);
                                a.get(&x) * b.get(&y)
                            })
                            .sum();
                        if d == DType::U8 { (s as i64 & 255) as f64 } else { s }
                    })
                    .collect();
                close("matmul", &got, &want, d, 4.0 + k as f64 / 16.0);
            }
        }
    }
    // A dot-product shape whose right operand is transposed in memory takes the group kernel.
    let a = Tensor::random(DType::F32, &[2, 300], 0, &mut g);
    let b = Tensor::random(DType::F32, &[300, 3], 1, &mut g);
    let low = lower_op(
        &Op::Matmul,
        &[a.operand.clone(), b.operand.clone()],
        &[Operand { dtype: DType::F32, view: View::dense(&[2, 3]) }],
        false,
        &caps(),
    );
    assert_eq!(low.unwrap().steps[0].0.name, "matmul_split");
}

/// f32 with ten bits of the significand, ties away from zero.
fn tf32(v: f64) -> f64 {
    let step = 2f64.powi(v.abs().log2().floor() as i32 - 10);
    if v == 0.0 { 0.0 } else { (v.abs() / step + 0.5).floor() * step * v.signum() }
}

/// Every tile in every layout, at the widths of NVIDIA's and AMD's subgroups.
#[test]
fn matmul_on_matrix_units() {
    let mut g = Rng(77);
    let units = [(&MATRIX_CUDA[..], 32), (&MATRIX_HIP[..], 64), (&MATRIX_HIP[..], 32)];
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
    for (ops, width) in units {
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
                // Half types also into f32.
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
    assert!(seen > 100, "{seen}");
}

/// Prompts on matrix units: every tile, at the widths of NVIDIA's and AMD's subgroups, against the definition.
#[test]
fn attention_on_matrix_units() {
    // Batch, query heads, key heads, queries, keys and length of a row.
    type Case = [usize; 6];
    struct Call {
        case: Case,
        causal: bool,
        scale: f64,
        /// Sizes of a mask's axes, from the last; 0 stands for the whole axis.
        mask: &'static [usize],
        /// Heads behind positions in memory.
        heads_inside: bool,
    }
    let call = |case, causal, mask| Call { case, causal, scale: 0.3, mask, heads_inside: false };
    let calls = [
        // Every tile of these.
        call([1, 2, 1, 40, 70, 32], true, &[][..]),
        call([1, 4, 2, 33, 65, 20], false, &[0, 0]),
        // The heuristic's.
        call([2, 2, 2, 64, 64, 64], true, &[]),
        call([1, 1, 1, 100, 130, 64], true, &[]),
        call([1, 6, 2, 7, 130, 24], true, &[0, 0, 0, 0]),
        call([2, 2, 1, 20, 37, 80], false, &[0, 1, 1]),
        call([1, 2, 1, 50, 20, 128], true, &[1, 0]),
        call([1, 1, 1, 16, 1, 1], false, &[]),
        Call { scale: -0.4, ..call([1, 2, 2, 17, 40, 9], true, &[]) },
        Call { heads_inside: true, ..call([2, 2, 1, 24, 33, 48], false, &[]) },
    ];
    let mut g = Rng(78);
    let mut seen = 0;
    for (ops, width) in [(&MATRIX_CUDA[..], 32), (&MATRIX_HIP[..], 64), (&MATRIX_HIP[..], 32)] {
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
            // The first row of keys is hidden from all queries that share it.
            let mask = Tensor::new(d, &shape, 0, |i| {
                if i < sk && sk > 1 || i % 5 == 2 { f64::NEG_INFINITY } else { (i % 7) as f64 / 4.0 }
            });
            let mut x = vec![&q, &k, &v];
            x.extend((!c.mask.is_empty()).then_some(&mask));
            let op = composite(&x, |g, i| {
                g.attention(i[0], i[1], i[2], i.get(3).copied(), c.causal, c.scale).unwrap()
            });
            let scale = Scalar::F(c.scale).cast(d).as_f64();
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
                // Scores of TF32 products are off by the operands' rounding; weights of half types are rounded.
                close(&what, &got, &want, if d == DType::F32 { DType::F16 } else { d }, 4.0);
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

/// Half types go to matrix units at every level, f32 only where the call's precision allows TF32, from O2 on.
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
        // At O0 attention is what it consists of.
        if level > Level::O0 {
            assert_eq!(kernel(DType::F16, level, precision, true), "attention_matrix");
            assert_eq!(kernel(DType::BF16, level, precision, true), "attention_matrix");
            let f32s = f32s.replace("matmul", "attention");
            assert_eq!(kernel(DType::F32, level, precision, true), f32s, "{level:?} {precision:?}");
        }
    }
}

/// What the verifier and the interpreter find wrong with matrices.
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
    // Work-items write an array of 128 vectors, and two subgroups load a matrix of it from a place and with a stride.
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
    // A sum that nothing set, and subgroups of another width.
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
    // Places that sums pass through on their way to an operand: each subgroup's own, and lost afterwards.
    let converts = |own: i64, reads: bool| {
        let k = kernel(&|b| {
            let l = b.local(Ty::U32x4, 128);
            l.store(b.local_id(0), b.words([b.constant(Ty::U32, 0); 4]));
            l.store(b.local_id(0) + 64, b.words([b.constant(Ty::U32, 0); 4]));
            b.barrier();
            let (s, x) = (b.fragment(op, Part::Sum), b.fragment(op, Part::A));
            b.fill_fragment(s, 0.0);
            b.convert_fragment(x, (s, 0), l, b.local_id(0).idiv(32) * own, 16);
            b.barrier();
            if reads {
                b.load_fragment(x, l, 0, 16, false);
            }
        });
        found(&k.unwrap())
    };
    assert_eq!(converts(256, false), None);
    assert_eq!(converts(0, false), Some(Fault::Race));
    assert_eq!(converts(256, true), Some(Fault::Uninitialised));
    // The device must have it.
    assert!(verify_for(unset.as_ref().unwrap(), &with_matrix_units(&MATRIX_CUDA, 32)).is_ok());
    let error = verify_for(unset.as_ref().unwrap(), &caps()).unwrap_err();
    assert!(error.to_string().contains("16×16×16 in f16"), "{error}");
    // What does not fit together.
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
        // Elements outside of a map, of another shape, and of rows where sums are gone through.
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
        // A map with another effect, a product of a row's elements, and an operand that begins within another.
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

#[test]
fn one_program_serves_every_shape_of_a_class() {
    let key = |m: usize, k: usize, n: usize| {
        let o = |a, b| Operand { dtype: DType::F32, view: View::dense(&[a, b]) };
        lower_op(&Op::Matmul, &[o(m, k), o(k, n)], &[o(m, n)], false, &caps()).unwrap().steps[0].0.key()
    };
    assert_eq!(key(200, 64, 64), key(100, 33, 77));
    assert_eq!(key(3, 5, 7), key(2, 30, 9));
    assert_ne!(key(3, 5, 7), key(100, 64, 77));
}

fn conv_reference(c: &Conv, x: &Tensor, w: &Tensor, out: &[usize]) -> Vec<f64> {
    let axes = c.stride.len();
    let (cg, og) = (w.shape()[1], w.shape()[0] / c.groups);
    let points = indices(out);
    points
        .iter()
        .map(|o| {
            let mut s = 0.0;
            for ci in 0..cg {
                for tap in indices(&w.shape()[2..]) {
                    let mut xi = vec![o[0], o[1] / og * cg + ci];
                    let mut inside = true;
                    for k in 0..axes {
                        let p = (o[2 + k] * c.stride[k] + tap[k] * c.dilation[k]) as i64 - c.pad[k].0;
                        let d = c.input_dilation[k] as i64;
                        inside &= p >= 0 && p % d == 0 && p / d < x.shape()[2 + k] as i64;
                        xi.push((p / d).max(0) as usize);
                    }
                    if inside {
                        let wi = [&[o[1], ci][..], &tap].concat();
                        s += x.get(&xi) * w.get(&wi);
                    }
                }
            }
            s
        })
        .collect()
}

#[test]
fn conv() {
    let mut g = Rng(2);
    let cases: Vec<(Vec<usize>, Vec<usize>, Conv)> = vec![
        (
            vec![2, 4, 9],
            vec![6, 2, 3],
            Conv {
                stride: [2].as_slice().into(),
                pad: [(1, 2)].as_slice().into(),
                dilation: [2].as_slice().into(),
                input_dilation: [1].as_slice().into(),
                groups: 2,
            },
        ),
        (
            vec![1, 3, 7, 6],
            vec![4, 3, 3, 2],
            Conv { pad: [(1, 1), (0, 1)].as_slice().into(), ..Conv::new(2) },
        ),
        (
            vec![1, 2, 4, 5],
            vec![3, 2, 3, 3],
            Conv {
                input_dilation: [2, 3].as_slice().into(),
                pad: [(2, 2), (1, 0)].as_slice().into(),
                ..Conv::new(2)
            },
        ),
        (
            vec![1, 2, 6, 6],
            vec![2, 1, 2, 2],
            Conv { pad: [(-1, 0), (-1, -2)].as_slice().into(), groups: 2, ..Conv::new(2) },
        ),
        (
            vec![1, 2, 4, 3, 5],
            vec![3, 2, 2, 2, 3],
            Conv {
                stride: [1, 2, 1].as_slice().into(),
                pad: [(0, 1), (1, 1), (1, 1)].as_slice().into(),
                ..Conv::new(3)
            },
        ),
    ];
    for (n, (xs, ws, c)) in cases.into_iter().enumerate() {
        for d in FLOATS {
            let x = Tensor::random(d, &xs, n, &mut g);
            let w = Tensor::random(d, &ws, n + 1, &mut g);
            let op = Op::Conv(c.clone());
            let t = op
                .infer(&[&TensorType::new(d, xs.as_slice()), &TensorType::new(d, ws.as_slice())], None)
                .unwrap();
            let shape: Vec<usize> = t.shape.iter().map(|d| d.known().unwrap()).collect();
            let (got, _) = execute(&op, &[&x, &w], d, &shape, false, &caps());
            close("conv", &got, &conv_reference(&c, &x, &w, &shape), d, 8.0);
        }
    }
}

fn pool(kind: PoolKind) -> Pool {
    Pool {
        kind,
        kernel: [3, 2].as_slice().into(),
        stride: [2, 1].as_slice().into(),
        pad: [(1, 1), (0, 1)].as_slice().into(),
        dilation: [1, 2].as_slice().into(),
    }
}

/// Elements of the window at `y` that are inside the input.
fn window(p: &Pool, x: &[usize], y: &[usize]) -> Vec<Vec<usize>> {
    indices(&p.kernel)
        .iter()
        .filter_map(|t| {
            let mut i = vec![y[0], y[1]];
            for k in 0..t.len() {
                let q = (y[2 + k] * p.stride[k] + t[k] * p.dilation[k]) as i64 - p.pad[k].0 as i64;
                if q < 0 || q >= x[2 + k] as i64 {
                    return None;
                }
                i.push(q as usize);
            }
            Some(i)
        })
        .collect()
}

#[test]
fn pools_and_their_gradients() {
    let mut g = Rng(3);
    let kinds = [
        PoolKind::Max,
        PoolKind::Avg { count_include_pad: true },
        PoolKind::Avg { count_include_pad: false },
    ];
    for kind in kinds {
        for (n, d) in FLOATS.into_iter().chain([DType::I32, DType::U8]).enumerate() {
            if !d.is_float() && kind != PoolKind::Max {
                continue;
            }
            let p = pool(kind);
            let xs = [2, 3, 7, 6];
            // Few values, so that maxima tie.
            let x = Tensor::new(d, &xs, n, |_| g.below(4) as f64 + 1.0);
            let op = Op::Pool(p.clone());
            let t = op.infer(&[&TensorType::new(d, xs.as_slice())], None).unwrap();
            let shape: Vec<usize> = t.shape.iter().map(|d| d.known().unwrap()).collect();
            let count = |w: usize| match kind {
                PoolKind::Avg { count_include_pad: true } => p.kernel.iter().product::<usize>() as f64,
                _ => w as f64,
            };
            let want: Vec<f64> = indices(&shape)
                .iter()
                .map(|y| {
                    let w = window(&p, &xs, y);
                    let v = w.iter().map(|i| x.get(i));
                    match kind {
                        PoolKind::Max => v.fold(f64::NEG_INFINITY, f64::max),
                        _ => v.sum::<f64>() / count(w.len()),
                    }
                })
                .collect();
            let (got, _) = execute(&op, &[&x], d, &shape, false, &caps());
            close("pool", &got, &want, d, 4.0);
            if !d.is_float() {
                continue;
            }
            let y = Tensor::new(d, &shape, n + 1, |i| got[i]);
            let dy = Tensor::random(d, &shape, n + 2, &mut g);
            let mut dx = vec![0.0; x.values.len()];
            for o in indices(&shape) {
                let w = window(&p, &xs, &o);
                match kind {
                    PoolKind::Max => {
                        let top = w.iter().find(|i| x.get(i) == y.get(&o)).unwrap();
                        dx[linear(&xs, top)] += dy.get(&o);
                    }
                    _ => w.iter().for_each(|i| dx[linear(&xs, i)] += dy.get(&o) / count(w.len())),
                }
            }
            let (got, _) = execute(&Op::PoolGrad(p.clone()), &[&x, &y, &dy], d, &xs, false, &caps());
            close("pool gradient", &got, &dx, d, 8.0);
        }
    }
}

/// The composite op that `f` adds to a graph with inputs of the given types.
fn composite(x: &[&Tensor], f: impl FnOnce(&mut Graph, &[halcyon_ir::NodeId]) -> halcyon_ir::NodeId) -> Op {
    let mut g = Graph::new();
    let ids: Vec<_> = x.iter().map(|t| g.input("x", TensorType::new(t.operand.dtype, t.shape()))).collect();
    let n = f(&mut g, &ids);
    g.node(n).op.clone()
}

#[test]
fn softmax_and_norms() {
    let mut g = Rng(4);
    for (n, d) in FLOATS.into_iter().enumerate() {
        for shape in [vec![3, 5], vec![2, 3, 200], vec![4, 1]] {
            for axis in 0..shape.len() {
                let x = Tensor::random(d, &shape, n, &mut g);
                let line = |i: &[usize]| -> Vec<f64> {
                    (0..shape[axis])
                        .map(|s| {
                            let mut j = i.to_vec();
                            j[axis] = s;
                            x.get(&j).exp()
                        })
                        .collect()
                };
                let soft: Vec<f64> =
                    indices(&shape).iter().map(|i| x.get(i).exp() / line(i).iter().sum::<f64>()).collect();
                let op = composite(&[&x], |g, i| g.softmax(i[0], axis).unwrap());
                close("softmax", &execute(&op, &[&x], d, &shape, false, &caps()).0, &soft, d, 4.0);
                let op = composite(&[&x], |g, i| g.log_softmax(i[0], axis).unwrap());
                let log: Vec<f64> = soft.iter().map(|v| v.ln()).collect();
                close("log_softmax", &execute(&op, &[&x], d, &shape, false, &caps()).0, &log, d, 4.0);
            }
            for rms in [false, true] {
                let axis = if rms { shape.len() - 1 } else { 1 };
                let x = Tensor::random(d, &shape, n, &mut g);
                let tail = &shape[axis..];
                let (k, b) = (Tensor::random(d, tail, 0, &mut g), Tensor::random(d, tail, 2, &mut g));
                let len: usize = tail.iter().product();
                let want: Vec<f64> = (0..x.values.len())
                    .map(|i| {
                        let row = &x.values[i / len * len..][..len];
                        let mean = if rms { 0.0 } else { row.iter().sum::<f64>() / len as f64 };
                        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / len as f64;
                        let y = (x.values[i] - mean) / (var + 1e-5).sqrt() * k.values[i % len];
                        if rms { y } else { y + b.values[i % len] }
                    })
                    .collect();
                let got = if rms {
                    let op = composite(&[&x, &k], |g, i| g.rms_norm(i[0], i[1], 1e-5).unwrap());
                    execute(&op, &[&x, &k], d, &shape, false, &caps()).0
                } else {
                    let op = composite(&[&x, &k, &b], |g, i| {
                        g.layer_norm(i[0], i[1], Some(i[2]), axis, 1e-5).unwrap()
                    });
                    execute(&op, &[&x, &k, &b], d, &shape, false, &caps()).0
                };
                close("norm", &got, &want, d, 30.0);
            }
        }
    }
}

#[test]
fn attention() {
    let mut g = Rng(5);
    for (n, d) in FLOATS.into_iter().enumerate() {
        for (b, h, hk, sq, sk, w) in [(1, 1, 1, 1, 1, 4), (2, 4, 2, 5, 70, 9), (1, 2, 1, 3, 130, 70)] {
            for (causal, masked) in [(false, false), (true, false), (false, true), (true, true)] {
                let q = Tensor::random(d, &[b, h, sq, w], n, &mut g);
                let k = Tensor::random(d, &[b, hk, sk, w], n + 1, &mut g);
                let v = Tensor::random(d, &[b, hk, sk, w], n + 2, &mut g);
                let m = Tensor::new(d, &[b, 1, 1, sk], 0, |i| {
                    if i % 5 == 1 && sk > 1 { f64::NEG_INFINITY } else { 0.25 }
                });
                let mut x = vec![&q, &k, &v];
                if masked {
                    x.push(&m);
                }
                let op = composite(&x, |g, i| {
                    g.attention(i[0], i[1], i[2], i.get(3).copied(), causal, 0.4).unwrap()
                });
                let want: Vec<f64> = indices(&[b, h, sq, w])
                    .iter()
                    .map(|o| {
                        let head = o[1] / (h / hk);
                        let e: Vec<f64> = (0..sk)
                            .map(|j| {
                                if causal && j as i64 > o[2] as i64 + sk as i64 - sq as i64 {
                                    return 0.0;
                                }
                                let s: f64 = (0..w)
                                    .map(|c| q.get(&[o[0], o[1], o[2], c]) * k.get(&[o[0], head, j, c]))
                                    .sum();
                                (s * 0.4 + if masked { m.get(&[o[0], 0, 0, j]) } else { 0.0 }).exp()
                            })
                            .collect();
                        let t: f64 = e.iter().sum();
                        (0..sk).map(|j| e[j] / t * v.get(&[o[0], head, j, o[3]])).sum()
                    })
                    .collect();
                let got = execute(&op, &x, d, &[b, h, sq, w], false, &caps()).0;
                close("attention", &got, &want, d, 6.0);
            }
        }
    }
}

#[test]
fn gathers() {
    let mut g = Rng(6);
    for (n, d) in [DType::F32, DType::F16, DType::I64, DType::Bool, DType::U8].into_iter().enumerate() {
        for (t, it) in [DType::I64, DType::I32, DType::U8].into_iter().enumerate() {
            let shape = [3, 5, 4];
            let x = Tensor::random(d, &shape, n, &mut g);
            for axis in 0..3 {
                let len = shape[axis] as i64;
                let pick = |g: &mut Rng| {
                    (g.below(len as usize) as i64 - if it == DType::U8 { 0 } else { g.below(2) as i64 * len })
                        as f64
                };
                let i = Tensor::new(it, &[2, 3], t, |_| pick(&mut g));
                let wrap = |v: f64| (if v < 0.0 { v as i64 + len } else { v as i64 }) as usize;
                let out = [&shape[..axis], &[2, 3], &shape[axis + 1..]].concat();
                let want: Vec<f64> = indices(&out)
                    .iter()
                    .map(|o| {
                        let at = wrap(i.get(&o[axis..axis + 2]));
                        x.get(&[&o[..axis], &[at], &o[axis + 2..]].concat())
                    })
                    .collect();
                let (got, fault) = execute(&Op::Gather { axis }, &[&x, &i], d, &out, false, &caps());
                close("gather", &got, &want, d, 0.0);
                assert!(!fault);
                let mut is = shape;
                is[axis] = 2;
                let i = Tensor::new(it, &is, t, |_| pick(&mut g));
                let want: Vec<f64> = indices(&is)
                    .iter()
                    .map(|o| {
                        let mut at = o.clone();
                        at[axis] = wrap(i.get(o));
                        x.get(&at)
                    })
                    .collect();
                let (got, fault) = execute(&Op::GatherElements { axis }, &[&x, &i], d, &is, false, &caps());
                close("gather_elements", &got, &want, d, 0.0);
                assert!(!fault);
            }
        }
    }
    // Out of range: clamped and reported, also where 32 bits would make it valid.
    let x = Tensor::new(DType::F32, &[4], 0, |i| i as f64);
    for (bad, to) in [(4.0, 3.0), (-5.0, 0.0), ((1u64 << 32) as f64, 3.0)] {
        let i = Tensor::new(DType::I64, &[1], 0, |_| bad);
        let (got, fault) = execute(&Op::Gather { axis: 0 }, &[&x, &i], DType::F32, &[1], false, &caps());
        assert!(got == [to] && fault, "{bad}: {got:?} {fault}");
    }
}

#[test]
fn scatters_and_updates() {
    let mut g = Rng(7);
    let kinds = [ScatterKind::Set, ScatterKind::Add, ScatterKind::Mul, ScatterKind::Max, ScatterKind::Min];
    let combine = |k: ScatterKind, a: f64, u: f64| match k {
        ScatterKind::Set => u,
        ScatterKind::Add => a + u,
        ScatterKind::Mul => a * u,
        ScatterKind::Max => a.max(u),
        ScatterKind::Min => a.min(u),
    };
    for (n, d) in [DType::F32, DType::F64, DType::I32, DType::I16].into_iter().enumerate() {
        for kind in kinds {
            for axis in 0..2 {
                let shape = [4, 3];
                let x = Tensor::random(d, &shape, n, &mut g);
                // Smaller than the base outside the axis, with repeated and negative indices.
                let mut is = [2, 2];
                is[axis] = 5;
                let i =
                    Tensor::new(DType::I64, &is, n, |_| g.below(shape[axis] * 2) as f64 - shape[axis] as f64);
                let u = Tensor::random(d, &is, n + 1, &mut g);
                let mut want = x.values.clone();
                for o in indices(&is) {
                    let mut at = o.clone();
                    let v = i.get(&o) as i64;
                    at[axis] = if v < 0 { v + shape[axis] as i64 } else { v } as usize;
                    let w = &mut want[linear(&shape, &at)];
                    *w = Scalar::F(combine(kind, *w, u.get(&o))).cast(d.compute()).as_f64();
                }
                let op = Op::ScatterElements { axis, kind };
                let (got, fault) = execute(&op, &[&x, &i, &u], d, &shape, false, &caps());
                close("scatter_elements", &got, &want, d, 2.0);
                assert!(!fault);
                let i = Tensor::new(DType::I32, &[2, 2], 0, |_| g.below(shape[axis]) as f64);
                let us = [&shape[..axis], &[2, 2], &shape[axis + 1..]].concat();
                let u = Tensor::random(d, &us, n + 2, &mut g);
                let mut want = x.values.clone();
                for o in indices(&us) {
                    let at = [&o[..axis], &[i.get(&o[axis..axis + 2]) as usize], &o[axis + 2..]].concat();
                    let w = &mut want[linear(&shape, &at)];
                    *w = Scalar::F(combine(kind, *w, u.get(&o))).cast(d.compute()).as_f64();
                }
                let op = Op::ScatterRows { axis, kind };
                let (got, _) = execute(&op, &[&x, &i, &u], d, &shape, false, &caps());
                close("scatter_rows", &got, &want, d, 2.0);
            }
        }
        for (at, clamped, in_place) in [(1.0, 1, false), (2.0, 2, true), (9.0, 3, true), (-1.0, 0, false)] {
            let base = Tensor::random(d, &[2, 5, 3], 0, &mut g);
            let u = Tensor::random(d, &[2, 2, 3], n, &mut g);
            let p = Tensor::new(DType::I64, &[], 0, |_| at);
            let mut want = base.values.clone();
            for o in indices(u.shape()) {
                want[linear(base.shape(), &[o[0], o[1] + clamped, o[2]])] = u.get(&o);
            }
            let (got, fault) =
                execute(&Op::UpdateSlice { axis: 1 }, &[&base, &u, &p], d, &[2, 5, 3], in_place, &caps());
            close("update_slice", &got, &want, d, 0.0);
            assert_eq!(fault, at != clamped as f64);
        }
    }
}

#[test]
fn scans_sorts_extremes_and_concatenation() {
    let mut g = Rng(8);
    for (n, d) in
        [DType::F32, DType::F16, DType::I32, DType::U8, DType::I64, DType::F64].into_iter().enumerate()
    {
        let shape = [3, 7, 2];
        for axis in 0..3 {
            let len = shape[axis];
            // Repeats, and NaN for floats.
            let x = Tensor::new(d, &shape, n, |i| {
                if d.is_float() && i % 11 == 3 { f64::NAN } else { g.below(5) as f64 }
            });
            let line = |o: &[usize]| -> Vec<f64> {
                (0..len)
                    .map(|s| {
                        let mut i = o.to_vec();
                        i[axis] = s;
                        x.get(&i)
                    })
                    .collect()
            };
            for descending in [false, true] {
                let mut want = vec![0.0; x.values.len()];
                for o in indices(&shape).iter().filter(|o| o[axis] == 0) {
                    let l = line(o);
                    let mut order: Vec<usize> = (0..len).collect();
                    let key = |v: f64| if v.is_nan() { f64::INFINITY } else { v };
                    order.sort_by(|&a, &b| {
                        let c = key(l[a]).total_cmp(&key(l[b]));
                        if descending { c.reverse() } else { c }
                    });
                    for (s, i) in order.into_iter().enumerate() {
                        let mut at = o.clone();
                        at[axis] = s;
                        want[linear(&shape, &at)] = i as f64;
                    }
                }
                let (got, _) =
                    execute(&Op::ArgSort { axis, descending }, &[&x], DType::I64, &shape, false, &caps());
                close("argsort", &got, &want, DType::I64, 0.0);
            }
            for (max, last, keep) in
                [(true, false, false), (false, false, true), (true, true, true), (false, true, false)]
            {
                let mut out = shape.to_vec();
                if keep {
                    out[axis] = 1
                } else {
                    out.remove(axis);
                }
                let want: Vec<f64> = indices(&shape)
                    .iter()
                    .filter(|o| o[axis] == 0)
                    .map(|o| {
                        let l = line(o);
                        let mut best = 0;
                        for s in 1..len {
                            let (v, t) = (l[s], l[best]);
                            let better = (v.is_nan() && !t.is_nan()) || if max { v > t } else { v < t };
                            let tie = v == t || (v.is_nan() && t.is_nan());
                            if better || (last && tie) {
                                best = s;
                            }
                        }
                        best as f64
                    })
                    .collect();
                let op = Op::ArgReduce { max, axis, keep, last };
                close(
                    "argreduce",
                    &execute(&op, &[&x], DType::I64, &out, false, &caps()).0,
                    &want,
                    DType::I64,
                    0.0,
                );
            }
            let x = Tensor::random(d, &shape, n, &mut g);
            for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
                for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
                    let mut want = vec![0.0; x.values.len()];
                    for o in indices(&shape).iter().filter(|o| o[axis] == 0) {
                        let mut acc = kind.identity(d);
                        for s in 0..len {
                            let mut at = o.clone();
                            at[axis] = if reverse { len - 1 - s } else { s };
                            let i = linear(&shape, &at);
                            let c = if d.is_float() { DType::F64 } else { d };
                            let v = Scalar::F(x.values[i]).cast(c);
                            let after = kind.op(d).eval(c, &[acc.cast(c), v]);
                            want[i] = if exclusive { acc } else { after }.as_f64();
                            acc = after;
                        }
                    }
                    let op = Op::Scan { kind, axis, exclusive, reverse };
                    close("scan", &execute(&op, &[&x], d, &shape, false, &caps()).0, &want, d, 8.0);
                }
            }
            let (mut a, mut b) = (shape, shape);
            (a[axis], b[axis]) = (2, 0);
            let (a, b, c) = (
                Tensor::random(d, &a, n, &mut g),
                Tensor::random(d, &b, 0, &mut g),
                Tensor::random(d, &shape, n + 1, &mut g),
            );
            let mut out = shape;
            out[axis] += 2;
            let want: Vec<f64> = indices(&out)
                .iter()
                .map(|o| {
                    let mut i = o.clone();
                    if o[axis] < 2 {
                        a.get(&i)
                    } else {
                        i[axis] -= 2;
                        c.get(&i)
                    }
                })
                .collect();
            close(
                "concat",
                &execute(&Op::Concat { axis }, &[&a, &b, &c], d, &out, false, &caps()).0,
                &want,
                d,
                0.0,
            );
        }
    }
}

#[test]
fn a_masked_operand_is_declined_with_its_number() {
    let m = Operand { dtype: DType::F32, view: View::dense(&[2, 2]).pad(&[1, 0], &[0, 0]) };
    let o = |a, b| Operand { dtype: DType::F32, view: View::dense(&[a, b]) };
    let e = lower_op(&Op::Matmul, &[o(4, 3), m], &[o(4, 2)], false, &caps()).unwrap_err();
    assert_eq!(e.dense, [1]);
}
