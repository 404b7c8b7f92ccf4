//! The operations that `halcyon bench ops` times.

use super::limits::Work;
use halcyon::ir::composite::CompositeKind;
use halcyon::ir::graph::NodeId;
use halcyon::ir::ops::Conv;
use halcyon::ir::{ConstData, DType, Graph, Op, Shape, TensorType, cost};
use halcyon::{Error, Result};
use std::sync::Arc;

/// One row of the table.
pub(crate) struct Item {
    pub name: String,
    /// The operands as text; for a convolution also the kernel and the output channels.
    pub what: String,
    /// The type in which its products are computed.
    pub arithmetic: &'static str,
    make: Box<dyn Fn(&mut Graph) -> Result<Vec<NodeId>>>,
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Item({}: {})", self.name, self.what)
    }
}

fn input(g: &mut Graph, dtype: DType, dims: &[usize]) -> NodeId {
    let name = format!("x{}", g.inputs().len());
    g.input(&name, TensorType::new(dtype, Shape::from(dims)))
}

fn item(
    name: impl Into<String>,
    what: impl Into<String>,
    make: impl Fn(&mut Graph) -> Result<Vec<NodeId>> + 'static,
) -> Item {
    Item { name: name.into(), what: what.into(), arithmetic: "f32", make: Box::new(make) }
}

fn gemm(n: usize, dtype: DType) -> Item {
    let (prefix, arithmetic) = if dtype == DType::BF16 { ("gemm-bf16", "bf16") } else { ("gemm", "f32") };
    let i = item(format!("{prefix}-{n}"), format!("{dtype} [{n}, {n}] x [{n}, {n}]"), move |g| {
        let (a, b) = (input(g, dtype, &[n, n]), input(g, dtype, &[n, n]));
        Ok(vec![g.matmul(a, b)?])
    });
    Item { arithmetic, ..i }
}

fn gemv(m: usize, k: usize) -> Item {
    item(format!("gemv-{m}x{k}"), format!("f32 [{m}, {k}] x [{k}]"), move |g| {
        let (a, x) = (input(g, DType::F32, &[m, k]), input(g, DType::F32, &[k]));
        Ok(vec![g.matmul(a, x)?])
    })
}

/// A convolution with batch 1: channels in and out, groups, image size, kernel, stride, padding.
fn conv(name: &str, [ci, co, groups, hw, k, stride, pad]: [usize; 7]) -> Item {
    let what = format!(
        "f32 [1, {ci}, {hw}, {hw}], {k}x{k} to {co} channels{}{}",
        if stride > 1 { format!(", stride {stride}") } else { String::new() },
        if groups > 1 { format!(", {groups} groups") } else { String::new() },
    );
    item(name, what, move |g| {
        let mut attrs = Conv::new(2);
        attrs.stride = [stride; 2].into_iter().collect();
        attrs.pad = [(pad as i64, pad as i64); 2].into_iter().collect();
        attrs.groups = groups;
        let x = input(g, DType::F32, &[1, ci, hw, hw]);
        let w = g.constant(random(DType::F32, &[co, ci / groups, k, k], 7)?);
        Ok(vec![g.conv(x, w, attrs)?])
    })
}

/// An operation `f` on a matrix `[rows, n]` and on `vectors` vectors of length `n`.
fn rows(
    name: impl Into<String>,
    [rows, n]: [usize; 2],
    vectors: usize,
    f: impl Fn(&mut Graph, NodeId, &[NodeId]) -> Result<Vec<NodeId>> + 'static,
) -> Item {
    let more = if vectors > 0 { format!(", {vectors} x [{n}]") } else { String::new() };
    item(name, format!("f32 [{rows}, {n}]{more}"), move |g| {
        let x = input(g, DType::F32, &[rows, n]);
        let v: Vec<NodeId> = (0..vectors).map(|_| input(g, DType::F32, &[n])).collect();
        f(g, x, &v)
    })
}

/// The name of a composite in the table, where dashes separate the words.
fn named(kind: &CompositeKind) -> String {
    kind.name().replace('_', "-")
}

fn attention(causal: bool) -> Item {
    let name = format!("{}-{}", named(&CompositeKind::Attention), if causal { "causal" } else { "full" });
    let dims = [1, 32, 1024, 128];
    item(name, format!("f32 q, k, v {dims:?}"), move |g| {
        let [q, k, v] = [(); 3].map(|()| input(g, DType::F32, &dims));
        Ok(vec![g.attention(q, k, v, None, causal, 1.0 / 128f64.sqrt())?])
    })
}

