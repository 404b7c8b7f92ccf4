//! Convolutional networks at level O2, with images in blocked layout, compared with O0.

use halcyon::ir::graph::NodeId;
use halcyon::ir::ops::{Conv, Op, Pool, PoolKind, ReduceKind};
use halcyon::ir::passes::{AFFINE, BLOCKED, EPILOGUES};
use halcyon::ir::plan::Plan;
use halcyon::ir::{Graph, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, ConstData, Session};
use halcyon_test::Rng;

fn cpu(level: Level, without: &[&str]) -> Backend {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(level).num_threads(2);
    without.iter().fold(b, |b, w| b.without(w)).build().unwrap()
}

/// Level O2 with products in bf16.
fn mixed(without: &[&str]) -> Backend {
    let b =
        Backend::builder().backend_type(BackendType::Cpu).num_threads(2).amp(AmpPolicy::Bf16).force_amp(true);
    without.iter().fold(b, |b, w| b.without(w)).build().unwrap()
}

struct Net {
    g: Graph,
    rng: Rng,
    inputs: Vec<ConstData>,
}

impl Net {
    fn new(test: &str) -> Net {
        Net { g: Graph::new(), rng: Rng::fresh(test), inputs: vec![] }
    }

    fn data(&mut self, dims: &[usize]) -> ConstData {
        let n: usize = dims.iter().product();
        ConstData::from_slice(dims, &self.rng.f32s(n)).unwrap()
    }

    fn input(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.inputs.push(d);
        let name = format!("x{}", self.inputs.len());
        self.g.input(&name, TensorType::new(DType::F32, dims))
    }

    fn weight(&mut self, dims: &[usize], scale: f32) -> NodeId {
        let n: usize = dims.iter().product();
        let v: Vec<f32> = self.rng.f32s(n).iter().map(|v| v * scale).collect();
        self.g.constant(ConstData::from_slice(dims, &v).unwrap())
    }

    fn dims(&self, x: NodeId) -> Vec<usize> {
        self.g.shape(x).known().unwrap().to_vec()
    }

    /// A convolution with weights scaled to keep the magnitude of the values.
    fn conv(&mut self, x: NodeId, out: usize, kernel: usize, stride: usize, groups: usize) -> NodeId {
        let c = self.dims(x)[1];
        let sum = c / groups * kernel * kernel;
        let w = self.weight(&[out, c / groups, kernel, kernel], 1.7 / (sum as f32).sqrt());
        let mut a = Conv::new(2);
        a.groups = groups;
        a.stride.iter_mut().for_each(|s| *s = stride);
        a.pad.iter_mut().for_each(|p| *p = (kernel as i64 / 2, (kernel as i64 - 1) / 2));
        self.g.conv(x, w, a).unwrap()
    }

    /// `(x - mean) * scale + shift` along the channels, as importers express batch normalisation.
    fn normalise(&mut self, x: NodeId) -> NodeId {
        let c = self.dims(x)[1];
        let [m, s, b] = [0.3, 1.5, 0.5].map(|v| self.weight(&[1, c, 1, 1], v));
        let y = self.g.sub(x, m).unwrap();
        let y = self.g.mul(y, s).unwrap();
        self.g.add(y, b).unwrap()
    }

    fn act(&mut self, x: NodeId) -> NodeId {
        match self.rng.below(4) {
            0 => x,
            1 => self.g.relu(x).unwrap(),
            2 => {
                let six = self.g.full(DType::F32, [1usize], 6.0);
                let y = self.g.relu(x).unwrap();
                self.g.scalar(ScalarOp::Min, &[y, six]).unwrap()
            }
            // An activation that the register tiles do not support.
            _ => {
                let s = self.g.scalar(ScalarOp::Sigmoid, &[x]).unwrap();
                self.g.mul(x, s).unwrap()
            }
        }
    }

    fn pool(&mut self, x: NodeId, kind: PoolKind, kernel: usize) -> NodeId {
        let two = |n: usize| [n; 2].into_iter().collect();
        let pad = [(kernel / 2, kernel / 2); 2].into_iter().collect();
        let p = Pool { kind, kernel: two(kernel), stride: two(2), pad, dilation: two(1) };
        self.g.pool(x, p).unwrap()
    }

