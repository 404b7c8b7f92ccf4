//! Custom ops: users can add ops to the op set.

use crate::data::ConstData;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernel::{Kernel, Launch};
use crate::layout::View;
use crate::shape::TensorType;
use crate::target::Caps;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock, RwLock};

/// An op defined by the user. Fusion treats it as a boundary. The op table, and the interpreter that checks
/// memory accesses, treat it like a built-in op.
pub trait CustomOp: Send + Sync + fmt::Debug {
    /// Unique name, for example `mycrate.swirl`. Attributes belong in [`CustomOp::key`].
    fn name(&self) -> &str;
    /// Distinguishes ops of the same name that need different kernels, for example by their attribute values.
    fn key(&self) -> String {
        String::new()
    }
    /// The result type for the given operand types.
    fn infer(&self, inputs: &[TensorType]) -> Result<TensorType>;
    /// The definition, evaluated on the host. It is the reference for checks and runs on devices without a
    /// kernel.
    fn reference(&self, inputs: &[ConstData]) -> Result<ConstData>;
    /// Builds nodes for the gradients of the operands, given the operands, the result and the gradient of the
    /// result. `None` for an operand without a gradient.
    fn gradient(
        &self,
        _g: &mut Graph,
        _inputs: &[NodeId],
        _out: NodeId,
        _grad: NodeId,
    ) -> Result<Vec<Option<NodeId>>> {
        Err(Error::unsupported(format!("the gradient of {}", self.name()), "Implement CustomOp::gradient"))
    }
    /// A kernel whose buffers are the dense operands followed by the dense result, or `None` to run
    /// [`CustomOp::reference`] on the host.
    fn kernel(&self, _inputs: &[View], _output: &View, _caps: &Caps) -> Result<Option<(Kernel, Launch)>> {
        Ok(None)
    }
}

/// A handle on a custom op. It is serialised as its name and key, so the op must be [`register`]ed before a
/// graph that uses it is loaded.
#[derive(Clone)]
pub struct Custom(Arc<dyn CustomOp>);

static REGISTRY: LazyLock<RwLock<HashMap<(String, String), Arc<dyn CustomOp>>>> =
    LazyLock::new(Default::default);

/// Registers the op so that serialised graphs that use it can be loaded.
pub fn register(op: Arc<dyn CustomOp>) {
    REGISTRY.write().unwrap_or_else(|e| e.into_inner()).insert((op.name().into(), op.key()), op);
}

impl Custom {
    pub fn new(op: Arc<dyn CustomOp>) -> Custom {
        Custom(op)
    }

    pub fn op(&self) -> &Arc<dyn CustomOp> {
        &self.0
    }
}

impl PartialEq for Custom {
    fn eq(&self, o: &Self) -> bool {
        self.0.name() == o.0.name() && self.0.key() == o.0.key()
    }
}
impl Eq for Custom {}
impl Hash for Custom {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.0.name().hash(h);
        self.0.key().hash(h);
    }
}
impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Custom({} {})", self.0.name(), self.0.key())
    }
}
impl Serialize for Custom {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        (self.0.name(), self.0.key()).serialize(s)
    }
}
impl<'de> Deserialize<'de> for Custom {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Custom, D::Error> {
        let id = <(String, String)>::deserialize(d)?;
        let r = REGISTRY.read().unwrap_or_else(|e| e.into_inner());
        r.get(&id).cloned().map(Custom).ok_or_else(|| {
            serde::de::Error::custom(format!(
                "custom op {} is not registered; call custom::register first",
                id.0
            ))
        })
    }
}
