//! Recurrent layers: a causal convolution over a few positions, and perhaps a scan, computed by chunks
//! (`crate::grid`).
//!
//! Within a chunk, positions see each other by products of matrices. With queries `q`, keys `k`, values `v`
//! and the sum `G` of the logarithms of the factors up to a position, row `i` of a chunk reads
//!
//! ```text
//! y_i = exp(G_i) q_i S + Σ_{j ≤ i} exp(G_i - G_j) (q_i · k_j) u_j
//! ```
//!
//! from the matrix `S` at the beginning of the chunk. In Mamba 2, `u` is the value times the size of the
//! step. In DeltaNet, `u_j` is what the value at `j` adds to what is already stored for its key; it depends
//! on earlier `u` of the chunk, which is a triangular system of equations (Yang et al. 2024).

use super::CacheShape;
use super::load::{Loader, expect};
use super::weights::{Matrix, NormWeights};
use crate::grid::{CHUNK, Grid, ring};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, DType, ScatterKind, Tensor};

#[derive(Debug)]
pub(super) struct RecurrentWeights {
    /// The projections, whose results are joined.
    input: Vec<Matrix>,
    /// The gate, if it has a matrix of its own.
    gate: Option<Matrix>,
    /// Of the convolution, f32 `[channels]`: a factor for each position from the oldest on, and a bias.
    taps: Vec<Tensor>,
    bias: Option<Tensor>,
    scan: Option<ScanWeights>,
    output: Matrix,
}

#[derive(Debug)]
struct ScanWeights {
    /// f32 `[heads]`: the rate of decay (negative), and the bias of the step.
    rate: Tensor,
    step_bias: Tensor,
    /// f32 `[heads, 1]`: the factor of values that are added to the result (Mamba 2).
    skip: Option<Tensor>,
    norm: NormWeights,
    masks: Masks,
}

/// Constant squares, f32 `[CHUNK, CHUNK]`.
#[derive(Debug)]
struct Masks {
    /// 1 where the column is not after the row.
    past: Tensor,
    identity: Tensor,
    /// For blocks of 2, 4, … rows on the diagonal: 1 in the lower left quarter of each block.
    quarters: Vec<Tensor>,
}

impl Masks {
    fn new(b: &Backend) -> Result<Masks> {
        let square = |f: &dyn Fn(usize, usize) -> bool| -> Result<Tensor> {
            let one = |i: usize| f32::from(u8::from(f(i / CHUNK, i % CHUNK)));
            let values: Vec<f32> = (0..CHUNK * CHUNK).map(one).collect();
            Ok(Tensor::constant(b, &ConstData::from_slice(&[CHUNK, CHUNK], &values)?))
        };
        let quarter =
            |size: usize| square(&|r, c| r / size == c / size && r % size >= size / 2 && c % size < size / 2);
        let sizes = std::iter::successors(Some(2), |n| Some(2 * n)).take_while(|n| *n <= CHUNK);
        Ok(Masks {
            past: square(&|r, c| c <= r)?,
            identity: square(&|r, c| c == r)?,
            quarters: sizes.map(quarter).collect::<Result<_>>()?,
        })
    }
}

/// The states of a layer: the ring of inputs, and the matrices.
pub(super) fn cache_shapes(r: &Recurrent, hidden: usize, sequences: usize) -> Vec<CacheShape> {
    let of =
        |rows: usize, size: usize| CacheShape { dims: [rows * (sequences + 1), size], dtype: DType::F32 };
    match &r.scan {
        None => vec![of(ring(r.kernel), hidden)],
        Some(s) => {
            vec![of(ring(r.kernel), s.channels() + s.extras()), of(2, s.heads * s.key * s.value)]
        }
    }
}

impl Scan {
    /// Inputs that are not convolved: for each head the step, and in DeltaNet also the strength.
    fn extras(&self) -> usize {
        match self.kind {
            ScanKind::Delta => 2 * self.heads,
            ScanKind::Mamba { .. } => self.heads,
        }
    }

