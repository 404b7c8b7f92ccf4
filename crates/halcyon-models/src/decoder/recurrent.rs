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

mod whole;

use super::CacheShape;
use super::load::{Loader, expect};
use super::weights::{Matrix, NormWeights};
use crate::grid::{CHUNK, Grid, ring};
use crate::spec::*;
use halcyon::ir::composite::CompositeKind;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ChunkScan, ConstData, DType, ScatterKind, Tensor};

#[derive(Debug)]
pub(super) struct RecurrentWeights {
    /// The projections, whose results are joined.
    input: Vec<Matrix>,
    /// The gate, if it has a matrix of its own.
    gate: Option<Matrix>,
    convolution: Convolution,
    scan: Option<ScanWeights>,
    output: Matrix,
}

#[derive(Debug)]
struct Convolution {
    /// f32 `[kernel, channels]`: factors for each position from the oldest on.
    taps: Tensor,
    /// f32 `[channels]`.
    bias: Option<Tensor>,
}

#[derive(Debug)]
struct ScanWeights {
    values: ScanValues,
    norm: NormWeights,
    masks: Masks,
}

#[derive(Debug)]
struct ScanValues {
    /// f32 `[heads]`: the rate of decay (negative), and the bias of the step.
    rate: Tensor,
    step_bias: Tensor,
    /// f32 `[heads, 1]`: the factor of values that are added to the result (Mamba 2).
    skip: Option<Tensor>,
}

/// Constant squares, f32 `[size, size]`, for chunks of `size` positions.
#[derive(Debug)]
struct Masks {
    size: usize,
    /// 1 where the column is not after the row.
    past: Tensor,
    identity: Tensor,
    /// For blocks of 2, 4, … rows on the diagonal: 1 in the lower left quarter of each block.
    quarters: Vec<Tensor>,
}

