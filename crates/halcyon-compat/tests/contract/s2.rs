//! Row S2.8 of the contract (docs/compat.md): what a vendor's hardware can do is used where it is present.

use crate::machine;
use halcyon::ir::plan::StepWork;
use halcyon::ir::reference::eval_f64;
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, MatmulPrecision, Scalar, Session};
use halcyon_test::Rng;
use halcyon_test::devices::devices;

/// Random numbers of a dtype.
fn data(rng: &mut Rng, dtype: DType, dims: &[usize]) -> ConstData {
    let times = if dtype.is_int() { 100.0 } else { 1.0 };
    let v = rng.f32s(dims.iter().product());
    ConstData::from_scalars(dtype, dims, v.iter().map(|v| Scalar::F(f64::from(*v) * times).cast(dtype)))
        .unwrap()
}

/// A product of two inputs whose numbers are widened to f32, and its operands.
fn product(rng: &mut Rng, dtype: DType) -> (Graph, [ConstData; 2]) {
    let inputs = [data(rng, dtype, &[64, 96]), data(rng, dtype, &[96, 48])];
    let mut g = Graph::new();
    let [x, w] = [0, 1].map(|i| g.input(["x", "w"][i], TensorType::new(dtype, &inputs[i].dims)));
    let wide = |g: &mut Graph, x| match dtype {
        DType::F32 | DType::F16 | DType::BF16 => x,
        _ => g.cast(x, DType::F32).unwrap(),
    };
    let (x, w) = (wide(&mut g, x), wide(&mut g, w));
    let y = g.matmul(x, w).unwrap();
    g.output("y", y);
    (g, inputs)
}

/// Runs a graph. Returns the names of its kernels, whether a generated kernel uses matrix units, and the
/// largest error relative to the largest result.
fn run(b: &Backend, g: &Graph, inputs: &[ConstData]) -> (Vec<String>, bool, f64) {
    let session = Session::new(b, g.clone());
    let got = session.run(inputs).unwrap();
    let want = eval_f64(g, inputs, &[]).unwrap();
    let most = want[0].scalars().map(|v| v.as_f64().abs()).fold(0.0, f64::max);
    let pairs = got[0].scalars().zip(want[0].scalars());
    let error = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max) / most;
    let plan = session.prepare(inputs).unwrap();
    let steps = &plan.plan().steps;
    let units = |w: &StepWork| matches!(w, StepWork::Kernel { kernel, .. } if !kernel.fragments.is_empty());
    let names = steps.iter().map(|s| s.work.kernel_name()).collect();
    (names, steps.iter().any(|s| units(&s.work)), error)
}

