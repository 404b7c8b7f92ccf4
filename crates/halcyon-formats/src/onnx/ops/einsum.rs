//! Einsum: turns an equation into views, products and sums.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[row("Einsum", 12, &["equation"], einsum)];

/// The label of an axis: a letter, or the position of an axis within an ellipsis, counted from the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Under(usize),
    Letter(u8),
}

/// A value whose axes have distinct labels.
#[derive(Clone, Debug)]
struct Term {
    v: Value,
    labels: Vec<Label>,
}

impl Term {
    fn at(&self, l: Label) -> Option<usize> {
        self.labels.iter().position(|x| *x == l)
    }

    fn size(&self, l: Label) -> Option<Dim> {
        self.at(l).map(|k| self.v.shape()[k])
    }
}

/// With at most this many operands, the pair with the smallest result is multiplied first; with more, they
/// are multiplied from left to right.
const MAX_GREEDY_OPERANDS: usize = 12;

fn einsum(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let args = c.args()?;
    let text = c.string("equation", "")?;
    let text: Vec<u8> = text.bytes().filter(|b| *b != b' ').collect();
    let (left, right) = match text.windows(2).position(|w| w == b"->") {
        Some(i) => (&text[..i], Some(&text[i + 2..])),
        None => (&text[..], None),
    };
    let words: Vec<&[u8]> = left.split(|b| *b == b',').collect();
    if words.len() != args.len() {
        return Err(c.invalid(format!("the equation has {} terms for {} operands", words.len(), args.len())));
    }
    let mut terms = Vec::with_capacity(args.len());
    let mut seen: Vec<Label> = vec![];
    for (word, v) in words.iter().zip(&args) {
        let labels = labels(c, word, v.rank())?;
        seen.extend(&labels);
        terms.push(diagonal(b, c, (*v).clone(), labels)?);
    }
    let depth = seen.iter().filter_map(|l| if let Label::Under(n) = l { Some(n + 1) } else { None }).max();
    let under = (0..depth.unwrap_or(0)).rev().map(Label::Under);
    let output = match right {
        Some(word) => {
            let has = word.windows(3).any(|w| w == b"...");
            let letters = word.iter().filter(|b| **b != b'.').count();
            let rank = letters + if has { depth.unwrap_or(0) } else { 0 };
            let out = labels(c, word, rank)?;
            if let Some(l) = out.iter().enumerate().find(|(i, l)| out[..*i].contains(l) || !seen.contains(l))
            {
                return Err(c.invalid(format!(
                    "the result's {:?} is in no term, or occurs twice in the result",
                    l.1
                )));
            }
            out
        }
        None => {
            let mut once: Vec<Label> = seen
                .iter()
                .copied()
                .filter(|l| matches!(l, Label::Letter(_)) && seen.iter().filter(|x| *x == l).count() == 1)
                .collect();
            once.sort();
            under.chain(once).collect()
        }
    };
    broadcast_terms(c, b, &mut terms)?;
    while terms.len() > 1 {
        let (i, j) = pick(&terms, &output);
        let (y, x) = (terms.remove(j), terms.remove(i));
        let wanted = |l: Label| output.contains(&l) || terms.iter().any(|t| t.labels.contains(&l));
        let new = pair(b, x, y, &wanted)?;
        terms.insert(i, new);
    }
    let Some(last) = terms.pop() else {
        return Err(c.invalid("there are no operands"));
    };
    let last = sum_out(b, last, &|l| output.contains(&l))?;
    let perm: Option<Vec<usize>> = output.iter().map(|l| last.at(*l)).collect();
    let perm = perm.ok_or_else(|| c.invalid("an axis of the result is in no term"))?;
    one(b.permute(&last.v, &perm)?)
}

