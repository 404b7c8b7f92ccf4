//! Lowering never makes the same query of the target twice: `Target::library` is called once for a product or
//! convolution with its epilogue and its packed weights, and once for a composite that the target claims.

use halcyon::hal::{Caps, Declined, LibraryCall, LibraryKernel, Target};
use halcyon::ir::graph::NodeId;
use halcyon::ir::lower::{LowerOptions, lower};
use halcyon::ir::ops::Conv;
use halcyon::ir::passes::{BLOCKED, EPILOGUES, PACKED, PassOptions};
use halcyon::ir::plan::{Plan, StepWork};
use halcyon::ir::target::Work;
use halcyon::ir::{Graph, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_test::Rng;
use std::sync::{Arc, Mutex};

/// A target that records the ops of the calls.
struct Counting<'a> {
    inner: &'a dyn Target,
    asked: Mutex<Vec<String>>,
}

impl Target for Counting<'_> {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }
    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        let answer = self.inner.library(call);
        if let Work::Op(op) = call.work {
            self.asked.lock().unwrap().push(op.name());
        }
        answer
    }
    fn part_alignment(&self) -> Option<usize> {
        self.inner.part_alignment()
    }
    fn has_epilogues(&self) -> bool {
        self.inner.has_epilogues()
    }
    fn channel_block(&self, dtype: DType) -> Option<usize> {
        self.inner.channel_block(dtype)
    }
}

/// Lowers for the CPU at O2. Returns the plan and the ops of the calls, sorted.
fn asked(g: &Graph, without: &[&str]) -> (Plan, Vec<String>) {
    let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(2).build().unwrap();
    let target = Counting { inner: b.device().as_target(), asked: Mutex::default() };
    let mut passes = PassOptions::at(Level::O2);
    passes.without.extend(without.iter().map(|w| w.to_string()));
    let plan = lower(g, &target, &LowerOptions { passes, ..LowerOptions::default() }).unwrap();
    let mut asked = target.asked.into_inner().unwrap();
    asked.sort();
    (plan, asked)
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
        let n = dims.iter().product();
        let v: Vec<f32> = self.rng.f32s(n).iter().map(|v| v * 0.2).collect();
        ConstData::from_slice(dims, &v).unwrap()
    }

    fn input(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.inputs.push(d);
        self.g.input(&format!("x{}", self.inputs.len()), TensorType::new(DType::F32, dims))
    }

    fn weight(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.g.constant(d)
    }

    fn conv(&mut self, x: NodeId, to: usize, side: usize) -> NodeId {
        let mut a = Conv::new(2);
        a.pad.iter_mut().for_each(|p| *p = (side as i64 / 2, side as i64 / 2));
        self.conv_of(x, to, side, a)
    }

    fn conv_of(&mut self, x: NodeId, to: usize, side: usize, a: Conv) -> NodeId {
        let from = self.g.shape(x).known().unwrap()[1];
        let w = self.weight(&[to, from, side, side]);
        self.g.conv(x, w, a).unwrap()
    }

    /// Batch normalisation with constants.
    fn normalise(&mut self, x: NodeId) -> NodeId {
        let c = self.g.shape(x).known().unwrap()[1];
        let [m, s, b] = [(); 3].map(|()| self.weight(&[1, c, 1, 1]));
        let y = self.g.sub(x, m).unwrap();
        let y = self.g.mul(y, s).unwrap();
        self.g.add(y, b).unwrap()
    }

    /// A convolution, and a block of three with a residual, with batch normalisation and relu, as in ResNet.
    fn residual(&mut self, x: NodeId) -> NodeId {
        let x = self.conv(x, 64, 3);
        let x = self.normalise(x);
        let x = self.g.relu(x).unwrap();
        let y = self.conv(x, 32, 1);
        let y = self.normalise(y);
        let y = self.g.relu(y).unwrap();
        let y = self.conv(y, 32, 3);
        let y = self.normalise(y);
        let y = self.g.relu(y).unwrap();
        let y = self.conv(y, 64, 1);
        let y = self.normalise(y);
        let y = self.g.add(y, x).unwrap();
        self.g.relu(y).unwrap()
    }

    /// Compares the CPU's results at O2 with those at O0.
    fn check(&self) {
        let run = |level| {
            let b = Backend::builder().backend_type(BackendType::Cpu).level(level).build().unwrap();
            Session::new(&b, self.g.clone()).run(&self.inputs).unwrap()
        };
        let (want, got) = (run(Level::O0), run(Level::O2));
        for (w, g) in want.iter().zip(&got) {
            let (w, g) = (w.to_vec::<f32>(), g.to_vec::<f32>());
            for (w, g) in w.iter().zip(&g) {
                assert!((w - g).abs() <= 1e-4 * (1.0 + w.abs()), "{g}, not {w}\n{}", self.g);
            }
        }
    }
}

