//! Attention by cuDNN's fused kernels, which cuDNN selects for one graph of operations (`cudnn_graph.rs`).
//!
//! The graph is the one that NVIDIA's cudnn-frontend builds for libraries before 9.21, which newer libraries
//! support too: the product with the keys; the scale; for causal attention, a comparison of indices that
//! selects -inf; the softmax in parts (maximum, difference, exponential, sum, quotient); and the product with
//! the values. The graph includes a logarithm of the sums, which nothing uses, because without it the library
//! has no engine (observed with 9.10.2 and 9.28).

use super::cudnn::{Dnn, TITLE, type_number};
use super::cudnn_graph::{
    ALIGNMENT, BOOLEAN, Builder, F32, Graphs, I32, Place, Plan, Pointwise, Reduce, Tensor,
};
use super::{KernelCall, SimtKernel, WORKSPACE, failed};
use crate::library_call::CallForm;
use crate::simt::sys::{Address, Handle};
use crate::{Declined, Operand, Result};
use halcyon_ir::composite::{Composite, CompositeKind};
use halcyon_ir::layout::dense_strides;
use halcyon_ir::{DType, Scalar};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// Minimum version. NVIDIA lists 9.10.0 and 9.10.1 as wrong, and earlier versions need a large negative
/// number instead of -inf.
pub(super) const SINCE: [i32; 3] = [9, 10, 2];
/// Minimum compute capability (major).
pub(super) const GENERATION: i32 = 8;
/// Calls with fewer queries use a generated kernel, which splits the keys among workgroups.
const FEW_QUERIES: usize = 16;
/// Calls with fewer multiply-adds use a generated kernel, because the library takes half a second or more to
/// compile for new sizes.
const SMALL: usize = 1 << 26;
/// Maximum row width.
const WIDEST: usize = 256;
/// Alignment of rows in two-byte elements.
const STEP: isize = ALIGNMENT as isize / 2;
/// Maximum number of plans kept.
pub(super) const PLANS: usize = 64;

/// The parameters that determine a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Key {
    dtype: DType,
    batch: i64,
    heads: i64,
    key_heads: i64,
    queries: i64,
    keys: i64,
    width: i64,
    /// Strides of q, k and v.
    strides: [[i64; 4]; 3],
    causal: bool,
    /// Bits of the scale as f32.
    scale: u32,
}

/// A call that the library supports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    key: Key,
    /// Offsets in bytes of the first elements of q, k and v.
    offsets: [isize; 3],
}

/// Strides of an operand; `None` if the library does not support one of them. Axes of size 1 get the strides
/// of a dense tensor, which are never used.
fn strides(o: &Operand) -> Option<[i64; 4]> {
    let v = &o.view;
    let dense = dense_strides(&v.shape);
    let mut all = [1; 4];
    for i in 0..3 {
        let s = if v.shape[i] == 1 { dense[i] } else { v.strides[i] };
        all[i] = Some(s).filter(|s| *s > 0 && s % STEP == 0)? as i64;
    }
    Some(all)
}