    /// The two axes of value heads, and of key heads: those of value heads with an axis of size 1.
    fn axes(&self) -> ([usize; 2], [usize; 2]) {
        let each = self.heads / self.shared;
        match self.tiled {
            true => ([each, self.shared], [1, self.shared]),
            false => ([self.shared, each], [self.shared, 1]),
        }
    }
}

impl Loader<'_> {
    pub(super) fn recurrent(&self, i: usize, r: &Recurrent) -> Result<RecurrentWeights> {
        let (h, p) = (self.spec.hidden, format!("blk.{i}"));
        let matrix = |name: &str, dims: [usize; 2]| self.matrix(&format!("{p}.{name}"), &dims);
        let Some(s) = &r.scan else {
            let (taps, bias) = self.convolution(&format!("{p}.shortconv.conv"), h, r.kernel)?;
            return Ok(RecurrentWeights {
                input: vec![matrix("shortconv.in_proj", [3 * h, h])?],
                gate: None,
                taps,
                bias,
                scan: None,
                output: matrix("shortconv.out_proj", [h, h])?,
            });
        };
        let inner = s.heads * s.value;
        let (input, gate) = match s.kind {
            ScanKind::Delta => {
                let heads = |name| matrix(name, [s.heads, h]);
                let input =
                    vec![matrix("attn_qkv", [s.channels(), h])?, heads("ssm_beta")?, heads("ssm_alpha")?];
                (input, Some(matrix("attn_gate", [inner, h])?))
            }
            ScanKind::Mamba { .. } => (vec![matrix("ssm_in", [inner + s.channels() + s.heads, h])?], None),
        };
        let (taps, bias) = self.convolution(&format!("{p}.ssm_conv1d"), s.channels(), r.kernel)?;
        let norm = Norm { kind: NormKind::Rms, eps: s.eps };
        let (skip, norm) = match s.kind {
            ScanKind::Delta => (None, self.norm(&format!("{p}.ssm_norm"), s.value, norm)?),
            // Its weights are not those of a group, but of all groups.
            ScanKind::Mamba { .. } => {
                let weight = self.values(&format!("{p}.ssm_norm.weight"), &[inner])?;
                let skip = self.values(&format!("{p}.ssm_d"), &[s.heads, 1])?;
                (Some(skip), NormWeights { weight: Some(weight), bias: None, spec: norm })
            }
        };
        let scan = ScanWeights {
            rate: self.values(&format!("{p}.ssm_a"), &[s.heads])?,
            step_bias: self.values(&format!("{p}.ssm_dt.bias"), &[s.heads])?,
            skip,
            norm,
            masks: Masks::new(self.backend)?,
        };
        Ok(RecurrentWeights {
            input,
            gate,
            taps,
            bias,
            scan: Some(scan),
            output: matrix("ssm_out", [h, inner])?,
        })
    }

    /// The values of a tensor in f32, as `dims`. Files differ in axes of size 1 and in how they divide an
    /// axis into groups.
    fn values(&self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let values = self.floats(&self.need(name)?)?;
        expect(name, &[values.len()], &[dims.iter().product()])?;
        Ok(Tensor::constant(self.backend, &ConstData::from_slice(dims, &values)?))
    }

    /// The factors and the bias of a convolution, which is stored as `[channels, kernel]` with further axes
    /// of size 1.
    fn convolution(
        &self,
        stem: &str,
        channels: usize,
        kernel: usize,
    ) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let name = format!("{stem}.weight");
        let values = self.floats(&self.need(&name)?)?;
        expect(&name, &[values.len()], &[channels * kernel])?;
        let tap = |j: usize| {
            let tap: Vec<f32> = values.iter().skip(j).step_by(kernel).copied().collect();
            Ok::<_, Error>(Tensor::constant(self.backend, &ConstData::from_slice(&[channels], &tap)?))
        };
        let taps = (0..kernel).map(tap).collect::<Result<Vec<_>>>()?;
        Ok((taps, self.vector(&format!("{stem}.bias"), &[channels])?))
    }
}

