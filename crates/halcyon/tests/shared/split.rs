//! One graph on two devices compared with one device, including the bytes copied.

use halcyon::hal::{
    Accounts, BufferRef, Caps, Command, Counters, Declined, Device, DeviceInfo, LibraryCall, LibraryKernel,
    Program, Tag, Target,
};
use halcyon::ir::graph::NodeId;
use halcyon::ir::kernel::{Kernel, verify_for};
use halcyon::ir::ops::Conv;
use halcyon::ir::{Graph, Op, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::split::{Share, by_layers, by_support};
use halcyon::{ConstData, Result, Selection, Session, Split};
use halcyon_test::Rng;
use halcyon_test::devices::devices;
use std::collections::BTreeMap;
use std::sync::Arc;

fn data(rng: &mut Rng, dims: &[usize]) -> ConstData {
    ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap()
}

/// A network of layers with a residual connection around each. It has two inputs and two outputs. One of the
/// outputs comes from the middle.
fn network(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let mut g = Graph::new();
    let ty = |d: &[usize]| TensorType::new(DType::F32, d);
    let (x, scale) = (g.input("x", ty(&[8, 32])), g.input("scale", ty(&[32])));
    let mut h = x;
    let mut middle = None;
    for i in 0..6 {
        let w = g.constant(data(rng, &[32, 32]));
        // The weight's transpose is computed from constants alone, so it must not be copied between devices.
        let w = g.transpose(w, 0, 1).unwrap();
        let y = g.matmul(h, w).unwrap();
        let y = g.mul(y, scale).unwrap();
        let y = g.tanh(y).unwrap();
        h = g.add(h, y).unwrap();
        if i == 1 {
            middle = Some(h);
        }
    }
    g.output("middle", middle.unwrap());
    g.output("y", h);
    let inputs = vec![data(rng, &[8, 32]), data(rng, &[32])];
    (g, inputs)
}

fn close(a: &[ConstData], b: &[ConstData], bound: f32) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!((a.dtype, &a.dims), (b.dtype, &b.dims));
        for (x, y) in a.to_vec::<f32>().iter().zip(b.to_vec::<f32>()) {
            assert!((x - y).abs() <= bound * y.abs().max(1.0), "{x} {y}");
        }
    }
}

/// Runs a split, and checks that its devices count the same bytes as its placement.
fn run_counted(s: &Split, inputs: &[ConstData]) -> Vec<ConstData> {
    let before: Vec<_> = s.backends().iter().map(Backend::counters).collect();
    let out = s.run(inputs, &[]).unwrap();
    for (b, was) in s.backends().iter().zip(before) {
        let now = b.counters();
        // A device may be listed more than once.
        let same = s.backends().iter().zip(&s.placement().devices);
        let said: Vec<_> = same.filter(|(x, _)| Arc::ptr_eq(x.device(), b.device())).map(|x| x.1).collect();
        let sum = |f: fn(&Share) -> u64| said.iter().map(|d| f(d)).sum::<u64>();
        assert_eq!(now.uploaded_bytes - was.uploaded_bytes, sum(|d| d.uploaded), "{}", b.id());
        assert_eq!(now.downloaded_bytes - was.downloaded_bytes, sum(|d| d.downloaded), "{}", b.id());
        assert_eq!(now.peer_bytes - was.peer_bytes, sum(|d| d.received), "{}", b.id());
        let ran = now.launches + now.library_calls > was.launches + was.library_calls;
        assert_eq!(ran, sum(|d| d.ops as u64) > 0, "{} ran its part", b.id());
    }
    out
}

