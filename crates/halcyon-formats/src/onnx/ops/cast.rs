//! Operators that convert between dtypes.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Result, Rounding};

pub(super) const ROWS: &[Row] = &[row("BitCast", 26, &["to"], bit_cast)];

/// Converts `x` as the tables of ONNX's `Cast` specify. With `saturate`, the default, values beyond the range
/// of an 8-bit float type, including infinity, become its largest number with the same sign. Without
/// `saturate` they become infinity or NaN. 2- and 4-bit integers keep the low bits; ONNX does not specify
/// this for casts from floats.
pub(super) fn convert(b: &mut Builder, c: &Call<'_>, x: &Value, to: DType) -> Result<Value> {
    let saturate = c.flag("saturate", true)?;
    match to {
        DType::F8E8M0 => {
            let rounding = match c.string("round_mode", "up")? {
                "up" => Rounding::Up,
                "down" => Rounding::Down,
                "nearest" => Rounding::Nearest,
                other => return Err(c.invalid(format!("round_mode '{other}' is not up, down or nearest"))),
            };
            b.cast_e8m0(x, rounding, saturate)
        }
        _ if saturate && to.is_float() && to.bits() == 8 => b.cast_saturating(x, to),
        _ => b.cast(x, to),
    }
}

fn bit_cast(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let to = c.dtype("to")?.ok_or_else(|| c.invalid("attribute 'to' is missing"))?;
    if to.bits() != x.dtype().bits() {
        return Err(c.invalid(format!(
            "{} has {} bits, {to} has {}; these must be equal",
            x.ty,
            x.dtype().bits(),
            to.bits()
        )));
    }
    one(b.bitcast(x, to)?)
}

#[cfg(test)]
mod tests {
    use crate::onnx::proto::NodeProto;
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType};

    fn cast(to: DType) -> NodeProto {
        node("Cast", &["x"], &["y"]).int("to", to.row().onnx.into())
    }

    fn bytes(opset: i64, n: NodeProto, x: &ConstData) -> Vec<u8> {
        run_one(opset, n, x, &[]).bytes().to_vec()
    }

    #[test]
    fn eight_bit_floats_saturate_or_not() {
        let x = t(&[7], &[448f32, 464.0, 465.0, -1e6, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        for (to, saturated, plain) in [
            (
                DType::F8E4M3FN,
                [0x7e, 0x7e, 0x7e, 0xfe, 0x7e, 0xfe, 0x7f],
                [0x7e, 0x7e, 0x7f, 0xff, 0x7f, 0xff, 0x7f],
            ),
            (DType::F8E4M3FNUZ, [0x7f, 0x7f, 0x7f, 0xff, 0x7f, 0xff, 0x80], [0x80; 7]),
            (
                DType::F8E5M2,
                [0x5f, 0x5f, 0x5f, 0xfb, 0x7b, 0xfb, 0x7e],
                [0x5f, 0x5f, 0x5f, 0xfc, 0x7c, 0xfc, 0x7e],
            ),
        ] {
            assert_eq!(bytes(19, cast(to), &x), saturated, "{to}");
            assert_eq!(bytes(28, cast(to).int("saturate", 0), &x), plain, "{to}");
            let like = node("CastLike", &["x", "w0"], &["y"]);
            let w = ConstData::splat(to, &[1], 1.0.into()).unwrap();
            assert_eq!(run_one(19, like, &x, &[w]).bytes(), saturated, "{to}");
        }
        // Infinity of a wider float, and an integer out of range.
        let x = ConstData::splat(DType::F8E5M2, &[1], f64::INFINITY.into()).unwrap();
        assert_eq!(bytes(28, cast(DType::F8E4M3FN), &x), [0x7e]);
        let x = t(&[2], &[-70_000i32, 3]);
        assert_eq!(bytes(28, cast(DType::F8E5M2), &x), [0xfb, 0x42]);
        assert_eq!(bytes(28, cast(DType::F8E5M2).int("saturate", 0), &x), [0xfc, 0x42]);
    }

    #[test]
    fn powers_of_two_round_as_asked() {
        let x = t(&[6], &[0f32, 1.1, 1.5, 3.4e38, f32::INFINITY, f32::NAN]);
        let to = DType::F8E8M0;
        assert_eq!(bytes(24, cast(to), &x), [0, 128, 128, 254, 254, 255]);
        let mode = |m, saturate| cast(to).text("round_mode", m).int("saturate", saturate);
        assert_eq!(bytes(24, mode("down", 1), &x), [0, 127, 127, 254, 254, 255]);
        assert_eq!(bytes(24, mode("nearest", 1), &x), [0, 127, 128, 254, 254, 255]);
        assert_eq!(bytes(24, mode("nearest", 0), &x), [255, 127, 128, 255, 255, 255]);
        let m = model(24, port("x", DType::F32, &["6"]), vec![mode("odd", 1)], &[]);
        assert!(import(m).unwrap_err().to_string().contains("round_mode"));
    }

    #[test]
    fn narrow_integers_keep_their_low_bits() {
        let x = t(&[5], &[-9f32, 7.9, 8.0, 15.0, -0.5]);
        assert_eq!(run_one(28, cast(DType::I4), &x, &[]).to_vec::<i64>(), [7, 7, -8, -1, 0]);
        assert_eq!(bytes(28, cast(DType::U2), &x), [0b11001111, 0]);
        let x = t(&[3], &[200i16, -1, 5]);
        assert_eq!(bytes(28, cast(DType::U4), &x), [0xf8, 0x05]);
    }

    #[test]
    fn bits_as_another_type() {
        let to = |d: DType| node("BitCast", &["x"], &["y"]).int("to", d.row().onnx.into());
        let x = ConstData::from_scalars(DType::I4, &[3], [-8i64, 7, -1].map(Into::into)).unwrap();
        assert_eq!(run_one(26, to(DType::U4), &x, &[]).to_vec::<i64>(), [8, 7, 15]);
        assert_eq!(run_one(26, to(DType::F4E2M1), &x, &[]).to_vec::<f64>(), [-0.0, 6.0, -6.0]);
        let x = t(&[2], &[1f32, -2.0]);
        assert_eq!(
            run_one(26, to(DType::I32), &x, &[]).to_vec::<i32>(),
            [0x3f80_0000, 0xc000_0000u32 as i32]
        );
        let mut known = to(DType::F32);
        known.input = vec!["w0".into()];
        let y = run_one(26, known, &x, &[t(&[1], &[0x3f80_0000i32])]);
        assert_eq!(y.to_vec::<f32>(), [1.0]);
        for d in [DType::I64, DType::U4] {
            let m = model(26, port("x", DType::F32, &["2"]), vec![to(d)], &[]);
            assert!(import(m).unwrap_err().to_string().contains("bits"), "{d}");
        }
    }
}
