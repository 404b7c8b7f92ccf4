//! Level O2 compared with O0: products and convolutions with constant weights, and their epilogues.

use halcyon::ir::graph::NodeId;
use halcyon::ir::ops::{Conv, ReduceKind};
use halcyon::ir::passes::{EPILOGUES, PACKED, RECOGNITION};
use halcyon::ir::{Graph, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, Scalar, Session};
use halcyon_test::Rng;

fn cpu(level: Level, without: &[&str]) -> Backend {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(level).num_threads(2);
    without.iter().fold(b, |b, w| b.without(w)).build().unwrap()
}

fn data(rng: &mut Rng, dims: &[usize]) -> ConstData {
    let n: usize = dims.iter().product();
    ConstData::from_slice(dims, &rng.f32s(n)).unwrap()
}

/// A graph and its inputs; building the graph may add inputs.
struct Case {
    g: Graph,
    inputs: Vec<ConstData>,
}

impl Case {
    fn new() -> Case {
        Case { g: Graph::new(), inputs: vec![] }
    }

    fn input(&mut self, rng: &mut Rng, dims: &[usize]) -> NodeId {
        self.inputs.push(data(rng, dims));
        let name = format!("x{}", self.inputs.len());
        self.g.input(&name, TensorType::new(DType::F32, dims))
    }

    fn weight(&mut self, rng: &mut Rng, dims: &[usize]) -> NodeId {
        let w = data(rng, dims);
        self.g.constant(w)
    }

    /// Adds random ops after a product with result `y`. `channel` is the axis of a bias.
    fn follow(&mut self, rng: &mut Rng, mut y: NodeId, channel: usize) -> NodeId {
        let dims: Vec<usize> = self.g.shape(y).known().unwrap().to_vec();
        for _ in 0..rng.below(4) {
            y = match rng.below(7) {
                0 | 1 => {
                    let mut b = vec![1; dims.len()];
                    b[channel] = dims[channel];
                    let b = if rng.below(3) == 0 { self.input(rng, &b) } else { self.weight(rng, &b) };
                    self.g.add(y, b).unwrap()
                }
                2 => self.g.relu(y).unwrap(),
                3 => {
                    let r = self.input(rng, &dims);
                    self.g.add(r, y).unwrap()
                }
                4 => self.g.scalar(ScalarOp::Gelu, &[y]).unwrap(),
                5 => {
                    let (lo, hi) =
                        (self.g.full(DType::F32, [1usize], -0.5), self.g.full(DType::F32, [1usize], 6.0));
                    let z = self.g.scalar(ScalarOp::Max, &[y, lo]).unwrap();
                    self.g.scalar(ScalarOp::Min, &[z, hi]).unwrap()
                }
                _ => {
                    // Leaky ReLU.
                    let (zero, slope) =
                        (self.g.full(DType::F32, [1usize], 0.0), self.g.full(DType::F32, [1usize], 0.1));
                    let (c, z) =
                        (self.g.scalar(ScalarOp::Gt, &[y, zero]).unwrap(), self.g.mul(y, slope).unwrap());
                    self.g.select(c, y, z).unwrap()
                }
            };
        }
        y
    }

    fn product(rng: &mut Rng) -> Case {
        let mut c = Case::new();
        let (m, n, k) = (1 + rng.below(70), 1 + rng.below(120), 1 + rng.below(700));
        let head: Vec<usize> = (0..rng.below(3)).map(|_| 1 + rng.below(3)).collect();
        let x = c.input(rng, &[&head[..], &[m, k]].concat());
        let w = match rng.below(3) {
            0 => c.input(rng, &[k, n]),
            1 => c.weight(rng, &[k, n]),
            _ => {
                let t = c.weight(rng, &[n, k]);
                c.g.permute(t, &[1, 0]).unwrap()
            }
        };
        let y = c.g.matmul(x, w).unwrap();
        let last = c.g.shape(y).rank() - 1;
        let y = c.follow(rng, y, last);
        // The sum of two products, as in a block with a shortcut.
        let y = if rng.below(3) == 0 {
            let w = c.weight(rng, &[k, n]);
            let z = c.g.matmul(x, w).unwrap();
            c.g.add(y, z).unwrap()
        } else {
            y
        };
        c.g.output("y", y);
        c
    }

