//! Tests that every transformation reduces a cost of some graph's plan, and that the cost is higher if the
//! transformation is switched off. Transformations that only save time, and those that other files test, are
//! left out. The costs are static, so they are compared exactly. `cargo xtask test --only receipts` measures
//! times, with an optimised build.

use halcyon::ir::graph::NodeId;
use halcyon::ir::ops::Conv;
use halcyon::ir::plan::Plan;
use halcyon::ir::{Graph, ScalarOp, TensorType, passes};
use halcyon::prelude::*;
use halcyon::receipts::Tally;
use halcyon::{AmpPolicy, ConstData, Session};
use halcyon_test::Rng;

fn cpu(level: Level, without: Option<&str>) -> Result<Backend> {
    under(AmpPolicy::None, level, without)
}

fn under(amp: AmpPolicy, level: Level, without: Option<&str>) -> Result<Backend> {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(level).amp(amp).num_threads(2);
    let b = b.force_amp(amp != AmpPolicy::None);
    without.into_iter().fold(b, |b, w| b.without(w)).build()
}

/// The cost that a transformation reduces.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shown {
    Steps,
    Flops,
    Moved,
    Scratch,
}

impl Shown {
    fn of(self, t: &Tally) -> u64 {
        match self {
            Shown::Steps => t.steps as u64,
            Shown::Flops => t.flops,
            Shown::Moved => t.moved,
            Shown::Scratch => t.scratch as u64,
        }
    }
}

struct Case {
    g: Graph,
    rng: Rng,
    inputs: Vec<ConstData>,
}

impl Case {
    fn new(name: &str) -> Case {
        Case { g: Graph::new(), rng: Rng::fresh(name), inputs: vec![] }
    }

    fn data(&mut self, dims: &[usize]) -> ConstData {
        let n: usize = dims.iter().product();
        ConstData::from_slice(dims, &self.rng.f32s(n)).expect("as many values as the shape has")
    }

    fn input(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.inputs.push(d);
        let name = format!("x{}", self.inputs.len());
        self.g.input(&name, TensorType::new(DType::F32, dims))
    }

    fn weight(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.g.constant(d)
    }

    fn conv(&mut self, x: NodeId, from: usize, to: usize, side: usize) -> Result<NodeId> {
        let w = self.weight(&[to, from, side, side]);
        let mut a = Conv::new(2);
        a.pad.iter_mut().for_each(|p| *p = (side as i64 / 2, side as i64 / 2));
        self.g.conv(x, w, a)
    }
}

