//! Writes a model as a GGUF file, each tensor in the type that was chosen for it.

use super::content::Content;
use halcyon::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{GgmlType, GgufWriter, TensorInfo};
use half::{bf16, f16};
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread::ScopedJoinHandle;

/// Elements that are converted before their bytes are written. All types have blocks of a divisor of this.
const SLAB: usize = 1 << 22;
/// Elements that are decoded before they are encoded, so that they stay in a cache of the processor.
const PIECE: usize = 1 << 12;

/// How a file is written.
pub struct WriteOptions<'a> {
    /// Threads that convert; `None`: one per processor.
    pub threads: Option<NonZero<usize>>,
    /// Whether tensors in blocks may get another block type, which adds the errors of both.
    pub requantise: bool,
    /// Asked before each slab: whether to stop.
    pub interrupted: &'a dyn Fn() -> bool,
    /// Called after each tensor.
    pub progress: &'a mut dyn FnMut(),
}

impl std::fmt::Debug for WriteOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WriteOptions { threads, requantise, .. } = self;
        f.debug_struct("WriteOptions")
            .field("threads", threads)
            .field("requantise", requantise)
            .finish_non_exhaustive()
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The size of the file in bytes.
    pub bytes: u64,
    /// Tensors whose type changed.
    pub changed: usize,
}

/// Whether weights of this type are in blocks.
fn in_blocks(ty: GgmlType) -> bool {
    !matches!(ty, GgmlType::Plain(_))
}

/// Writes the model with a type for each tensor. Memory is bounded by a few tens of MiB, and for tensors that
/// are computed by the largest of them. An existing file is replaced only when the new one is complete.
///
/// # Errors
/// `Error::Argument` for a tensor in blocks that would get another block type, unless `requantise`, and if
/// `types` has another length; `Error::Unsupported` for a type that cannot be decoded or encoded;
/// `Error::Format` for values that the new type does not have; `Error::Interrupted`; `Error::Io`.
pub fn write(
    content: &Content<'_>,
    types: &[GgmlType],
    path: &Path,
    options: &mut WriteOptions<'_>,
) -> Result<Written> {
    if types.len() != content.tensors.len() {
        let what = format!("{} types for {} tensors", types.len(), content.tensors.len());
        return Err(Error::argument("export", what));
    }
    let infos = content.tensors.iter().zip(types);
    let new: Vec<TensorInfo> = infos.map(|(t, ty)| TensorInfo { ty: *ty, ..t.info.clone() }).collect();
    for (t, n) in content.tensors.iter().zip(&new) {
        check(&t.info, n.ty, options.requantise)?;
    }
    let threads = options.threads.or_else(|| std::thread::available_parallelism().ok());
    let threads = threads.map_or(1, NonZero::get);
    let changed = content.tensors.iter().zip(types).filter(|(t, ty)| t.info.ty != **ty).count();
    let mut out = GgufWriter::create(path, &content.metadata, new.clone())?;
    let mut buffer = vec![];
    for (t, n) in content.tensors.iter().zip(&new) {
        let bytes = t.bytes()?;
        let (from, to) = (t.info.ty, n.ty);
        let want = from.row_bytes(t.info.elements());
        if want != Some(bytes.len()) {
            let what = format!("'{}' has {} bytes, and its shape means {want:?}", t.info.name, bytes.len());
            return Err(Error::internal(what));
        }
        for slab in bytes.chunks(SLAB / from.elements() * from.bytes()) {
            if (options.interrupted)() {
                return Err(Error::Interrupted { what: format!("writing {}", path.display()) });
            }
            if from == to {
                out.append(&n.name, slab)?;
                continue;
            }
            let elements = slab.len() / from.bytes() * from.elements();
            buffer.clear();
            buffer.resize(elements / to.elements() * to.bytes(), 0);
            convert((from, slab), (to, &mut buffer), threads).map_err(|v| not_representable(n, v))?;
            out.append(&n.name, &buffer)?;
        }
        (options.progress)();
    }
    Ok(Written { bytes: out.finish()?, changed })
}

fn not_representable(t: &TensorInfo, value: f32) -> Error {
    let next = match t.ty {
        GgmlType::F16 => "f16 has numbers up to 65504; choose bf16 or f32",
        _ => "the tensor must have finite values",
    };
    Error::Format {
        file: format!("tensor '{}'", t.name),
        what: format!("the value {value} in {}: {next}", t.ty),
    }
}