    /// A random layer, or block of layers.
    fn layer(&mut self, x: NodeId) -> NodeId {
        let c = self.dims(x)[1];
        let wide = [16, 24, 32, 48, 64][self.rng.below(5)];
        let conv = |n: &mut Net, x, out, kernel, stride, groups| {
            let y = n.conv(x, out, kernel, stride, groups);
            let y = if n.rng.below(2) == 0 { n.normalise(y) } else { y };
            n.act(y)
        };
        match self.rng.below(9) {
            0 => conv(self, x, wide, 1, 1, 1),
            1 => {
                let s = 1 + self.rng.below(2);
                conv(self, x, wide, 3, s, 1)
            }
            2 => conv(self, x, c, 3, 1, c),
            3 if c.is_multiple_of(32) => conv(self, x, c, 3, 1, 2),
            // A block with a shortcut. The shortcut may have a convolution too.
            4 | 5 => {
                let y = conv(self, x, c, 3, 1, 1);
                let y = self.conv(y, c, 1, 1, 1);
                let y = self.normalise(y);
                let z = match self.rng.below(2) {
                    0 => x,
                    _ => {
                        let z = self.conv(x, c, 1, 1, 1);
                        self.normalise(z)
                    }
                };
                let y = self.g.add(y, z).unwrap();
                self.act(y)
            }
            6 => {
                let (a, b) = (conv(self, x, wide, 1, 1, 1), conv(self, x, 16, 3, 1, 1));
                self.g.concat(&[a, b], 1).unwrap()
            }
            7 => {
                let kind = match self.rng.below(2) {
                    0 => PoolKind::Max,
                    _ => PoolKind::Avg { count_include_pad: self.rng.below(2) == 0 },
                };
                let k = 2 + self.rng.below(2);
                self.pool(x, kind, k)
            }
            // Squeeze and excite: the weight of each channel depends on the whole image.
            _ => {
                let s = self.mean(x, true);
                let s = conv(self, s, 16, 1, 1, 1);
                let s = self.conv(s, c, 1, 1, 1);
                let s = self.g.scalar(ScalarOp::Sigmoid, &[s]).unwrap();
                self.g.mul(x, s).unwrap()
            }
        }
    }

    fn mean(&mut self, x: NodeId, keep: bool) -> NodeId {
        let d = self.dims(x);
        let s = self.g.reduce(ReduceKind::Sum, x, &[2, 3], keep).unwrap();
        let n = self.g.full(DType::F32, [1usize], 1.0 / (d[2] * d[3]) as f64);
        self.g.mul(s, n).unwrap()
    }

    fn random(test: &str) -> Net {
        let mut n = Net::new(test);
        let (batch, size) = (1 + n.rng.below(3), 9 + n.rng.below(24));
        let channels = [1, 3, 5, 16, 32][n.rng.below(5)];
        let x = n.input(&[batch, channels, size, size]);
        let mut y = n.conv(x, 32, 3, 1, 1);
        for _ in 0..2 + n.rng.below(5) {
            y = n.layer(y);
        }
        if n.rng.below(3) == 0 {
            // An intermediate image as an output.
            n.g.output("image", y);
        }
        if n.rng.below(2) == 0 {
            // A number of channels that does not fill a block requires the plain layout.
            y = n.conv(y, 7, 1, 1, 1);
        }
        let y = n.mean(y, false);
        let c = n.dims(y)[1];
        let w = n.weight(&[c, 10], 0.3);
        let y = n.g.matmul(y, w).unwrap();
        n.g.output("y", y);
        n
    }

    fn plan(&self, b: &Backend) -> Plan {
        Session::new(b, self.g.clone()).prepare(&self.inputs).unwrap().plan().clone()
    }

    fn run(&self, b: &Backend) -> Vec<ConstData> {
        Session::new(b, self.g.clone()).run(&self.inputs).unwrap()
    }
}

fn count(p: &Plan, name: &str) -> usize {
    p.receipts.iter().filter(|r| r.transformation == name).map(|r| r.count).sum()
}

#[test]
fn blocked_networks_follow_o0() {
    let (each, o2) = (cpu(Level::O0, &[]), cpu(Level::O2, &[]));
    let (mut blocked, mut convs) = (0, 0);
    for round in 0..60 {
        let n = Net::random("networks");
        let (want, got) = (n.run(&each), n.run(&o2));
        let d = halcyon::session::difference(&got, &want);
        let plan = n.plan(&o2);
        assert!(d < 2e-5, "round {round}: {d}\n{}\n{plan}", n.g);
        blocked += count(&plan, BLOCKED);
        convs += n.g.nodes().iter().filter(|n| matches!(n.op, Op::Conv(_))).count();
        assert_eq!(n.run(&o2), got, "round {round}: again");
    }
    // (Only convolutions whose channels do not fill a block keep the plain layout.)
    assert!(blocked * 2 > convs, "{blocked} of {convs}");
}

