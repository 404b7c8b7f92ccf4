//! Operators for images and detection that run on the host because the shapes of their results depend on
//! data.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use crate::picture::{self, Failure};
use halcyon_ir::{ConstData, DType, Result};

pub(super) const ROWS: &[Row] = &[
    row("ImageDecoder", 20, &["pixel_format"], image_decoder),
    row("NonMaxSuppression", 10, &["center_point_box"], non_max_suppression),
];

/// The pixels `[height, width, channels]` of an encoded image; `[0, 0, channels]` if it is damaged. An image
/// in an unsupported format is an error.
fn image_decoder(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if x.dtype() != DType::U8 || x.rank() != 1 {
        return Err(c.invalid(format!("the encoded image must be a vector of u8, not {}", x.ty)));
    }
    let channels = match c.string("pixel_format", "RGB")? {
        "RGB" | "BGR" => 3,
        "Grayscale" => 1,
        f => return Err(c.invalid(format!("pixel_format '{f}' is not known"))),
    };
    let swap = c.string("pixel_format", "RGB")? == "BGR";
    let data = b.fetch(x, "the encoded image")?;
    let p = match picture::decode(data.bytes()) {
        Ok(p) => p,
        Err(Failure::Corrupt(_)) => return one(b.feed(ConstData::from_slice::<u8>(&[0, 0, channels], &[])?)),
        Err(Failure::Unsupported(what)) => {
            return Err(c.unsupported(&what, "Store the image as baseline JPEG or PNG"));
        }
    };
    let pixels = match (p.channels, channels) {
        (1, 3) => p.pixels.iter().flat_map(|&v| [v; 3]).collect(),
        (3, 1) => p.pixels.chunks_exact(3).map(luma).collect(),
        (3, 3) if swap => p.pixels.chunks_exact(3).flat_map(|p| [p[2], p[1], p[0]]).collect(),
        _ => p.pixels,
    };
    one(b.feed(ConstData::from_slice(&[p.height, p.width, channels], &pixels)?))
}

/// ITU-R BT.601, in fixed point with 16 fractional bits.
fn luma(p: &[u8]) -> u8 {
    let v = |i: usize| u32::from(p[i]);
    ((19_595 * v(0) + 38_470 * v(1) + 7_471 * v(2) + (1 << 15)) >> 16) as u8
}

/// Corners of a box, the smaller coordinate first.
#[derive(Clone, Copy)]
struct Corners {
    lo: [f32; 2],
    hi: [f32; 2],
}

impl Corners {
    fn new(b: &[f32], center: bool) -> Corners {
        if center {
            let (w, h) = (b[2] / 2.0, b[3] / 2.0);
            return Corners { lo: [b[0] - w, b[1] - h], hi: [b[0] + w, b[1] + h] };
        }
        let order = |p: f32, q: f32| if p >= q { (q, p) } else { (p, q) };
        let ((y0, y1), (x0, x1)) = (order(b[0], b[2]), order(b[1], b[3]));
        Corners { lo: [x0, y0], hi: [x1, y1] }
    }

    fn area(&self) -> f32 {
        (self.hi[0] - self.lo[0]) * (self.hi[1] - self.lo[1])
    }

    /// Whether the intersection is more than `most` times the union.
    fn overlaps(&self, o: &Corners, most: f32) -> bool {
        let side = |k: usize| self.hi[k].min(o.hi[k]) - self.lo[k].max(o.lo[k]);
        let (w, h) = (side(0), side(1));
        if !(w > 0.0 && h > 0.0) {
            return false;
        }
        let (both, a, b) = (w * h, self.area(), o.area());
        let all = a + b - both;
        both > 0.0 && a > 0.0 && b > 0.0 && all > 0.0 && both / all > most
    }
}

/// Greedy selection by score within each batch and class. The result is `[selected, 3]`; its rows are the
/// indices (batch, class, box).
fn non_max_suppression(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (boxes, scores) = (c.arg(0)?, c.arg(1)?);
    let fits = boxes.dtype() == DType::F32 && scores.dtype() == DType::F32;
    if !fits || boxes.rank() != 3 || scores.rank() != 3 {
        return Err(c.invalid(format!(
            "boxes {} and scores {}: expected f32[b, n, 4] and f32[b, c, n]",
            boxes.ty, scores.ty
        )));
    }
    let center = match c.int("center_point_box", 0)? {
        0 => false,
        1 => true,
        v => return Err(c.invalid(format!("center_point_box is {v}, expected 0 or 1"))),
    };
    let mut number = |i: usize, what: &str| match c.opt(i) {
        Some(v) if !v.shape().numel().is(0) => b.known_scalar(v, what).map(Some),
        _ => Ok(None),
    };
    let most = number(2, "the number of boxes of NonMaxSuppression")?.map_or(0, |s| s.as_i64());
    let overlap = number(3, "the threshold of NonMaxSuppression")?.map_or(0.0, |s| s.as_f64() as f32);
    let least = number(4, "the least score of NonMaxSuppression")?.map(|s| s.as_f64() as f32);
    let boxes = b.fetch(boxes, "the boxes of NonMaxSuppression")?;
    let scores = b.fetch(scores, "the scores of NonMaxSuppression")?;
    let (&[batches, n, four], &[also, classes, m]) = (&boxes.dims[..], &scores.dims[..]) else {
        return Err(c.invalid("boxes and scores have three axes"));
    };
    if four != 4 || also != batches || m != n {
        return Err(c.invalid(format!(
            "boxes {:?} and scores {:?} do not match [b, n, 4] and [b, c, n]",
            boxes.dims, scores.dims
        )));
    }
    let most = usize::try_from(most).unwrap_or(0).min(n);
    if most == 0 {
        // Return early, for any number of batches and classes.
        return one(b.feed(ConstData::from_slice::<i64>(&[0, 3], &[])?));
    }
    let (boxes, scores) = (boxes.to_vec::<f32>(), scores.to_vec::<f32>());
    let mut out: Vec<i64> = vec![];
    for batch in 0..batches {
        let corners: Vec<Corners> = boxes[batch * n * 4..(batch + 1) * n * 4]
            .chunks_exact(4)
            .map(|v| Corners::new(v, center))
            .collect();
        for class in 0..classes {
            let from = (batch * classes + class) * n;
            let score = &scores[from..from + n];
            let mut order: Vec<usize> = (0..n).filter(|&i| least.is_none_or(|l| score[i] > l)).collect();
            // Stable, so that of equal scores the first box comes first. Adding 0.0 makes both zeros equal.
            order.sort_by(|&a, &b| (score[b] + 0.0).total_cmp(&(score[a] + 0.0)));
            let mut kept: Vec<usize> = vec![];
            for i in order {
                if kept.len() == most {
                    break;
                }
                if !kept.iter().any(|&k| corners[i].overlaps(&corners[k], overlap)) {
                    kept.push(i);
                    out.extend([batch as i64, class as i64, i as i64]);
                }
            }
        }
    }
    one(b.feed(ConstData::from_slice(&[out.len() / 3, 3], &out)?))
}
