//! Custom ops as a user of the library writes them.

use crate::ir::custom::CustomOp;
use crate::ir::kernel::{Builder, Kernel, Launch, Ty};
use crate::ir::layout::View;
use crate::ir::shape::TensorType;
use crate::ir::target::Caps;
use crate::ir::{Graph, NodeId};
use crate::{ConstData, DType, Error, Result};

/// `x² + shift·x` on f32, with a kernel and a gradient.
#[derive(Debug)]
pub struct SquareShift {
    pub shift: f32,
}

impl CustomOp for SquareShift {
    fn name(&self) -> &str {
        "tests.swirl"
    }

    fn key(&self) -> String {
        self.shift.to_bits().to_string()
    }

    fn infer(&self, x: &[TensorType]) -> Result<TensorType> {
        match x {
            [t] if t.dtype == DType::F32 => Ok(t.clone()),
            _ => Err(Error::argument("tests.swirl", "takes one f32 tensor")),
        }
    }

    fn reference(&self, x: &[ConstData]) -> Result<ConstData> {
        let v: Vec<f32> = x[0].to_vec::<f32>().iter().map(|v| v * v + self.shift * v).collect();
        ConstData::from_slice(&x[0].dims, &v)
    }

    fn gradient(&self, g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId) -> Result<Vec<Option<NodeId>>> {
        // dy · (2x + shift)
        let (two, s) = (g.lit(x[0], 2.0), g.lit(x[0], self.shift));
        let t = g.mul(x[0], two)?;
        let slope = g.add(t, s)?;
        Ok(vec![Some(g.mul(dy, slope)?)])
    }

    fn kernel(&self, x: &[View], _: &View, caps: &Caps) -> Result<Option<(Kernel, Launch)>> {
        let b = Builder::new("swirl", [64, 1, 1]);
        let (from, to) = (b.input(DType::F32), b.output(DType::F32));
        let (n, shift) = (b.size("n"), b.param("shift", Ty::F32));
        let i = b.linear_id();
        b.if_(i.lt(n), || {
            let v = b.load(from, i);
            b.store(to, i, v * v + shift * v);
        });
        let k = b.finish()?;
        let count = x[0].numel();
        let groups = Launch::fold(count.div_ceil(64) as u64, caps.max_groups);
        let l = Launch::bind(&k, groups, &[("n", count.into()), ("shift", self.shift.into())])?;
        Ok(Some((k, l)))
    }
}

/// `x + 1` for any dtype, without a kernel or a gradient.
#[derive(Debug)]
pub struct PlusOne;

impl CustomOp for PlusOne {
    fn name(&self) -> &str {
        "tests.plus_one"
    }

    fn infer(&self, x: &[TensorType]) -> Result<TensorType> {
        x.first().cloned().ok_or_else(|| Error::argument("tests.plus_one", "takes one tensor"))
    }

    fn reference(&self, x: &[ConstData]) -> Result<ConstData> {
        let d = x[0].dtype;
        let bytes: Vec<u8> = x[0]
            .scalars()
            .flat_map(|s| crate::Scalar::F(s.as_f64() + 1.0).to_bytes(d)[..d.size()].to_vec())
            .collect();
        ConstData::new(d, &x[0].dims, std::sync::Arc::new(bytes))
    }
}
