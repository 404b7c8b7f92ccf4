//! Attention by cuDNN, compared with sums in f64.

use crate::ALONE;
use crate::common::standin::{self, StandIn};
use crate::common::*;
use crate::libraries::{Call, at, error, indices, tolerance};
use halcyon_hal::{Command, Device, Driver, Error, Options, Recording};
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::{DType, Graph, Scalar, TensorType};
use std::sync::Arc;

/// The scale of the scores, large enough that results change noticeably without it.
const SCALE: f64 = 0.4;

/// The attention composite. Its sizes do not matter here.
fn attention(causal: bool, scale: f64) -> Op {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [1, 1, 2, 8]));
    let y = g.attention(x, x, x, None, causal, scale).unwrap();
    g.node(y).op.clone()
}

/// The results according to the definition, in f64.
fn expected(call: &Call<'_>, causal: bool, scale: f64) -> Vec<f64> {
    let values = call.values();
    let dense = |i: usize| -> Vec<f64> {
        let v = &call.inputs[i].view;
        indices(&v.shape).map(|x| at(&values[i], v, &x)).collect()
    };
    let (q, k, v) = (dense(0), dense(1), dense(2));
    let (qs, ks) = (&call.inputs[0].view.shape, &call.inputs[1].view.shape);
    let (h, sq, d, hk, sk) = (qs[1], qs[2], qs[3], ks[1], ks[2]);
    let scale = Scalar::F(scale).cast(call.inputs[0].dtype).as_f64();
    let mut out = vec![];
    for row in 0..qs[0] * h * sq {
        let (n, head, i) = (row / (h * sq), row / sq % h, row % sq);
        let keys = (n * hk + head / (h / hk)) * sk;
        let seen = if causal { i + 1 + sk - sq } else { sk };
        let query = &q[row * d..][..d];
        let scores: Vec<f64> = (0..seen)
            .map(|j| query.iter().zip(&k[(keys + j) * d..]).map(|(x, y)| x * y).sum::<f64>() * scale)
            .collect();
        let top = scores.iter().fold(f64::MIN, |m, s| m.max(*s));
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut y = vec![0.0; d];
        for (j, w) in weights.iter().enumerate() {
            y.iter_mut().zip(&v[(keys + j) * d..]).for_each(|(y, v)| *y += w / sum * v);
        }
        out.extend(y);
    }
    out
}

fn call<'a>(op: &'a Op, dtype: DType, views: [View; 3]) -> Call<'a> {
    let shape = views[0].shape.to_vec();
    let inputs = views.map(|v| (dtype, v));
    Call { seed: fresh(), ..Call::new(op, &inputs, (dtype, &shape)) }
}

/// A different number in each run of the tests.
fn fresh() -> u64 {
    halcyon_test_host::seed("attention") | 1
}

/// Dense operands: batch, query heads, key heads, queries, keys, row length.
fn dense([b, h, hk, sq, sk, d]: [usize; 6]) -> [View; 3] {
    [View::dense(&[b, h, sq, d]), View::dense(&[b, hk, sk, d]), View::dense(&[b, hk, sk, d])]
}

/// Operands with the heads between the rows.
fn turned([b, h, hk, sq, sk, d]: [usize; 6]) -> [View; 3] {
    [(h, sq), (hk, sk), (hk, sk)].map(|(h, s)| View::dense(&[b, s, h, d]).permute(&[0, 2, 1, 3]))
}

/// Windows of larger tensors; rows start at multiples of 16 bytes.
fn windows([b, h, hk, sq, sk, d]: [usize; 6]) -> [View; 3] {
    let of = |h: usize, s: usize| {
        let all = View::dense(&[b, h + 1, s + 3, d + 16]);
        all.slice(&[0, 1, 2, 8], &[1; 4], &[b, h, s, d])
    };
    [of(h, sq), of(hk, sk), of(hk, sk)]
}

const SQUARE: [usize; 6] = [2, 8, 8, 192, 192, 64];
const SHARED: [usize; 6] = [1, 8, 2, 163, 420, 64];
const NARROW: [usize; 6] = [2, 6, 3, 210, 345, 40];

fn right(s: &StandIn, d: &dyn Device) {
    let (all, causal) = (attention(false, SCALE), attention(true, SCALE));
    let cases = [
        ("plain", dense(SQUARE), false),
        ("causal", dense(SQUARE), true),
        ("shared heads, more keys than queries", dense(SHARED), true),
        ("heads between rows", turned(NARROW), true),
        ("windows", windows(SHARED), false),
    ];
    for (i, (what, views, masked)) in cases.into_iter().enumerate() {
        for dtype in [DType::F16, DType::BF16] {
            let c = call(if masked { &causal } else { &all }, dtype, views.clone());
            let before = s.get("attentions");
            let (name, got) = c.run(d, i % 2 == 1);
            assert_eq!(s.get("attentions"), before + 1);
            let suffix = if masked { ".causal" } else { "" };
            assert_eq!(name, format!("cudnn.attention.{dtype}{suffix}"));
            let e = error(&got, &expected(&c, masked, SCALE));
            assert!(e <= tolerance(dtype), "{what}, {dtype}, seed {}: {e}", c.seed);
        }
    }
}