impl Attention {
    pub(super) fn of(call: &CallForm<'_>, c: &Composite) -> Result<Attention, Declined> {
        let no = |why: &str| Err(Declined::because(why));
        let [q, k, v] = call.inputs else {
            return no(
                "cuDNN does not define the result of a query whose keys are all masked, so attention with a mask uses a generated kernel",
            );
        };
        if call.epilogue.is_some() {
            return no("cuDNN's attention has no epilogue");
        }
        let dtype = q.dtype;
        let same = [k, v, &call.outputs[0]].iter().all(|o| o.dtype == dtype);
        if !matches!(dtype, DType::F16 | DType::BF16) || !same {
            return no("cuDNN's attention takes f16 and bf16");
        }
        let (qs, ks) = (&q.view.shape, &k.view.shape);
        if qs.len() != 4
            || ks.len() != 4
            || v.view.shape != *ks
            || call.outputs[0].view.numel() != q.view.numel()
        {
            return no("attention has operands of rank 4");
        }
        let [batch, heads, queries, width] = [0, 1, 2, 3].map(|i| qs[i]);
        let (key_heads, keys) = (ks[1], ks[2]);
        if ks[0] != batch || ks[3] != width || key_heads == 0 || heads % key_heads != 0 {
            return no("the shapes of q, k and v do not match");
        }
        if width == 0 || width % STEP as usize != 0 || width > WIDEST {
            return Err(Declined::because(format!(
                "cuDNN's attention takes rows of a multiple of {STEP} elements, at most {WIDEST}, not {width}"
            )));
        }
        if queries < FEW_QUERIES {
            return Err(Declined::because(format!(
                "a call of fewer than {FEW_QUERIES} queries uses a generated kernel"
            )));
        }
        let causal = c.flag("causal");
        if causal && queries > keys {
            return no(
                "cuDNN does not define the result of a query that attends to no key, and the first queries attend to none",
            );
        }
        let work = [batch, heads, queries, keys, width].iter().fold(2usize, |n, d| n.saturating_mul(*d));
        if work < SMALL {
            return Err(Declined::because(format!(
                "a call of fewer than {SMALL} multiply-adds uses a generated kernel"
            )));
        }
        let scattered: SmallVec<[usize; 3]> =
            (0..3).filter(|i| call.inputs[*i].view.strides[3] != 1).collect();
        if !scattered.is_empty() {
            return Err(Declined::needs_dense(scattered));
        }
        let last = |o: &Operand| o.view.range().map_or(0, |(_, hi)| hi);
        if [q, k, v].iter().any(|o| last(o) >= i32::MAX as isize) {
            return no("a tensor has 2³¹ elements or more");
        }
        let (Some(sq), Some(sk), Some(sv)) = (strides(q), strides(k), strides(v)) else {
            return no(
                "cuDNN's attention takes rows that begin at multiples of 16 bytes and are not repeated",
            );
        };
        if [q, k, v].iter().any(|o| o.view.offset % STEP != 0) {
            return no("cuDNN's attention takes operands that begin at multiples of 16 bytes");
        }
        // In the definition of attention, the scale is a literal of the operands' type.
        let scale = c.float("scale").map(|s| Scalar::F(s).cast(dtype).as_f64() as f32);
        // The scale must be positive, because kernels may take the maximum before they scale.
        let Some(scale) = scale.filter(|s| s.is_finite() && *s > 0.0) else {
            return no("cuDNN's attention takes a positive, finite scale");
        };
        let size = dtype.size() as isize;
        Ok(Attention {
            key: Key {
                dtype,
                batch: batch as i64,
                heads: heads as i64,
                key_heads: key_heads as i64,
                queries: queries as i64,
                keys: keys as i64,
                width: width as i64,
                strides: [sq, sk, sv],
                causal,
                scale: scale.to_bits(),
            },
            offsets: [q, k, v].map(|o| o.view.offset * size),
        })
    }
}

/// A plan, and the ids of the tensors whose addresses a run provides.
pub(super) struct AttentionPlan {
    plan: Plan,
    /// Ids of q, k, v and the result, then of the scalars.
    ids: Vec<i64>,
    /// Bits of the scalars, which are in host memory.
    values: Vec<u32>,
}

/// Adds scalars to the graph, and collects their ids and bits.
struct Values<'a> {
    b: &'a mut Builder,
    ids: Vec<i64>,
    bits: Vec<u32>,
}

impl Values<'_> {
    fn add(&mut self, of: i32, bits: u32) -> Result<Tensor, String> {
        let t = self.b.tensor(of, [1; 4], Place::Value)?;
        self.ids.push(t.id);
        self.bits.push(bits);
        Ok(t)
    }
}

impl AttentionPlan {
    /// # Safety
    /// `handle` must be a live handle of the library, which no other thread uses during the call. It must
    /// outlive the plan.
    unsafe fn new(graphs: &'static Graphs, handle: Handle, k: &Key) -> Result<AttentionPlan, String> {
        let of = type_number(k.dtype).ok_or_else(|| format!("it has no element type {}", k.dtype))?;
        let mut builder = Builder::new(graphs);
        let mut x = Values { b: &mut builder, ids: vec![], bits: vec![] };
        let [sq, sk, sv] = k.strides;
        let q = x.b.tensor(of, [k.batch, k.heads, k.queries, k.width], Place::Memory(sq))?;
        // The matrix of the keys is transposed: it has a column for each key.
        let turned = Place::Memory([sk[0], sk[1], sk[3], sk[2]]);
        let keys = x.b.tensor(of, [k.batch, k.key_heads, k.width, k.keys], turned)?;
        let v = x.b.tensor(of, [k.batch, k.key_heads, k.keys, k.width], Place::Memory(sv))?;
        let row = k.queries * k.width;
        let dense = Place::Memory([k.heads * row, row, k.width, 1]);
        let out = x.b.tensor(of, [k.batch, k.heads, k.queries, k.width], dense)?;

        let dots = x.b.tensor(F32, [k.batch, k.heads, k.queries, k.keys], Place::Virtual)?;
        x.b.matmul(q, keys, dots)?;
        let scale = x.add(F32, k.scale)?;
        let mut scores = x.b.pointwise(Pointwise::Mul, F32, &[dots, scale], F32)?;
        if k.causal {
            let (mut limit, key) = (x.b.index(scores, 2)?, x.b.index(scores, 3)?);
            // Query `i` attends to keys up to `i + keys - queries`.
            if k.keys != k.queries {
                for (mode, n) in [(Pointwise::Add, k.keys), (Pointwise::Sub, k.queries)] {
                    let n = i32::try_from(n).map_err(|_| "a dimension is 2³¹ or more")?;
                    let n = x.add(I32, n as u32)?;
                    limit = x.b.pointwise(mode, I32, &[limit, n], I32)?;
                }
            }
            let seen = x.b.pointwise(Pointwise::GreaterOrEqual, BOOLEAN, &[limit, key], BOOLEAN)?;
            let none = x.add(F32, f32::NEG_INFINITY.to_bits())?;
            scores = x.b.pointwise(Pointwise::Select, F32, &[scores, none, seen], F32)?;
        }
        let top = x.b.reduce(Reduce::Max, scores)?;
        let below = x.b.pointwise(Pointwise::Sub, F32, &[scores, top], F32)?;
        let weights = x.b.pointwise(Pointwise::Exp, F32, &[below], F32)?;
        let sum = x.b.reduce(Reduce::Add, weights)?;
        // The logarithm of the sums, which nothing uses (see the module's documentation).
        let log = x.b.pointwise(Pointwise::Log, F32, &[sum], F32)?;
        x.b.pointwise(Pointwise::Add, F32, &[top, log], F32)?;
        let shares = x.b.pointwise(Pointwise::Div, F32, &[weights, sum], of)?;
        x.b.matmul(shares, v, out)?;

        let Values { ids, bits, .. } = x;
        let ids = [q.id, keys.id, v.id, out.id].into_iter().chain(ids).collect();
        // SAFETY: `AttentionPlan::new` requires a live handle that no other thread uses and that outlives the
        // plan.
        let plan = unsafe { builder.plan(handle, WORKSPACE)? };
        Ok(AttentionPlan { plan, ids, values: bits })
    }
}

