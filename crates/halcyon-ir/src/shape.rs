//! Shapes with known and symbolic dimensions.
//!
//! A [`Dim`] is a non-negative integer or a polynomial over symbols in a normal form, so `b*s` equals `s*b`. Graphs may hold
//! symbolic dimensions; plans never do: [`crate::Graph::bind`] replaces every symbol first.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, LazyLock, RwLock};

/// Concrete sizes.
pub type Dims = SmallVec<[usize; 6]>;

/// Values of symbols.
pub type Bindings = BTreeMap<Arc<str>, usize>;

/// What a term of a dimension is a product of.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Atom {
    Sym(Arc<str>),
    /// Floored quotient.
    Div(Poly, Poly),
    Max(Poly, Poly),
}

/// Sum of `coefficient * product of atoms`, sorted, no zero coefficients.
pub type Poly = Vec<(Vec<Atom>, i64)>;

#[derive(Default)]
struct Interner {
    polys: Vec<Poly>,
    ids: HashMap<Poly, i64>,
}

static INTERNER: LazyLock<RwLock<Interner>> = LazyLock::new(Default::default);

/// One dimension: a size, or an expression over symbols.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dim(i64);

impl Dim {
    pub fn sym(name: &str) -> Dim {
        Dim::intern(vec![(vec![Atom::Sym(name.into())], 1)])
    }

    fn intern(p: Poly) -> Dim {
        match p.as_slice() {
            [] => return Dim(0),
            [(atoms, c)] if atoms.is_empty() && *c >= 0 => return Dim(*c),
            _ => {}
        }
        // A poisoned lock still holds a valid table: entries are only ever added whole.
        if let Some(id) = INTERNER.read().unwrap_or_else(|e| e.into_inner()).ids.get(&p) {
            return Dim(*id);
        }
        let mut t = INTERNER.write().unwrap_or_else(|e| e.into_inner());
        if let Some(id) = t.ids.get(&p) {
            return Dim(*id);
        }
        t.polys.push(p.clone());
        let id = -(t.polys.len() as i64);
        t.ids.insert(p, id);
        Dim(id)
    }

    /// The expression's terms.
    pub fn poly(self) -> Poly {
        match self.0 {
            0 => vec![],
            n if n > 0 => vec![(vec![], n)],
            id => INTERNER.read().unwrap_or_else(|e| e.into_inner()).polys[(-id - 1) as usize].clone(),
        }
    }

    /// The size, when no symbol is involved.
    pub fn known(self) -> Option<usize> {
        (self.0 >= 0).then_some(self.0 as usize)
    }

    pub fn is(self, n: usize) -> bool {
        self.known() == Some(n)
    }

    fn combine(terms: impl IntoIterator<Item = (Vec<Atom>, i64)>) -> Dim {
        let mut m: BTreeMap<Vec<Atom>, i64> = BTreeMap::new();
        for (a, c) in terms {
            *m.entry(a).or_default() += c;
        }
        Dim::intern(m.into_iter().filter(|(_, c)| *c != 0).collect())
    }

    pub fn mul(self, o: Dim) -> Dim {
        if let (Some(a), Some(b)) = (self.known(), o.known())
            && let Some(p) = a.checked_mul(b).filter(|p| *p <= i64::MAX as usize)
        {
            return Dim(p as i64);
        }
        let (a, b) = (self.poly(), o.poly());
        Dim::combine(a.iter().flat_map(|(x, c)| {
            b.iter().map(move |(y, d)| {
                let mut v: Vec<Atom> = x.iter().chain(y).cloned().collect();
                v.sort();
                (v, c.saturating_mul(*d))
            })
        }))
    }

    pub fn add(self, o: Dim) -> Dim {
        Dim::combine(self.poly().into_iter().chain(o.poly()))
    }

    pub fn offset(self, by: i64) -> Dim {
        Dim::combine(self.poly().into_iter().chain([(vec![], by)]))
    }

    pub fn sub(self, o: Dim) -> Dim {
        Dim::combine(self.poly().into_iter().chain(o.poly().into_iter().map(|(a, c)| (a, -c))))
    }