    fn convolution(rng: &mut Rng) -> Case {
        let mut c = Case::new();
        let dims = 1 + rng.below(3);
        let groups = 1 + rng.below(3);
        let (ci, co) = (groups * (1 + rng.below(20)), groups * (1 + rng.below(40)));
        let (ci, co, groups) = if rng.below(4) == 0 { (ci, ci, ci) } else { (ci, co, groups) };
        let space: Vec<usize> = (0..dims).map(|_| 5 + rng.below(16 / dims)).collect();
        let kernel: Vec<usize> = (0..dims).map(|_| 1 + rng.below(3)).collect();
        let mut attrs = Conv::new(dims);
        attrs.groups = groups;
        attrs.pad.iter_mut().for_each(|p| *p = (rng.below(2) as i64, rng.below(2) as i64));
        attrs.stride.iter_mut().for_each(|s| *s = 1 + rng.below(2));
        let batch = 1 + rng.below(3);
        let x = c.input(rng, &[&[batch, ci][..], &space].concat());
        let w = c.weight(rng, &[&[co, ci / groups][..], &kernel].concat());
        let y = c.g.conv(x, w, attrs).unwrap();
        let y = c.follow(rng, y, 1);
        c.g.output("y", y);
        c
    }
}

#[test]
fn o2_follows_o0() {
    let mut rng = Rng::fresh("o2");
    let (each, o2) = (cpu(Level::O0, &[]), cpu(Level::O2, &[]));
    let (mut packed, mut epilogues) = (0, 0);
    for round in 0..150 {
        let c = if round % 2 == 0 { Case::product(&mut rng) } else { Case::convolution(&mut rng) };
        let want = Session::new(&each, c.g.clone()).run(&c.inputs).unwrap();
        let session = Session::new(&o2, c.g.clone());
        let got = session.run(&c.inputs).unwrap();
        let plan = session.prepare(&c.inputs).unwrap();
        let d = halcyon::session::difference(&got, &want);
        assert!(d < 1e-5, "round {round}: {d}\n{}\n{}", c.g, plan.plan());
        let count = |name: &str| {
            plan.plan().receipts.iter().filter(|r| r.transformation == name).map(|r| r.count).sum::<usize>()
        };
        packed += count(PACKED);
        epilogues += count(EPILOGUES);
        // A second run with the same plan gives the same result.
        assert_eq!(session.run(&c.inputs).unwrap(), got);
    }
    assert!(packed > 50 && epilogues > 50, "{packed} packed, {epilogues} epilogues");
}

/// A transformer layer as exporters write it: norm, attention over heads with a mask, a product with GELU.
fn layer(rng: &mut Rng, seq: usize) -> Case {
    let mut c = Case::new();
    // A norm over one element would be degenerate.
    let (batch, heads, size) = (1 + rng.below(2), 1 + rng.below(3), 2 + rng.below(39));
    let width = heads * size;
    let x = c.input(rng, &[batch, seq, width]);
    let (scale, bias) = (c.weight(rng, &[width]), c.weight(rng, &[width]));
    let weights: Vec<NodeId> = (0..3).map(|_| c.weight(rng, &[width, width])).collect();
    let rows = [1, seq][rng.below(2)];
    let mask = c.input(rng, &[batch, 1, rows, seq]);
    let up = c.weight(rng, &[width, 2 * width]);
    let g = &mut c.g;
    let m = g.mean(x, &[2], true).unwrap();
    let d = g.sub(x, m).unwrap();
    let two = g.lit(d, 2.0);
    let sq = g.scalar(ScalarOp::Pow, &[d, two]).unwrap();
    let v = g.mean(sq, &[2], true).unwrap();
    let eps = g.lit(v, 1e-5);
    let v = g.add(v, eps).unwrap();
    let root = g.scalar(ScalarOp::Sqrt, &[v]).unwrap();
    let n = g.div(d, root).unwrap();
    let n = g.mul(n, scale).unwrap();
    let n = g.add(n, bias).unwrap();
    let split: Vec<NodeId> = weights
        .iter()
        .map(|w| {
            let y = g.matmul(n, *w).unwrap();
            let y = g.reshape(y, [batch, seq, heads, size]).unwrap();
            g.permute(y, &[0, 2, 1, 3]).unwrap()
        })
        .collect();
    let kt = g.permute(split[1], &[0, 1, 3, 2]).unwrap();
    let s = g.matmul(split[0], kt).unwrap();
    let r = g.lit(s, (size as f64).sqrt());
    let s = g.div(s, r).unwrap();
    // Some keys are masked by a large negative number or by negative infinity.
    let (hide, some) = (g.lit(mask, [-1e30, f64::NEG_INFINITY][rng.below(2)]), g.lit(mask, 0.8));
    let hidden = g.scalar(ScalarOp::Gt, &[mask, some]).unwrap();
    let mask = g.select(hidden, hide, mask).unwrap();
    let s = g.add(s, mask).unwrap();
    let p = g.softmax(s, 3).unwrap();
    let y = g.matmul(p, split[2]).unwrap();
    let y = g.permute(y, &[0, 2, 1, 3]).unwrap();
    let y = g.reshape(y, [batch, seq, width]).unwrap();
    let y = g.add(y, x).unwrap();
    let y = g.matmul(y, up).unwrap();
    let u = g.lit(y, std::f64::consts::SQRT_2);
    let u = g.div(y, u).unwrap();
    let e = g.scalar(ScalarOp::Erf, &[u]).unwrap();
    let (one, half) = (g.lit(e, 1.0), g.lit(e, 0.5));
    let e = g.add(e, one).unwrap();
    let y = g.mul(y, e).unwrap();
    let y = g.mul(y, half).unwrap();
    g.output("y", y);
    c
}