/// A graph on which a transformation has a gain, and the costs that show it. Every new transformation needs a
/// case here.
fn case(name: &str) -> Result<(Case, &'static [Shown])> {
    let mut c = Case::new(name);
    let (y, shown): (NodeId, &'static [Shown]) = match name {
        // Values computed from constants are computed once, not in every run.
        passes::FOLD => {
            let (a, b, x) = (c.weight(&[64, 64]), c.weight(&[64, 64]), c.input(&[64, 64]));
            let s = c.g.mul(a, b)?;
            let s = c.g.scalar(ScalarOp::Tanh, &[s])?;
            (c.g.add(x, s)?, &[Shown::Flops, Shown::Moved])
        }
        // Multiplication by one.
        passes::SIMPLIFY => {
            let x = c.input(&[64, 48]);
            let one = c.g.lit(x, 1.0);
            let y = c.g.mul(x, one)?;
            let e = c.g.scalar(ScalarOp::Exp, &[y])?;
            (c.g.mul(e, one)?, &[Shown::Flops])
        }
        // The same softmax twice.
        passes::CSE => {
            let x = c.input(&[64, 64]);
            let (a, b) = (c.g.softmax(x, 1)?, c.g.softmax(x, 1)?);
            let z = c.g.softmax(a, 0)?;
            (c.g.add(z, b)?, &[Shown::Steps, Shown::Flops])
        }
        // A chain is one step, and its intermediate values are not stored.
        passes::FUSION => {
            let (x, z) = (c.input(&[64, 64]), c.input(&[64, 64]));
            let y = c.g.mul(x, z)?;
            let y = c.g.scalar(ScalarOp::Tanh, &[y])?;
            (c.g.add(y, x)?, &[Shown::Steps, Shown::Moved, Shown::Scratch])
        }
        // A composite is one kernel.
        passes::COMPOSITES => {
            let x = c.input(&[64, 256]);
            (c.g.softmax(x, 1)?, &[Shown::Steps, Shown::Moved])
        }
        // One step stores a value and also computes the value's reader.
        passes::JOINED => {
            let x = c.input(&[64, 64]);
            let y = c.g.scalar(ScalarOp::Tanh, &[x])?;
            c.g.output("first", y);
            (c.g.mul(y, x)?, &[Shown::Steps, Shown::Moved])
        }
        // A row is written into the table in place; the table is not copied.
        passes::IN_PLACE => {
            let (x, row) = (c.input(&[256, 64]), c.input(&[1, 64]));
            let x = c.g.softmax(x, 1)?;
            let at = c.g.full(DType::I64, [] as [usize; 0], 3i64);
            (c.g.update_slice(x, row, at, 0)?, &[Shown::Scratch])
        }
        // A convolution reads weights that were packed once, and needs no scratch to pack them in each run.
        passes::PACKED => {
            let x = c.input(&[1, 64, 28, 28]);
            (c.conv(x, 64, 80, 3)?, &[Shown::Scratch])
        }
        // Ops after a product are its epilogue, computed on its tiles.
        passes::EPILOGUES => {
            let (x, w, b) = (c.input(&[64, 64]), c.weight(&[64, 64]), c.weight(&[64]));
            let y = c.g.matmul(x, w)?;
            let y = c.g.add(y, b)?;
            (c.g.scalar(ScalarOp::Gelu, &[y])?, &[Shown::Steps, Shown::Scratch])
        }
        // Batch normalisation as separate ops.
        passes::AFFINE => {
            let x = c.input(&[1, 8, 16, 16]);
            let mut y = c.conv(x, 8, 8, 3)?;
            for op in [ScalarOp::Sub, ScalarOp::Mul, ScalarOp::Mul, ScalarOp::Add] {
                let k = c.weight(&[8, 1, 1]);
                y = c.g.scalar(op, &[y, k])?;
            }
            (y, &[Shown::Flops])
        }
        // Consecutive convolutions. The plans differ only in the order of bytes: the gain is time, which
        // `cargo xtask test --only receipts` measures.
        passes::BLOCKED => {
            let x = c.input(&[1, 3, 56, 56]);
            let mut y = c.conv(x, 3, 80, 3)?;
            for _ in 0..2 {
                y = c.conv(y, 80, 80, 3)?;
                y = c.g.relu(y)?;
            }
            let y = c.g.mean(y, &[2, 3], false)?;
            (y, &[])
        }
        // A layer norm as separate ops.
        passes::RECOGNITION => {
            let x = c.input(&[64, 128]);
            let m = c.g.mean(x, &[1], true)?;
            let d = c.g.sub(x, m)?;
            let two = c.g.lit(d, 2.0);
            let q = c.g.scalar(ScalarOp::Pow, &[d, two])?;
            let v = c.g.mean(q, &[1], true)?;
            let eps = c.g.lit(v, 1e-5);
            let v = c.g.add(v, eps)?;
            let r = c.g.scalar(ScalarOp::Sqrt, &[v])?;
            let n = c.g.div(d, r)?;
            let (scale, bias) = (c.weight(&[128]), c.weight(&[128]));
            let n = c.g.mul(n, scale)?;
            (c.g.add(n, bias)?, &[Shown::Steps, Shown::Moved])
        }
        // Weights take half the bytes. Even on processors without bf16 products, this saves more than the
        // casts add.
        passes::MIXED => {
            let (x, w) = (c.input(&[16, 256]), c.weight(&[256, 256]));
            (c.g.matmul(x, w)?, &[Shown::Moved])
        }
        other => panic!("the transformation \"{other}\" has no case here"),
    };
    c.g.output("y", y);
    Ok((c, shown))
}

fn applied(p: &Plan, name: &str) -> usize {
    p.receipts.iter().filter(|r| r.transformation == name).map(|r| r.count).sum()
}