#[test]
fn a_model_over_two_devices_is_the_model_on_one() {
    let test = "a_model_over_two_devices_is_the_model_on_one";
    let mut rng = Rng::fresh(test);
    for level in [Level::O0, Level::O1, Level::O2] {
        let devices = devices(test, level);
        let cpu = &devices[0];
        let (g, inputs) = network(&mut rng);
        let whole = Session::new(cpu, g.clone()).run(&inputs).unwrap();
        for other in &devices {
            for (first, second) in [(cpu, other), (other, cpu)] {
                for share in [0.2, 0.5, 0.9] {
                    let s =
                        Split::layers(&[(first.clone(), share), (second.clone(), 1.0 - share)], g.clone())
                            .unwrap();
                    close(&run_counted(&s, &inputs), &whole, 1e-5);
                    let p = s.placement();
                    assert_eq!(p.segments, 2);
                    assert!(p.devices.iter().all(|d| d.flops > 0 && d.ops > 0 && d.constants > 0), "{p:?}");
                    // The copy between the devices is either the output of one layer, 8 by 32 numbers, or a
                    // layer's inner value and its residual.
                    assert!([1024, 2048].contains(&p.between()), "{p:?}");
                }
            }
        }
    }
}

#[test]
fn three_parts_and_empty_ones_run_too() {
    let test = "three_parts_and_empty_ones_run_too";
    let mut rng = Rng::fresh(test);
    let devices = devices(test, Level::O1);
    let (g, inputs) = network(&mut rng);
    let whole = Session::new(&devices[0], g.clone()).run(&inputs).unwrap();
    let last = devices.last().unwrap();
    let three = [(devices[0].clone(), 1.0), (last.clone(), 1.0), (devices[0].clone(), 1.0)];
    let s = Split::layers(&three, g.clone()).unwrap();
    assert_eq!(s.placement().segments, 3);
    close(&s.run(&inputs, &[]).unwrap(), &whole, 1e-5);
    // The device alternates from node to node, so there is a segment for each change.
    let assign: Vec<usize> = (0..g.nodes().len()).map(|i| i % 2).collect();
    let both = [devices[0].clone(), last.clone()];
    let s = Split::new(&both, g.clone(), &assign, &BTreeMap::new()).unwrap();
    assert!(s.placement().segments > 4);
    close(&run_counted(&s, &inputs), &whole, 1e-5);
    // All ops on the second device, with an input and a constant as outputs.
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3]));
    let c = g.constant(ConstData::from_slice(&[2], &[1f32, 2.0]).unwrap());
    let y = g.neg(x).unwrap();
    for (n, v) in [("x", x), ("c", c), ("y", y)] {
        g.output(n, v);
    }
    let s = Split::new(&both, g, &[1, 1, 1], &BTreeMap::new()).unwrap();
    let out = s.run(&[ConstData::from_slice(&[3], &[1f32, 2.0, 3.0]).unwrap()], &[]).unwrap();
    assert_eq!(out[0].to_vec::<f32>(), [1.0, 2.0, 3.0]);
    assert_eq!(out[1].to_vec::<f32>(), [1.0, 2.0]);
    assert_eq!(out[2].to_vec::<f32>(), [-1.0, -2.0, -3.0]);
}

/// An output computed from constants alone is computed on one device, and readers on another device compute
/// it again, so no device waits for another.
#[test]
fn outputs_that_are_constant_are_not_waited_for() {
    let b = || Backend::builder().backend_type(BackendType::Cpu).level(Level::O1).build().unwrap();
    let both = [b(), b()];
    for assign in [[0, 0, 1, 0, 0], [1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1, 0]] {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [2]));
        let c = g.constant(ConstData::from_slice(&[2], &[1f32, 2.0]).unwrap());
        let half = g.neg(c).unwrap();
        let back = g.neg(half).unwrap();
        let y = g.add(x, back).unwrap();
        g.output("half", half);
        g.output("y", y);
        let s = Split::new(&both, g, &assign, &BTreeMap::new()).unwrap();
        let out = run_counted(&s, &[ConstData::from_slice(&[2], &[10f32, 20.0]).unwrap()]);
        assert_eq!((out[0].to_vec::<f32>(), out[1].to_vec::<f32>()), (vec![-1.0, -2.0], vec![11.0, 22.0]));
    }
}

