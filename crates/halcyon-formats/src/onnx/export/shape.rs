//! Exports sizes as values of the model. A symbolic size is read from the shape of an input that has it.

use super::emit::{Emitter, Val, int};
use halcyon_ir::shape::{Atom, Poly};
use halcyon_ir::{ConstData, DType, Dim, Error, Result, Shape, TensorType};

impl Emitter<'_> {
    /// Sizes as a vector of i64.
    pub(super) fn dims(&mut self, d: &[Dim]) -> Result<Val> {
        if let Some(known) = d.iter().map(|d| d.known()).collect::<Option<Vec<usize>>>() {
            return self.ints(&known.iter().map(|&n| n as i64).collect::<Vec<_>>());
        }
        let parts = d.iter().map(|d| self.dim(*d)).collect::<Result<Vec<_>>>()?;
        self.concat(&parts)
    }

    /// Concatenates vectors of one i64 each. If all of them are constants, the result is a constant.
    pub(super) fn concat(&mut self, parts: &[Val]) -> Result<Val> {
        if let [one] = parts {
            return Ok(one.clone());
        }
        if let Some(v) = parts.iter().map(|v| self.known_int(v)).collect::<Option<Vec<i64>>>() {
            return self.ints(&v);
        }
        let ty = TensorType::new(DType::I64, [parts.len()]);
        Ok(self.node("Concat", &parts.iter().collect::<Vec<_>>(), vec![int("axis", 0)], ty))
    }

    /// A size (or another expression of sizes) as a vector with one i64.
    pub(super) fn dim(&mut self, d: Dim) -> Result<Val> {
        if d.is_lost() {
            return Err(Error::shape("export", "a size is too large"));
        }
        if let Some(v) = self.sizes.get(&d) {
            return Ok(v.clone());
        }
        let v = self.poly(&d.poly())?;
        self.sizes.insert(d, v.clone());
        Ok(v)
    }

    /// A size as a scalar.
    pub(super) fn dim_scalar(&mut self, d: Dim) -> Result<Val> {
        if let Some(n) = d.known() {
            return self.lit(DType::I64, n as i64);
        }
        let v = self.dim(d)?;
        self.reshape(&v, &Shape::scalar())
    }

    fn poly(&mut self, p: &Poly) -> Result<Val> {
        let mut sum: Option<Val> = None;
        // Add constants last, so that the model is easier to read.
        for (atoms, c) in p.iter().rev() {
            let mut term: Option<Val> = None;
            for a in atoms {
                let v = self.atom(a)?;
                term = Some(match term {
                    Some(t) => self.calc("Mul", &[&t, &v])?,
                    None => v,
                });
            }
            let k = self.ints(&[*c])?;
            let term = match term {
                Some(t) if *c == 1 => t,
                Some(t) => self.calc("Mul", &[&t, &k])?,
                None => k,
            };
            sum = Some(match sum {
                Some(s) => self.calc("Add", &[&s, &term])?,
                None => term,
            });
        }
        match sum {
            Some(s) => Ok(s),
            None => self.ints(&[0]),
        }
    }

    fn atom(&mut self, a: &Atom) -> Result<Val> {
        match a {
            Atom::Sym(name) => {
                let d = Dim::sym(name);
                if let Some(v) = self.sizes.get(&d) {
                    return Ok(v.clone());
                }
                let v = self.symbol(d)?;
                self.sizes.insert(d, v.clone());
                Ok(v)
            }
            Atom::Div(x, y) => {
                let (x, y) = (self.poly(x)?, self.poly(y)?);
                // Div truncates; subtracting the floored remainder first makes the division exact.
                let r = self.calc("Mod", &[&x, &y])?;
                let x = self.calc("Sub", &[&x, &r])?;
                self.calc("Div", &[&x, &y])
            }
            Atom::Max(x, y) => {
                let (x, y) = (self.poly(x)?, self.poly(y)?);
                self.calc("Max", &[&x, &y])
            }
        }
    }

    /// A symbol, read from the shape of an input that has it as a size.
    fn symbol(&mut self, d: Dim) -> Result<Val> {
        let found = self.g.inputs().iter().find_map(|i| {
            let k = self.g.shape(i.node).iter().position(|x| *x == d)?;
            Some((Val { name: (&*i.name).into(), ty: self.g.ty(i.node).clone() }, k as i64))
        });
        let Some((x, k)) = found else {
            return Err(Error::unsupported(
                format!("the symbolic size {d}, which is not the size of any input axis"),
                "Give concrete sizes before exporting",
            ));
        };
        Ok(self.node(
            "Shape",
            &[&x],
            vec![int("start", k), int("end", k + 1)],
            TensorType::new(DType::I64, [1usize]),
        ))
    }

    /// The shape operand of a Reshape, and whether a 0 in it means a size of 0 (else it means "unchanged").
    pub(super) fn target(&mut self, from: &Shape, to: &Shape) -> Result<(Val, bool)> {
        if let Some(known) = to.known() {
            let v: Vec<i64> = known.iter().map(|&n| n as i64).collect();
            return Ok((self.ints(&v)?, v.contains(&0)));
        }
        if !to.iter().any(|d| d.is(0)) {
            let mut open = 0;
            let v: Vec<i64> = (0..to.rank())
                .map(|k| match to[k].known() {
                    Some(n) => n as i64,
                    None if from.get(k) == Some(&to[k]) => 0,
                    None => {
                        open += 1;
                        -1
                    }
                })
                .collect();
            // A size that is copied (0) may be zero at run time; -1 would then be ambiguous.
            if open == 0 || open == 1 && !v.contains(&0) {
                return Ok((self.constant("const", ConstData::from_slice(&[v.len()], &v)?), false));
            }
        }
        Ok((self.dims(to)?, true))
    }
}