#[test]
fn every_transformation_gains_and_without_it_the_gain_is_lost() -> Result<()> {
    // Tuning reduces time, which a plan does not show; `tuning.rs` tests it. Quantisation rewrites the graph
    // before it is planned; `quantize.rs` tests it. The CPU merges no launches; `launches.rs` tests merged
    // launches on devices that have them.
    let elsewhere = [passes::TUNED, passes::QUANTIZED, passes::LAUNCHES];
    for name in passes::ALL.iter().filter(|n| !elsewhere.contains(n)) {
        let (c, shown) = case(name)?;
        // Mixed precision must be requested.
        let (amp, most) = match *name {
            passes::MIXED => (AmpPolicy::Bf16, 2e-2),
            _ => (AmpPolicy::None, 1e-5),
        };
        let of = |without: Option<&str>| -> Result<(Session, Tally, usize)> {
            let s = Session::new(&under(amp, Level::O2, without)?, c.g.clone());
            let e = s.prepare(&c.inputs)?;
            Ok((s, Tally::of(e.plan()), applied(e.plan(), name)))
        };
        let (on, with, count) = of(None)?;
        let (off, less, none) = of(Some(name))?;
        println!("{name}: {count} times\n  with    {with:?}\n  without {less:?}");
        assert!(count > 0, "{name} does not apply");
        assert_eq!(none, 0, "{name} is switched off");
        // Making a plan again gives the same plan.
        assert_eq!((of(None)?.1, of(Some(name))?.1), (with, less), "{name}");
        let d = halcyon::session::difference(&on.run(&c.inputs)?, &off.run(&c.inputs)?);
        assert!(d < most, "{name}: the results differ by {d}");
        for s in shown {
            assert!(s.of(&with) < s.of(&less), "{name} gains no {s:?}:\n{with:?}\n{less:?}");
        }
    }
    Ok(())
}

#[test]
fn a_measured_gain_is_in_the_receipt() -> Result<()> {
    let (c, _) = case(passes::EPILOGUES)?;
    let s = Session::new(&cpu(Level::O2, None)?, c.g.clone());
    let plain = s.prepare(&c.inputs)?.plan().receipts.clone();
    assert!(plain.iter().all(|r| r.gain.is_none() && r.error.is_none()), "{plain:?}");
    let told = s.measure_receipts(&c.inputs, 3, |w| match w {
        None => cpu(Level::O0, None),
        name => cpu(Level::O2, name),
    })?;
    let names = |v: &[halcyon::ir::plan::Receipt]| {
        v.iter().map(|r| (r.transformation.clone(), r.count)).collect::<Vec<_>>()
    };
    assert_eq!(names(&told), names(&plain));
    for r in &told {
        assert!(r.gain.is_some_and(|g| g > 0.0) && r.error.is_some_and(|e| e < 1e-5), "{r:?}");
    }
    Ok(())
}

#[test]
fn workspace_lies_in_the_scratch_that_a_step_leaves_free() -> Result<()> {
    let (c, _) = case(passes::BLOCKED)?;
    let s = Session::new(&cpu(Level::O2, None)?, c.g.clone());
    let e = s.prepare(&c.inputs)?;
    let p = e.plan();
    let wanted: Vec<usize> = p.steps.iter().map(|s| s.work.workspace()).collect();
    assert!(wanted.iter().any(|w| *w > 0), "{p}");
    assert_eq!((p.workspace, p.workspaces.len()), (0, wanted.iter().filter(|w| **w > 0).count()));
    for (step, slot) in &p.workspaces {
        let at = p.slots[*slot as usize];
        assert!(at.bytes >= wanted[*step as usize], "{at:?}");
        // No buffer that the step reads or writes overlaps the workspace.
        for b in &p.steps[*step as usize].buffers {
            if let halcyon::ir::plan::Storage::Slot(k) = p.buffers[b.0 as usize].storage {
                let o = p.slots[k as usize];
                assert!(at.offset + at.bytes <= o.offset || o.offset + o.bytes <= at.offset, "{at:?} {o:?}");
            }
        }
    }
    assert!(p.needed() <= p.scratch() && p.scratch() <= p.needed() + p.needed() / 10 + (64 << 10));
    let want = Session::new(&cpu(Level::O0, None)?, c.g.clone()).run(&c.inputs)?;
    assert!(halcyon::session::difference(&s.run(&c.inputs)?, &want) < 1e-5);
    Ok(())
}
