//! What the lowering asks of a device.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fused::Fused;
use crate::kernel::MatrixOp;
use crate::layout::View;
use crate::op::Op;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Limits and abilities of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Caps {
    /// Storage types that kernels can load and store.
    pub storage: Vec<DType>,
    /// Arithmetic in 64-bit floats.
    pub f64: bool,
    /// 64-bit integers.
    pub i64: bool,
    /// Whether the device computes in f16, as its driver or processor tells. A fact about the device:
    /// generated kernels store f16, which every device can, and compute its values in f32.
    pub f16_arithmetic: bool,
    /// Whether the device multiplies 8-bit floats; `None` where nobody tells.
    #[serde(default)]
    pub f8_products: Option<bool>,
    /// Width of a subgroup; `None` where subgroup operations are missing.
    pub subgroup: Option<u32>,
    pub max_workgroup: u32,
    /// Bytes of workgroup memory.
    pub workgroup_memory: u32,
    /// Buffers one kernel may bind.
    pub max_bindings: u32,
    pub max_binding_bytes: u64,
    pub max_groups: u32,
    /// Alignment of a buffer offset, bytes.
    pub offset_alignment: u32,
    /// Compute units (cores), as the driver tells; `None` where it does not ([`Caps::units`]).
    pub compute_units: Option<u32>,
    /// The device is a CPU, so kernels should give each work-item long contiguous runs.
    pub is_cpu: bool,
    /// What its matrix units do; empty where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matrix: Vec<MatrixOp>,
}

/// Compute units that kernels are laid out for where the driver tells none: those of a small GPU.
const UNKNOWN_UNITS: usize = 16;

impl Caps {
    /// Compute units to lay kernels out for.
    pub fn units(&self) -> usize {
        self.compute_units.map_or(UNKNOWN_UNITS, |n| n.max(1) as usize)
    }

    /// The types that kernels load and store, by what the device can: f64 needs arithmetic in f64, and 64-bit
    /// integers need theirs. Every other type needs nothing of the device: halves are widened to f32 by
    /// integer arithmetic where it has no conversion, and narrow integers and bools are computed in 32 bits.
    pub fn storage_of(f64: bool, i64: bool) -> Vec<DType> {
        let runs = |d: &DType| match d {
            DType::F64 => f64,
            DType::I64 | DType::U64 => i64,
            _ => true,
        };
        DType::native().filter(runs).collect()
    }

    /// A device with every ability and generous limits, for the interpreter and for snapshots.
    pub fn generous() -> Caps {
        Caps {
            storage: DType::native().collect(),
            f64: true,
            i64: true,
            f16_arithmetic: false,
            f8_products: None,
            subgroup: None,
            max_workgroup: 256,
            workgroup_memory: 32 << 10,
            max_bindings: 32,
            max_binding_bytes: u64::MAX,
            max_groups: 65_535,
            offset_alignment: 1,
            compute_units: Some(1),
            is_cpu: false,
            matrix: vec![],
        }
    }
}

/// Type and place of an operand inside its buffer.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Operand {
    pub dtype: DType,
    pub view: View,
}

/// How exact f32 matrix work must be. For bf16 operands, whose products f32 holds exactly, `Medium` allows
/// instructions that take denormals for zero and add in an order of their own; from
/// [`crate::passes::Level::O2`] on they are called so.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MatmulPrecision {
    /// f32 products, f32 sums.
    #[default]
    Highest,
    /// TF32 or better.
    High,
    /// bf16 products or better.
    Medium,
}

impl fmt::Display for MatmulPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MatmulPrecision::Highest => "highest",
            MatmulPrecision::High => "high",
            MatmulPrecision::Medium => "medium",
        })
    }
}

/// `highest`, `high` or `medium`, in any case.
impl FromStr for MatmulPrecision {
    type Err = Error;
    fn from_str(s: &str) -> Result<MatmulPrecision> {
        match s.trim().to_ascii_lowercase().as_str() {
            "highest" => Ok(MatmulPrecision::Highest),
            "high" => Ok(MatmulPrecision::High),
            "medium" => Ok(MatmulPrecision::Medium),
            _ => {
                let why = format!("\"{s}\" is not a precision of products; use highest, high or medium");
                Err(Error::argument("matmul precision", why))
            }
        }
    }
}