/// The CPU's kernels use the best instructions of the processor, and every lesser set on request, and all of
/// them are right.
#[test]
#[cfg(target_arch = "x86_64")]
fn s2_08_the_cpu_uses_the_instructions_that_it_has() {
    use halcyon::hal::cpu::isa::IsaLevel;
    const VARIABLE: &str = "HALCYON_CPU_ISA";
    let test = "s2::s2_08_the_cpu_uses_the_instructions_that_it_has";
    let Ok(level) = std::env::var(VARIABLE) else {
        // The processor's flags, as the system reports them, decide what is available.
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("flags")).unwrap_or_default();
        let has = |flags: &[&str]| flags.iter().all(|f| line.split_whitespace().any(|x| x == *f));
        let names: Vec<&str> = IsaLevel::available().iter().map(|l| l.name()).collect();
        let steps = [
            ("avx2", &["avx2", "fma", "f16c"][..]),
            ("avx512", &["avx512f", "avx512bw", "avx512dq", "avx512vl"]),
            ("avx512vnni", &["avx512_vnni"]),
            ("avx512bf16", &["avx512_bf16"]),
        ];
        if !line.is_empty() && cfg!(feature = "simd") {
            let listed = steps.iter().take_while(|(_, flags)| has(flags)).map(|(name, _)| *name);
            let want: Vec<&str> = std::iter::once("portable").chain(listed).collect();
            assert_eq!(names[..want.len()], want[..]);
            // AMX also needs the system's permission.
            assert!(
                names.len() == want.len() || (has(&["amx_tile"]) && names.ends_with(&["amx"])),
                "{names:?}"
            );
        }
        names.iter().for_each(|l| machine::alone_with(test, &[(VARIABLE, l)]));
        return;
    };
    machine::alone(test, || {
        let open = |p| Backend::builder().backend_type(BackendType::Cpu).precision(p).build().unwrap();
        let (b, fast) = (open(MatmulPrecision::Highest), open(MatmulPrecision::Medium));
        let p = &b.info().properties;
        assert_eq!(p["instruction_set"], level);
        let isa = p["simd"].as_str();
        let of_level = match level.as_str() {
            "portable" => "portable",
            "avx2" => "avx2+fma",
            _ => "avx512",
        };
        assert_eq!(isa, of_level, "{level}");
        let mut rng = Rng::fresh(test);
        // f32: by vectors of the set.
        let (g, inputs) = product(&mut rng, DType::F32);
        let (names, _, error) = run(&b, &g, &inputs);
        assert!(
            names.iter().any(|n| n.starts_with(&format!("cpu.gemm.{isa}"))) && error < 1e-6,
            "{names:?} {error}"
        );
        // 8-bit integers: by the instruction for them, if there is one, and exactly.
        let (g, inputs) = product(&mut rng, DType::I8);
        let (names, _, error) = run(&b, &g, &inputs);
        let with = match level.as_str() {
            "amx" => "cpu.gemm_i8.amx_int8",
            "avx512vnni" | "avx512bf16" => "cpu.gemm_i8.avx512_vnni",
            _ => "cpu.gemm_i8.",
        };
        assert!(names.iter().any(|n| n.starts_with(with)) && error == 0.0, "{level}: {names:?} {error}");
        // bf16: by the instruction for it, where it is faster.
        let (g, inputs) = product(&mut rng, DType::BF16);
        let code = fast.info().properties["bf16_products"].as_str();
        match level.as_str() {
            "amx" => assert!(code == "amx_bf16" || code == "avx512_bf16" || code == "f32", "{code}"),
            "avx512bf16" => assert!(code == "avx512_bf16" || code == "f32", "{code}"),
            _ => assert_eq!(code, "f32", "{level}"),
        }
        let (names, _, error) = run(&fast, &g, &inputs);
        assert!(error < 8e-3, "{level}: {names:?} {error}");
        if code != "f32" {
            let with = format!("cpu.gemm_bf16.{code}");
            assert!(names.iter().any(|n| n.starts_with(&with)), "{level}: {names:?}");
        }
        // Quantised weights, and attention as one kernel, which stores no matrix of scores.
        let (names, _) = attention(&b);
        assert!(names.iter().any(|n| *n == format!("cpu.attention.{isa}")), "{names:?}");
    });
}

/// Attention of 320 rows: the names of its kernels, and the bytes of memory that the plan needs besides its
/// inputs and its result.
fn attention(b: &Backend) -> (Vec<String>, usize) {
    let (mut rng, mut g) = (Rng::fresh("attention"), Graph::new());
    let inputs: Vec<ConstData> = (0..3).map(|_| data(&mut rng, DType::F32, &[1, 2, ROWS, 32])).collect();
    let [q, k, v] =
        [0, 1, 2].map(|i| g.input(["q", "k", "v"][i], TensorType::new(DType::F32, &inputs[i].dims)));
    let y = g.attention(q, k, v, None, true, 0.2).unwrap();
    g.output("y", y);
    let (names, _, error) = run(b, &g, &inputs);
    assert!(error < 1e-5, "{}: {error}", b.id());
    let session = Session::new(b, g);
    let plan = session.prepare(&inputs).unwrap();
    (names, plan.plan().needed())
}

const ROWS: usize = 320;

/// Attention is a kernel that goes over the keys in blocks, on every device of this machine.
#[test]
fn s2_08_attention_stores_no_matrix_of_scores() {
    let scores = 4 * 2 * ROWS * ROWS;
    for b in devices("s2_08_attention_stores_no_matrix_of_scores", Level::O2) {
        let (names, bytes) = attention(&b);
        assert!(bytes < scores / 2, "{}: {names:?} use {bytes} bytes, the scores have {scores}", b.id());
        assert!(names.iter().any(|n| n.contains("attention")), "{}: {names:?}", b.id());
    }
}

