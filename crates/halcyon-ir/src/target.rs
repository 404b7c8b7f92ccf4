//! The interface through which lowering queries a device.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fused::Fused;
use crate::kernel::MatrixOp;
use crate::layout::View;
use crate::ops::Op;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Limits and abilities of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Caps {
    /// Dtypes that kernels can load and store.
    pub storage: Vec<DType>,
    /// Whether the device has f64 arithmetic.
    pub f64: bool,
    /// Whether the device has 64-bit integers.
    pub i64: bool,
    /// Whether the device has f16 arithmetic, according to its driver or processor. Generated kernels do not
    /// use it: they load and store f16, which every device can, and compute in f32.
    pub f16_arithmetic: bool,
    /// Whether the device multiplies 8-bit floats; `None` if unknown.
    #[serde(default)]
    pub f8_products: Option<bool>,
    /// Subgroup size in work-items; `None` if the device has no subgroup operations.
    pub subgroup: Option<u32>,
    /// Maximum number of work-items in a workgroup.
    pub max_workgroup: u32,
    /// Workgroup memory in bytes.
    pub workgroup_memory: u32,
    /// Maximum number of buffers that a kernel may bind.
    pub max_bindings: u32,
    /// Maximum size of a kernel's arguments in bytes, if one launch may run several element-wise kernels
    /// ([`crate::kernel::Parts`]); 0 if it may not.
    #[serde(default)]
    pub max_argument_bytes: u32,
    /// Maximum size of one bound buffer in bytes.
    pub max_binding_bytes: u64,
    pub max_groups: u32,
    /// Required alignment of buffer offsets, in bytes.
    pub offset_alignment: u32,
    /// Compute units (cores) reported by the driver; `None` if it reports none. See [`Caps::units`].
    pub compute_units: Option<u32>,
    /// Whether the device is a CPU. Kernels then give each work-item long contiguous ranges.
    pub is_cpu: bool,
    /// Operations of the device's matrix units; empty if it has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matrix: Vec<MatrixOp>,
}

/// The number of compute units assumed when the driver reports none: that of a small GPU.
const UNKNOWN_UNITS: usize = 16;

impl Caps {
    /// The number of compute units for which to lay out kernels.
    pub fn units(&self) -> usize {
        self.compute_units.map_or(UNKNOWN_UNITS, |n| n.max(1) as usize)
    }

    /// The dtypes that kernels can load and store. `f64`: the device has f64 arithmetic. `i64`: it has 64-bit
    /// integers. Every other native dtype works on any device: half types are widened to f32 by integer
    /// arithmetic if the device has no conversion, and small integers and bools are computed in 32 bits.
    pub fn storage_of(f64: bool, i64: bool) -> Vec<DType> {
        let runs = |d: &DType| match d {
            DType::F64 => f64,
            DType::I64 | DType::U64 => i64,
            _ => true,
        };
        DType::native().filter(runs).collect()
    }

    /// A device with f64, 64-bit integers and generous limits, for the interpreter and for snapshots.
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
            max_argument_bytes: 0,
            max_binding_bytes: u64::MAX,
            max_groups: 65_535,
            offset_alignment: 1,
            compute_units: Some(1),
            is_cpu: false,
            matrix: vec![],
        }
    }
}

/// The dtype of an operand and its view into its buffer.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Operand {
    pub dtype: DType,
    pub view: View,
}

/// How exact f32 products must be. For bf16 factors, whose products are exact in f32, `Medium` allows
/// instructions that flush denormals to zero and sum in their own order. From [`crate::passes::Level::O2`]
/// on, bf16 products are requested at `Medium`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MatmulPrecision {
    /// f32 products and f32 sums.
    #[default]
    Highest,
    /// TF32 products or better.
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

/// Parses `highest`, `high` or `medium`, ignoring case.
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

/// Work for which a target may have a library kernel.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    Op(&'a Op),
    Fused(&'a Fused),
}

