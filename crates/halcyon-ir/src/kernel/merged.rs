//! Kernels that run one kernel several times in one launch, each time on other buffers. An optimizer's step
//! updates many small parameters by the same kernel. One launch for all parameters costs less than one launch
//! for each.

use super::ir::*;
use super::{Launch, is_offset};
use crate::dtype::Scalar;
use crate::error::{Error, Result};
use crate::target::Caps;
use serde::{Deserialize, Serialize};

/// The content of a kernel that runs another kernel several times.
///
/// The outer kernel declares the buffers that each part reads, part after part, then the buffers that each
/// part writes, part after part. Its first parameters are the parameters of `kernel`, with part 0's values.
/// The parameters in `own` follow, once for each further part. The last parameters are the indices of the
/// first workgroup of each further part.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Parts {
    /// The kernel that each part runs. It computes a linear index of its workgroup, and does nothing in
    /// workgroups beyond its size.
    pub kernel: Kernel,
    /// Number of parts, at least 2.
    pub count: u32,
    /// The parameters that each part has for itself, in increasing order. The parts share all others.
    pub own: Vec<ParamId>,
}

/// The values of a kernel's parameters in a plan: a literal, or the number of a run-time argument.
pub type PlanParams = Vec<(Scalar, Option<u32>)>;

impl Parts {
    fn reads(&self) -> usize {
        self.kernel.buffers.iter().filter(|b| !b.write).count()
    }

    /// The buffer of the outer kernel that part `part` uses as its buffer `b`.
    pub fn buffer(&self, part: usize, b: usize) -> usize {
        let reads = self.reads();
        let writes = self.kernel.buffers.len() - reads;
        match b.checked_sub(reads) {
            None => part * reads + b,
            Some(w) => self.count as usize * reads + part * writes + w,
        }
    }

    /// The parameter of the outer kernel that part `part` uses as its parameter `p`.
    pub fn param(&self, part: usize, p: usize) -> usize {
        match self.own.iter().position(|o| o.ix() == p) {
            Some(k) if part > 0 => self.kernel.params.len() + (part - 1) * self.own.len() + k,
            _ => p,
        }
    }

    /// The parameter of the outer kernel with the index of the first workgroup of part `part`, which must be
    /// at least 1. Part 0 starts at workgroup 0.
    pub fn start(&self, part: usize) -> usize {
        self.kernel.params.len() + (self.count as usize - 1) * self.own.len() + part - 1
    }

    /// The declarations of the outer kernel.
    fn outer(self) -> Kernel {
        let (k, n) = (&self.kernel, self.count as usize);
        let mut buffers = vec![k.buffers[0]; k.buffers.len() * n];
        for part in 0..n {
            for (b, decl) in k.buffers.iter().enumerate() {
                buffers[self.buffer(part, b)] = *decl;
            }
        }
        let mut params = k.params.clone();
        for part in 1..n {
            let own = self.own.iter().map(|p| &k.params[p.ix()]);
            params.extend(own.map(|p| ParamDecl { name: format!("{}_part{part}", p.name), ty: p.ty }));
        }
        params.extend((1..n).map(|part| ParamDecl { name: format!("start{part}"), ty: Ty::I32 }));
        Kernel {
            name: format!("{}_parts", k.name),
            buffers,
            params,
            locals: vec![],
            privates: vec![],
            fragments: vec![],
            workgroup: k.workgroup,
            noalias: k.noalias,
            exprs: vec![],
            values: vec![],
            vars: vec![],
            body: vec![],
            parts: Some(Box::new(self)),
        }
    }

    /// Checks that the outer kernel `k` has the declarations of its parts.
    pub(super) fn verify(&self, k: &Kernel) -> Result<()> {
        let fail = |what: &str| Err(Error::argument(format!("kernel {}", k.name), what));
        if self.count < 2 || self.kernel.buffers.is_empty() || !can_be_part(&self.kernel) {
            return fail("its parts cannot run in one launch");
        }
        if self.own.iter().any(|p| p.ix() >= self.kernel.params.len()) {
            return fail("a part has a parameter that its kernel does not declare");
        }
        let same = |a: &Kernel| a.buffers == k.buffers && a.params == k.params && a.workgroup == k.workgroup;
        match same(&self.clone().outer()) && k.body.is_empty() && k.noalias == self.kernel.noalias {
            true => super::verify(&self.kernel),
            false => fail("its declarations are not those of its parts"),
        }
    }

