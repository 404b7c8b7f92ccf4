//! Kernels: the IR, its builder, verifier and interpreter, and the templates that build kernels.

pub(crate) mod access;
pub mod builder;
mod chain;
pub mod interp;
pub mod ir;
pub mod lower;
pub mod merged;
mod parts;
pub mod templates;
pub mod tune;
pub mod verify;

pub use builder::{Buf, Builder, E, Fault, Local, Private, Var};
pub use ir::*;
pub use merged::Parts;
pub use verify::{verify, verify_for};

use crate::dtype::Scalar;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How a kernel is launched: the number of workgroups in each dimension, and the parameter values in order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Launch {
    pub groups: [u32; 3],
    pub params: Vec<Scalar>,
}

impl Launch {
    /// Puts named parameter values in the kernel's order. An offset `o<buffer>` or the parameter `fault` is 0
    /// if it is missing.
    ///
    /// # Errors
    /// [`Error::Internal`] if a value is missing, unknown or does not fit its type.
    pub fn bind(k: &Kernel, groups: [u32; 3], values: &[(&str, Scalar)]) -> Result<Launch> {
        if let Some((n, _)) = values.iter().find(|(n, _)| !k.params.iter().any(|p| p.name == *n)) {
            return Err(Error::internal(format!("kernel {} has no parameter {n}", k.name)));
        }
        let params = k
            .params
            .iter()
            .map(|p| {
                let v = match values.iter().find(|(n, _)| *n == p.name) {
                    Some((_, v)) => *v,
                    // The device replaces the 0 of `fault` by the command's fault id.
                    None if p.name == "fault" || is_offset(&p.name) => Scalar::U(0),
                    None => {
                        return Err(Error::internal(format!(
                            "kernel {}: parameter {} not given",
                            k.name, p.name
                        )));
                    }
                };
                let c = v.cast(p.ty.dtype());
                if p.ty.is_int() && c.as_f64() != v.as_f64() {
                    let what = format!("kernel {}: {} = {v:?} does not fit {}", k.name, p.name, p.ty.name());
                    return Err(Error::internal(what));
                }
                Ok(c)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Launch { groups, params })
    }

    /// A grid of at least `n` workgroups, split over two dimensions if `n` exceeds `max_groups` (at most
    /// 65,535). The linear index is `group.y * groups.x + group.x`; kernels must check it against their size.
    pub fn fold(n: u64, max_groups: u32) -> [u32; 3] {
        let max = max_groups.clamp(1, 65_535) as u64;
        if n <= max {
            return [n.max(1) as u32, 1, 1];
        }
        let rows = n.div_ceil(max);
        [n.div_ceil(rows) as u32, rows as u32, 1]
    }
}

fn is_offset(name: &str) -> bool {
    name.strip_prefix('o').is_some_and(|d| !d.is_empty() && d.bytes().all(|c| c.is_ascii_digit()))
}