fn declined(s: &StandIn, d: &dyn Device) {
    let (all, causal) = (attention(false, SCALE), attention(true, SCALE));
    let asked = s.get("graph calls");
    let no = |op: &Op, dtype: DType, views: [View; 3], why: &str| {
        let e = call(op, dtype, views).kernel(d).unwrap_err();
        assert!(e.reason.contains(why), "{why}: {e:?}");
        e.dense
    };
    no(&all, DType::F32, dense(SQUARE), "takes f16 and bf16");
    no(&all, DType::F16, dense([8, 32, 8, 8, 1024, 128]), "fewer than 16 queries");
    no(&all, DType::F16, dense([1, 4, 4, 64, 64, 64]), "multiply-adds");
    no(&causal, DType::F16, dense([2, 8, 8, 256, 192, 64]), "attends to no key");
    no(&all, DType::F16, dense([2, 8, 8, 256, 256, 68]), "not 68");
    no(&all, DType::F16, dense([2, 8, 8, 256, 256, 264]), "not 264");
    for scale in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        no(&attention(false, scale), DType::F16, dense(SQUARE), "positive, finite scale");
    }
    let [q, k, v] = dense(SQUARE);
    let odd = View::dense(&[2, 8, 192, 68]).slice(&[0; 4], &[1; 4], &[2, 8, 192, 64]);
    no(&all, DType::F16, [odd, k.clone(), v.clone()], "rows that begin at multiples of 16 bytes");
    let late = View::dense(&[2, 8, 192, 72]).slice(&[0, 0, 0, 4], &[1; 4], &[2, 8, 192, 64]);
    no(&all, DType::F16, [q.clone(), late, v.clone()], "operands that begin at multiples of 16 bytes");
    let one = View::dense(&[2, 1, 192, 64]).expand(&[2, 8, 192, 64]);
    no(&all, DType::F16, [q.clone(), one, v.clone()], "not repeated");
    let columns = View::dense(&[2, 8, 64, 192]).permute(&[0, 1, 3, 2]);
    assert_eq!(no(&all, DType::F16, [q.clone(), columns, v.clone()], "must be dense"), [1]);
    let mask = (DType::F16, View::dense(&[192, 192]));
    let inputs: Vec<_> = [q, k, v].map(|v| (DType::F16, v)).into_iter().chain([mask]).collect();
    let e = Call::new(&all, &inputs, (DType::F16, &[2, 8, 192, 64])).kernel(d).unwrap_err();
    assert!(e.reason.contains("attention with a mask"), "{e:?}");
    assert_eq!(s.get("graph calls"), asked, "the library was not asked");
}

/// Lets each call of the library fail in turn. The kernel must be declined with a reason, or the run must
/// return an error, and nothing may leak.
fn faults(s: &StandIn) {
    let op = attention(true, SCALE);
    let c = call(&op, DType::F16, dense(SHARED));
    let none = s.get("descriptions");
    let (mut reasons, mut kernels) = (0, 0);
    let mut d = s.driver.open(0, &Options::default()).unwrap();
    for n in 0.. {
        s.set("fail graph", n);
        let made = c.kernel(&*d);
        let left = s.get("fail graph");
        s.set("fail graph", -1);
        match made {
            Err(e) => {
                assert!(e.reason.starts_with("cuDNN: ") && e.reason.ends_with("told to fail)"), "{n}: {e:?}");
                assert_eq!(s.get("descriptions"), none, "{n}: {e:?}");
                reasons += 1;
            }
            // The call concerned one engine only, so another engine was used.
            Ok(k) => {
                assert!(k.name() == "cudnn.attention.f16.causal" && s.get("descriptions") > none);
                kernels += 1;
                // The device keeps the plan, so open a new one.
                (d, _) = (s.driver.open(0, &Options::default()).unwrap(), (k, d));
                assert_eq!(s.get("descriptions"), none, "{n}");
            }
        }
        if left >= 0 {
            break;
        }
    }
    assert!(reasons > 100 && kernels > 10, "{reasons} reasons, {kernels} kernels");

    let kernel = c.kernel(&*d).unwrap();
    // The engines that the library lists first are not deterministic, exceed shared memory or need more
    // workspace.
    assert_eq!(kernel.workspace(), 4096);
    let asked = s.get("graph calls");
    let again = c.kernel(&*d).unwrap();
    assert_eq!(s.get("graph calls"), asked, "a plan is made once");
    drop(again);
    let buffers = c.buffers(&*d, &*kernel);
    let submit = || d.submit(&[Command::Library { kernel: &kernel, buffers: &buffers, args: &[], fault: 0 }]);
    let held = s.get("descriptions");
    let calls = {
        let before = s.get("graph calls");
        submit().unwrap();
        s.get("graph calls") - before
    };
    for n in 0..calls {
        s.set("fail graph", n);
        let e = submit().unwrap_err();
        assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("attention ("), "{n}: {e}");
        assert!(e.to_string().contains("told to fail"), "{n}: {e}");
        assert_eq!(s.get("descriptions"), held, "{n}");
    }
    s.set("fail graph", -1);
    let (_, got) = c.run(&*d, false);
    assert!(error(&got, &expected(&c, true, SCALE)) <= tolerance(DType::F16));
    captured(&*d, &c, &kernel, &buffers);
}