/// The labels of a term over `rank` axes. An ellipsis covers the axes without a letter.
fn labels(c: &Call<'_>, word: &[u8], rank: usize) -> Result<Vec<Label>> {
    let text = || String::from_utf8_lossy(word).into_owned();
    let letters = word.iter().filter(|b| b.is_ascii_alphabetic()).count();
    let mut out = Vec::with_capacity(rank);
    let mut rest = word;
    let mut dots = false;
    while let Some((&first, tail)) = rest.split_first() {
        if first.is_ascii_alphabetic() {
            out.push(Label::Letter(first));
            rest = tail;
        } else if let (Some(tail), false) = (rest.strip_prefix(b"..."), dots) {
            let hidden = rank.checked_sub(letters);
            let hidden =
                hidden.ok_or_else(|| c.invalid(format!("term '{}' does not match {rank} axes", text())))?;
            out.extend((0..hidden).rev().map(Label::Under));
            (rest, dots) = (tail, true);
        } else {
            return Err(
                c.invalid(format!("term '{}' of the equation may have only letters and one '...'", text()))
            );
        }
    }
    if out.len() != rank {
        return Err(c.invalid(format!("term '{}' does not match {rank} axes", text())));
    }
    Ok(out)
}

/// Takes the diagonal of axes with the same label: two axes of size n are merged into one axis, where the
/// diagonal is a slice with step n + 1.
fn diagonal(b: &mut Builder, c: &Call<'_>, mut v: Value, mut labels: Vec<Label>) -> Result<Term> {
    while let Some((i, j)) =
        (0..labels.len()).find_map(|j| labels[..j].iter().position(|l| *l == labels[j]).map(|i| (i, j)))
    {
        let n = v.shape()[i];
        if v.shape()[j] != n {
            return Err(
                c.invalid(format!("axes {i} and {j} of {} have the same label, but different sizes", v.ty))
            );
        }
        let mut perm: Vec<usize> = (0..labels.len()).filter(|k| *k != i && *k != j).collect();
        let rest: Vec<Dim> = perm.iter().map(|&k| v.shape()[k]).collect();
        let names: Vec<Label> = perm.iter().map(|&k| labels[k]).chain([labels[i]]).collect();
        perm.extend([i, j]);
        let size = n.known().and_then(|n| i64::try_from(n).ok());
        let size = size.ok_or_else(|| c.unsupported("a symbolic diagonal", "Give concrete input shapes"))?;
        v = b.permute(&v, &perm)?;
        v = b.reshape(&v, [&rest[..], &[n.mul(n)]].concat())?;
        let mut r: Vec<Range> = rest.iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
        r.push(Range { start: Dim::from(0), step: size.saturating_add(1), len: n });
        v = b.slice(&v, &r)?;
        labels = names;
    }
    Ok(Term { v, labels })
}

/// Removes axes of size 1 whose label has another size in another term, so that they are broadcast. All other
/// axes with the same label must have the same size.
fn broadcast_terms(c: &Call<'_>, b: &mut Builder, terms: &mut [Term]) -> Result<()> {
    let mut sizes: Vec<(Label, Dim)> = vec![];
    for (l, d) in terms.iter().flat_map(|t| t.labels.iter().copied().zip(t.v.shape().iter().copied())) {
        match sizes.iter_mut().find(|s| s.0 == l) {
            None => sizes.push((l, d)),
            Some(s) if s.1 == d || d.is(1) => {}
            Some(s) if s.1.is(1) => s.1 = d,
            Some(s) => {
                return Err(c.invalid(format!("axes with the same label have the sizes {} and {d}", s.1)));
            }
        }
    }
    for t in terms {
        let kept: Vec<usize> = (0..t.labels.len())
            .filter(|&k| !t.v.shape()[k].is(1) || sizes.iter().any(|s| s.0 == t.labels[k] && s.1.is(1)))
            .collect();
        if kept.len() < t.labels.len() {
            let to: Shape = kept.iter().map(|&k| t.v.shape()[k]).collect();
            t.v = b.reshape(&t.v, to)?;
            t.labels = kept.iter().map(|&k| t.labels[k]).collect();
        }
    }
    Ok(())
}

