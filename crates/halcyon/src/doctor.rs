//! Checks whether a backend works on this machine, from loading its library to a matrix product. Each check
//! gives a line with its status and measurements.
//!
//! A faulty driver may crash the process. So programs, such as `halcyon doctor`, run [`examine`] in a child
//! process ([`halcyon_hal::child`]).

use crate::backend::Backend;
use crate::session::Session;
use halcyon_hal::policy::Fallback;
use halcyon_hal::select;
use halcyon_hal::{BackendType, Command, Device, DeviceInfo, Tag, registry};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::kernel::{Builder, Kernel, Ty};
use halcyon_ir::passes::AmpPolicy;
use halcyon_ir::{ConstData, DType, Graph, Scalar, TensorType};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The status of a check. The variants are in order of severity; the worst status in a report is its verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Pass,
    /// The backend is not on this machine, or not in this build.
    Absent,
    Warn,
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Name of the check: `library`, `device`, `open`, `libraries` (kernel libraries, if the backend can use
    /// any), `kernel`, `copies`, `product`, `first use`.
    pub check: String,
    /// The device, if the check concerns one: `cpu:0`.
    pub device: Option<String>,
    pub status: Status,
    /// What was found, or why the check failed.
    pub text: String,
    /// What to do about a problem.
    pub fix: Option<String>,
    /// The findings in machine-readable form.
    pub facts: Value,
}

/// Number of elements of the test kernel.
const ITEMS: usize = 4096;
/// Bytes of each timed copy.
const COPY_BYTES: usize = 16 << 20;
/// Rows, columns and depth of the test product.
const SIDE: usize = 256;
/// Minimum time for which the product is repeated.
const MIN_TIME: Duration = Duration::from_millis(100);

fn fix(e: &Error) -> Option<String> {
    match e {
        Error::Unavailable { fix, .. } => Some(fix.clone()),
        Error::Unsupported { next, .. } | Error::OutOfMemory { next, .. } | Error::Driver { next, .. } => {
            Some(next.clone())
        }
        _ => None,
    }
}

/// Examines a backend and all its devices. Calls `tell` before each check with its name and device, so that a
/// check that crashes the process can be identified, and after each check with its line.
pub fn examine(kind: BackendType, tell: &mut dyn FnMut(Event)) {
    tell(Event::Started { check: "library".into(), device: None });
    let driver = match registry::driver(kind).and_then(|d| d.probe().map(|infos| (d, infos))) {
        Ok(x) => x,
        Err(e) => {
            let (status, tried) = match &e {
                Error::Unavailable { tried, .. } => (Status::Absent, tried.clone()),
                _ => (Status::Fail, vec![]),
            };
            return tell(Event::Done(Line {
                check: "library".into(),
                device: None,
                status,
                text: select::brief(&e),
                fix: fix(&e),
                facts: json!({ "tried": tried }),
            }));
        }
    };
    let (driver, infos) = driver;
    let library = infos.iter().find_map(|d| d.properties.get("library")).map_or("built in", String::as_str);
    tell(Event::Done(Line {
        check: "library".into(),
        device: None,
        status: Status::Pass,
        text: format!("{library}, {} device{}", infos.len(), if infos.len() == 1 { "" } else { "s" }),
        fix: None,
        facts: json!({ "library": library, "devices": infos.len() }),
    }));
    for info in infos {
        let id = info.id.clone();
        let mut step = |check: &str, work: &mut dyn FnMut() -> Result<(String, Value)>| -> bool {
            tell(Event::Started { check: check.into(), device: Some(id.clone()) });
            let line = |status, text, fix, facts| Line {
                check: check.into(),
                device: Some(id.clone()),
                status,
                text,
                fix,
                facts,
            };
            let (done, ok) = match work() {
                Ok((text, facts)) => (line(Status::Pass, text, None, facts), true),
                Err(e) => (line(Status::Fail, e.to_string(), fix(&e), Value::Null), false),
            };
            tell(Event::Done(done));
            ok
        };
        step("device", &mut || Ok((describe(&info), json!(info))));
        let start = Instant::now();
        let mut backend = None;
        let open = step("open", &mut || {
            let start = Instant::now();
            // Opens this device, without a fallback and without mixed precision, even if the environment or
            // the configuration file requests them.
            let b = Backend::builder().backend_type(driver.kind()).device(info.index);
            backend = Some(b.fallback(Fallback::Never).amp(AmpPolicy::None).build()?);
            let took = start.elapsed().as_secs_f64();
            Ok((milliseconds(took), json!({ "seconds": took })))
        });
        let (true, Some(b)) = (open, backend) else { continue };
        let d = &**b.device();
        let libraries = d.kernel_libraries();
        if !libraries.is_empty() {
            let text: Vec<String> =
                libraries.iter().map(|(name, found)| format!("{name}: {found}")).collect();
            let facts = json!(libraries.iter().cloned().collect::<std::collections::BTreeMap<_, _>>());
            step("libraries", &mut || Ok((text.join("; "), facts.clone())));
        }
        let ran = step("kernel", &mut || kernel(d));
        let first = start.elapsed().as_secs_f64();
        step("copies", &mut || copies(d));
        step("product", &mut || product(&b));
        if ran {
            let text = format!("{} from opening to the first kernel's result", milliseconds(first));
            step("first use", &mut || Ok((text.clone(), json!({ "seconds": first }))));
        }
    }
}

