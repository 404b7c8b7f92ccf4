//! Operations as methods and operators of `Tensor`. Each calls the graph builder of the same name.
//!
//! All axes are `i64`; negative values count from the end. Operands broadcast as in NumPy. A number takes the
//! dtype of the tensor it is combined with.

mod language;
mod nn;
mod reduce;
mod shape;

pub use language::Cache;
pub use nn::{Attention, CrossEntropy};
pub use reduce::{Axes, Order, Scan, Variance};
pub use shape::{Extent, Extents};

use crate::tensor::Tensor;
use halcyon_ir::dtype::{DType, Scalar};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::{NodeId, ScalarOp};
use std::panic::Location;

/// A graph builder with two operands.
type Binary = fn(&mut Graph, NodeId, NodeId) -> Result<NodeId>;

/// A number combined with a tensor. The number is converted to the tensor's dtype. A float dtype rounds it.
/// If an integer dtype cannot represent it (`ints + 1.5`, `bytes * 300`), or if the dtype is bool, the result
/// carries an error.
pub trait Number: Copy + Into<Scalar> {}

macro_rules! numbers {
    ($($t:ty),*) => {$( impl Number for $t {} )*};
}
numbers!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, usize);

/// The second operand of an element-wise operation: a tensor of the same dtype, by value or reference, or a
/// [`Number`].
pub trait Operand {
    #[doc(hidden)]
    fn apply(self, x: &Tensor, at: &'static Location<'static>, f: Binary) -> Tensor;
}

impl Operand for &Tensor {
    fn apply(self, x: &Tensor, at: &'static Location<'static>, f: Binary) -> Tensor {
        Tensor::build_on(x.backend(), &[x, self], at, |g, v| f(g, v[0], v[1]))
    }
}
impl Operand for &&Tensor {
    fn apply(self, x: &Tensor, at: &'static Location<'static>, f: Binary) -> Tensor {
        (*self).apply(x, at, f)
    }
}
impl Operand for Tensor {
    fn apply(self, x: &Tensor, at: &'static Location<'static>, f: Binary) -> Tensor {
        (&self).apply(x, at, f)
    }
}
impl<N: Number> Operand for N {
    fn apply(self, x: &Tensor, at: &'static Location<'static>, f: Binary) -> Tensor {
        let v = self.into();
        Tensor::build_on(x.backend(), &[x], at, |g, x| {
            let c = number(g, x[0], v)?;
            f(g, x[0], c)
        })
    }
}

/// A literal with the dtype of `like`.
fn number(g: &mut Graph, like: NodeId, v: Scalar) -> Result<NodeId> {
    let d = g.dtype(like);
    if d == DType::Bool || !d.is_float() && v.cast(d).as_f64() != v.as_f64() {
        return Err(Error::DType {
            op: "operator".into(),
            dtype: d,
            want: format!("it does not hold {}; cast the tensor to combine it with that number", v.as_f64()),
            at: Default::default(),
        });
    }
    Ok(g.lit(like, v))
}