fn count(asked: &[String], op: &str) -> usize {
    asked.iter().filter(|a| *a == op).count()
}

/// The steps that run library kernels whose name contains `kernel`, and how many of them have an epilogue.
fn steps(plan: &Plan, kernel: &str) -> (usize, usize) {
    let named = plan.steps.iter().filter(|s| match &s.work {
        StepWork::Library(k) => k.name().contains(kernel),
        _ => false,
    });
    let with = named.clone().filter(|s| s.fused.is_some()).count();
    (named.count(), with)
}

#[test]
fn a_residual_block_makes_one_query_per_convolution() {
    let mut n = Net::new("a_residual_block_makes_one_query_per_convolution");
    // The first convolution reads its image in the layout [N, C, H, W], so no step copies the image into the
    // blocked layout.
    let x = n.input(&[1, 3, 14, 14]);
    let y = n.residual(x);
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "conv_blocked"), plan.packed.len()), ((4, 4), 4), "{plan}");
    assert_eq!((count(&all, "blocked_conv"), count(&all, "conv")), (4, 0), "{all:?}\n{plan}");
    // Without blocked layouts.
    let (plan, all) = asked(&n.g, &[BLOCKED]);
    assert_eq!(steps(&plan, "cpu.conv."), (4, 4), "{plan}");
    assert_eq!(count(&all, "conv"), 4, "{all:?}\n{plan}");
    // Without blocked layouts, epilogues and packed constants.
    let (plan, all) = asked(&n.g, &[BLOCKED, EPILOGUES, PACKED]);
    assert_eq!((steps(&plan, "cpu.conv."), plan.packed.len()), ((4, 0), 0), "{plan}");
    assert_eq!(count(&all, "conv"), 4, "{all:?}\n{plan}");
    n.check();
}

#[test]
fn products_of_one_chain_are_queried_once_each() {
    let mut n = Net::new("products_of_one_chain_are_queried_once_each");
    let x = n.input(&[48, 64]);
    let products = [n.weight(&[64, 96]), n.weight(&[64, 96])].map(|w| n.g.matmul(x, w).unwrap());
    let y = n.g.add(products[0], products[1]).unwrap();
    let y = n.g.relu(y).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    // The later product has the epilogue.
    assert_eq!(steps(&plan, "gemm"), (2, 1), "{plan}");
    assert!(plan.steps[0].fused.is_none() && plan.steps[1].fused.is_some(), "{plan}");
    assert_eq!((count(&all, "matmul"), plan.packed.len()), (2, 2), "{all:?}\n{plan}");
    n.check();

    // The sum reads the transpose of the later product. An epilogue of that product's kernel cannot store its
    // result transposed, so the earlier product has the epilogue.
    let mut n = Net::new("products_of_one_chain_are_queried_once_each");
    let (x, z) = (n.input(&[48, 64]), n.input(&[96, 64]));
    let w = [n.weight(&[64, 96]), n.weight(&[64, 48])];
    let (a, b) = (n.g.matmul(x, w[0]).unwrap(), n.g.matmul(z, w[1]).unwrap());
    let b = n.g.permute(b, &[1, 0]).unwrap();
    let y = n.g.add(a, b).unwrap();
    let y = n.g.relu(y).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "gemm"), plan.steps.len(), count(&all, "matmul")), ((2, 1), 2, 2), "{plan}");
    n.check();
}