/// A call with its plan.
struct Run {
    /// The plan. It must be dropped before the handle with which it was made, so this is the first field.
    planned: Arc<AttentionPlan>,
    dnn: Arc<Dnn>,
    offsets: [isize; 3],
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run").field("workspace", &self.planned.plan.workspace).finish_non_exhaustive()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // The fields are dropped next. This may release kernels that the plan compiled, for which the thread
        // must have a current context.
        let _ = self.dnn.context.enter();
    }
}

impl Dnn {
    /// The plan for these sizes, from the cache or new.
    fn plan_for(&self, graphs: &'static Graphs, key: &Key) -> Result<Arc<AttentionPlan>, String> {
        let mut kept = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        let planned = match kept.iter().position(|(k, _)| k == key) {
            Some(i) => kept.remove(i).1,
            None => {
                let handle = self.handle.lock().unwrap_or_else(|e| e.into_inner());
                // SAFETY: the handle is live and locked. Only `self.plans` and kernels hold plans.
                // `self.plans` is emptied before the handle is destroyed, and kernels hold `self`.
                Arc::new(unsafe { AttentionPlan::new(graphs, handle.0, key) }?)
            }
        };
        // The list is sorted by the last use, with the most recent at the end.
        if kept.len() >= PLANS {
            kept.remove(0);
        }
        kept.push((*key, planned.clone()));
        Ok(planned)
    }

    pub(super) fn attention(
        self: &Arc<Dnn>,
        owner: u64,
        call: &CallForm<'_>,
        a: &Attention,
    ) -> Result<SimtKernel, Declined> {
        let graphs = self.graphs().map_err(Declined::because)?;
        self.context.enter().map_err(|e| Declined::because(e.to_string()))?;
        let planned =
            self.plan_for(graphs, &a.key).map_err(|why| Declined::because(format!("{TITLE}: {why}")))?;
        let kind = CompositeKind::Attention;
        let name = format!("cudnn.{kind}.{}{}", a.key.dtype, if a.key.causal { ".causal" } else { "" });
        let workspace = planned.plan.workspace;
        SimtKernel::new(name, owner, call, workspace, Run { planned, dnn: self.clone(), offsets: a.offsets })
    }
}

impl KernelCall for Run {
    unsafe fn enqueue(&self, stream: Handle, at: &[Address]) -> Result<()> {
        let (dnn, p) = (&self.dnn, &self.planned);
        let place = |at: Address| ptr::with_exposed_provenance_mut::<c_void>(at as usize);
        let inputs = (0..3).map(|i| place(at[i].wrapping_add_signed(self.offsets[i] as i64)));
        let values = p.values.iter().map(|v| ptr::from_ref(v).cast_mut().cast());
        let all: SmallVec<[*mut c_void; 8]> = inputs.chain([place(at[3])]).chain(values).collect();
        let room = at.get(4).map_or(ptr::null_mut(), |at| place(*at));
        // SAFETY: `enqueue` requires a live stream of this device.
        let handle = unsafe { dnn.bind(stream) }?;
        // SAFETY: `enqueue` requires buffers that passed `SimtKernel::check` and stay allocated until the
        // work has run, so the operands lie in the buffers, and the result overlaps no operand. The scalars
        // live in the plan and are not written; captures keep their kernels alive. The plan was made with
        // this handle, whose lock is held.
        let done = unsafe { p.plan.execute(handle.0, &p.ids, &all, room) };
        done.map_err(|e| failed(&dnn.context, TITLE, &format!("attention ({})", e.call), e.code, &e.text))
    }
}