    pub fn max(self, o: Dim) -> Dim {
        match (self.known(), o.known()) {
            (Some(a), Some(b)) => Dim::from(a.max(b)),
            _ if self == o => self,
            _ => Dim::intern(vec![(vec![Atom::Max(self.poly(), o.poly())], 1)]),
        }
    }

    /// Floored quotient; exact when the divisor divides every term.
    pub fn div(self, o: Dim) -> Result<Dim> {
        if o.is(0) {
            return Err(Error::shape("shape", "division of a dimension by zero"));
        }
        if let (Some(a), Some(b)) = (self.known(), o.known()) {
            return Ok(Dim::from(a / b));
        }
        if let [(atoms, c)] = o.poly().as_slice() {
            let mut out = vec![];
            for (a, k) in self.poly() {
                let mut rest = a.clone();
                let ok = k % c == 0
                    && atoms.iter().all(|x| match rest.iter().position(|y| y == x) {
                        Some(i) => {
                            rest.remove(i);
                            true
                        }
                        None => false,
                    });
                if !ok {
                    return Ok(Dim::intern(vec![(vec![Atom::Div(self.poly(), o.poly())], 1)]));
                }
                out.push((rest, k / c));
            }
            return Ok(Dim::combine(out));
        }
        if self == o {
            return Ok(Dim(1));
        }
        Ok(Dim::intern(vec![(vec![Atom::Div(self.poly(), o.poly())], 1)]))
    }

    /// Replaces symbols by their values.
    pub fn bind(self, b: &Bindings) -> Result<Dim> {
        if self.0 >= 0 {
            return Ok(self);
        }
        let v = eval_poly(&self.poly(), b)?;
        usize::try_from(v)
            .map(Dim::from)
            .map_err(|_| Error::shape("bind", format!("dimension {self} becomes {v}, which is negative")))
    }

    /// Names of the symbols in the expression.
    pub fn symbols(self, out: &mut std::collections::BTreeSet<Arc<str>>) {
        fn walk(p: &Poly, out: &mut std::collections::BTreeSet<Arc<str>>) {
            for a in p.iter().flat_map(|(a, _)| a) {
                match a {
                    Atom::Sym(s) => {
                        out.insert(s.clone());
                    }
                    Atom::Div(x, y) | Atom::Max(x, y) => {
                        walk(x, out);
                        walk(y, out);
                    }
                }
            }
        }
        walk(&self.poly(), out)
    }
}

fn eval_poly(p: &Poly, b: &Bindings) -> Result<i64> {
    let overflow = || Error::shape("bind", "a dimension overflows 64 bits");
    let mut sum = 0i64;
    for (atoms, c) in p {
        let mut t = *c;
        for a in atoms {
            let v = match a {
                Atom::Sym(s) => *b.get(s).ok_or_else(|| {
                    Error::shape("bind", format!("no size given for the symbolic dimension \"{s}\""))
                })? as i64,
                Atom::Div(x, y) => {
                    let d = eval_poly(y, b)?;
                    if d == 0 {
                        return Err(Error::shape("bind", "division of a dimension by zero"));
                    }
                    eval_poly(x, b)?.div_euclid(d)
                }
                Atom::Max(x, y) => eval_poly(x, b)?.max(eval_poly(y, b)?),
            };
            t = t.checked_mul(v).ok_or_else(overflow)?;
        }
        sum = sum.checked_add(t).ok_or_else(overflow)?;
    }
    Ok(sum)
}

impl From<usize> for Dim {
    fn from(n: usize) -> Dim {
        Dim(n.min(i64::MAX as usize) as i64)
    }
}
impl From<&str> for Dim {
    fn from(n: &str) -> Dim {
        Dim::sym(n)
    }
}