/// One step per convolution: normalisation, shortcut and activation are in its epilogue, and nothing changes
/// layout in between.
#[test]
fn a_residual_block_is_one_step_per_convolution() {
    let mut n = Net::new("residual");
    let x = n.input(&[1, 3, 20, 20]);
    let y = n.conv(x, 64, 7, 2, 1);
    let y = n.normalise(y);
    let x = n.g.relu(y).unwrap();
    let y = n.conv(x, 64, 3, 1, 1);
    let y = n.normalise(y);
    let y = n.g.relu(y).unwrap();
    let y = n.conv(y, 64, 1, 1, 1);
    let y = n.normalise(y);
    let z = n.conv(x, 64, 1, 1, 1);
    let z = n.normalise(z);
    let y = n.g.add(y, z).unwrap();
    let y = n.g.relu(y).unwrap();
    let y = n.mean(y, false);
    n.g.output("y", y);
    let b = cpu(Level::O2, &[]);
    let plan = n.plan(&b);
    // Four convolutions, the sum and its division.
    assert_eq!(plan.steps.len(), 6, "{plan}");
    assert_eq!((count(&plan, BLOCKED), count(&plan, AFFINE), count(&plan, EPILOGUES)), (4, 4, 4), "{plan}");
    let d = halcyon::session::difference(&n.run(&b), &n.run(&cpu(Level::O0, &[])));
    assert!(d < 1e-5, "{d}");
    for without in [BLOCKED, AFFINE, EPILOGUES] {
        let b = cpu(Level::O2, &[without]);
        assert_eq!(count(&n.plan(&b), without), 0);
        let d = halcyon::session::difference(&n.run(&b), &n.run(&cpu(Level::O0, &[])));
        assert!(d < 1e-5, "without {without}: {d}");
    }
    assert_eq!(count(&n.plan(&cpu(Level::O1, &[])), BLOCKED), 0);
}

/// An affine chain is merged only into a product whose value nothing else reads.
#[test]
fn affine_chains_that_others_read_stay() {
    let mut n = Net::new("affine");
    let x = n.input(&[2, 16, 8, 8]);
    let y = n.conv(x, 16, 3, 1, 1);
    let z = n.normalise(y);
    n.g.output("y", y);
    n.g.output("z", z);
    let (each, o2) = (cpu(Level::O0, &[]), cpu(Level::O2, &[]));
    assert_eq!(count(&n.plan(&o2), AFFINE), 0);
    let d = halcyon::session::difference(&n.run(&o2), &n.run(&each));
    assert!(d < 1e-5, "{d}");

    let mut n = Net::new("no product");
    let x = n.input(&[2, 16, 8, 8]);
    let z = n.normalise(x);
    n.g.output("z", z);
    assert_eq!(count(&n.plan(&o2), AFFINE), 0);
}

/// One constant used as weights of two shapes, which are packed differently.
#[test]
fn weights_of_two_shapes_share_no_packed_form() {
    let mut n = Net::new("two shapes");
    let (x, z) = (n.input(&[1, 96, 6, 6]), n.input(&[1, 32, 6, 6]));
    let w = n.weight(&[32, 96, 1, 1], 0.1);
    let v = n.g.reshape(w, [32usize, 32, 3, 1]).unwrap();
    let a = n.g.conv(x, w, Conv::new(2)).unwrap();
    let b = n.g.conv(z, v, Conv::new(2)).unwrap();
    n.g.output("a", a);
    n.g.output("b", b);
    // (With constant folding the second shape would be a separate constant.)
    for without in [&["constant folding"][..], &[]] {
        let o2 = cpu(Level::O2, without);
        let plan = n.plan(&o2);
        assert_eq!((count(&plan, BLOCKED), plan.packed.len()), (2, 2), "{plan}");
        let d = halcyon::session::difference(&n.run(&o2), &n.run(&cpu(Level::O0, &[])));
        assert!(d < 1e-5, "{d}");
    }
}

/// Images of bf16 in blocked layout, beside plain f32 images whose channels do not fill a block.
#[test]
fn networks_in_bf16_follow_f32() {
    let (each, amp, plain) = (cpu(Level::O0, &[]), mixed(&[]), mixed(&[BLOCKED, EPILOGUES]));
    for round in 0..30 {
        let n = Net::random("networks in bf16");
        let (want, got) = (n.run(&each), n.run(&amp));
        // bf16 has eight bits of precision, and errors add up over about ten layers. The bf16 kernels in
        // plain layout differ from f32 by as much.
        let (d, p) =
            (halcyon::session::difference(&got, &want), halcyon::session::difference(&n.run(&plain), &want));
        assert!(d < 0.03 && d < 3.0 * p + 0.004, "round {round}: {d}, plain {p}\n{}\n{}", n.g, n.plan(&amp));
        assert_eq!(n.run(&amp), got, "round {round}: again");
    }
}

