//! Rows, cases, operands, and how operands are filled.

use super::rng::Rng;
use crate::ir::blocks::BlockType;
use crate::ir::graph::{Graph, NodeId};
use crate::ir::shape::TensorType;
use crate::{ConstData, DType, Result, Scalar};
use std::fmt;
use std::sync::Arc;

/// Adds the op under test to a graph, given the nodes of its operands.
pub type Build = Arc<dyn Fn(&mut Graph, &[NodeId]) -> Result<NodeId> + Send + Sync>;

/// How operand values are drawn.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Floats are drawn uniformly from the interval. Integers are the ends of the dtype's range, small
    /// numbers or random bits.
    Range(f64, f64),
    /// Like `Range(-9.0, 9.0)`, plus NaN, infinities, both zeros, the smallest normal and the largest number
    /// of the dtype.
    Special,
    /// Like `Special` without the largest number, for ops whose partial results must not overflow.
    NonFinite,
    /// Few distinct values, so that many elements are equal.
    Ties,
    /// Integers in `[lo, hi)`.
    Index(i64, i64),
    /// These values, repeated.
    Values(Vec<f64>),
    /// Random bit patterns of the dtype, including NaN.
    Bits,
    /// Bytes of block-quantised weights with scales of ordinary size. The last axis holds whole blocks.
    Blocks(BlockType),
}

/// One operand.
#[derive(Clone, Debug)]
pub struct OperandSpec {
    /// The operand's shape.
    pub dims: Vec<usize>,
    /// `None`: the dtype that the row is run for.
    pub dtype: Option<DType>,
    pub fill: Fill,
}

/// An operand of the row's dtype. Floats are drawn from -3 to 3, integers as in [`Fill::Range`].
pub fn x<const N: usize>(dims: [usize; N]) -> OperandSpec {
    OperandSpec { dims: dims.to_vec(), dtype: None, fill: Fill::Range(-3.0, 3.0) }
}

/// An operand of i64 indices in `[lo, hi)`.
pub fn ix<const N: usize>(dims: [usize; N], lo: i64, hi: i64) -> OperandSpec {
    OperandSpec { dims: dims.to_vec(), dtype: Some(DType::I64), fill: Fill::Index(lo, hi) }
}

impl OperandSpec {
    /// Fills with floats from this interval.
    pub fn range(mut self, lo: f64, hi: f64) -> OperandSpec {
        self.fill = Fill::Range(lo, hi);
        self
    }

    /// Fills in another way.
    pub fn fill(mut self, f: Fill) -> OperandSpec {
        self.fill = f;
        self
    }

    /// Fixes the operand's dtype, so that it does not depend on the row.
    pub fn of(mut self, d: DType) -> OperandSpec {
        self.dtype = Some(d);
        self
    }

    /// Values for a row that is run for dtype `row`.
    pub fn data(&self, row: DType, rng: &mut Rng) -> Result<ConstData> {
        let d = self.dtype.unwrap_or(row);
        let n: usize = self.dims.iter().product();
        ConstData::from_scalars(d, &self.dims, (0..n).map(|i| self.fill.draw(d, i, rng)))
    }
}

/// Largest finite number (for bf16, a number that rounds to it) and smallest normal number of a float dtype.
pub fn extremes(d: DType) -> (f64, f64) {
    match d {
        DType::F16 => (65504.0, 2f64.powi(-14)),
        DType::BF16 => (f32::MAX as f64 * 0.998, f32::MIN_POSITIVE as f64),
        DType::F32 => (f32::MAX as f64, f32::MIN_POSITIVE as f64),
        _ => (f64::MAX, f64::MIN_POSITIVE),
    }
}

fn any_int(d: DType, rng: &mut Rng) -> Scalar {
    let (lo, hi) = d.range();
    let v = match rng.below(10) {
        0 => return Scalar::F(lo).cast(d),
        1 => return Scalar::F(hi).cast(d),
        2 => 0,
        3..=6 => rng.below(41) as i64 - 20,
        _ => rng.next() as i64,
    };
    Scalar::I(v).cast(d)
}