/// Whether a tensor can be converted.
fn check(t: &TensorInfo, to: GgmlType, requantise: bool) -> Result<()> {
    let from = t.ty;
    if from == to {
        return Ok(());
    }
    let unsupported = |what: &str, ty: GgmlType| {
        let next = "Use a file whose tensors have types that can be read";
        Err(Error::unsupported(format!("{what} tensor '{}' of type {ty}", t.name), next))
    };
    if !matches!(from, GgmlType::Block(_) | GgmlType::LoadOnly(_)) && !is_float(from) {
        return unsupported("decoding", from);
    }
    if !matches!(to, GgmlType::Block(_)) && !is_float(to) {
        return unsupported("encoding", to);
    }
    if in_blocks(from) && to != GgmlType::F32 && !requantise {
        let what = format!(
            "tensor '{}' is {from}, and {to} adds errors to those it has; start from a file in f32, f16 or \
             bf16, or give --allow-requantize",
            t.name
        );
        return Err(Error::argument("export", what));
    }
    Ok(())
}

fn is_float(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::Plain(DType::F32 | DType::F16 | DType::BF16 | DType::F64))
}

/// Converts whole blocks. Fails with a value that the new type does not have.
fn convert(from: (GgmlType, &[u8]), to: (GgmlType, &mut [u8]), threads: usize) -> Result<(), f32> {
    let ((from, source), (to, target)) = (from, to);
    // Blocks have a power of two elements, so the larger block is a multiple of the smaller one.
    let unit = from.elements().max(to.elements());
    let units = source.len() / from.bytes() * from.elements() / unit;
    let share = units.div_ceil(threads.max(1)).max(PIECE / unit) * unit;
    let sources = source.chunks(share / from.elements() * from.bytes());
    let targets = target.chunks_mut(share / to.elements() * to.bytes());
    std::thread::scope(|s| {
        let work = |(source, target)| move || convert_part(from, source, to, target);
        let running: Vec<_> = sources.zip(targets).map(|part| s.spawn(work(part))).collect();
        // The scope waits for those after a failure.
        let join = |t: ScopedJoinHandle<'_, _>| t.join().unwrap_or_else(|p| resume_unwind(p));
        running.into_iter().try_for_each(join)
    })
}

fn convert_part(from: GgmlType, source: &[u8], to: GgmlType, target: &mut [u8]) -> Result<(), f32> {
    let mut values = vec![0f32; PIECE];
    let sources = source.chunks(PIECE / from.elements() * from.bytes());
    let targets = target.chunks_mut(PIECE / to.elements() * to.bytes());
    for (source, target) in sources.zip(targets) {
        let values = &mut values[..source.len() / from.bytes() * from.elements()];
        decode(from, source, values);
        encode(values, to, target)?;
    }
    Ok(())
}

/// The values of whole blocks of a type that [`check`] accepts.
pub(super) fn decode(from: GgmlType, source: &[u8], values: &mut [f32]) {
    macro_rules! plain {
        ($bytes:literal, $one:expr) => {
            for (v, b) in values.iter_mut().zip(source.as_chunks::<$bytes>().0) {
                *v = $one(*b);
            }
        };
    }
    match from {
        GgmlType::Block(b) => b.decode(source, values),
        GgmlType::LoadOnly(b) => b.decode(source, values),
        GgmlType::F16 => plain!(2, |b| f16::from_le_bytes(b).to_f32()),
        GgmlType::BF16 => plain!(2, |b| bf16::from_le_bytes(b).to_f32()),
        GgmlType::Plain(DType::F64) => plain!(8, |b| f64::from_le_bytes(b) as f32),
        _ => plain!(4, f32::from_le_bytes),
    }
}

/// Encodes whole blocks in a type that [`check`] accepts.
fn encode(values: &[f32], to: GgmlType, target: &mut [u8]) -> Result<(), f32> {
    let stray = |limit: f32| values.iter().copied().find(|v| v.abs() >= limit || v.is_nan());
    match to {
        GgmlType::Block(b) => {
            if let Some(v) = stray(f32::INFINITY) {
                return Err(v);
            }
            b.encode(values, target);
        }
        GgmlType::F16 => {
            // From 65520 on, numbers are rounded to infinity. Infinities and NaN stay as they are.
            if let Some(v) = stray(65_520.0).filter(|v| v.is_finite()) {
                return Err(v);
            }
            let halves = target.as_chunks_mut::<2>().0;
            halves.iter_mut().zip(values).for_each(|(t, v)| *t = f16::from_f32(*v).to_le_bytes());
        }
        GgmlType::BF16 => {
            let halves = target.as_chunks_mut::<2>().0;
            halves.iter_mut().zip(values).for_each(|(t, v)| *t = bf16::from_f32(*v).to_le_bytes());
        }
        GgmlType::Plain(DType::F64) => {
            let all = target.as_chunks_mut::<8>().0;
            all.iter_mut().zip(values).for_each(|(t, v)| *t = f64::from(*v).to_le_bytes());
        }
        _ => {
            let all = target.as_chunks_mut::<4>().0;
            all.iter_mut().zip(values).for_each(|(t, v)| *t = v.to_le_bytes());
        }
    }
    Ok(())
}