impl Masks {
    /// `size` is a power of two.
    fn new(b: &Backend, size: usize) -> Result<Masks> {
        let square = |f: &dyn Fn(usize, usize) -> bool| -> Result<Tensor> {
            let one = |i: usize| f32::from(u8::from(f(i / size, i % size)));
            let values: Vec<f32> = (0..size * size).map(one).collect();
            Ok(Tensor::constant(b, &ConstData::from_slice(&[size, size], &values)?))
        };
        let quarter = |n: usize| square(&|r, c| r / n == c / n && r % n >= n / 2 && c % n < n / 2);
        let sizes = std::iter::successors(Some(2), |n| Some(2 * n)).take_while(|n| *n <= size);
        Ok(Masks {
            size,
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
            return Ok(RecurrentWeights {
                input: vec![matrix("shortconv.in_proj", [3 * h, h])?],
                gate: None,
                convolution: self.convolution(&format!("{p}.shortconv.conv"), h, r.kernel)?,
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
        let convolution = self.convolution(&format!("{p}.ssm_conv1d"), s.channels(), r.kernel)?;
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
        let values = ScanValues {
            rate: self.values(&format!("{p}.ssm_a"), &[s.heads])?,
            step_bias: self.values(&format!("{p}.ssm_dt.bias"), &[s.heads])?,
            skip,
        };
        let scan = Some(ScanWeights { values, norm, masks: Masks::new(self.backend, CHUNK)? });
        let output = matrix("ssm_out", [h, inner])?;
        Ok(RecurrentWeights { input, gate, convolution, scan, output })
    }

    /// The values of a tensor in f32, as `dims`. Files differ in axes of size 1 and in how they divide an
    /// axis into groups.
    fn values(&self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let values = self.floats(&self.need(name)?)?;
        expect(name, &[values.len()], &[dims.iter().product()])?;
        Ok(Tensor::constant(self.backend, &ConstData::from_slice(dims, &values)?))
    }

    /// A convolution, whose factors are stored as `[channels, kernel]` with further axes of size 1.
    fn convolution(&self, stem: &str, channels: usize, kernel: usize) -> Result<Convolution> {
        let name = format!("{stem}.weight");
        let values = self.floats(&self.need(&name)?)?;
        expect(&name, &[values.len()], &[channels * kernel])?;
        let turned: Vec<f32> =
            (0..kernel).flat_map(|j| values.iter().skip(j).step_by(kernel).copied()).collect();
        let taps = Tensor::constant(self.backend, &ConstData::from_slice(&[kernel, channels], &turned)?);
        Ok(Convolution { taps, bias: self.vector(&format!("{stem}.bias"), &[channels])? })
    }
}

pub(super) struct RecurrentStep<'a> {
    pub(super) r: &'a Recurrent,
    pub(super) w: &'a RecurrentWeights,
    pub(super) grid: Grid<'a>,
    /// Sequences of the engine.
    pub(super) slots: usize,
}

/// The inputs of a scan over `n` chunks of `size` positions: first the first chunk of each sequence, then the
/// second one, and so on. The two head axes are those of [`Scan::axes`].
struct Inputs {
    /// `[n, heads, size, key]`.
    q: Tensor,
    k: Tensor,
    /// `[n, heads, size, value]`.
    v: Tensor,
    /// The logarithms of the factors of the matrices, `[n, heads, size]`.
    decay: Tensor,
    /// What the part of a position is multiplied by, `[n, heads, size, 1]`.
    strength: Tensor,
}

impl RecurrentStep<'_> {
    /// The results for the rows, `[rows, hidden]`, and the new states.
    pub(super) fn run(&self, x: &Tensor, states: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let (input, gate) = self.w.project(self.r, x);
        // The ring is written in place after it is read.
        let ring = || states[0].scatter_rows(self.grid.ring, &input, 0, ScatterKind::Set);
        let Some((s, w)) = self.r.scan.as_ref().zip(self.w.scan.as_ref()) else {
            let hidden = last(&input);
            let y = self.w.convolution.apply(&self.window(&input, &states[0]), hidden);
            let y = y.reshape([self.chunks() * CHUNK, hidden]).gather(self.grid.back, 0);
            return Ok((self.w.output.apply(&(gate * y)), vec![ring()]));
        };
        let all = self.chunk_scan(s, w, &input, states)?;
        let ring = ring();
        let (rows, inner, matrix) = (x.dims()?[0], s.heads * s.value, s.heads * s.key * s.value);
        let kept = self.kept();
        let y = all.narrow(0, 0, rows * inner).reshape([rows, inner]);
        // Writing no rows keeps the state's memory. These rows are no view of the state: a state that its own
        // update reads is copied first.
        let after = all.narrow(0, rows * inner, kept * matrix).reshape([kept, matrix]);
        let matrices = states[1].scatter_rows(self.grid.write, &after, 0, ScatterKind::Set);
        Ok((self.w.output.apply(&w.normed(s, y, gate)), vec![ring, matrices]))
    }

    /// The composite `chunk_scan`: the results of the rows before the norm, and the matrices after chunks.
    fn chunk_scan(&self, s: &Scan, w: &ScanWeights, input: &Tensor, states: &[Tensor]) -> Result<Tensor> {
        let (grid, convolution) = (&self.grid, &self.w.convolution);
        let limit = match s.kind {
            ScanKind::Mamba { limit: (low, high) } if low > 0.0 || high.is_finite() => Some((low, high)),
            _ => None,
        };
        let options = ChunkScan {
            delta: s.kind == ScanKind::Delta,
            heads: s.heads,
            shared: s.shared,
            key: s.key,
            value: s.value,
            tiled: s.tiled,
            ring: ring(self.r.kernel),
            limit,
            bias: convolution.bias.is_some(),
        };
        let weights = [&convolution.taps, &w.values.rate, &w.values.step_bias];
        let places = [grid.sequences, grid.window, grid.valid, grid.full, grid.start, grid.kept, grid.back];
        let mut operands = vec![input, &states[0], &states[1]];
        operands.extend(weights.into_iter().chain(places));
        operands.extend(w.values.skip.iter().chain(&convolution.bias));
        halcyon::composite(CompositeKind::ChunkScan, options.attrs(), &operands, |x| {
            let [input, inputs, state, taps, rate, step_bias, rest @ ..] = x else { return Err(missing()) };
            let [sequences, window, valid, full, start, kept, back, rest @ ..] = rest else {
                return Err(missing());
            };
            let mut rest = rest.iter().cloned();
            let skip = w.values.skip.as_ref().and_then(|_| rest.next());
            let grid = Grid { sequences, window, valid, full, start, kept, back, ..self.grid };
            let values = ScanValues { rate: rate.clone(), step_bias: step_bias.clone(), skip };
            let convolution = Convolution { taps: taps.clone(), bias: rest.next() };
            let step = RecurrentStep { grid, ..*self };
            Ok(step.body(s, (&convolution, &values, &w.masks), input, [inputs, state]))
        })
    }

    /// The body of the composite, of the operands of this grid.
    fn body(
        &self,
        s: &Scan,
        (convolution, w, masks): (&Convolution, &ScanValues, &Masks),
        input: &Tensor,
        [inputs, state]: [&Tensor; 2],
    ) -> Tensor {
        let (n, inner, matrix) = (self.chunks(), s.heads * s.value, s.heads * s.key * s.value);
        let window = self.window(input, inputs);
        let valid = self.grid.valid.reshape([n, CHUNK, 1]);
        let mixed = convolution.apply(&window, s.channels()).silu() * &valid;
        let extras = window.narrow(1, self.r.kernel - 1, CHUNK).narrow(2, s.channels(), s.extras());
        let x = w.inputs(s, &mixed, &extras, Some(&valid));
        let ([a, b], _) = s.axes();
        let width = self.width();
        let start = state.gather(self.grid.start, 0).reshape([width, a, b, s.key, s.value]);
        let full = self.grid.full.reshape([n, 1, 1, 1]);
        let (y, after) = x.scan(s, masks, Some(&full), start);
        let y = w.skipped(s, y.permute(&[0, 3, 1, 2, 4]).reshape([n * CHUNK, inner]), &mixed);
        let y = y.gather(self.grid.back, 0);
        let y = y.reshape([y.dims().map_or(0, |d| d[0]) * inner]);
        if self.kept() == 0 {
            // The matrices after the chunk are not computed, because nothing reads them.
            return y;
        }
        let after: Vec<Tensor> = after.iter().map(|m| m.reshape([width, matrix])).collect();
        let after = Tensor::cat(&after, 0).gather(self.grid.kept, 0);
        Tensor::cat(&[&y, &after.reshape([self.kept() * matrix])], 0)
    }

    /// Chunks of the grid.
    fn chunks(&self) -> usize {
        self.grid.full.dims().map_or(0, |d| d[0] * d[1])
    }

    /// Chunks after which the matrices are kept.
    fn kept(&self) -> usize {
        self.grid.kept.dims().map_or(0, |d| d[0])
    }

    /// Sequences of the grid.
    fn width(&self) -> usize {
        self.grid.full.dims().map_or(0, |d| d[1])
    }

    /// The inputs in the places of the grid and before them, `[chunks, CHUNK + kernel - 1, size]`.
    fn window(&self, input: &Tensor, state: &Tensor) -> Tensor {
        let (size, rows, kernel) = (last(input), ring(self.r.kernel), self.r.kernel);
        let rings = state.reshape([self.slots + 1, rows * size]).gather(self.grid.sequences, 0);
        let rings = rings.reshape([self.width() * rows, size]);
        let none = Tensor::zeros(input.backend(), [1, size], DType::F32);
        let all = Tensor::cat(&[&rings, input, &none], 0);
        all.gather(self.grid.window, 0).reshape([self.chunks(), CHUNK + kernel - 1, size])
    }
}

fn missing() -> Error {
    Error::internal("chunk_scan was built of other operands")
}

impl Inputs {
    /// The results `[n, heads, size, value]`, and the matrices `[sequences, heads, key, value]` after each
    /// chunk of the sequences; `start` are those before the first one. `full`, f32 `[n, 1, 1, 1]`, is 1 for
    /// chunks that are complete, else 0; without it, all are.
    fn scan(&self, s: &Scan, masks: &Masks, full: Option<&Tensor>, start: Tensor) -> (Tensor, Vec<Tensor>) {
        let ([a, b], _) = s.axes();
        let (n, size) = (self.q.dims().map_or(0, |d| d[0]), masks.size);
        let width = start.dims().map_or(1, |d| d[0]).max(1);
        let sum = self.decay.cumsum(-1);
        let pairs = sum.reshape([n, a, b, size, 1]) - sum.reshape([n, a, b, 1, size]);
        // Pairs of which the second is later have no factor; its exponent could be too large.
        let factors = pairs.minimum(0.0).exp() * &masks.past;
        let kt = self.k.transpose(-1, -2);
        let attention = self.q.matmul(&kt) * &factors;
        let whole = sum.narrow(3, size - 1, 1);
        let (mut kept, mut to_end) = (whole.exp(), (&whole - &sum).exp());
        // A chunk that is not complete leaves the matrices as they are.
        if let Some(full) = full {
            let one = Tensor::scalar(sum.backend(), 1.0, DType::F32);
            kept = full.gt(0.5).select(&kept, &one);
            to_end = to_end * full;
        }
        let kept = kept.reshape([n, a, b, 1, 1]);
        let added = (&self.k * to_end.reshape([n, a, b, size, 1])).transpose(-1, -2);
        let from_start = sum.exp().reshape([n, a, b, size, 1]);
        // Products are part of the operands of matrix products, and not of the sums of their results: a
        // compiler may contract a product with a sum, in one kernel and not in another.
        let mut values = &self.v * &self.strength;
        let queries = &self.q * &from_start;
        // What the matrices return for the keys, as DeltaNet takes it away.
        let returned = matches!(s.kind, ScanKind::Delta).then(|| {
            let solved = masks.solved(&(self.k.matmul(&kt) * &factors * &self.strength));
            values = solved.matmul(&values);
            solved.matmul(&(&self.k * (&from_start * &self.strength)))
        });
        let mut matrices = start;
        let (mut results, mut after) = (vec![], vec![]);
        for d in 0..n / width {
            let of = |t: &Tensor| t.narrow(0, d * width, width);
            let u = match &returned {
                Some(keys) => of(&values) - of(keys).matmul(&matrices),
                None => of(&values),
            };
            results.push(of(&queries).matmul(&matrices) + of(&attention).matmul(&u));
            matrices = matrices * of(&kept) + of(&added).matmul(&u);
            after.push(matrices.clone());
        }
        (Tensor::cat(&results, 0), after)
    }
}

impl Masks {
    /// The inverse of `1 + L`, where `L` is the part of `system` below the diagonal. The inverses of blocks
    /// of 1, 2, 4, … rows on the diagonal follow from each other. Unlike a series of powers, this stays exact
    /// if the keys of a chunk are almost equal.
    fn solved(&self, system: &Tensor) -> Tensor {
        let mut inverse = self.identity.clone();
        for (i, quarter) in self.quarters.iter().enumerate() {
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
}

impl RecurrentWeights {
    /// What is convolved and scanned of the rows, and the gate of their results.
    fn project(&self, r: &Recurrent, x: &Tensor) -> (Tensor, Tensor) {
        let all: Vec<Tensor> = self.input.iter().map(|m| m.apply(x)).collect();
        match (&r.scan, &self.gate) {
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
}

impl Convolution {
    /// Of `[n, size + kernel - 1, …]` the first channels, `[n, size, channels]`.
    fn apply(&self, window: &Tensor, channels: usize) -> Tensor {
        let x = window.narrow(2, 0, channels);
        let kernel = self.taps.dims().map_or(1, |d| d[0]);
        let size = window.dims().map_or(0, |d| (d[1] + 1).saturating_sub(kernel));
        let tap = |j| x.narrow(1, j, size) * self.taps.narrow(0, j, 1).reshape([channels]);
        let sum = (0..kernel).map(tap).reduce(|a, b| a + b);
        match (sum, &self.bias) {
            (Some(y), Some(b)) => y + b,
            (Some(y), None) => y,
            (None, _) => x,
        }
    }
}

impl ScanValues {
    /// The inputs of a scan. `mixed` is `[n, size, channels]`, and `extras` `[n, size, …]`. `valid`, f32
    /// `[n, size, 1]`, is 1 for places that have a row, else 0; without it, all have one.
    fn inputs(&self, s: &Scan, mixed: &Tensor, extras: &Tensor, valid: Option<&Tensor>) -> Inputs {
        let (n, size) = mixed.dims().map_or((0, 0), |d| (d[0], d[1]));
        let valid = |x: Tensor| match valid {
            Some(v) => x * v,
            None => x,
        };
        let ([a, b], [ka, kb]) = s.axes();
        let (keys, inner) = (s.shared * s.key, s.heads * s.value);
        let part = |first: usize, dims: [usize; 5]| {
            let count = dims[2] * dims[3] * dims[4];
            mixed.narrow(2, first, count).reshape(dims).permute(&[0, 2, 3, 1, 4])
        };
        let key = |first: usize| part(first, [n, size, ka, kb, s.key]);
        let value = |first: usize| part(first, [n, size, a, b, s.value]);
        let head = |t: Tensor| t.reshape([n, size, a, b]).permute(&[0, 2, 3, 1]);
        let extra = |i: usize| extras.narrow(2, i * s.heads, s.heads);
        match s.kind {
            ScanKind::Delta => {
                // Queries and keys are divided by their length, and queries by the root of their size.
                let width = s.key as f64;
                let unit = |x: Tensor, by: f64| {
                    let weight = Tensor::full(x.backend(), [s.key], by, DType::F32);
                    x.rms_norm(&weight, 1e-6 / width)
                };
                let step = softplus(&(extra(1) + &self.step_bias)) * &self.rate;
                Inputs {
                    q: unit(key(0), 1.0 / width),
                    k: unit(key(keys), 1.0 / width.sqrt()),
                    v: value(2 * keys),
                    decay: head(valid(step)),
                    strength: head(valid(extra(0).sigmoid())).reshape([n, a, b, size, 1]),
                }
            }
            ScanKind::Mamba { limit: (low, high) } => {
                let mut step = softplus(&(extra(0) + &self.step_bias));
                if low > 0.0 || high.is_finite() {
                    step = step.clamp(low, high);
                }
                let step = valid(step);
                Inputs {
                    q: key(inner + keys),
                    k: key(inner),
                    v: value(0),
                    decay: head(&step * &self.rate),
                    strength: head(step).reshape([n, a, b, size, 1]),
                }
            }
        }
    }

    /// The results `[rows, heads * value]` with the part of the values that skips the scan. `mixed` is
    /// `[n, size, channels]`, with as many rows.
    fn skipped(&self, s: &Scan, y: Tensor, mixed: &Tensor) -> Tensor {
        let Some(skip) = &self.skip else { return y };
        let (rows, inner) = (y.dims().map_or(0, |d| d[0]), s.heads * s.value);
        let v = mixed.narrow(2, 0, inner).reshape([rows, s.heads, s.value]);
        y + (v * skip).reshape([rows, inner])
    }
}

impl ScanWeights {
    /// Norm and gate of the results `[rows, heads * value]`.
    fn normed(&self, s: &Scan, y: Tensor, gate: Tensor) -> Tensor {
        let (rows, inner) = (y.dims().map_or(0, |d| d[0]), s.heads * s.value);
        match s.kind {
            ScanKind::Delta => {
                self.norm.apply(&y.reshape([rows, s.heads, s.value])).reshape([rows, inner]) * gate.silu()
            }
            ScanKind::Mamba { .. } => {
                let y = y * gate.silu();
                if s.shared == 1 {
                    return self.norm.apply(&y);
                }
                let plain = NormWeights { weight: None, bias: None, spec: self.norm.spec };
                let y = plain.apply(&y.reshape([rows, s.shared, inner / s.shared])).reshape([rows, inner]);
                match &self.norm.weight {
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
