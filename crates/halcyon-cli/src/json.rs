//! A JSON formatter: each object member on its own line, arrays of plain values on a single line.

use halcyon::hal::driver_output;
use halcyon::{ConstData, DType, Error, Result, Scalar};
use serde::ser::{Serialize, SerializeSeq, Serializer};
use serde_json::ser::{CompactFormatter, Formatter};
use std::io::{self, Write};

/// Writes a value and a newline.
///
/// # Errors
/// [`Error::Io`] about `file`. A closed pipe is not an error.
pub(crate) fn write(w: &mut impl Write, v: &impl Serialize, file: &str) -> Result<()> {
    let mut s = serde_json::Serializer::with_formatter(&mut *w, Lines::default());
    let done = v
        .serialize(&mut s)
        .map_err(io::Error::from)
        .and_then(|()| w.write_all(b"\n"))
        .and_then(|()| w.flush());
    match done {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::Io { path: file.into(), what: e.to_string() })
        }
        _ => Ok(()),
    }
}

/// Writes a value to standard output. Same errors as [`write()`].
pub(crate) fn print(v: &impl Serialize) -> Result<()> {
    write(&mut io::BufWriter::new(driver_output::out()), v, "standard output")
}

/// The values of a tensor in row-major order. A float has the fewest digits that identify its value as f64
/// (for f64 tensors) or as f32. JSON has no NaN and no infinities, so these are strings.
#[derive(Debug)]
pub(crate) struct Values<'a>(pub &'a ConstData);

impl Serialize for Values<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let mut seq = s.serialize_seq(Some(self.0.numel()))?;
        for v in self.0.scalars() {
            match v {
                Scalar::Bool(b) => seq.serialize_element(&b)?,
                Scalar::I(i) => seq.serialize_element(&i)?,
                Scalar::U(u) => seq.serialize_element(&u)?,
                Scalar::F(f) if f.is_nan() => seq.serialize_element("NaN")?,
                Scalar::F(f) if f.is_infinite() => {
                    seq.serialize_element(if f > 0.0 { "Infinity" } else { "-Infinity" })?
                }
                Scalar::F(f) if self.0.dtype == DType::F64 => seq.serialize_element(&f)?,
                Scalar::F(f) => seq.serialize_element(&(f as f32))?,
            }
        }
        seq.end()
    }
}

#[derive(Debug, Default)]
struct Lines {
    depth: usize,
    /// For each open array, whether its elements have their own lines.
    arrays: Vec<bool>,
    /// Set when an array element begins: whether it is the first.
    element: Option<bool>,
    /// Whether the object being closed has members.
    members: bool,
}

impl Lines {
    fn line<W: ?Sized + Write>(&self, w: &mut W) -> io::Result<()> {
        w.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| w.write_all(b"  "))
    }

    fn scalar<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        match self.element.take() {
            Some(false) => w.write_all(b", "),
            _ => Ok(()),
        }
    }

    fn nested<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        let Some(first) = self.element.take() else { return Ok(()) };
        if !first {
            w.write_all(b",")?;
        }
        if let Some(lines) = self.arrays.last_mut() {
            *lines = true;
        }
        self.line(w)
    }
}

macro_rules! scalars {
    ($($name:ident($t:ty)),*) => {
        $(fn $name<W: ?Sized + Write>(&mut self, w: &mut W, v: $t) -> io::Result<()> {
            self.scalar(w)?;
            CompactFormatter.$name(w, v)
        })*
    };
}

impl Formatter for Lines {
    scalars!(
        write_bool(bool),
        write_i8(i8),
        write_i16(i16),
        write_i32(i32),
        write_i64(i64),
        write_i128(i128),
        write_u8(u8),
        write_u16(u16),
        write_u32(u32),
        write_u64(u64),
        write_u128(u128),
        write_f32(f32),
        write_f64(f64),
        write_number_str(&str)
    );

    fn write_null<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.scalar(w)?;
        CompactFormatter.write_null(w)
    }

    fn begin_string<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.scalar(w)?;
        CompactFormatter.begin_string(w)
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, w: &mut W, text: &str) -> io::Result<()> {
        // Escape control characters that a terminal would interpret.
        let odd = |c: char| ('\u{7f}'..='\u{9f}').contains(&c);
        for c in text.split_inclusive(odd) {
            let plain = c.trim_end_matches(odd);
            w.write_all(plain.as_bytes())?;
            c[plain.len()..].chars().try_for_each(|c| write!(w, "\\u{:04x}", c as u32))?;
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.nested(w)?;
        self.depth += 1;
        self.arrays.push(false);
        w.write_all(b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if self.arrays.pop() == Some(true) {
            self.line(w)?;
        }
        w.write_all(b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, _: &mut W, first: bool) -> io::Result<()> {
        self.element = Some(first);
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.nested(w)?;
        self.depth += 1;
        self.members = false;
        w.write_all(b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if self.members {
            self.line(w)?;
        }
        w.write_all(b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if !first {
            w.write_all(b",")?;
        }
        self.line(w)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.members = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn text(v: &impl Serialize) -> String {
        let mut out = vec![];
        write(&mut out, v, "t").unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn arrays_of_values_take_one_line() {
        let v = json!({ "a": [1, 2.5, "x", null, true], "b": [], "c": {}, "d": [{ "e": [[1], [2, 3]] }, {}], "f": "\u{9b}\n" });
        let t = text(&v);
        assert!(
            t.contains(
                "\n  \"a\": [1, 2.5, \"x\", null, true],\n  \"b\": [],\n  \"c\": {},\n  \"d\": [\n    {\n"
            ),
            "{t}"
        );
        assert!(t.contains("\\u009b\\n"), "{t}");
        assert_eq!(serde_json::from_str::<Value>(&t).unwrap(), v);
        assert_eq!(text(&json!([])), "[]\n");
    }

    #[test]
    fn values_keep_every_digit_and_what_json_lacks() {
        let x = ConstData::from_slice(&[5], &[0.1f32, 1e-30, f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
            .unwrap();
        assert_eq!(text(&Values(&x)), "[0.1, 1e-30, \"NaN\", \"Infinity\", \"-Infinity\"]\n");
        let x = ConstData::from_slice(&[2], &[i64::MAX, -1]).unwrap();
        assert_eq!(text(&Values(&x)), "[9223372036854775807, -1]\n");
        let x = ConstData::from_slice(&[1], &[0.1f64]).unwrap();
        assert_eq!(text(&Values(&x)), "[0.1]\n");
    }
}