#[test]
fn written_out_composites_follow_o0() {
    let mut rng = Rng::fresh("composites");
    let (each, o2) = (cpu(Level::O0, &[]), cpu(Level::O2, &[]));
    for round in 0..20 {
        let seq = [1, 7, 13, 33, 150][round % 5];
        let c = layer(&mut rng, seq);
        let want = Session::new(&each, c.g.clone()).run(&c.inputs).unwrap();
        let session = Session::new(&o2, c.g.clone());
        let got = session.run(&c.inputs).unwrap();
        let plan = session.prepare(&c.inputs).unwrap();
        // If all keys of a query are masked by infinity, both results are NaN.
        let values = |v: &[ConstData]| v[0].to_vec::<f32>();
        let top = values(&want).iter().filter(|v| v.is_finite()).fold(0f32, |m, v| m.max(v.abs()));
        for (a, b) in values(&got).iter().zip(values(&want)) {
            let close = (a - b).abs() <= 2e-5 * top.max(1.0) || a.is_nan() && b.is_nan();
            assert!(close, "round {round}: {a} {b}\n{}\n{}", c.g, plan.plan());
        }
        let receipt = plan.plan().receipts.iter().find(|r| r.transformation == RECOGNITION).map(|r| r.count);
        // Three composites: norm, attention and GELU. The softmax over one key is trivial, but the attention
        // is still recognised.
        assert_eq!(receipt, Some(3), "round {round}\n{}\n{}", c.g, plan.plan());
        assert_eq!(session.run(&c.inputs).unwrap().len(), 1);
        let one = cpu_threads(1);
        assert_eq!(
            bits(&Session::new(&one, c.g.clone()).run(&c.inputs).unwrap()),
            bits(&got),
            "round {round}"
        );
    }
    let c = layer(&mut rng, 33);
    let plain = Session::new(&cpu(Level::O2, &[RECOGNITION]), c.g.clone()).prepare(&c.inputs).unwrap();
    assert!(plain.plan().receipts.iter().all(|r| r.transformation != RECOGNITION), "{}", plain.plan());
}

fn cpu_threads(n: usize) -> Backend {
    Backend::builder().backend_type(BackendType::Cpu).level(Level::O2).num_threads(n).build().unwrap()
}

fn bits(v: &[ConstData]) -> Vec<u8> {
    v.iter().flat_map(|c| c.bytes().to_vec()).collect()
}

#[test]
fn a_product_that_something_else_reads_keeps_its_step() {
    let mut rng = Rng::fresh("readers");
    let mut c = Case::new();
    let x = c.input(&mut rng, &[40, 60]);
    let w = c.weight(&mut rng, &[60, 80]);
    let y = c.g.matmul(x, w).unwrap();
    let a = c.g.relu(y).unwrap();
    let s = c.g.reduce(ReduceKind::Sum, y, &[1], false).unwrap();
    c.g.output("a", a);
    c.g.output("s", s);
    let run = |b: &Backend| Session::new(b, c.g.clone()).run(&c.inputs).unwrap();
    let session = Session::new(&cpu(Level::O2, &[]), c.g.clone());
    let plan = session.prepare(&c.inputs).unwrap();
    assert!(plan.plan().receipts.iter().all(|r| r.transformation != EPILOGUES), "{}", plan.plan());
    let d = halcyon::session::difference(&session.run(&c.inputs).unwrap(), &run(&cpu(Level::O0, &[])));
    assert!(d < 1e-5, "{d}");
}