/// Byte `at` of a block. The high byte of a scale, or an exponent, gives a number from 2^-5 to 2^-3.
fn block_byte(t: BlockType, at: usize, rng: &mut Rng) -> i64 {
    let halves: &[usize] = match t {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::IQ4_NL | BlockType::IQ4_XS => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::MXFP4 if at == 0 => return 122 + rng.below(3) as i64,
        BlockType::MXFP4 => &[],
    };
    if halves.iter().any(|h| h + 1 == at) {
        let sign = (rng.below(2) << 7) as i64;
        return sign | (10 + rng.below(2) as i64) << 2 | rng.below(4) as i64;
    }
    rng.below(256) as i64
}

impl Fill {
    fn draw(&self, d: DType, i: usize, rng: &mut Rng) -> Scalar {
        let float = d.is_float();
        let v = match self {
            Fill::Values(v) => Scalar::F(v[i % v.len()]),
            Fill::Bits => Scalar::from_bytes(d, &rng.next().to_le_bytes()),
            Fill::Blocks(t) => Scalar::I(block_byte(*t, i % t.row().bytes, rng)),
            Fill::Index(lo, hi) => Scalar::I(lo + rng.below((hi - lo) as usize) as i64),
            Fill::Ties => Scalar::I(rng.below(4) as i64),
            _ if d == DType::Bool => Scalar::Bool(rng.below(2) == 1),
            Fill::Range(lo, hi) if float => Scalar::F(rng.uniform(*lo, *hi)),
            Fill::Special | Fill::NonFinite if float => {
                let (max, min) = extremes(d);
                let max = if matches!(self, Fill::Special) { max } else { 2.0 };
                let list = [
                    f64::NAN,
                    f64::INFINITY,
                    f64::NEG_INFINITY,
                    0.0,
                    -0.0,
                    1.0,
                    -1.0,
                    0.5,
                    min,
                    -min,
                    max,
                    -max,
                ];
                match list.get(rng.below(18)) {
                    Some(v) => Scalar::F(*v),
                    None => Scalar::F(rng.uniform(-9.0, 9.0)),
                }
            }
            Fill::Range(..) | Fill::Special | Fill::NonFinite => any_int(d, rng),
        };
        v.cast(d)
    }
}

/// The tolerance of a result relative to the reference.
#[derive(Clone, Copy, Debug)]
pub enum Tol {
    /// Equal to the typed reference in every bit, with two exceptions: any NaN equals any other, and except
    /// in f16, a device may flush numbers below the smallest normal number to zero.
    Exact,
    /// Equal in value to the typed reference: as `Exact`, but the two zeros are equal.
    Equal,
    /// Units of the epsilon of the dtype that the op computes in (f32 for half types), relative to the
    /// reference's magnitude. For a half type, one rounding of the result is added.
    Ulps(f64),
    /// Like `Ulps`, for `a * b + c` on devices that round once. On devices whose language permits a separate
    /// product and sum, one unit of the terms' magnitudes is added for the rounding of the product.
    Fused(f64),
    /// For sums (or products) of this many terms. The tolerance is relative to the result of the same op on
    /// the operands' magnitudes.
    Sum(usize),
    /// Like `Sum`, for ops that round every partial sum to the result's dtype.
    Each(usize),
    /// Units of the dtype's epsilon, relative to the tensor's largest magnitude.
    Norm(f64),
}

impl fmt::Display for Tol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tol::Exact => f.write_str("every bit"),
            Tol::Equal => f.write_str("equal"),
            Tol::Ulps(u) | Tol::Fused(u) => write!(f, "{u} ulp"),
            Tol::Sum(_) | Tol::Each(_) => f.write_str("by the sum's length"),
            Tol::Norm(u) => write!(f, "{u} ulp of the largest"),
        }
    }
}