/// Picks the next two terms to multiply, and returns their indices, the smaller one first.
fn pick(terms: &[Term], output: &[Label]) -> (usize, usize) {
    if terms.len() > MAX_GREEDY_OPERANDS {
        return (0, 1);
    }
    let mut best = (f64::INFINITY, 0, 1);
    for j in 1..terms.len() {
        for i in 0..j {
            let left = |l: &Label| {
                output.contains(l)
                    || terms.iter().enumerate().any(|(k, t)| k != i && k != j && t.labels.contains(l))
            };
            let of = |t: &Term, skip: &[Label]| -> f64 {
                let kept = t.labels.iter().filter(|l| left(l) && !skip.contains(l));
                kept.filter_map(|l| t.size(*l)?.known()).map(|n| n as f64).product()
            };
            let size = of(&terms[i], &[]) * of(&terms[j], &terms[i].labels);
            if size < best.0 {
                best = (size, i, j);
            }
        }
    }
    (best.1, best.2)
}

/// Sums over the axes that are not `wanted`.
fn sum_out(b: &mut Builder, t: Term, wanted: &dyn Fn(Label) -> bool) -> Result<Term> {
    let gone: Vec<usize> = (0..t.labels.len()).filter(|&k| !wanted(t.labels[k])).collect();
    let labels = t.labels.into_iter().filter(|l| wanted(*l)).collect();
    Ok(Term { v: b.reduce(R::Sum, &t.v, &gone, false)?, labels })
}