#[test]
fn each_can_be_switched_off_and_packed_weights_are_shared() {
    let mut rng = Rng::fresh("switches");
    let mut c = Case::new();
    let x = c.input(&mut rng, &[40, 60]);
    let w = c.weight(&mut rng, &[60, 80]);
    let y = c.g.matmul(x, w).unwrap();
    let y = c.g.relu(y).unwrap();
    c.g.output("y", y);
    let names = |b: &Backend| {
        let p = Session::new(b, c.g.clone()).prepare(&c.inputs).unwrap();
        p.plan().receipts.iter().map(|r| r.transformation.clone()).collect::<Vec<_>>()
    };
    let has = |v: &[String], n: &str| v.iter().any(|t| t == n);
    let all = names(&cpu(Level::O2, &[]));
    assert!(has(&all, PACKED) && has(&all, EPILOGUES), "{all:?}");
    let less = names(&cpu(Level::O2, &[PACKED]));
    assert!(!has(&less, PACKED) && has(&less, EPILOGUES), "{less:?}");
    let less = names(&cpu(Level::O2, &[EPILOGUES]));
    assert!(has(&less, PACKED) && !has(&less, EPILOGUES), "{less:?}");
    let o1 = names(&cpu(Level::O1, &[]));
    assert!(!has(&o1, PACKED) && !has(&o1, EPILOGUES), "{o1:?}");

    // Two plans with the same weight share one packed constant.
    let b = cpu(Level::O2, &[]);
    let s = Session::new(&b, c.g.clone());
    let _kept = s.prepare(&c.inputs).unwrap();
    let before = b.memory().allocated;
    let mut twice = c.g.clone();
    let z = twice.scalar(ScalarOp::Neg, &[y]).unwrap();
    twice.output("z", z);
    let _other = Session::new(&b, twice).prepare(&c.inputs).unwrap();
    assert!(b.memory().allocated < before + 60 * 80 * 4, "{} {before}", b.memory().allocated);
}

/// `(a - z)(b - w)`, at random without `z` or `w`. The operands are 8-bit integers that are converted to f32,
/// as in quantised models. O0 computes the product in f32, and O2 multiplies 8-bit integers.
#[test]
fn integers_are_multiplied_as_bytes_and_exactly() {
    let mut rng = Rng::fresh("integers");
    for round in 0..24 {
        let mut c = Case::new();
        let types = [rng.below(2), rng.below(2)].map(|i| [DType::I8, DType::U8][i]);
        // K is small enough that sums in f32 are exact.
        let (m, k, n) = (1 + rng.below(40), 1 + rng.below(200), 1 + rng.below(40));
        let batch = [vec![], vec![3]][rng.below(2)].clone();
        let turned = rng.below(2) == 1;
        let dims = [[&batch[..], &[m, k]].concat(), if turned { vec![n, k] } else { vec![k, n] }];
        let mut of = |c: &mut Case, i: usize| {
            let low = if types[i] == DType::U8 { 100.0 } else { 0.0 };
            let v = rng.f32s(dims[i].iter().product());
            let v = v.iter().map(|v| Scalar::F(f64::from(*v) * 30.0 + low).cast(types[i]));
            let data = ConstData::from_scalars(types[i], &dims[i], v).unwrap();
            let x = if i == 1 && rng.below(2) == 0 {
                c.g.constant(data)
            } else {
                c.inputs.push(data);
                c.g.input(&format!("x{i}"), TensorType::new(types[i], &*dims[i]))
            };
            let mut x = c.g.cast(x, DType::F32).unwrap();
            if rng.below(2) == 0 {
                let z = c.g.full(types[i], [1usize], 1 + rng.below(100) as i64);
                let z = c.g.cast(z, DType::F32).unwrap();
                x = c.g.sub(x, z).unwrap();
            }
            if i == 1 && turned { c.g.transpose(x, 0, 1).unwrap() } else { x }
        };
        let (a, b) = (of(&mut c, 0), of(&mut c, 1));
        let y = c.g.matmul(a, b).unwrap();
        let y = c.g.cast(y, DType::I32).unwrap();
        c.g.output("y", y);
        let run = |b: &Backend| Session::new(b, c.g.clone()).run(&c.inputs).unwrap();
        let session = Session::new(&cpu(Level::O2, &[]), c.g.clone());
        let got = session.run(&c.inputs).unwrap();
        assert_eq!(bits(&got), bits(&run(&cpu(Level::O0, &[]))), "round {round}: {types:?} {m} {k} {n}");
        let plan = session.prepare(&c.inputs).unwrap();
        let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
        assert!(names.iter().any(|n| n.starts_with("cpu.gemm_i8.")), "{names:?}");
        let without = Session::new(&cpu(Level::O2, &[RECOGNITION]), c.g.clone());
        let plan = without.prepare(&c.inputs).unwrap();
        assert!(plan.plan().steps.iter().all(|s| !s.work.kernel_name().starts_with("cpu.gemm_i8.")));
    }
}