/// Random assignments of random graphs of element-wise ops.
#[test]
fn any_assignment_gives_the_same() {
    let test = "any_assignment_gives_the_same";
    let mut rng = Rng::fresh(test);
    let cpu = Backend::builder().backend_type(BackendType::Cpu).level(Level::O1).build().unwrap();
    let second = Backend::builder().backend_type(BackendType::Cpu).level(Level::O1).build().unwrap();
    for _ in 0..40 {
        let mut g = Graph::new();
        let mut v: Vec<NodeId> =
            (0..3).map(|i| g.input(&format!("x{i}"), TensorType::new(DType::F32, [5, 7]))).collect();
        v.push(g.constant(data(&mut rng, &[5, 7])));
        for _ in 0..rng.below(25) + 1 {
            let (a, b) = (v[rng.below(v.len())], v[rng.below(v.len())]);
            let op = [ScalarOp::Add, ScalarOp::Sub, ScalarOp::Max, ScalarOp::Min][rng.below(4)];
            v.push(g.scalar(op, &[a, b]).unwrap());
        }
        for k in 0..rng.below(3) + 1 {
            let o = v[rng.below(v.len())];
            g.output(&format!("y{k}"), o);
        }
        let inputs: Vec<ConstData> = (0..3).map(|_| data(&mut rng, &[5, 7])).collect();
        let whole = Session::new(&cpu, g.clone()).run(&inputs).unwrap();
        let assign: Vec<usize> = g.nodes().iter().map(|_| rng.below(2)).collect();
        let s = Split::new(&[cpu.clone(), second.clone()], g, &assign, &BTreeMap::new()).unwrap();
        close(&run_counted(&s, &inputs), &whole, 0.0);
    }
}

/// The CPU without f64 and without library kernels.
#[derive(Debug)]
struct Picky {
    cpu: Arc<dyn Device>,
    info: DeviceInfo,
    caps: Caps,
}

impl Picky {
    fn backend() -> Backend {
        let cpu = Backend::cpu().unwrap().device().clone();
        let info = DeviceInfo { id: "picky:0".into(), ..cpu.info().clone() };
        let caps = Caps { f64: false, ..Caps::generous() };
        Backend::from_device(
            Arc::new(Picky { cpu, info: info.clone(), caps }),
            Selection::given(info),
            Level::O1,
        )
    }
}

impl Target for Picky {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn library(&self, _: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        Err(Declined::because("this device has no library kernels"))
    }
}

impl Device for Picky {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn counters(&self) -> Counters {
        self.cpu.counters()
    }
    fn pool(&self) -> &dyn Accounts {
        self.cpu.pool()
    }
    fn pinned(&self) -> u64 {
        self.cpu.pinned()
    }
    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        self.cpu.alloc(bytes, tag)
    }
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.cpu.write(dst, offset, src)
    }
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.cpu.read(src, offset, dst)
    }
    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        verify_for(kernel, &self.caps)?;
        self.cpu.compile(kernel)
    }
    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        self.cpu.submit(commands)
    }
    fn synchronize(&self) -> Result<()> {
        self.cpu.synchronize()
    }
    fn take_fault(&self) -> Result<Option<u32>> {
        self.cpu.take_fault()
    }
    fn as_target(&self) -> &dyn Target {
        self
    }
}