#[test]
fn a_declined_epilogue_is_a_step_of_its_own_without_another_query() {
    let mut n = Net::new("a_declined_epilogue_is_a_step_of_its_own_without_another_query");
    let x = n.input(&[48, 64]);
    let w = n.weight(&[64, 96]);
    let y = n.g.matmul(x, w).unwrap();
    // An epilogue cannot contain an iota.
    let i = n.g.iota(DType::F32, [48usize, 96], 1).unwrap();
    let y = n.g.add(y, i).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "gemm"), plan.steps.len(), plan.packed.len()), ((1, 0), 2, 1), "{plan}");
    assert_eq!(count(&all, "matmul"), 1, "{all:?}\n{plan}");
    n.check();
}

#[test]
fn a_claimed_composite_is_queried_once() {
    let mut n = Net::new("a_claimed_composite_is_queried_once");
    let x = n.input(&[48, 64]);
    let y = n.g.softmax(x, 1).unwrap();
    let [scale, bias] = [(); 2].map(|()| n.weight(&[64]));
    let y = n.g.layer_norm(y, scale, Some(bias), 1, 1e-5).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "softmax").0, steps(&plan, "layer_norm").0), (1, 1), "{plan}");
    assert_eq!((count(&all, "softmax"), count(&all, "layer_norm")), (1, 1), "{all:?}\n{plan}");
    n.check();
}

#[test]
fn a_convolution_that_does_not_run_in_blocks_is_queried_once_in_each_layout() {
    let mut n = Net::new("a_convolution_that_does_not_run_in_blocks_is_queried_once_in_each_layout");
    let x = n.input(&[1, 3, 9, 9]);
    // Kernels in blocks support no dilated input.
    let y = n.conv_of(x, 64, 3, Conv { input_dilation: [2, 2].into_iter().collect(), ..Conv::new(2) });
    let y = n.g.relu(y).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "conv_blocked"), steps(&plan, "cpu.conv.")), ((0, 0), (1, 1)), "{plan}");
    assert_eq!((count(&all, "blocked_conv"), count(&all, "conv")), (1, 1), "{all:?}\n{plan}");
    n.check();
}

#[test]
fn a_product_is_computed_before_its_operand_is_overwritten() {
    let mut n = Net::new("a_product_is_computed_before_its_operand_is_overwritten");
    let (x, rows, w) = (n.input(&[32, 64]), n.input(&[1, 64]), n.weight(&[64, 96]));
    let at = n.g.constant(ConstData::from_slice(&[], &[3i32]).unwrap());
    let base = n.g.scalar(ScalarOp::Sin, &[x]).unwrap();
    let p = n.g.matmul(base, w).unwrap();
    // Overwrites the memory of `base`, which the product reads.
    let updated = n.g.update_slice(base, rows, at, 0).unwrap();
    let y = n.g.relu(p).unwrap();
    n.g.output("updated", updated);
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert!(plan.receipts.iter().any(|r| r.transformation == "in-place updates"), "{plan}");
    assert_eq!((steps(&plan, "gemm"), count(&all, "matmul")), ((1, 0), 1), "{plan}");
    n.check();
}

#[test]
fn a_product_in_two_parts_of_one_concatenation_is_computed_once() {
    let mut n = Net::new("a_product_in_two_parts_of_one_concatenation_is_computed_once");
    let (x, w) = (n.input(&[48, 64]), n.weight(&[64, 96]));
    let p = n.g.matmul(x, w).unwrap();
    let y = n.g.concat(&[p, p], 0).unwrap();
    n.g.output("y", y);
    let (plan, all) = asked(&n.g, &[]);
    assert_eq!((steps(&plan, "gemm").0, count(&all, "matmul")), (1, 1), "{plan}");
    n.check();
}