/// Sorts every row. With `k`, returns only the first `k` elements of each sorted row, and also their indices.
fn sorted(g: &mut Graph, x: NodeId, descending: bool, k: Option<usize>) -> Result<Vec<NodeId>> {
    let order = g.argsort(x, 1, descending)?;
    let index = match k {
        Some(k) => g.narrow(order, 1, 0, k)?,
        None => order,
    };
    let y = g.gather_elements(x, index, 1)?;
    Ok(if k.is_some() { vec![y, index] } else { vec![y] })
}

/// All operations, in the order of the table.
pub(crate) fn all() -> Vec<Item> {
    const SQUARE: [usize; 2] = [4096, 4096];
    let mut v: Vec<Item> = [512, 1024, 2048, 4096].into_iter().map(|n| gemm(n, DType::F32)).collect();
    v.extend([1024, 2048].map(|n| gemm(n, DType::BF16)));
    v.extend([gemv(4096, 4096), gemv(14336, 4096)]);
    // Layers of ResNet-50, and a depthwise layer of MobileNet.
    v.extend([
        conv("conv-stem-7x7", [3, 64, 1, 224, 7, 2, 3]),
        conv("conv-1x1-64-256", [64, 256, 1, 56, 1, 1, 0]),
        conv("conv-1x1-256-64", [256, 64, 1, 56, 1, 1, 0]),
        conv("conv-1x1-2048-512", [2048, 512, 1, 7, 1, 1, 0]),
        conv("conv-1x1-s2-256-512", [256, 512, 1, 56, 1, 2, 0]),
        conv("conv-3x3-64", [64, 64, 1, 56, 3, 1, 1]),
        conv("conv-3x3-128", [128, 128, 1, 28, 3, 1, 1]),
        conv("conv-3x3-256", [256, 256, 1, 14, 3, 1, 1]),
        conv("conv-3x3-512", [512, 512, 1, 7, 3, 1, 1]),
        conv("conv-3x3-s2-128", [128, 128, 1, 56, 3, 2, 1]),
        conv("conv-depthwise-3x3-128", [128, 128, 128, 56, 3, 1, 1]),
    ]);
    v.extend([
        rows(named(&CompositeKind::Softmax), SQUARE, 0, |g, x, _| Ok(vec![g.softmax(x, 1)?])),
        rows(named(&CompositeKind::LayerNorm), SQUARE, 2, |g, x, v| {
            Ok(vec![g.layer_norm(x, v[0], Some(v[1]), 1, 1e-5)?])
        }),
        rows(named(&CompositeKind::RmsNorm), SQUARE, 1, |g, x, v| Ok(vec![g.rms_norm(x, v[0], 1e-5)?])),
        rows("silu", SQUARE, 0, |g, x, _| Ok(vec![g.silu(x)?])),
        // silu(x) * w + b
        rows("chain", SQUARE, 2, |g, x, v| {
            let s = g.silu(x)?;
            let m = g.mul(s, v[0])?;
            Ok(vec![g.add(m, v[1])?])
        }),
        attention(true),
        attention(false),
        rows("sort", [256, 4096], 0, |g, x, _| sorted(g, x, false, None)),
        rows("top-k", [32, 32000], 0, |g, x, _| sorted(g, x, true, Some(50))),
    ]);
    v
}

/// The operations that `--only` selects; all if it is not given. Each argument selects the operation whose
/// name equals it, and all operations whose names begin with it and a dash.
///
/// # Errors
/// [`Error::Argument`] for an unknown name, with a list of all names.
pub(crate) fn select_items(only: &[String]) -> Result<Vec<Item>> {
    let all = all();
    let fits = |i: &Item, o: &str| {
        i.name == o || i.name.strip_prefix(o).is_some_and(|r| r.starts_with('-') && !o.is_empty())
    };
    for o in only {
        if !all.iter().any(|i| fits(i, o)) {
            let names: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
            return Err(Error::argument(
                "--only",
                format!("there is no operation \"{o}\"; the operations are {}", names.join(", ")),
            ));
        }
    }
    Ok(all.into_iter().filter(|i| only.is_empty() || only.iter().any(|o| fits(i, o))).collect())
}

impl Item {
    pub(crate) fn graph(&self) -> Result<Graph> {
        let mut g = Graph::new();
        for (i, y) in (self.make)(&mut g)?.into_iter().enumerate() {
            g.output(&format!("y{i}"), y);
        }
        Ok(g)
    }

    pub(crate) fn work(&self, g: &Graph) -> Result<Work> {
        work(g, self.arithmetic)
    }
}