fn show(p: &Poly, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (i, (atoms, c)) in p.iter().rev().enumerate() {
        if i > 0 {
            f.write_str(if *c < 0 { "-" } else { "+" })?;
        } else if *c < 0 {
            f.write_str("-")?;
        }
        if c.abs() != 1 || atoms.is_empty() {
            write!(f, "{}", c.abs())?;
        }
        for (j, a) in atoms.iter().enumerate() {
            if j > 0 || c.abs() != 1 {
                f.write_str("*")?;
            }
            match a {
                Atom::Sym(s) => f.write_str(s)?,
                Atom::Div(x, y) | Atom::Max(x, y) => {
                    f.write_str(if matches!(a, Atom::Div(..)) { "floor((" } else { "max(" })?;
                    show(x, f)?;
                    f.write_str(if matches!(a, Atom::Div(..)) { ")/(" } else { "," })?;
                    show(y, f)?;
                    f.write_str(if matches!(a, Atom::Div(..)) { "))" } else { ")" })?;
                }
            }
        }
    }
    Ok(())
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some(n) => write!(f, "{n}"),
            None => show(&self.poly(), f),
        }
    }
}
impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum DimRepr {
    Known(i64),
    Poly(Vec<(Vec<AtomRepr>, i64)>),
}
#[derive(Serialize, Deserialize)]
enum AtomRepr {
    Sym(String),
    Div(Vec<(Vec<AtomRepr>, i64)>, Vec<(Vec<AtomRepr>, i64)>),
    Max(Vec<(Vec<AtomRepr>, i64)>, Vec<(Vec<AtomRepr>, i64)>),
}
fn to_repr(p: &Poly) -> Vec<(Vec<AtomRepr>, i64)> {
    let atom = |a: &Atom| match a {
        Atom::Sym(s) => AtomRepr::Sym(s.to_string()),
        Atom::Div(x, y) => AtomRepr::Div(to_repr(x), to_repr(y)),
        Atom::Max(x, y) => AtomRepr::Max(to_repr(x), to_repr(y)),
    };
    p.iter().map(|(a, c)| (a.iter().map(atom).collect(), *c)).collect()
}
fn of_repr(p: Vec<(Vec<AtomRepr>, i64)>) -> Poly {
    let atom = |a: AtomRepr| match a {
        AtomRepr::Sym(s) => Atom::Sym(s.into()),
        AtomRepr::Div(x, y) => Atom::Div(of_repr(x), of_repr(y)),
        AtomRepr::Max(x, y) => Atom::Max(of_repr(x), of_repr(y)),
    };
    let mut v: Poly = p.into_iter().map(|(a, c)| (a.into_iter().map(atom).collect(), c)).collect();
    v.sort();
    v
}
impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self.known() {
            Some(n) => DimRepr::Known(n as i64),
            None => DimRepr::Poly(to_repr(&self.poly())),
        }
        .serialize(s)
    }
}
impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Dim, D::Error> {
        match DimRepr::deserialize(d)? {
            DimRepr::Known(n) if n >= 0 => Ok(Dim(n)),
            DimRepr::Known(n) => Err(serde::de::Error::custom(format!("negative dimension {n}"))),
            DimRepr::Poly(p) => Ok(Dim::intern(of_repr(p))),
        }
    }
}

/// Dimensions of a tensor, outermost first. Rank 0 is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
pub struct Shape(pub SmallVec<[Dim; 6]>);

impl Shape {
    pub fn scalar() -> Shape {
        Shape::default()
    }

    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Sizes, when no symbol is involved.
    pub fn known(&self) -> Option<Dims> {
        self.0.iter().map(|d| d.known()).collect()
    }

    /// Sizes, or an error that names the symbols.
    pub fn dims(&self) -> Result<Dims> {
        self.known()
            .ok_or_else(|| Error::shape("shape", format!("{self} has symbolic dimensions; bind them first")))
    }

    /// Number of elements.
    pub fn numel(&self) -> Dim {
        self.0.iter().fold(Dim::from(1), |a, d| a.mul(*d))
    }

    pub fn bind(&self, b: &Bindings) -> Result<Shape> {
        self.0.iter().map(|d| d.bind(b)).collect::<Result<_>>().map(Shape)
    }

    /// NumPy broadcasting of two shapes. A symbolic dimension goes with itself or 1.
    pub fn broadcast(&self, o: &Shape) -> Result<Shape> {
        let n = self.rank().max(o.rank());
        let get = |s: &Shape, i: usize| (i + s.rank()).checked_sub(n).map_or(Dim::from(1), |j| s.0[j]);
        (0..n)
            .map(|i| match (get(self, i), get(o, i)) {
                (a, b) if a == b || b.is(1) => Ok(a),
                (a, b) if a.is(1) => Ok(b),
                (a, b) => Err(Error::shape(
                    "broadcast",
                    format!("{self} and {o} do not go together: {a} against {b}"),
                )),
            })
            .collect::<Result<_>>()
            .map(Shape)
    }