/// Ops between bf16 convolutions are in their epilogues, and no image is converted to f32 in memory.
#[test]
fn a_residual_block_in_bf16_is_one_step_per_convolution() {
    let mut n = Net::new("residual in bf16");
    let x = n.input(&[2, 3, 30, 30]);
    let y = n.conv(x, 64, 7, 2, 1);
    let y = n.normalise(y);
    let y = n.g.relu(y).unwrap();
    let x = n.pool(y, PoolKind::Max, 3);
    let y = n.conv(x, 64, 3, 1, 1);
    let y = n.normalise(y);
    let y = n.g.relu(y).unwrap();
    let y = n.conv(y, 96, 1, 1, 1);
    let y = n.normalise(y);
    let z = n.conv(x, 96, 1, 1, 1);
    let z = n.normalise(z);
    let y = n.g.add(y, z).unwrap();
    let y = n.g.relu(y).unwrap();
    // Depthwise.
    let y = n.conv(y, 96, 3, 2, 96);
    let y = n.normalise(y);
    let y = n.mean(y, false);
    n.g.output("y", y);
    let b = mixed(&[]);
    let plan = n.plan(&b);
    let d = halcyon::session::difference(&n.run(&b), &n.run(&cpu(Level::O0, &[])));
    assert!(d < 0.03, "{d}\n{plan}");
    if !halcyon::hal::cpu::library::conv::blocked_bf16::available(halcyon::hal::cpu::sys::Isa::best()) {
        eprintln!("the plan is not checked, because bf16 products are not faster than f32 products here");
        return;
    }
    // The input's rounding, five convolutions, the pool, the sum and its division.
    assert_eq!(plan.steps.len(), 9, "{plan}");
    let text = format!("{plan}");
    assert_eq!(text.matches("conv_blocked16").count(), 5, "{plan}");
    assert_eq!(text.matches("pool_blocked16").count(), 1, "{plan}");
}

/// The gradient of max pooling, and the sum of gradients over all images (the gradient of a bias), stay in
/// blocks.
#[test]
fn gradients_of_pools_and_biases_stay_in_blocks() {
    let mut n = Net::new("gradients");
    let x = n.input(&[6, 3, 14, 14]);
    let wrt =
        [n.input(&[32, 3, 3, 3]), n.input(&[1, 32, 1, 1]), n.input(&[64, 32, 3, 3]), n.input(&[1, 64, 1, 1])];
    let [w1, b1, w2, b2] = wrt;
    let mut y = x;
    for (w, b) in [(w1, b1), (w2, b2)] {
        y = n.g.conv(y, w, Conv::new(2)).unwrap();
        y = n.g.add(y, b).unwrap();
        y = n.g.relu(y).unwrap();
    }
    let two = |v: usize| [v; 2].into_iter().collect();
    let pad = [(0, 0); 2].into_iter().collect();
    let pool = Pool { kind: PoolKind::Max, kernel: two(2), stride: two(2), pad, dilation: two(1) };
    let y = n.g.pool(y, pool).unwrap();
    let seed = n.input(&[6, 64, 5, 5]);
    let grads = halcyon::ir::grad::gradients(&mut n.g, y, &wrt, Some(seed)).unwrap();
    for (k, d) in grads.into_iter().enumerate() {
        n.g.output(&format!("d{k}"), d.unwrap());
    }
    let want = n.run(&cpu(Level::O0, &[]));
    // Where two elements of a window are nearly equal, rounding may decide which of them gets the gradient.
    // So the sums of the squared differences are compared.
    let error = |got: &[ConstData], k: usize| {
        let all = |d: &ConstData| d.to_vec::<f32>().into_iter().map(f64::from).collect::<Vec<f64>>();
        let (a, b) = (all(&got[k]), all(&want[k]));
        let squares = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>();
        (squares(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied())).sqrt()
    };
    for (b, bound) in [(cpu(Level::O2, &[]), 1e-3), (mixed(&[]), 0.3)] {
        let (got, plan) = (n.run(&b), n.plan(&b).to_string());
        for k in 0..4 {
            assert!(error(&got, k) < bound, "output {k}: {}\n{plan}", error(&got, k));
        }
        assert_eq!(plan.matches("max_pool_grad_blocked").count(), 1, "{plan}");
    }
}