#[test]
fn only_what_may_leave_a_device_does() {
    let test = "only_what_may_leave_a_device_does";
    let mut rng = Rng::fresh(test);
    let (cpu, picky) = (Backend::cpu().unwrap(), Picky::backend());
    // A product, a sum in f64, a product.
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [16, 16]));
    let y = g.matmul(x, x).unwrap();
    let wide = g.cast(y, DType::F64).unwrap();
    let sum = g.sum(wide, &[1], true).unwrap();
    let sum = g.cast(sum, DType::F32).unwrap();
    let z = g.matmul(y, sum).unwrap();
    g.output("z", z);
    let inputs = [data(&mut rng, &[16, 16])];
    let whole = Session::new(&cpu, g.clone()).run(&inputs).unwrap();
    let alone = Session::new(&picky, g.clone()).run(&inputs).unwrap_err();
    assert_eq!(alone.exit_code(), 3, "{alone}");
    // The sum has 256 of about 9,000 operations.
    let s = Split::leaving(&picky, &cpu, g.clone(), 0.05).unwrap();
    close(&run_counted(&s, &inputs), &whole, 1e-5);
    let p = s.placement();
    let away: Vec<(&str, &str)> =
        p.ops.iter().filter_map(|o| Some((o.op.as_str(), o.reason.as_deref()?))).collect();
    let names: Vec<&str> = away.iter().map(|a| a.0).collect();
    assert_eq!(names, ["cast", "reduce_sum", "cast"], "{p:?}");
    assert!(away.iter().all(|a| a.1.contains("f64")), "{away:?}");
    assert!((0.01..0.05).contains(&p.flops_elsewhere()), "{}", p.flops_elsewhere());
    assert_eq!((p.segments, p.between()), (3, 16 * 16 * 4 + 16 * 4));
    for limit in [0.0, 0.01] {
        let e = Split::leaving(&picky, &cpu, g.clone(), limit).unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains("reduce_sum at"), "{e}");
    }
    // If the first device supports all ops, nothing moves to the second.
    for b in devices(test, Level::O1) {
        let (g, inputs) = network(&mut rng);
        let whole = Session::new(&cpu, g.clone()).run(&inputs).unwrap();
        let (assign, why) = by_support(&b, &cpu, &g, 0.0).unwrap();
        assert!(assign.iter().all(|d| *d == 0) && why.is_empty(), "{why:?}");
        let s = Split::leaving(&b, &cpu, g.clone(), 0.0).unwrap();
        close(&s.run(&inputs, &[]).unwrap(), &whole, 1e-5);
        assert_eq!((s.placement().flops_elsewhere(), s.placement().between()), (0.0, 0));
    }
}

#[test]
fn wrong_splits_are_refused() {
    let mut rng = Rng::fresh("wrong_splits_are_refused");
    let cpu = Backend::cpu().unwrap();
    let (g, inputs) = network(&mut rng);
    for shares in [&[][..], &[0.0, 1.0], &[-1.0], &[f64::NAN, 1.0]] {
        assert_eq!(by_layers(&g, shares).unwrap_err().exit_code(), 2);
    }
    let none = BTreeMap::new();
    assert_eq!(Split::new(std::slice::from_ref(&cpu), g.clone(), &[0], &none).unwrap_err().exit_code(), 2);
    let two = vec![1; g.nodes().len()];
    assert_eq!(Split::new(std::slice::from_ref(&cpu), g.clone(), &two, &none).unwrap_err().exit_code(), 2);
    let s = Split::layers(&[(cpu.clone(), 1.0), (cpu.clone(), 1.0)], g.clone()).unwrap();
    assert_eq!(s.run(&inputs[..1], &[]).unwrap_err().exit_code(), 2);
    let swapped = [inputs[1].clone(), inputs[0].clone()];
    assert_eq!(s.run(&swapped, &[]).unwrap_err().exit_code(), 2);
    // Graphs with states cannot be split.
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3]));
    let y = g.neg(x).unwrap();
    let o = g.output("y", y);
    g.state(0, o).unwrap();
    assert_eq!(Split::layers(&[(cpu.clone(), 1.0), (cpu, 1.0)], g).unwrap_err().exit_code(), 3);
}

/// The cut is made where the fewest bytes cross: before the layer that widens.
#[test]
fn the_cut_is_made_where_little_crosses() {
    let mut rng = Rng::fresh("the_cut_is_made_where_little_crosses");
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [1, 4, 16, 16]));
    let mut conv = |g: &mut Graph, x: NodeId, from: usize, to: usize| {
        let w = g.constant(data(&mut rng, &[to, from, 3, 3]));
        let mut a = Conv::new(2);
        a.pad.iter_mut().for_each(|p| *p = (1, 1));
        g.conv(x, w, a).unwrap()
    };
    // Work: 4*64, 64*4, 4*64, 64*4; the fewest channels are in the middle.
    let mut h = x;
    for (from, to) in [(4, 64), (64, 4), (4, 64), (64, 4)] {
        h = conv(&mut g, h, from, to);
    }
    g.output("y", h);
    let assign = by_layers(&g, &[0.45, 0.55]).unwrap();
    let convs: Vec<usize> =
        g.ids().filter(|i| matches!(g.node(*i).op, Op::Conv(_))).map(|i| assign[i.index()]).collect();
    assert_eq!(convs, [0, 0, 1, 1]);
}