    /// Turns a possibly negative axis into an index.
    pub fn axis(&self, axis: i64) -> Result<usize> {
        let n = self.rank() as i64;
        let a = if axis < 0 { axis + n } else { axis };
        if a < 0 || a >= n {
            return Err(Error::shape("axis", format!("axis {axis} is outside -{n}..{n} of shape {self}")));
        }
        Ok(a as usize)
    }
}

impl std::ops::Deref for Shape {
    type Target = [Dim];
    fn deref(&self) -> &[Dim] {
        &self.0
    }
}
impl<D: Into<Dim> + Copy> From<&[D]> for Shape {
    fn from(d: &[D]) -> Shape {
        Shape(d.iter().map(|d| (*d).into()).collect())
    }
}
impl<D: Into<Dim>, const N: usize> From<[D; N]> for Shape {
    fn from(d: [D; N]) -> Shape {
        Shape(d.into_iter().map(|d| d.into()).collect())
    }
}
impl<D: Into<Dim>> From<Vec<D>> for Shape {
    fn from(d: Vec<D>) -> Shape {
        Shape(d.into_iter().map(|d| d.into()).collect())
    }
}
impl From<&Dims> for Shape {
    fn from(d: &Dims) -> Shape {
        Shape(d.iter().map(|d| Dim::from(*d)).collect())
    }
}
impl FromIterator<Dim> for Shape {
    fn from_iter<T: IntoIterator<Item = Dim>>(t: T) -> Shape {
        Shape(t.into_iter().collect())
    }
}
impl From<&Shape> for Shape {
    fn from(s: &Shape) -> Shape {
        s.clone()
    }
}
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}
impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Element type and shape.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct TensorType {
    pub dtype: crate::DType,
    pub shape: Shape,
}

impl TensorType {
    pub fn new(dtype: crate::DType, shape: impl Into<Shape>) -> TensorType {
        TensorType { dtype, shape: shape.into() }
    }
}
impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbolic_arithmetic_has_a_normal_form() {
        let (b, s) = (Dim::sym("b"), Dim::sym("s"));
        assert_eq!(b.mul(s), s.mul(b));
        assert_eq!(b.mul(s).mul(Dim::from(12)).div(Dim::from(12)).unwrap(), b.mul(s));
        assert_eq!(b.add(s).sub(s), b);
        assert_eq!(b.mul(Dim::from(384)).div(b).unwrap(), Dim::from(384));
        let odd = b.offset(1).div(Dim::from(2)).unwrap();
        assert_eq!(odd.bind(&[("b".into(), 6)].into()).unwrap(), Dim::from(3));
        assert!(b.bind(&Bindings::new()).is_err());
        assert!(b.offset(-7).bind(&[("b".into(), 6)].into()).is_err());
    }

    #[test]
    fn dims_survive_serialisation() {
        for d in [
            Dim::from(7),
            Dim::sym("b"),
            Dim::sym("b").mul(Dim::sym("s")).offset(3),
            Dim::sym("b").offset(1).div(Dim::from(2)).unwrap(),
        ] {
            let j = serde_json::to_string(&d).unwrap();
            assert_eq!(serde_json::from_str::<Dim>(&j).unwrap(), d, "{j}");
        }
    }

    #[test]
    fn broadcasting() {
        let s = |v: &[usize]| Shape::from(v);
        assert_eq!(s(&[3, 1]).broadcast(&s(&[4])).unwrap(), s(&[3, 4]));
        assert_eq!(s(&[0, 2]).broadcast(&s(&[1, 2])).unwrap(), s(&[0, 2]));
        assert!(s(&[3]).broadcast(&s(&[4])).is_err());
        let b = Shape::from([Dim::sym("b"), 4.into()]);
        assert_eq!(b.broadcast(&s(&[1, 4])).unwrap(), b);
    }
}
