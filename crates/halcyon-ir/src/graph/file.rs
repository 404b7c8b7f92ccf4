//! Graphs as bytes, and the checks of a graph that was read or rewritten. The bytes are magic bytes, the
//! length of the header, the header in JSON, and the constants' bytes.

use super::{Graph, NodeId};
use crate::data::ConstData;
use crate::error::{Error, Result};
use crate::ops::Op;
use crate::shape::TensorType;
use std::sync::Arc;

/// Magic bytes of a serialised graph; the last byte is the format version.
const MAGIC: &[u8; 8] = b"HALCGRF1";

/// Maximum nesting depth of composites in a graph. The built-in composites nest three deep.
const MAX_DEPTH: usize = 16;

impl Graph {
    /// Serialises the graph. The magic bytes at the start contain the format version.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut g = self.clone();
        let mut blobs = vec![];
        g.each_const(0, &mut |c| {
            c.blob = blobs.len() as u32;
            blobs.push(c.clone());
            Ok(())
        })?;
        let head =
            serde_json::to_vec(&g).map_err(|e| Error::internal(format!("graph does not serialise: {e}")))?;
        let mut out = MAGIC.to_vec();
        out.extend((head.len() as u64).to_le_bytes());
        out.extend(head);
        for b in blobs {
            out.extend(b.bytes());
        }
        Ok(out)
    }

    /// Reads a graph written by [`Graph::to_bytes`], and checks its structure and types.
    ///
    /// # Errors
    /// [`Error::Format`] for bytes that are not such a graph, and errors of the type rules.
    pub fn from_bytes(b: &[u8]) -> Result<Graph> {
        let bad = |what: &str| Error::Format { file: "graph".into(), what: what.into() };
        if b.get(..8) != Some(MAGIC) {
            return Err(bad("not a graph of this version (expected HALCGRF1)"));
        }
        let len = b
            .get(8..16)
            .and_then(|x| x.try_into().ok())
            .map(u64::from_le_bytes)
            .ok_or_else(|| bad("truncated"))?;
        let end = usize::try_from(len)
            .ok()
            .and_then(|l| l.checked_add(16))
            .ok_or_else(|| bad("header length overflows"))?;
        let head = b.get(16..end).ok_or_else(|| bad("the header is longer than the file"))?;
        let mut g: Graph = serde_json::from_slice(head).map_err(|e| bad(&format!("header: {e}")))?;
        g.well_formed(0).map_err(|w| bad(&w))?;
        let mut at = end;
        g.each_const(0, &mut |c| {
            let n = c
                .dims
                .iter()
                .try_fold(1usize, |a, d| a.checked_mul(*d))
                .ok_or_else(|| bad("a constant is too large"))?;
            let stop = at.checked_add(c.dtype.bytes(n)).ok_or_else(|| bad("a constant is too large"))?;
            let data = b.get(at..stop).ok_or_else(|| bad("a constant's data is missing"))?.to_vec();
            at = stop;
            c.attach(Arc::new(data))
        })?;
        if at != b.len() {
            return Err(bad("bytes at the end belong to no constant"));
        }
        // A type that contradicts its rule is an error in the file here, not an internal error.
        g.check().map_err(|e| match e {
            Error::Internal(what) => bad(&what),
            e => e,
        })?;
        Ok(g)
    }

    /// Visits every constant in node order. Constants in the body of a composite are visited at the
    /// composite's position.
    fn each_const(&mut self, depth: usize, f: &mut dyn FnMut(&mut ConstData) -> Result<()>) -> Result<()> {
        for n in &mut self.nodes {
            match &mut n.op {
                Op::Const(c) => f(c)?,
                Op::Composite(c) if depth < MAX_DEPTH && c.body.has_const(depth) => {
                    Arc::make_mut(c).body.each_const(depth + 1, f)?
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn has_const(&self, depth: usize) -> bool {
        self.nodes.iter().any(|n| match &n.op {
            Op::Const(_) => true,
            Op::Composite(c) => depth < MAX_DEPTH && c.body.has_const(depth + 1),
            _ => false,
        })
    }

    /// Checks the structure: operands precede their users, every input, argument, output and state index is
    /// in range, states pair equal types, and composites are not nested too deeply. The error names the
    /// violation.
    fn well_formed(&self, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("composites are nested deeper than {MAX_DEPTH}"));
        }
        for (i, n) in self.nodes.iter().enumerate() {
            if n.inputs.iter().any(|x| x.index() >= i) {
                return Err(format!("operand of node {i} is not a node before it"));
            }
            match &n.op {
                Op::Input(k) => {
                    let spec = self.inputs.get(*k as usize).and_then(|s| self.nodes.get(s.node.index()));
                    if spec.is_none_or(|s| s.ty != n.ty) {
                        return Err(format!("node {i} is not a declared input"));
                    }
                }
                Op::Arg(k) if self.args.get(*k as usize) != Some(&n.ty.dtype) => {
                    return Err(format!("node {i} is not a declared argument"));
                }
                Op::Composite(c) => c.body.well_formed(depth + 1)?,
                _ => {}
            }
        }
        for (k, s) in self.inputs.iter().enumerate() {
            match self.nodes.get(s.node.index()).map(|n| &n.op) {
                Some(Op::Input(j)) if *j as usize == k => {}
                _ => return Err(format!("input {k} does not refer to its own input node")),
            }
        }
        if let Some(k) = self.outputs.iter().position(|o| o.node.index() >= self.nodes.len()) {
            return Err(format!("output {k} is not a node"));
        }
        let ty = |n: NodeId| &self.nodes[n.index()].ty;
        let paired = |(i, o): &(u32, u32)| match (self.inputs.get(*i as usize), self.outputs.get(*o as usize))
        {
            (Some(i), Some(o)) => ty(i.node) == ty(o.node),
            _ => false,
        };
        match self.states.iter().all(paired) {
            true => Ok(()),
            false => Err("a state is not a pair of an input and an output of one type".into()),
        }
    }

    /// Checks the graph's structure, and every node against its type rule.
    pub fn check(&self) -> Result<()> {
        self.well_formed(0).map_err(|w| Error::internal(format!("graph: {w}")))?;
        self.check_types()
    }

    fn check_types(&self) -> Result<()> {
        for n in &self.nodes {
            let tys: Vec<&TensorType> = n.inputs.iter().map(|i| self.ty(*i)).collect();
            if let Some(why) = n.ty.fault() {
                return Err(Error::shape(n.op.name(), why).at(&n.span));
            }
            let t = n.op.infer(&tys, Some(&n.ty)).map_err(|e| e.at(&n.span))?;
            if t != n.ty {
                return Err(Error::internal(format!(
                    "{} is typed {} but its rule gives {t} (at {})",
                    n.op.name(),
                    n.ty,
                    n.span
                )));
            }
            if let Op::Composite(c) = &n.op {
                c.body.check_types().map_err(|e| e.at(&n.span))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::tests::mlp;
    use crate::shape::Dim;

    #[test]
    fn serialised_graphs_come_back_and_damage_is_an_error() {
        let g = mlp(Dim::sym("b"));
        let b = g.to_bytes().unwrap();
        assert_eq!(Graph::from_bytes(&b).unwrap(), g);
        for n in [0, 7, 15, 40, b.len() - 1] {
            assert!(Graph::from_bytes(&b[..n]).is_err(), "{n}");
        }
        let mut c = b.clone();
        c[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Graph::from_bytes(&c).is_err());
        let mut c = b.clone();
        c.push(0);
        assert!(Graph::from_bytes(&c).is_err());
    }

    #[test]
    fn constants_in_bodies_are_serialised_and_bodies_are_checked() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [3usize]));
        let y = g
            .composite("table", Default::default(), &[x], |g, x| {
                let c = g.constant(ConstData::from_slice(&[3], &[1f32, 2.0, 4.0]).unwrap());
                g.mul(x[0], c)
            })
            .unwrap();
        g.output("y", y);
        let b = g.to_bytes().unwrap();
        assert_eq!(Graph::from_bytes(&b).unwrap(), g);
        // Corrupt the JSON header: operand, input, output and state indices out of range, in the graph and in
        // the composite's body.
        let len = u64::from_le_bytes(b[8..16].try_into().unwrap()) as usize;
        let head = std::str::from_utf8(&b[16..16 + len]).unwrap();
        let with = |head: &str| {
            let mut v = MAGIC.to_vec();
            v.extend((head.len() as u64).to_le_bytes());
            v.extend(head.as_bytes());
            v.extend(&b[16 + len..]);
            Graph::from_bytes(&v)
        };
        assert_eq!(with(head).unwrap(), g);
        for (from, to) in [
            ("\"inputs\":[0,1]", "\"inputs\":[0,9]"),
            ("\"inputs\":[0,1]", "\"inputs\":[0,2]"),
            ("\"inputs\":[0]", "\"inputs\":[1]"),
            ("\"Input\":0", "\"Input\":7"),
            ("\"node\":2", "\"node\":3"),
            ("\"node\":1", "\"node\":0"),
            ("\"states\":[]", "\"states\":[[0,4]]"),
            ("\"dims\":[3]", "\"dims\":[4]"),
            ("\"dims\":[3]", "\"dims\":[2305843009213693952,4]"),
            ("\"shape\":[3]", "\"shape\":[5]"),
            ("\"shape\":[3]", "\"shape\":[9223372036854775807]"),
        ] {
            assert!(head.contains(from), "{from} is not in {head}");
            for (at, _) in head.match_indices(from) {
                let changed = [&head[..at], to, &head[at + from.len()..]].concat();
                // An output may also name the input node, so that change is valid.
                assert!(with(&changed).is_err() || from == "\"node\":1", "{changed}");
            }
        }
    }
}