/// The work of a graph: the sum of its ops' FLOPs, and the bytes of inputs, constants and outputs, each
/// counted once.
pub(crate) fn work(g: &Graph, arithmetic: &'static str) -> Result<Work> {
    let mut w = Work { flops: 0, read: 0, written: 0, arithmetic };
    for id in g.ids() {
        let n = g.node(id);
        match n.op {
            Op::Input(_) | Op::Const(_) => w.read = w.read.saturating_add(cost::type_bytes(&n.ty)?),
            _ if n.op.is_leaf() || n.op.is_view() => {}
            _ => w.flops = w.flops.saturating_add(cost::of_node(g, id)?.0),
        }
    }
    for o in g.outputs() {
        w.written = w.written.saturating_add(cost::type_bytes(g.ty(o.node))?);
    }
    Ok(w)
}

/// Numbers in -1..1 that depend only on the seed.
///
/// # Errors
/// [`Error::Unsupported`] for types other than f32 and bf16.
pub(crate) fn random(dtype: DType, dims: &[usize], seed: u64) -> Result<ConstData> {
    let n: usize = dims.iter().product();
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    // Multiplier and increment of Knuth's MMIX generator.
    let mut next = || {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((s >> 40) as f32 / (1u32 << 23) as f32 - 1.0).to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(dtype.bytes(n));
    match dtype {
        DType::F32 => (0..n).for_each(|_| bytes.extend_from_slice(&next())),
        // The upper half of the f32 is the number as bf16, rounded towards zero.
        DType::BF16 => (0..n).for_each(|_| bytes.extend_from_slice(&next()[2..])),
        d => return Err(Error::unsupported(format!("random numbers of type {d} here"), "Use f32 or bf16")),
    }
    ConstData::new(dtype, dims, Arc::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_work_is_a_graph_with_the_work_it_says() {
        for i in all() {
            let g = i.graph().unwrap_or_else(|e| panic!("{}: {e}", i.name));
            let w = i.work(&g).expect("a figure");
            assert!(w.flops > 0 && w.read > 0 && w.written > 0, "{}: {w:?}", i.name);
        }
        let of = |name: &str| {
            let i = select_items(&[name.to_string()]).expect("it is there").remove(0);
            i.work(&i.graph().expect("a graph")).expect("a figure")
        };
        let gemm = of("gemm-512");
        assert_eq!((gemm.flops, gemm.read, gemm.written), (2 * 512 * 512 * 512, 8 << 18, 4 << 18));
        // Output 112 x 112 x 64, a window of 7 x 7 x 3.
        let stem = of("conv-stem-7x7");
        assert_eq!(stem.flops, 2 * 112 * 112 * 64 * 147);
        assert_eq!(stem.read, 4 * (3 * 224 * 224 + 64 * 147));
        let (half, full) = (of("attention-causal"), of("attention-full"));
        let ratio = half.flops as f64 / full.flops as f64;
        assert!((ratio - 0.5).abs() < 1e-3, "{ratio}");
        assert_eq!(of("gemm-bf16-1024").read, 4 << 20);
    }

    #[test]
    fn names_choose_one_or_a_group() {
        let names = |o: &[&str]| -> Vec<String> {
            let o: Vec<String> = o.iter().map(|s| s.to_string()).collect();
            select_items(&o).expect("they are there").into_iter().map(|i| i.name).collect()
        };
        assert_eq!(names(&["gemm-512"]), ["gemm-512"]);
        assert_eq!(names(&["gemv", "sort"]), ["gemv-4096x4096", "gemv-14336x4096", "sort"]);
        assert_eq!(names(&[]).len(), all().len());
        for bad in ["gem", "", "conv-3x"] {
            let e = select_items(&[bad.to_string()]).unwrap_err();
            assert!(e.exit_code() == 2 && e.to_string().contains("attention-causal"), "{e}");
        }
        let mut all = names(&[]);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), names(&[]).len());
    }

    #[test]
    fn random_numbers_fill_their_range() {
        let v = random(DType::F32, &[1000], 3).expect("f32").to_vec::<f32>();
        assert!(v.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!(v.iter().any(|x| *x < -0.9) && v.iter().any(|x| *x > 0.9));
        let h = random(DType::BF16, &[1000], 3).expect("bf16").to_vec::<f32>();
        assert!(v.iter().zip(&h).all(|(a, b)| (a - b).abs() <= a.abs() / 128.0));
        assert!(random(DType::I8, &[1], 0).is_err());
    }
}