/// One piece of work that a device may have a kernel of its own for.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    Op(&'a Op),
    Fused(&'a Fused),
}

/// Operand types are the op's, and the output's the op's result; a device may also take [`Op::Matmul`] of
/// 8-bit integers into i32, and of bf16 into f32, where a pass proposes it. Inputs may have any view; outputs
/// are dense unless the work is fused (whose views are inside it; operands are then whole buffers). With
/// [`LibraryCall::in_place`], output 0 shares the buffer of input 0.
#[derive(Clone, Copy, Debug)]
pub struct LibraryCall<'a> {
    pub work: Work<'a>,
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    pub precision: MatmulPrecision,
    pub in_place: bool,
    /// A constant input that the kernel is to read in a layout of its own ([`LibraryKernel::packing`]). A
    /// device declines where it has none that pays.
    pub packed: Option<usize>,
    /// What happens to the result before it is the call's output. The inputs are the op's own, then the
    /// chain's others.
    pub epilogue: Option<Epilogue<'a>>,
}

/// An element-wise chain that reads the result of an op.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// Without a reduction; its one output is the call's.
    pub fused: &'a Fused,
    /// Which of the chain's inputs is the op's result. The others follow the op's inputs, in their order.
    pub product: u32,
}

impl<'a> LibraryCall<'a> {
    /// At the highest precision, not in place, nothing packed.
    pub fn new(work: Work<'a>, inputs: &'a [Operand], outputs: &'a [Operand]) -> LibraryCall<'a> {
        LibraryCall {
            work,
            inputs,
            outputs,
            precision: MatmulPrecision::Highest,
            in_place: false,
            packed: None,
            epilogue: None,
        }
    }
}

/// A constant in a kernel's own layout.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Packing {
    pub input: usize,
    /// Size of the packed form.
    pub bytes: usize,
    /// Kernels with equal keys read the same packed form of the same constant.
    pub key: String,
}

/// Why a device has no kernel for a call.
#[derive(Clone, Debug, Default)]
pub struct Declined {
    pub reason: String,
    /// Inputs that would have to be dense for the device to take the call; empty when nothing would help.
    pub dense: Vec<usize>,
}

impl Declined {
    pub fn because(reason: impl Into<String>) -> Declined {
        Declined { reason: reason.into(), dense: vec![] }
    }

    /// The device would take the call if these inputs were dense.
    pub fn needs_dense(inputs: impl IntoIterator<Item = usize>) -> Declined {
        Declined { reason: "operands must be dense".into(), dense: inputs.into_iter().collect() }
    }
}

/// A device's own kernel, ready to run. The device that made it runs it.
pub trait LibraryKernel: Send + Sync + fmt::Debug {
    /// For traces and receipts, for example `cpu.gemm.avx512`.
    fn name(&self) -> &str;
    /// Scratch bytes one run needs.
    fn workspace(&self) -> usize {
        0
    }
    /// How the input lies that the call asked to be packed; `None` for a call that did not ask. The device
    /// packs it.
    fn packing(&self) -> Option<&Packing> {
        None
    }
    fn as_any(&self) -> &dyn Any;
}

/// The lowering's view of a device.
pub trait Target {
    fn caps(&self) -> &Caps;
    /// Asks for a kernel of the device's own. Support and execution are one value, so they cannot disagree.
    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined>;
    /// Whether the device hands out parts of a buffer as buffers: the alignment in bytes of where a part may
    /// start. Scratch is then one block in which buffers have offsets. `None`: every buffer is an allocation
    /// of its own.
    fn part_alignment(&self) -> Option<usize> {
        None
    }
    /// Whether kernels for products and convolutions may end in a chain ([`LibraryCall::epilogue`]). Chains
    /// are then cut so that each joins its own product.
    fn has_epilogues(&self) -> bool {
        false
    }
    /// Channels to a block in the layout that the device's convolutions of this element type are fastest in,
    /// if it has kernels for [`crate::passes::blocked`].
    fn channel_block(&self, _dtype: DType) -> Option<usize> {
        None
    }
}