/// A request for a library kernel. Inputs and outputs have the types that the op's type rule gives. In
/// addition, an [`Op::Matmul`] may have 8-bit integers and an i32 output, or bf16 factors and an f32 output.
/// Inputs may have any view; outputs are dense. For fused work, operands are whole buffers and the views are
/// part of the chain.
///
/// A call describes everything that lowering knows about the work, so that the target can answer with one
/// kernel. The kernel reports which of the offers in `constants` and `epilogue` it uses.
#[derive(Clone, Copy, Debug)]
pub struct LibraryCall<'a> {
    pub work: Work<'a>,
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    pub precision: MatmulPrecision,
    /// The number of outputs that overwrite an operand: output `i` has the buffer of input `i`, for each `i`
    /// below this number.
    pub in_place: usize,
    /// Indices of constant inputs. The kernel may read one of them as a packed constant
    /// ([`LibraryKernel::packing`]).
    pub constants: &'a [usize],
    /// Element-wise work on the result, which the kernel may do before it stores it
    /// ([`LibraryKernel::applies_epilogue`]).
    pub epilogue: Option<Epilogue<'a>>,
}

/// An element-wise chain applied to the result of an op.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// The chain, without a reduction and with a single output.
    pub fused: &'a Fused,
    /// Which input of the chain is the op's result.
    pub product: u32,
    /// The chain's other inputs, in order. A kernel that applies the epilogue reads them after the op's
    /// inputs.
    pub inputs: &'a [Operand],
    /// The chain's output. A kernel that applies the epilogue writes it instead of the op's output.
    pub output: &'a Operand,
}

impl<'a> LibraryCall<'a> {
    /// A call at the highest precision, not in place, without constants and epilogue.
    pub fn new(work: Work<'a>, inputs: &'a [Operand], outputs: &'a [Operand]) -> LibraryCall<'a> {
        LibraryCall {
            work,
            inputs,
            outputs,
            precision: MatmulPrecision::Highest,
            in_place: 0,
            constants: &[],
            epilogue: None,
        }
    }
}

/// The layout of a packed constant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Packing {
    pub input: usize,
    /// Size of the packed constant in bytes.
    pub bytes: usize,
    /// Kernels with equal keys read the same packed form of a constant.
    pub key: String,
}

/// Why a target has no kernel for a call.
#[derive(Clone, Debug, Default)]
pub struct Declined {
    pub reason: String,
    /// Inputs that must be dense for the target to accept the call. Empty if making inputs dense would not
    /// help.
    pub dense: Vec<usize>,
}

impl Declined {
    /// A refusal for a reason that dense inputs would not remove.
    pub fn because(reason: impl Into<String>) -> Declined {
        Declined { reason: reason.into(), dense: vec![] }
    }

    /// The reason for a call that the target would accept if `inputs` were dense.
    pub fn needs_dense(inputs: impl IntoIterator<Item = usize>) -> Declined {
        Declined { reason: "operands must be dense".into(), dense: inputs.into_iter().collect() }
    }
}

/// A library kernel, ready to run on the device that made it.
pub trait LibraryKernel: Send + Sync + fmt::Debug {
    /// Name in traces and receipts, for example `cpu.gemm.avx512`.
    fn name(&self) -> &str;
    /// Workspace for one run, in bytes.
    fn workspace(&self) -> usize {
        0
    }
    /// The layout in which the kernel reads one of [`LibraryCall::constants`]; `None` if it reads all inputs
    /// as they are. The device does the packing.
    fn packing(&self) -> Option<&Packing> {
        None
    }
    /// Whether the kernel applies the call's epilogue. If not, it computes the op alone, and the epilogue is
    /// a step of its own.
    fn applies_epilogue(&self) -> bool {
        false
    }
    fn as_any(&self) -> &dyn Any;
}

/// What lowering queries of a device.
pub trait Target {
    fn caps(&self) -> &Caps;
    /// Returns a library kernel for the call. A target has no other way to say that it supports a call, so
    /// every supported call has a kernel. Lowering makes each query once: equal calls get the first result,
    /// so one kernel may serve several steps.
    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined>;
    /// If the device supports parts of a buffer as buffers, the required alignment of their offsets in bytes.
    /// Scratch memory is then one allocation, and scratch buffers have offsets in it. `None`: every buffer is
    /// a separate allocation.
    fn part_alignment(&self) -> Option<usize> {
        None
    }
    /// Whether kernels for products and convolutions may apply epilogues ([`LibraryCall::epilogue`]). Chains
    /// are then split so that each can become the epilogue of its own product, and calls may have epilogues.
    fn has_epilogues(&self) -> bool {
        false
    }
    /// Channels per block in the blocked layout in which the device's convolutions of this dtype are fastest;
    /// `None` if the device has no kernels for [`crate::passes::blocked`]. A convolution that
    /// [`Target::library`] declines in this layout is lowered in the plain layout.
    fn channel_block(&self, _dtype: DType) -> Option<usize> {
        None
    }
}