/// Multiplies two terms and sums over the labels that neither another term nor the output needs. This is a
/// matrix product if the terms share such a label, and one of them has a needed label that the other lacks.
fn pair(b: &mut Builder, x: Term, y: Term, wanted: &dyn Fn(Label) -> bool) -> Result<Term> {
    let (xl, yl) = (x.labels.clone(), y.labels.clone());
    let x = sum_out(b, x, &|l| wanted(l) || yl.contains(&l))?;
    let y = sum_out(b, y, &|l| wanted(l) || xl.contains(&l))?;
    let split = |t: &Term, o: &Term, in_other: bool, keep: bool| -> Vec<Label> {
        let pick = |l: &Label| o.labels.contains(l) == in_other && wanted(*l) == keep;
        t.labels.iter().copied().filter(pick).collect()
    };
    let (batch, inner) = (split(&x, &y, true, true), split(&x, &y, true, false));
    let (rows, columns) = (split(&x, &y, false, true), split(&y, &x, false, true));
    let dims = |t: &Term, l: &[Label]| -> Vec<Dim> { l.iter().filter_map(|l| t.size(*l)).collect() };
    let size = |t: &Term, l: &[Label]| Shape::from(dims(t, l)).numel();
    let full = [dims(&x, &batch), dims(&x, &rows), dims(&y, &columns)].concat();
    let names = [&batch[..], &rows, &columns].concat();

    // Permutes to this order of labels and merges each list into one axis.
    let matrix = |b: &mut Builder, t: &Term, lists: [&[Label]; 3]| -> Result<Value> {
        let perm: Vec<usize> = lists.concat().iter().filter_map(|l| t.at(*l)).collect();
        let v = b.permute(&t.v, &perm)?;
        b.reshape(&v, lists.map(|l| size(t, l)))
    };
    let v = if inner.is_empty() || rows.is_empty() && columns.is_empty() {
        // An element-wise product and a sum; half types are summed in a wider type.
        let to = x.v.dtype();
        let l = matrix(b, &x, [&batch, &rows, &inner])?;
        let r = matrix(b, &y, [&batch, &columns, &inner])?;
        let (l, r) =
            if inner.is_empty() { (l, r) } else { (b.cast(&l, to.compute())?, b.cast(&r, to.compute())?) };
        let l = b.reshape(&l, [size(&x, &batch), size(&x, &rows), Dim::from(1), size(&x, &inner)])?;
        let r = b.reshape(&r, [size(&x, &batch), Dim::from(1), size(&y, &columns), size(&x, &inner)])?;
        let mut p = b.scalar(S::Mul, &[&l, &r])?;
        if !inner.is_empty() {
            p = b.reduce(R::Sum, &p, &[3], false)?;
        }
        b.cast(&p, to)?
    } else {
        let l = matrix(b, &x, [&batch, &rows, &inner])?;
        let r = matrix(b, &y, [&batch, &inner, &columns])?;
        let ids = b.ids(&[&l, &r])?;
        let n = b.g.matmul(ids[0], ids[1])?;
        b.value(n)
    };
    Ok(Term { v: b.reshape(&v, full)?, labels: names })
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType, Error};

    fn count(dims: &[usize]) -> ConstData {
        let v: Vec<f64> = (1..=dims.iter().product::<usize>()).map(|i| i as f64).collect();
        t(dims, &v)
    }

    fn op(equation: &'static str, n: usize) -> crate::onnx::proto::NodeProto {
        let names = ["x", "w0", "w1", "w2"];
        node("Einsum", &names[..n], &["y"]).text("equation", equation)
    }

    /// Evaluates an equation without an ellipsis by its definition, in a loop over all combinations of
    /// indices.
    fn plain(equation: &str, x: &[ConstData]) -> Vec<f64> {
        let (left, right) = equation.split_once("->").unwrap();
        let terms: Vec<&str> = left.split(',').collect();
        let mut sizes: std::collections::BTreeMap<char, usize> = Default::default();
        for (t, x) in terms.iter().zip(x) {
            t.chars().zip(&x.dims).for_each(|(l, &n)| {
                let s = sizes.entry(l).or_insert(n);
                *s = (*s).max(n);
            });
        }
        let names: Vec<char> = sizes.keys().copied().collect();
        let mut out = vec![0.0; right.chars().map(|l| sizes[&l]).product()];
        let total: usize = sizes.values().product();
        for k in 0..total {
            let mut rest = k;
            let at: std::collections::BTreeMap<char, usize> = names
                .iter()
                .map(|l| {
                    let i = rest % sizes[l];
                    rest /= sizes[l];
                    (*l, i)
                })
                .collect();
            let p: f64 = terms
                .iter()
                .zip(x)
                .map(|(t, x)| {
                    let i =
                        t.chars().zip(&x.dims).fold(0, |s, (l, &n)| s * n + if n == 1 { 0 } else { at[&l] });
                    x.to_vec::<f64>()[i]
                })
                .product();
            out[right.chars().fold(0, |s, l| s * sizes[&l] + at[&l])] += p;
        }
        out
    }

    #[test]
    fn equations_against_the_definition() {
        let cases: &[(&'static str, &[&[usize]])] = &[
            ("ij->ji", &[&[2, 3]]),
            ("ij->", &[&[2, 3]]),
            ("iij->j", &[&[3, 3, 2]]),
            ("jiji->ij", &[&[2, 3, 2, 3]]),
            ("iii->i", &[&[3, 3, 3]]),
            ("iii->", &[&[3, 3, 3]]),
            ("ij,jk->ik", &[&[2, 3], &[3, 4]]),
            ("ij,kj->ki", &[&[2, 3], &[4, 3]]),
            ("bij,bjk->bik", &[&[2, 2, 3], &[2, 3, 2]]),
            ("i,i->", &[&[3], &[3]]),
            ("i,j->ij", &[&[3], &[2]]),
            ("ij,ij->ij", &[&[2, 3], &[2, 3]]),
            ("ij,j->", &[&[2, 3], &[3]]),
            ("ia,ja->ij", &[&[2, 2], &[3, 2]]),
            ("ab,cd->ac", &[&[2, 3], &[2, 2]]),
            ("ij,jk,kl->il", &[&[2, 3], &[3, 2], &[2, 4]]),
            ("a,b,ab,->ba", &[&[2], &[3], &[2, 3], &[]]),
            ("ii,i->i", &[&[3, 3], &[3]]),
            ("ij,jk->ik", &[&[2, 1], &[3, 4]]),
            ("aB,Ab->AaBb", &[&[2, 2], &[2, 2]]),
            ("i,ij->j", &[&[0], &[0, 2]]),
        ];
        for (equation, dims) in cases {
            let x: Vec<ConstData> = dims.iter().map(|d| count(d)).collect();
            let got = run_one(12, op(equation, x.len()), &x[0], &x[1..]);
            assert_eq!(got.to_vec::<f64>(), plain(equation, &x), "{equation}");
        }
    }

    #[test]
    fn ellipses_spaces_and_implicit_results() {
        let (x, w) = (count(&[2, 3]), [count(&[3, 2])]);
        check(12, op(" ij , jk ", 2), &x, &w, &[2, 2], &[22.0, 28.0, 49.0, 64.0]);
        check(12, op("ba", 1), &x, &[], &[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        check(12, op("...i->...", 1), &x, &[], &[2], &[6.0, 15.0]);
        check(12, op("...i->i", 1), &x, &[], &[3], &[5.0, 7.0, 9.0]);
        check(12, op("i...", 1), &x, &[], &[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        // Ellipses are aligned at their last axes and broadcast.
        let (x, w) = (count(&[2, 1, 2, 3]), [count(&[2, 3, 1])]);
        let y = run_one(12, op("...ij,...jk->...ik", 2), &x, &w);
        assert_eq!((&y.dims[..], y.to_vec::<f64>()[0]), (&[2usize, 2, 2, 1][..], 14.0));
        let y = run_one(12, op("...,...", 2), &count(&[2]), &[count(&[3, 1])]);
        assert_eq!((&y.dims[..], y.to_vec::<f64>()), (&[3usize, 2][..], vec![1.0, 2.0, 2.0, 4.0, 3.0, 6.0]));
        let i = t(&[2], &[3i32, -4]);
        check(12, op("i,i->", 2), &i, std::slice::from_ref(&i), &[], &[25.0]);
    }

    #[test]
    fn half_types_sum_in_a_wider_one() {
        let v: Vec<f32> = vec![1.0; 4096];
        let m = model(
            28,
            port("x", DType::F32, &["4096"]),
            vec![
                node("Cast", &["x"], &["h"]).int("to", 10),
                node("Einsum", &["h", "h"], &["y"]).text("equation", "i,i->"),
            ],
            &[],
        );
        let g = import(m).unwrap().graph;
        assert!(g.nodes().iter().all(|n| n.op.name() != "reduce_sum" || n.ty.dtype == DType::F32));
        let y = crate::onnx::reference::run(&g, &[t(&[4096], &v)]).remove(0);
        assert_eq!((y.dtype, y.to_vec::<f64>()), (DType::F16, vec![4096.0]));
    }

    #[test]
    fn equations_that_make_no_sense() {
        for (equation, n) in [
            ("ij", 2),
            ("ijk", 1),
            ("i", 1),
            ("ij->ik", 1),
            ("ij->ii", 1),
            ("ii->i", 1),
            ("i.j", 1),
            ("i....j", 1),
            ("......", 1),
            ("i1", 1),
            ("ij->j->i", 1),
            ("ij->...", 2),
            ("ij,jk,kl->il", 1),
            ("abc...", 1),
            ("", 1),
            ("->", 1),
        ] {
            let names = ["x", "x"];
            let op = node("Einsum", &names[..n], &["y"]).text("equation", equation);
            let m = model(12, port("x", DType::F32, &["2", "3"]), vec![op], &[]);
            assert!(matches!(import(m), Err(Error::Argument { .. })), "{equation}");
        }
        let op = node("Einsum", &["x", "x"], &["y"]).text("equation", "ij,jk");
        assert!(matches!(
            import(model(12, port("x", DType::F32, &["2", "3"]), vec![op], &[])),
            Err(Error::Argument { .. })
        ));
    }
}
