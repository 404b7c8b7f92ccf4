//! Random numbers, bytes and small kernels for driver tests.

use crate::{BufferRef, Command, Device, Program, Result, Tag};
use halcyon_ir::kernel::{Builder, Kernel, Reduce, Ty};
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;

/// Pseudo-random numbers (xorshift64*, Vigna 2016). The seed is printed, so that failures can be reproduced.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// A generator whose seed is `HALCYON_SEED` if that is set to a number, else the time.
    pub fn fresh() -> Random {
        if let Some(seed) = std::env::var("HALCYON_SEED").ok().and_then(|s| s.parse().ok()) {
            return Random::seeded(seed);
        }
        let t = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Random::seeded(t.map_or(1, |t| t.as_nanos() as u64))
    }

    pub fn seeded(seed: u64) -> Random {
        println!("seed {seed}");
        Random(seed | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number in [0, n). `n` must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.below(256) as u8).collect()
    }
}

/// Encodes values as bytes of a type.
pub fn pack(dtype: DType, values: &[Scalar]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_bytes(dtype)[..dtype.size()].to_vec()).collect()
}

/// Decodes bytes of a type to values.
pub fn unpack(dtype: DType, bytes: &[u8]) -> Vec<Scalar> {
    bytes.chunks_exact(dtype.size()).map(|b| Scalar::from_bytes(dtype, b)).collect()
}

/// A new buffer with these bytes.
pub fn upload(d: &dyn Device, bytes: &[u8]) -> BufferRef {
    let b = d.alloc(bytes.len(), Tag::Io).unwrap();
    d.write(&b, 0, bytes).unwrap();
    b
}

/// All bytes of a buffer.
pub fn download(d: &dyn Device, b: &BufferRef) -> Vec<u8> {
    let mut out = vec![0; b.bytes()];
    d.read(b, 0, &mut out).unwrap();
    out
}

/// Submits one launch without a fault id.
pub fn launch(
    d: &dyn Device,
    program: &Arc<dyn Program>,
    groups: [u32; 3],
    buffers: &[&BufferRef],
    params: &[Scalar],
) -> Result<()> {
    let buffers: Vec<BufferRef> = buffers.iter().map(|b| (*b).clone()).collect();
    d.submit(&[Command::Launch { program, groups, buffers: &buffers, params, fault: 0 }])
}

/// `y[i] = x[i] * a + c` for `i < n`, in the compute type of `dtype`.
pub fn affine(dtype: DType) -> Kernel {
    let b = Builder::new(&format!("affine_{dtype}"), [32, 1, 1]);
    let ty = Ty::of(dtype);
    let (x, y) = (b.raw_buffer(dtype, false), b.raw_buffer(dtype, true));
    let (n, a, c) = (b.size("n"), b.param("a", ty), b.param("c", ty));
    let i = b.linear_id();
    b.if_(i.lt(n), || b.store(y, i, b.load(x, i) * a + c));
    b.finish().unwrap()
}

/// Parameters of every type, in an order that mixes their sizes; 64-bit floats only if `f64`. The kernel
/// writes each parameter to the first element of its own buffer.
pub fn params_of_every_type(f64: bool) -> (Kernel, Vec<Ty>) {
    let mut types = vec![Ty::I32, Ty::I64, Ty::U64, Ty::U32, Ty::F32, Ty::I64, Ty::F32];
    if f64 {
        types.extend([Ty::F64, Ty::I32, Ty::F64]);
    }
    let b = Builder::new("all_params", [1, 1, 1]);
    let buffers: Vec<_> = types.iter().map(|t| b.raw_buffer(t.dtype(), true)).collect();
    let params: Vec<_> = types.iter().enumerate().map(|(i, t)| b.param(&format!("q{i}"), *t)).collect();
    for (buf, p) in buffers.iter().zip(params) {
        b.store(*buf, 0, p);
    }
    (b.finish().unwrap(), types)
}

/// Every work-item of a three-dimensional grid adds one to its own element and writes its workgroup's and its
/// own index.
pub fn grid() -> Kernel {
    let b = Builder::new("grid", [4, 2, 2]);
    let (count, place) = (b.raw_buffer(DType::I32, true), b.raw_buffer(DType::I32, true));
    let group = b.let_((b.group_id(2) * b.groups(1) + b.group_id(1)) * b.groups(0) + b.group_id(0));
    let local = b.let_((b.local_id(2) * 2 + b.local_id(1)) * 4 + b.local_id(0));
    let i = b.let_(group * 16 + local);
    b.atomic_add(count, i, 1);
    b.store(place, i, group * 100 + local);
    b.finish().unwrap()
}

/// `out[i] = table[index[i]]`; indices outside `0..n` are clamped and reported.
pub fn gather() -> Kernel {
    let b = Builder::new("gather_checked", [16, 1, 1]);
    let (table, index) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::I32, false));
    let out = b.raw_buffer(DType::F32, true);
    let (n, len) = (b.size("n"), b.size("len"));
    let fault = b.fault();
    let i = b.linear_id();
    b.if_(i.lt(len), || {
        let j = b.load(index, i);
        let bad = j.lt(0).or(j.ge(n));
        b.if_(bad, || fault.set());
        let clamped = j.max(0).min(n - 1);
        b.store(out, i, b.load(table, clamped));
    });
    b.finish().unwrap()
}

/// Sum of each workgroup's 64 elements, through workgroup memory and barriers.
pub fn group_sum() -> Kernel {
    let b = Builder::new("group_sum", [64, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::F32, true));
    let scratch = b.local(Ty::F32, 64);
    let v = b.load(x, b.linear_id());
    let s = b.group_reduce(Reduce::Add, v, scratch);
    b.if_(b.local_id(0).equals(0), || b.store(y, b.linear_group(), s));
    b.finish().unwrap()
}

/// One slow work-item: evaluates `v = v * a + 1` `n` times.
pub fn slow() -> Kernel {
    let b = Builder::new("slow", [1, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::F32, true));
    let (n, a) = (b.size("n"), b.param("a", Ty::F32));
    let v = b.var(b.load(x, 0));
    b.for_(0, n, 1, |_| v.set(v.get() * a + 1.0));
    b.store(y, 0, v.get());
    b.finish().unwrap()
}