/// A test of an op: its operands and the graph that applies it.
#[derive(Clone)]
pub struct Case {
    /// A description of the case, for messages.
    pub label: String,
    /// The operands.
    pub ins: Vec<OperandSpec>,
    /// Dtypes of run-time arguments, which `build` gets after the operands.
    pub args: Vec<DType>,
    /// Adds the op to a graph.
    pub build: Build,
    /// Replaces the row's tolerance.
    pub tol: Option<Tol>,
    /// Runs only for these dtypes, if not empty.
    pub only: Vec<DType>,
    /// Whether the case's gradient is checked too.
    pub grad: bool,
    /// Whether the case is slow in the interpreter, which then runs it for few dtypes only.
    pub slow: bool,
}

/// A case without run-time arguments, for every dtype of its row, with the row's tolerance.
pub fn case(
    label: impl Into<String>,
    ins: impl Into<Vec<OperandSpec>>,
    build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId> + Send + Sync + 'static,
) -> Case {
    Case {
        label: label.into(),
        ins: ins.into(),
        args: vec![],
        build: Arc::new(build),
        tol: None,
        only: vec![],
        grad: false,
        slow: false,
    }
}

impl Case {
    /// Sets the case's own tolerance.
    pub fn tol(mut self, t: Tol) -> Case {
        self.tol = Some(t);
        self
    }

    /// Restricts the case to these dtypes.
    pub fn only(mut self, d: &[DType]) -> Case {
        self.only = d.to_vec();
        self
    }

    /// Marks the case so that its gradient is checked too.
    pub fn grad(mut self) -> Case {
        self.grad = true;
        self
    }

    /// Marks the case as slow in the interpreter.
    pub fn slow(mut self) -> Case {
        self.slow = true;
        self
    }

    /// Whether the case is run for a dtype.
    pub fn takes(&self, d: DType) -> bool {
        self.only.is_empty() || self.only.contains(&d)
    }

    /// The graph for one dtype, with one output.
    pub fn graph(&self, d: DType) -> Result<Graph> {
        let mut g = Graph::new();
        let mut ids: Vec<NodeId> = vec![];
        for (i, o) in self.ins.iter().enumerate() {
            ids.push(g.input(&format!("x{i}"), TensorType::new(o.dtype.unwrap_or(d), o.dims.as_slice())));
        }
        for a in &self.args {
            ids.push(g.arg(*a));
        }
        let y = (self.build)(&mut g, &ids)?;
        g.output("y", y);
        Ok(g)
    }

    /// Draws values for the operands.
    pub fn inputs(&self, d: DType, rng: &mut Rng) -> Result<Vec<ConstData>> {
        self.ins.iter().map(|i| i.data(d, rng)).collect()
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Case({:?} on {:?})", self.label, self.ins)
    }
}

/// A row of the op table: an op with its dtypes, its tolerance and its cases.
#[derive(Clone, Debug)]
pub struct Row {
    /// The op's name.
    pub name: String,
    /// The dtypes that the cases are run for.
    pub dtypes: Vec<DType>,
    /// The tolerance of cases without their own.
    pub tol: Tol,
    /// The cases.
    pub cases: Vec<Case>,
    /// A larger case, on which the speed of the op is measured.
    pub bench: Option<Case>,
}

impl Row {
    /// Sets the case on which the speed of the op is measured.
    pub fn bench(mut self, c: Case) -> Row {
        self.bench = Some(c);
        self
    }
}

/// A row without a speed measurement.
pub fn row(name: impl Into<String>, dtypes: Vec<DType>, tol: Tol, cases: impl Into<Vec<Case>>) -> Row {
    Row { name: name.into(), dtypes, tol, cases: cases.into(), bench: None }
}

/// Float dtypes that kernels support.
pub fn floats() -> Vec<DType> {
    DType::native().filter(|d| d.is_float()).collect()
}
/// Dtypes that kernels support, except bool.
pub fn numbers() -> Vec<DType> {
    DType::native().filter(|d| *d != DType::Bool).collect()
}
/// Dtypes that kernels support.
pub fn all() -> Vec<DType> {
    DType::native().collect()
}

/// One dtype of each class, for cases where a program per dtype would be too many.
pub const ONE_PER_CLASS: &[DType] = &[DType::F32, DType::I32, DType::BF16, DType::U8];