macro_rules! tensor_methods {
    (
        unary { $($(#[$udoc:meta])+ $u:ident $umethod:ident $urow:tt;)* }
        binary { $($(#[$bdoc:meta])+ $b:ident $bmethod:ident $btensor:ident $brow:tt;)* }
        ternary { $($(#[$tdoc:meta])+ $t:ident $tmethod:ident $ttensor:ident $trow:tt;)* }
    ) => {
        /// Element-wise operations with one operand. The result has the operand's shape. It also has the
        /// operand's dtype, except for tests such as `isnan`, which give bool.
        impl Tensor {
            $($(#[$udoc])+
            #[track_caller]
            pub fn $umethod(&self) -> Tensor {
                Tensor::build(&[self], |g, x| g.$umethod(x[0]))
            })*
        }
        /// Element-wise operations with two operands. The second operand may be a number. The operands
        /// broadcast.
        impl Tensor {
            $($(#[$bdoc])+
            #[track_caller]
            pub fn $btensor(&self, other: impl Operand) -> Tensor {
                other.apply(self, Location::caller(), Graph::$bmethod)
            })*
        }
        /// Element-wise operations with three operands. The operands broadcast.
        impl Tensor {
            $($(#[$tdoc])+
            #[track_caller]
            pub fn $ttensor(&self, a: &Tensor, b: &Tensor) -> Tensor {
                Tensor::build(&[self, a, b], |g, x| g.$tmethod(x[0], x[1], x[2]))
            })*
        }
    };
}
halcyon_ir::for_each_scalar_op!(tensor_methods);

impl Tensor {
    /// Applies a scalar op, element by element.
    #[track_caller]
    pub fn scalar_op(op: ScalarOp, x: &[&Tensor]) -> Tensor {
        Tensor::build(x, |g, x| g.scalar(op, x))
    }

    /// Converts to another dtype. Floats become integers by rounding towards zero and saturating at the ends
    /// of the range; NaN becomes 0.
    #[track_caller]
    pub fn cast(&self, dtype: DType) -> Tensor {
        Tensor::build(&[self], |g, x| g.cast(x[0], dtype))
    }

    /// Reinterprets the bits as another dtype of equal size.
    #[track_caller]
    pub fn bitcast(&self, dtype: DType) -> Tensor {
        Tensor::build(&[self], |g, x| g.bitcast(x[0], dtype))
    }

    /// The same value, but no gradient is propagated through it. If the dtype is not a float, returns the
    /// tensor itself.
    #[track_caller]
    pub fn stop_gradient(&self) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let d = g.dtype(x[0]);
            let bits = match d.bits() {
                _ if !d.is_float() => return Ok(x[0]),
                8 => DType::U8,
                16 => DType::U16,
                32 => DType::U32,
                64 => DType::U64,
                _ => return Err(Error::unsupported(format!("stop_gradient of {d}"), "Cast it to f32 first")),
            };
            // The bits are an integer, and integers have no gradient.
            let b = g.bitcast(x[0], bits)?;
            g.bitcast(b, d)
        })
    }

    /// `x²`.
    #[track_caller]
    pub fn sqr(&self) -> Tensor {
        Tensor::build(&[self], |g, x| g.mul(x[0], x[0]))
    }

    /// Limits to the range from `low` to `high`, which are numbers or tensors. The result is `high` where
    /// `low > high`. NaN stays NaN.
    #[track_caller]
    pub fn clamp(&self, low: impl Operand, high: impl Operand) -> Tensor {
        let at = Location::caller();
        high.apply(&low.apply(self, at, Graph::max), at, Graph::min)
    }

    /// `x` where `x` is positive, else `slope * x`.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Tensor {
        Tensor::build(&[self], |g, x| g.leaky_relu(x[0], slope))
    }

    /// Matrix product as in NumPy: batch dimensions broadcast; an operand of rank 1 is a row (left) or a
    /// column (right).
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        Tensor::build(&[self, other], |g, x| g.matmul(x[0], x[1]))
    }

    /// Applies a custom op.
    #[track_caller]
    pub fn custom(op: std::sync::Arc<dyn halcyon_ir::custom::CustomOp>, x: &[&Tensor]) -> Tensor {
        Tensor::build(x, |g, x| g.custom(op, x))
    }
}

// A number on the left is f64 or i64 only: with one float and one integer type, Rust can infer the type of a
// literal. Write numbers of other types on the right, or use the method.
macro_rules! operators {
    ($($tr:ident $f:ident),*) => {$(
        impl<O: Operand> std::ops::$tr<O> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: O) -> Tensor { o.apply(self, Location::caller(), Graph::$f) }
        }
        impl<O: Operand> std::ops::$tr<O> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: O) -> Tensor { o.apply(&self, Location::caller(), Graph::$f) }
        }
        operators!(left f64 $tr $f);
        operators!(left i64 $tr $f);
    )*};
    (left $n:ident $tr:ident $f:ident) => {
        impl std::ops::$tr<&Tensor> for $n {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: &Tensor) -> Tensor {
                self.apply(o, Location::caller(), |g, a, b| g.$f(b, a))
            }
        }
        impl std::ops::$tr<Tensor> for $n {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: Tensor) -> Tensor {
                self.apply(&o, Location::caller(), |g, a, b| g.$f(b, a))
            }
        }
    };
}
operators!(Add add, Sub sub, Mul mul, Div div, Rem rem);

impl std::ops::Neg for &Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        Tensor::neg(self)
    }
}
impl std::ops::Neg for Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        Tensor::neg(&self)
    }
}