/// The events that [`examine`] reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    Started { check: String, device: Option<String> },
    Done(Line),
}

fn milliseconds(s: f64) -> String {
    format!("{:.2} ms", s * 1e3)
}

fn describe(d: &DeviceInfo) -> String {
    let mut s = d.name.clone();
    if let Some(m) = d.memory_gb() {
        s += &format!(", {m:.1} GiB");
    }
    if let Some(v) = &d.driver_version {
        s += &format!(", driver {v}");
    }
    if d.software {
        s += ", runs on the CPU";
    }
    s
}

/// A kernel of `y[i] = x[i] * factor + nonce + i` in 32 bits.
fn scramble() -> Result<Kernel> {
    let b = Builder::new("doctor", [64, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::U32, false), b.raw_buffer(DType::U32, true));
    let (n, nonce, factor) = (b.size("n"), b.param("nonce", Ty::U32), b.param("factor", Ty::U32));
    let i = b.linear_id();
    b.if_(i.lt(n), || b.store(y, i, b.load(x, i) * factor + nonce + i.to(Ty::U32)));
    b.finish()
}

const FACTOR: u32 = 2_654_435_761;

/// Compiles a kernel, runs it on unpredictable numbers, and compares every result.
fn kernel(d: &dyn Device) -> Result<(String, Value)> {
    let nonce = nonce();
    let start = Instant::now();
    let program = d.compile(&scramble()?)?;
    let compile = start.elapsed().as_secs_f64();
    let x: Vec<u32> = (0..ITEMS as u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ nonce).collect();
    let want: Vec<u32> = (0..ITEMS as u32)
        .zip(&x)
        .map(|(i, x)| x.wrapping_mul(FACTOR).wrapping_add(nonce).wrapping_add(i))
        .collect();
    let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
    let (from, to) = (d.alloc(bytes.len(), Tag::Io)?, d.alloc(bytes.len(), Tag::Io)?);
    d.write(&from, 0, &bytes)?;
    d.write(&to, 0, &vec![0xA5; bytes.len()])?;
    let params = [Scalar::I(ITEMS as i64), Scalar::U(u64::from(nonce)), Scalar::U(u64::from(FACTOR))];
    let groups = [ITEMS.div_ceil(64) as u32, 1, 1];
    let start = Instant::now();
    let buffers = [from, to.clone()];
    d.submit(&[Command::Launch { program: &program, groups, buffers: &buffers, params: &params, fault: 0 }])?;
    let mut got = vec![0u8; bytes.len()];
    d.read(&to, 0, &mut got)?;
    let run = start.elapsed().as_secs_f64();
    let got: Vec<u32> = got.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    // FNV-1a, one word at a time.
    let sum = |v: &[u32]| {
        let eat = |a: u64, x: &u32| (a ^ u64::from(*x)).wrapping_mul(0x0100_0000_01B3);
        v.iter().fold(0xCBF2_9CE4_8422_2325, eat)
    };
    if let Some(i) = (0..ITEMS).find(|i| got[*i] != want[*i]) {
        return Err(Error::Driver {
            device: d.info().id.clone(),
            call: "a kernel on random numbers".into(),
            code: format!("element {i} is {:#x}, expected {:#x} (nonce {nonce:#x})", got[i], want[i]),
            next: "The driver computes wrong results: update it, or choose another backend".into(),
        });
    }
    let text = format!(
        "compiled in {}, ran in {}, checksum {:016x} as on the host (nonce {nonce:#x})",
        milliseconds(compile),
        milliseconds(run),
        sum(&got)
    );
    Ok((
        text,
        json!({ "compile_seconds": compile, "run_seconds": run, "nonce": nonce, "checksum": sum(&got) }),
    ))
}