/// A device keeps the plans of a limited number of sizes. A kernel keeps its own plan alive.
fn kept(s: &StandIn) {
    let (op, d) = (attention(false, SCALE), s.driver.open(0, &Options::default()).unwrap());
    let make =
        |keys: usize| call(&op, DType::F16, dense([1, 8, 8, 192, 1024 + keys, 64])).kernel(&*d).unwrap();
    let first = make(0);
    let before = s.get("descriptions");
    drop(make(1));
    let one = s.get("descriptions") - before;
    (2..64).for_each(|i| drop(make(i)));
    let full = s.get("descriptions");
    assert_eq!(full - before, 63 * one);
    drop(make(64));
    assert_eq!(s.get("descriptions"), full + one, "the oldest plan left the list, but its kernel holds it");
    drop(first);
    assert_eq!(s.get("descriptions"), full);
}

/// A captured run reads the current content of its buffers.
fn captured(
    d: &dyn Device,
    c: &Call<'_>,
    kernel: &Arc<dyn halcyon_hal::LibraryKernel>,
    buffers: &[halcyon_hal::BufferRef],
) {
    let commands = [Command::Library { kernel, buffers, args: &[], fault: 0 }];
    let bound: Vec<_> = buffers.iter().collect();
    let r = d.capture(&Recording { commands: &commands, buffers: &bound, variables: &[] }).unwrap();
    let out = &buffers[c.inputs.len()];
    for seed in [fresh(), fresh() ^ 0xabc] {
        let other = Call { seed, inputs: c.inputs.clone(), output: c.output.clone(), ..*c };
        for (b, (o, v)) in buffers.iter().zip(other.inputs.iter().zip(other.values())) {
            d.write(b, 0, &pack(o.dtype, &v)).unwrap();
        }
        d.write(out, 0, &vec![0; out.bytes()]).unwrap();
        assert!(d.launch_capture(&*r, &bound, &[]).unwrap());
        let got: Vec<f64> = unpack(DType::F16, &download(d, out)).iter().map(|v| v.as_f64()).collect();
        assert!(error(&got, &expected(&other, true, SCALE)) <= tolerance(DType::F16), "seed {seed}");
    }
}

#[test]
fn attention_is_the_librarys() {
    if halcyon_test_host::left_out("attention_is_the_librarys") {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(s) = standin::all().into_iter().next() else { return };
    let held = || ["handles", "descriptions", "memory", "graphs", "execs"].map(|n| s.get(n));
    let before = held();
    let d = s.driver.open(0, &Options::default()).unwrap();
    declined(&s, &*d);
    right(&s, &*d);
    assert!(d.kernel_libraries()[1].1.ends_with(" 9.10.2, with attention"), "{:?}", d.kernel_libraries());
    drop(d);
    assert_eq!(held(), before);
    faults(&s);
    kept(&s);
    assert_eq!(held(), before);
}

#[test]
fn older_libraries_have_convolutions_alone() {
    if halcyon_test_host::left_out("older_libraries_have_convolutions_alone") {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(s) = standin::all().into_iter().next() else { return };
    let op = attention(false, SCALE);
    let conv = Op::Conv(halcyon_ir::ops::Conv::new(2));
    let image = [View::dense(&[1, 8, 20, 20]), View::dense(&[16, 8, 3, 3])].map(|v| (DType::F16, v));
    let check = |s: &StandIn, why: &str| {
        let d = s.driver.open(0, &Options::default()).unwrap();
        let e = call(&op, DType::F16, dense(SQUARE)).kernel(&*d).unwrap_err();
        assert!(e.reason.contains(why), "{e:?}");
        let found = d.kernel_libraries();
        assert!(found[1].1.contains(&format!("no attention: {}", e.reason)), "{found:?}");
        let k = Call::new(&conv, &image, (DType::F16, &[1, 16, 18, 18])).kernel(&*d).unwrap();
        assert_eq!(k.name(), "cudnn.conv.f16");
    };
    s.set("dnn version", 91001);
    check(&s, "cuDNN 9.10.1 is older than 9.10.2");
    s.set("dnn version", 91002);
    check(&standin::older(), "no function cudnnBackendCreateDescriptor");
}