pub(super) struct RecurrentStep<'a> {
    pub(super) r: &'a Recurrent,
    pub(super) w: &'a RecurrentWeights,
    pub(super) grid: Grid<'a>,
    /// Sequences of the engine.
    pub(super) slots: usize,
}

/// The inputs of a scan in the places of a grid of `n` chunks. The two head axes are those of [`Scan::axes`].
struct Inputs {
    /// `[n, heads, CHUNK, key]`.
    q: Tensor,
    k: Tensor,
    /// `[n, heads, CHUNK, value]`.
    v: Tensor,
    /// The logarithms of the factors of the matrices, `[n, heads, CHUNK]`.
    decay: Tensor,
    /// What the part of a position is multiplied by, `[n, heads, CHUNK, 1]`.
    strength: Tensor,
}

impl RecurrentStep<'_> {
    /// The results for the rows, `[rows, hidden]`, and the new states.
    pub(super) fn run(&self, x: &Tensor, states: &[Tensor]) -> (Tensor, Vec<Tensor>) {
        let (input, gate) = self.project(x);
        let n = self.chunks();
        let (window, ring) = self.window(&input, &states[0]);
        let Some((s, w)) = self.r.scan.as_ref().zip(self.w.scan.as_ref()) else {
            let hidden = last(&input);
            let y = self.convolve(&window, hidden).reshape([n * CHUNK, hidden]).gather(self.grid.back, 0);
            return (self.w.output.apply(&(gate * y)), vec![ring]);
        };
        let valid = self.grid.valid.reshape([n, CHUNK, 1]);
        let mixed = self.convolve(&window, s.channels()).silu() * &valid;
        let extras = window.narrow(1, self.r.kernel - 1, CHUNK).narrow(2, s.channels(), s.extras());
        let inputs = self.inputs(s, w, &mixed, &extras, &valid);
        let (y, matrices) = self.scan(s, &w.masks, &inputs, &states[1]);
        let inner = s.heads * s.value;
        let mut y = y.permute(&[0, 3, 1, 2, 4]).reshape([n * CHUNK, inner]);
        if let Some(skip) = &w.skip {
            let v = mixed.narrow(2, 0, inner).reshape([n * CHUNK, s.heads, s.value]);
            y = y + (v * skip).reshape([n * CHUNK, inner]);
        }
        let y = self.normed(s, w, y.gather(self.grid.back, 0), gate);
        (self.w.output.apply(&y), vec![ring, matrices])
    }

    /// Chunks of the grid.
    fn chunks(&self) -> usize {
        self.grid.write.dims().map_or(0, |d| d[0])
    }

    /// Sequences of the grid.
    fn width(&self) -> usize {
        self.grid.start.dims().map_or(0, |d| d[0])
    }

    /// What the ring keeps of the rows, and the gate of their results.
    fn project(&self, x: &Tensor) -> (Tensor, Tensor) {
        let all: Vec<Tensor> = self.w.input.iter().map(|m| m.apply(x)).collect();
        match (&self.r.scan, &self.w.gate) {
            (None, _) => {
                let h = last(x);
                let part = |i: usize| all[0].narrow(1, i * h, h);
                (part(0) * part(2), part(1))
            }
            (Some(_), Some(gate)) => (Tensor::cat(&all, 1), gate.apply(x)),
            (Some(s), None) => {
                let inner = s.heads * s.value;
                (all[0].narrow(1, inner, s.channels() + s.extras()), all[0].narrow(1, 0, inner))
            }
        }
    }

    /// The inputs in the places of the grid and before them, `[chunks, CHUNK + kernel - 1, size]`, and the
    /// new ring.
    fn window(&self, input: &Tensor, state: &Tensor) -> (Tensor, Tensor) {
        let (size, rows, kernel) = (last(input), ring(self.r.kernel), self.r.kernel);
        let rings = state.reshape([self.slots + 1, rows * size]).gather(self.grid.sequences, 0);
        let rings = rings.reshape([self.width() * rows, size]);
        let none = Tensor::zeros(input.backend(), [1, size], DType::F32);
        let all = Tensor::cat(&[&rings, input, &none], 0);
        let window = all.gather(self.grid.window, 0).reshape([self.chunks(), CHUNK + kernel - 1, size]);
        (window, state.scatter_rows(self.grid.ring, input, 0, ScatterKind::Set))
    }

    /// `[chunks, CHUNK, channels]`.
    fn convolve(&self, window: &Tensor, channels: usize) -> Tensor {
        let x = window.narrow(2, 0, channels);
        let tap = |(j, t): (usize, &Tensor)| x.narrow(1, j, CHUNK) * t;
        let sum = self.w.taps.iter().enumerate().map(tap).reduce(|a, b| a + b);
        match (sum, &self.w.bias) {
            (Some(y), Some(b)) => y + b,
            (Some(y), None) => y,
            (None, _) => x,
        }
    }

    fn inputs(&self, s: &Scan, w: &ScanWeights, mixed: &Tensor, extras: &Tensor, valid: &Tensor) -> Inputs {
        let n = self.chunks();
        let ([a, b], [ka, kb]) = s.axes();
        let (keys, inner) = (s.shared * s.key, s.heads * s.value);
        let part = |first: usize, dims: [usize; 5]| {
            let size = dims[2] * dims[3] * dims[4];
            mixed.narrow(2, first, size).reshape(dims).permute(&[0, 2, 3, 1, 4])
        };
        let key = |first: usize| part(first, [n, CHUNK, ka, kb, s.key]);
        let value = |first: usize| part(first, [n, CHUNK, a, b, s.value]);
        let head = |t: Tensor| t.reshape([n, CHUNK, a, b]).permute(&[0, 2, 3, 1]);
        let extra = |i: usize| extras.narrow(2, i * s.heads, s.heads);
        match s.kind {
            ScanKind::Delta => {
                // Queries and keys are divided by their length, and queries by the root of their size.
                let size = s.key as f64;
                let unit = |x: Tensor, by: f64| {
                    let weight = Tensor::full(x.backend(), [s.key], by, DType::F32);
                    x.rms_norm(&weight, 1e-6 / size)
                };
                let step = softplus(&(extra(1) + &w.step_bias)) * &w.rate * valid;
                Inputs {
                    q: unit(key(0), 1.0 / size),
                    k: unit(key(keys), 1.0 / size.sqrt()),
                    v: value(2 * keys),
                    decay: head(step),
                    strength: head(extra(0).sigmoid() * valid).reshape([n, a, b, CHUNK, 1]),
                }
            }
            ScanKind::Mamba { limit: (low, high) } => {
                let mut step = softplus(&(extra(0) + &w.step_bias));
                if low > 0.0 || high.is_finite() {
                    step = step.clamp(low, high);
                }
                let step = step * valid;
                Inputs {
                    q: key(inner + keys),
                    k: key(inner),
                    v: value(0),
                    decay: head(&step * &w.rate),
                    strength: head(step).reshape([n, a, b, CHUNK, 1]),
                }
            }
        }
    }

    /// The results in the places of the grid, `[chunks, heads, CHUNK, value]`, and the new matrices.
    fn scan(&self, s: &Scan, masks: &Masks, x: &Inputs, state: &Tensor) -> (Tensor, Tensor) {
        let ([a, b], _) = s.axes();
        let (n, width) = (self.chunks(), self.width());
        let sum = x.decay.cumsum(-1);
        let pairs = sum.reshape([n, a, b, CHUNK, 1]) - sum.reshape([n, a, b, 1, CHUNK]);
        // Pairs of which the second is later have no factor; its exponent could be too large.
        let factors = pairs.minimum(0.0).exp() * &masks.past;
        let kt = x.k.transpose(-1, -2);
        let attention = x.q.matmul(&kt) * &factors;
        let whole = sum.narrow(3, CHUNK - 1, 1);
        let full = self.grid.full.reshape([n, 1, 1, 1]);
        let one = Tensor::scalar(sum.backend(), 1.0, DType::F32);
        // A chunk that is not complete leaves the matrices as they are.
        let kept = full.gt(0.5).select(&whole.exp(), &one).reshape([n, a, b, 1, 1]);
        let to_end = (&whole - &sum).exp() * &full;
        let added = (&x.k * to_end.reshape([n, a, b, CHUNK, 1])).transpose(-1, -2);
        let from_start = sum.exp().reshape([n, a, b, CHUNK, 1]);
        // Products are part of the operands of matrix products, and not of the sums of their results: a
        // compiler may contract a product with a sum, in one kernel and not in another.
        let mut values = &x.v * &x.strength;
        let queries = &x.q * &from_start;
        // What the matrices return for the keys, as DeltaNet takes it away.
        let returned = matches!(s.kind, ScanKind::Delta).then(|| {
            let solved = Self::solved(masks, &(x.k.matmul(&kt) * &factors * &x.strength));
            values = solved.matmul(&values);
            solved.matmul(&(&x.k * (&from_start * &x.strength)))
        });
        let keep = self.grid.keep.reshape([width, 1]);
        let zero = Tensor::scalar(sum.backend(), 0.0, DType::F32);
        let mut matrices = keep
            .gt(0.5)
            .select(&state.gather(self.grid.start, 0), &zero)
            .reshape([width, a, b, s.key, s.value]);
        let (mut results, mut after) = (vec![], vec![]);
        for d in 0..n / width.max(1) {
            let of = |t: &Tensor| t.narrow(0, d * width, width);
            let u = match &returned {
                Some(keys) => of(&values) - of(keys).matmul(&matrices),
                None => of(&values),
            };
            results.push(of(&queries).matmul(&matrices) + of(&attention).matmul(&u));
            matrices = matrices * of(&kept) + of(&added).matmul(&u);
            after.push(matrices.reshape([width, s.heads * s.key * s.value]));
        }
        let state = state.scatter_rows(self.grid.write, &Tensor::cat(&after, 0), 0, ScatterKind::Set);
        (Tensor::cat(&results, 0), state)
    }

    /// The inverse of `1 + L`, where `L` is the part of `system` below the diagonal. The inverses of blocks
    /// of 1, 2, 4, … rows on the diagonal follow from each other. Unlike a series of powers, this stays exact
    /// if the keys of a chunk are almost equal.
    fn solved(masks: &Masks, system: &Tensor) -> Tensor {
        let mut inverse = masks.identity.clone();
        for (i, quarter) in masks.quarters.iter().enumerate() {
            let part = system * quarter;
            // The first blocks have one row, and their inverse is 1.
            let next = match i {
                0 => &inverse - &part,
                _ => &inverse - inverse.matmul(&part).matmul(&inverse),
            };
            inverse = next;
        }
        inverse
    }

    /// Norm and gate of the results `[rows, heads * value]`.
    fn normed(&self, s: &Scan, w: &ScanWeights, y: Tensor, gate: Tensor) -> Tensor {
        let (rows, inner) = (y.dims().map_or(0, |d| d[0]), s.heads * s.value);
        match s.kind {
            ScanKind::Delta => {
                w.norm.apply(&y.reshape([rows, s.heads, s.value])).reshape([rows, inner]) * gate.silu()
            }
            ScanKind::Mamba { .. } => {
                let y = y * gate.silu();
                let plain = NormWeights { weight: None, bias: None, spec: w.norm.spec };
                let y = plain.apply(&y.reshape([rows, s.shared, inner / s.shared])).reshape([rows, inner]);
                match &w.norm.weight {
                    Some(weight) => y * weight,
                    None => y,
                }
            }
        }
    }
}

fn last(x: &Tensor) -> usize {
    x.dims().ok().and_then(|d| d.last().copied()).unwrap_or(0)
}

/// `ln(1 + exp(x))`.
fn softplus(x: &Tensor) -> Tensor {
    x.maximum(0.0) + (-x.abs()).exp().log1p()
}