fn nonce() -> u32 {
    let t = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let n = t.map_or(1, |d| d.as_nanos() as u64) ^ u64::from(std::process::id()) << 32;
    (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

/// Measures bytes per second to the device, from it, and inside it (counting both the read and the write of a
/// copy), best of three.
fn copies(d: &dyn Device) -> Result<(String, Value)> {
    let size = d.available().map_or(COPY_BYTES, |free| COPY_BYTES.min((free / 4) as usize)).max(4096);
    let mut bytes = host::zeros(size, "copies to be timed")?;
    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
    let (a, b) = (d.alloc(size, Tag::Io)?, d.alloc(size, Tag::Io)?);
    let mut best = [f64::INFINITY; 3];
    let mut back = host::zeros(size, "copies to be timed")?;
    for _ in 0..3 {
        let mut time = |k: usize, f: &mut dyn FnMut() -> Result<()>| -> Result<()> {
            let start = Instant::now();
            f()?;
            d.synchronize()?;
            best[k] = best[k].min(start.elapsed().as_secs_f64());
            Ok(())
        };
        time(0, &mut || d.write(&a, 0, &bytes))?;
        time(2, &mut || {
            d.submit(&[Command::Copy { src: &a, src_offset: 0, dst: &b, dst_offset: 0, bytes: size }])
        })?;
        time(1, &mut || d.read(&b, 0, &mut back))?;
    }
    if back != bytes {
        return Err(Error::Driver {
            device: d.info().id.clone(),
            call: "copies".into(),
            code: "the bytes read back differ from those written".into(),
            next: "The driver loses data: update it, or choose another backend".into(),
        });
    }
    let rate = |k: usize, n: usize| (n * size) as f64 / best[k].max(1e-9);
    let (up, down, inside) = (rate(0, 1), rate(1, 1), rate(2, 2));
    let gb = |r: f64| format!("{:.2} GB/s", r / 1e9);
    let text = format!(
        "{} to the device, {} from it, {} within it (reads plus writes)",
        gb(up),
        gb(down),
        gb(inside)
    );
    Ok((text, json!({ "upload": up, "download": down, "device": inside, "bytes": size })))
}

/// Computes a matrix product whose sums are exact in f32, compares five of its elements, and measures its
/// rate.
fn product(b: &Backend) -> Result<(String, Value)> {
    let mut g = Graph::new();
    let ty = TensorType::new(DType::F32, [SIDE, SIDE]);
    let (x, y) = (g.input("x", ty.clone()), g.input("y", ty));
    let z = g.matmul(x, y)?;
    g.output("z", z);
    // With small integers every sum is exact in f32.
    let seed = nonce() as usize;
    let entry = |i: usize, k: usize| ((i.wrapping_mul(31) ^ k.wrapping_mul(17) ^ seed) % 7) as f32 - 3.0;
    let fill = |f: &dyn Fn(usize, usize) -> f32| -> Result<ConstData> {
        let v: Vec<f32> = (0..SIDE * SIDE).map(|i| f(i / SIDE, i % SIDE)).collect();
        ConstData::from_slice(&[SIDE, SIDE], &v)
    };
    let inputs = [fill(&|i, k| entry(i, k))?, fill(&|k, j| entry(j, k + 1))?];
    let session = Session::new(b, g);
    let got = session.run(&inputs)?;
    let got = got.first().map(ConstData::to_vec::<f32>).unwrap_or_default();
    for (i, j) in [(0, 0), (1, SIDE - 1), (SIDE / 2, SIDE / 3), (SIDE - 1, 2), (SIDE - 1, SIDE - 1)] {
        let want: f32 = (0..SIDE).map(|k| entry(i, k) * entry(j, k + 1)).sum();
        let it = got.get(i * SIDE + j).copied().unwrap_or(f32::NAN);
        if it != want {
            return Err(Error::Driver {
                device: b.id().into(),
                call: "a matrix product".into(),
                code: format!("element ({i}, {j}) is {it}, expected {want}"),
                next: "The device computes wrong results: update its driver, or choose another backend"
                    .into(),
            });
        }
    }
    let (start, mut n, mut best) = (Instant::now(), 0, f64::INFINITY);
    while n < 3 || start.elapsed() < MIN_TIME {
        best = best.min(session.time(&inputs, 1)?.as_secs_f64());
        n += 1;
    }
    let rate = 2.0 * (SIDE * SIDE * SIDE) as f64 / best.max(1e-9);
    let text = format!("{SIDE}x{SIDE}x{SIDE} in f32: exact, {:.1} GFLOP/s", rate / 1e9);
    Ok((text, json!({ "side": SIDE, "flops_per_second": rate })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(kind: BackendType) -> Vec<Line> {
        let (mut lines, mut open) = (vec![], None);
        examine(kind, &mut |e| match e {
            Event::Started { check, device } => open = Some((check, device)),
            Event::Done(l) => {
                assert_eq!(open.take(), Some((l.check.clone(), l.device.clone())), "each step is announced");
                lines.push(l);
            }
        });
        lines
    }

    #[test]
    fn the_cpu_passes_every_step() {
        let l = lines(BackendType::Cpu);
        let names: Vec<&str> = l.iter().map(|l| l.check.as_str()).collect();
        assert_eq!(names, ["library", "device", "open", "kernel", "copies", "product", "first use"]);
        assert!(l.iter().all(|l| l.status == Status::Pass && l.fix.is_none()), "{l:#?}");
        assert!(l[5].facts["flops_per_second"].as_f64() > Some(1e6), "{l:#?}");
    }

    /// A device that computes nothing must be reported.
    #[test]
    fn a_device_that_computes_nothing_fails() {
        let l = lines(BackendType::Noop);
        let of = |check: &str| l.iter().find(|l| l.check == check).map(|l| l.status);
        assert_eq!((of("open"), of("kernel")), (Some(Status::Pass), Some(Status::Fail)), "{l:#?}");
        assert!(l.iter().any(|l| l.status == Status::Fail && l.fix.is_some()), "{l:#?}");
    }

    #[test]
    fn a_backend_without_a_driver_is_absent() {
        let l = lines(BackendType::Cuda);
        assert_eq!((l.len(), l[0].status), (1, Status::Absent));
    }
}