/// Over the vendors' stand-ins: tensor cores and matrix cores in the libraries' kernels and in generated
/// ones, products of 8-bit floats, and cuDNN's attention.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s2_08_matrix_units_and_eight_bit_floats_of_the_vendors() {
    use halcyon::hal::simt::SimtDriver;
    use halcyon::hal::{Driver, cuda, registry, rocm};
    use std::sync::Arc;
    machine::alone("s2::s2_08_matrix_units_and_eight_bit_floats_of_the_vendors", || {
        let mut rng = Rng::fresh("s2_08");
        for s in halcyon_test::standins::all() {
            let kind = s.driver.kind();
            registry::register(s.driver.clone()).unwrap();
            let open = |units: bool| {
                let b = Backend::builder().backend_type(kind).precision(match units {
                    true => MatmulPrecision::High,
                    false => MatmulPrecision::Highest,
                });
                b.enable_tensor_cores(units).build().unwrap()
            };
            let lt = if kind == BackendType::Cuda { "cublaslt" } else { "hipblaslt" };
            // The library multiplies halves on matrix units; without them, a plain kernel does.
            for dtype in [DType::F16, DType::BF16] {
                let (g, inputs) = product(&mut rng, dtype);
                let (names, _, error) = run(&open(true), &g, &inputs);
                assert_eq!(names, [format!("{lt}.{}", dtype.name())], "{kind}");
                assert!(error < 8e-3, "{kind} {dtype}: {error}");
                let (names, units, error) = run(&open(false), &g, &inputs);
                assert!(!names[0].starts_with(lt) && !units && error < 8e-3, "{kind}: {names:?} {error}");
            }
            // 8-bit floats and integers.
            let f8 = if kind == BackendType::Cuda { DType::F8E4M3FN } else { DType::F8E4M3FNUZ };
            for (dtype, within) in [(f8, 1e-4), (DType::I8, 0.0)] {
                let (g, inputs) = product(&mut rng, dtype);
                let (names, _, error) = run(&open(true), &g, &inputs);
                let with = format!("{lt}.{}", dtype.name());
                assert!(names.contains(&with) && error <= within, "{kind}: {names:?} {error}");
            }
            // Attention of a prompt in f16: cuDNN's kernel on CUDA, a generated one on ROCm.
            let mut g = Graph::new();
            let dims = [1, 8, 256, 64];
            let inputs: Vec<ConstData> = (0..3).map(|_| data(&mut rng, DType::F16, &dims)).collect();
            let of = |g: &mut Graph, n: &str| g.input(n, TensorType::new(DType::F16, dims));
            let (q, k, v) = (of(&mut g, "q"), of(&mut g, "k"), of(&mut g, "v"));
            let y = g.attention(q, k, v, None, false, 0.2).unwrap();
            g.output("y", y);
            let names = Session::new(&open(true), g).prepare(&inputs).unwrap();
            let names: Vec<String> = names.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
            match kind {
                BackendType::Cuda => assert!(names[0].starts_with("cudnn.attention.f16"), "{names:?}"),
                _ => assert!(names.iter().all(|n| n.starts_with("ir.")), "{names:?}"),
            }
            // Without libraries, generated kernels use the units.
            let family = if kind == BackendType::Cuda { &cuda::CUDA } else { rocm_gfx90a() };
            // SAFETY: the stand-in has the vendor's functions.
            let bare = unsafe { SimtDriver::over(family, &s.path, &s.path) };
            registry::register(Arc::new(bare)).unwrap();
            let (g, inputs) = product(&mut rng, DType::F16);
            let (names, units, error) = run(&open(true), &g, &inputs);
            assert!(units && error < 8e-3, "{kind}: {names:?} {error}");
            let (names, units, _) = run(&open(false), &g, &inputs);
            assert!(!units, "{kind}: {names:?}");
        }
        fn rocm_gfx90a() -> &'static halcyon::hal::simt::Family {
            static AMD: halcyon::hal::simt::Family =
                halcyon::hal::simt::Family { architecture: |_| Some("gfx90a".into()), ..rocm::ROCM };
            &AMD
        }
    });
}