    /// Splits the launch `all` of the outer kernel into one launch for each part.
    pub(super) fn launches(&self, all: &Launch) -> Vec<Launch> {
        let total: u64 = all.groups.iter().map(|g| *g as u64).product();
        let n = self.count as usize;
        let start = |part: usize| match part {
            0 => 0,
            p if p == n => total,
            p => all.params[self.start(p)].as_f64() as u64,
        };
        let of = |part: usize| {
            let groups = start(part + 1).saturating_sub(start(part)).min(u32::MAX as u64) as u32;
            let params = (0..self.kernel.params.len()).map(|p| all.params[self.param(part, p)]).collect();
            Launch { groups: [groups, 1, 1], params }
        };
        (0..n).map(of).collect()
    }
}

/// Whether a kernel can be a part: its work-items neither exchange values nor report faults, and it uses only
/// the workgroup indices that make a linear index.
pub(crate) fn can_be_part(k: &Kernel) -> bool {
    let linear = |e: &Expr| match e {
        Expr::Id(Id::Group(d)) => *d < 2,
        Expr::Id(Id::Groups(d)) => *d < 1,
        _ => true,
    };
    let mut alone = k.locals.is_empty() && !k.uses_subgroups() && k.exprs.iter().all(linear);
    k.walk(&mut |s| alone &= !matches!(s, Stmt::Barrier { .. } | Stmt::SetError { .. }));
    // Offsets and `fault` are set by name ([`Launch::bind`], the device). The copies of a parameter for
    // further parts have other names.
    let special = k.params.iter().any(|p| p.name == "fault" || is_offset(&p.name));
    // `Parts::buffer` requires that the buffers that are only read come before those that are written.
    let ordered = k.buffers.is_sorted_by_key(|b| b.write);
    alone && !special && ordered && k.parts.is_none()
}

/// Size in bytes of a kernel's arguments: eight for each buffer, and the parameters.
pub(crate) fn argument_bytes(k: &Kernel) -> usize {
    8 * k.buffers.len() + k.params.iter().map(|p| p.ty.size().next_multiple_of(8)).sum::<usize>()
}

/// One kernel for several launches of `kernel`, given by their numbers of workgroups and their parameters.
/// `kernel` must be a generated chain without a reduction. `None` if it cannot be a part, or if the device
/// does not take that many arguments or workgroups.
pub(crate) fn merge(
    kernel: &Kernel,
    launches: &[([u32; 3], &PlanParams)],
    caps: &Caps,
) -> Option<(Kernel, [u32; 3], PlanParams)> {
    if launches.len() < 2 || !can_be_part(kernel) || kernel.buffers.is_empty() {
        return None;
    }
    let first = launches[0].1;
    if launches.iter().any(|(_, p)| p.len() != kernel.params.len()) {
        return None;
    }
    let differs = |p: &usize| launches.iter().any(|(_, values)| values[*p] != first[*p]);
    let own: Vec<usize> = (0..kernel.params.len()).filter(differs).collect();
    let mut params = first.clone();
    for (_, values) in &launches[1..] {
        params.extend(own.iter().map(|p| values[*p]));
    }
    let mut total = 0u64;
    for (k, (groups, _)) in launches.iter().enumerate() {
        if k > 0 {
            params.push((Scalar::I(total as i64), None));
        }
        total += groups.iter().map(|g| *g as u64).product::<u64>();
    }
    if total > i32::MAX as u64 {
        return None;
    }
    let own = own.into_iter().map(|p| ParamId(p as u32)).collect();
    let merged = Parts { kernel: kernel.clone(), count: launches.len() as u32, own }.outer();
    if argument_bytes(&merged) > caps.max_argument_bytes as usize {
        return None;
    }
    Some((merged, Launch::fold(total, caps.max_groups), params))
}
