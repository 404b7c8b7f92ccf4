//! The kernel against a scan position by position in f64, and whether the bits of a row depend on other rows.

use super::*;
use crate::cpu::library::testing::*;
use halcyon_ir::ops::ChunkScan;
use std::sync::atomic::{AtomicU32, Ordering};

/// The operands of a call, in the order of the composite.
#[derive(Clone)]
pub(super) struct Case {
    pub s: ChunkScanSizes,
    pub input: Vec<f32>,
    pub ring: Vec<f32>,
    pub matrices: Vec<f32>,
    pub taps: Vec<f32>,
    pub rate: Vec<f32>,
    pub step_bias: Vec<f32>,
    pub sequences: Vec<i32>,
    pub window: Vec<i32>,
    pub valid: Vec<f32>,
    pub full: Vec<f32>,
    pub start: Vec<i32>,
    pub kept: Vec<i32>,
    pub back: Vec<i32>,
    pub skip: Vec<f32>,
    pub bias: Vec<f32>,
}

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len())]
}

fn scan(rng: &mut Rng, delta: bool) -> ChunkScan {
    let (shared, each) = (pick(rng, &[1, 2, 3]), pick(rng, &[1, 2, 3]));
    let limit = (!delta && rng.below(2) == 0).then_some((0.2, 1.5));
    ChunkScan {
        delta,
        heads: shared * each,
        shared,
        key: pick(rng, &[8, 13, 16, 32, 37, 128]),
        value: pick(rng, &[1, 5, 8, 16, 24, 32, 67, 128]),
        tiled: rng.below(2) == 0,
        ring: pick(rng, &[5, 19, 35]),
        limit,
        bias: rng.below(2) == 0,
    }
}

impl Case {
    pub(super) fn new(rng: &mut Rng, delta: bool) -> Case {
        let scan = scan(rng, delta);
        let s = ChunkScanSizes {
            scan,
            rows: pick(rng, &[1, 2, 7, 30]),
            slots: pick(rng, &[1, 3]),
            matrices: pick(rng, &[1, 4]),
            depth: pick(rng, &[1, 2, 3]),
            width: pick(rng, &[1, 2]),
            chunk: pick(rng, &[4, 16]),
            kernel: pick(rng, &[1, 3, 4]),
            kept: pick(rng, &[0, 1, 3]),
        };
        let l = Layout::new(&s, 1);
        let chunks = s.depth * s.width;
        let ints = |rng: &mut Rng, n: usize, below: usize| -> Vec<i32> {
            (0..n).map(|_| rng.below(below) as i32).collect()
        };
        let flags = |rng: &mut Rng, n: usize| -> Vec<f32> {
            (0..n).map(|_| if rng.below(4) > 0 { 1.0 } else { 0.0 }).collect()
        };
        Case {
            s,
            input: rng.vec(s.rows * l.size),
            ring: rng.vec(s.slots * scan.ring * l.size),
            matrices: rng.vec(s.matrices * l.all),
            taps: rng.vec(s.kernel * l.channels),
            rate: rng.vec(scan.heads).iter().map(|r| -r.abs()).collect(),
            step_bias: rng.vec(scan.heads),
            sequences: ints(rng, s.width, s.slots),
            window: ints(rng, chunks * (s.chunk + s.kernel - 1), s.width * scan.ring + s.rows + 1),
            valid: flags(rng, chunks * s.chunk),
            full: flags(rng, chunks),
            start: ints(rng, s.width, s.matrices),
            kept: ints(rng, s.kept, chunks),
            back: ints(rng, s.rows, chunks * s.chunk),
            skip: if delta { vec![] } else { rng.vec(scan.heads) },
            bias: if scan.bias { rng.vec(l.channels) } else { vec![] },
        }
    }

    /// Runs the kernel between guard pages, in poisoned memory. Returns the result, and whether it reported a
    /// fault.
    pub(super) fn run(&self, team: &Team, isa: Isa, side: Side) -> (Vec<f32>, bool) {
        let l = Layout::new(&self.s, 1);
        let g = |x: &[f32]| Guarded::new(x, side);
        let i = |x: &[i32]| Guarded::new(x, side);
        let word = AtomicU32::new(0);
        let floats = [
            g(&self.input),
            g(&self.ring),
            g(&self.matrices),
            g(&self.taps),
            g(&self.rate),
            g(&self.step_bias),
            g(&self.valid),
            g(&self.full),
            g(&self.skip),
            g(&self.bias),
        ];
        let ints = [i(&self.sequences), i(&self.window), i(&self.start), i(&self.kept), i(&self.back)];
        let y = g(&vec![f32::NAN; self.s.rows * l.inner + self.s.kept * l.all]);
        let f = |n: usize| SharedConst(floats[n].ptr());
        let n = |n: usize| SharedConst(ints[n].ptr());
        let perhaps = |n: usize, x: &[f32]| if x.is_empty() { SharedConst(std::ptr::null()) } else { f(n) };
        let o = Operands {
            input: f(0),
            stride: l.size as isize,
            ring: f(1),
            matrices: f(2),
            taps: f(3),
            rate: f(4),
            step_bias: f(5),
            sequences: n(0),
            window: n(1),
            valid: f(6),
            full: f(7),
            start: n(2),
            kept: n(3),
            back: n(4),
            skip: perhaps(8, &self.skip),
            bias: perhaps(9, &self.bias),
            y: SharedMut(y.mut_ptr()),
        };
        poison(team);
        // SAFETY: each guarded vector has the elements of its operand.
        unsafe { chunk_scan(team, isa, &self.s, o, Fault::new(&word, 1)) };
        (y.slice().to_vec(), word.load(Ordering::Relaxed) != 0)
    }
}

/// Fills the scratch memory that the next call gets with NaN.
fn poison(team: &Team) {
    let both = [team.scratch(1 << 20), team.scratch(1 << 20)];
    for memory in &both {
        // SAFETY: the memory has so many floats and is borrowed by this function only.
        unsafe { std::slice::from_raw_parts_mut(memory.ptr(), 1 << 20) }.fill(f32::NAN);
    }
}

/// A value in f64, and a bound of the magnitudes of what it was computed from.
#[derive(Clone, Copy, Default)]
struct Bounded {
    x: f64,
    most: f64,
}

/// The head's inputs at a place.
struct Place {
    q: Vec<Bounded>,
    k: Vec<Bounded>,
    v: Vec<Bounded>,
    decay: f64,
    strength: f64,
}

impl Case {
    fn input_row(&self, chunk: usize, at: usize) -> Vec<f32> {
        let (s, l) = (&self.s, Layout::new(&self.s, 1));
        let i = self.window[chunk * (s.chunk + s.kernel - 1) + at] as usize;
        let rings = s.width * s.scan.ring;
        if i < rings {
            let slot = self.sequences[i / s.scan.ring] as usize;
            return self.ring[(slot * s.scan.ring + i % s.scan.ring) * l.size..][..l.size].to_vec();
        }
        if i - rings < s.rows {
            self.input[(i - rings) * l.size..][..l.size].to_vec()
        } else {
            vec![0.0; l.size]
        }
    }

    fn place(&self, chunk: usize, place: usize, head: usize) -> Place {
        let (s, l) = (&self.s, Layout::new(&self.s, 1));
        let c = &s.scan;
        let shared = if c.tiled { head % c.shared } else { head / (c.heads / c.shared) };
        let valid = f64::from(self.valid[chunk * s.chunk + place]);
        let rows: Vec<Vec<f32>> = (0..s.kernel).map(|j| self.input_row(chunk, place + j)).collect();
        let channel = |i: usize| {
            let mut sum = Bounded::default();
            let bias = self.bias.get(i).map(|b| f64::from(*b));
            let terms = rows.iter().enumerate();
            let terms = terms.map(|(j, r)| f64::from(r[i]) * f64::from(self.taps[j * l.channels + i]));
            for t in terms.chain(bias) {
                sum = Bounded { x: sum.x + t, most: sum.most + t.abs() };
            }
            Bounded { x: valid * sum.x / (1.0 + (-sum.x).exp()), most: valid * sum.most }
        };
        let part = |from: usize, n: usize| (from..from + n).map(channel).collect::<Vec<_>>();
        let unit = |x: Vec<Bounded>, by: f64| {
            let length = (x.iter().map(|x| x.x * x.x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| Bounded { x: x.x / length * by, most: x.most / length * by }).collect()
        };
        let (mut q, mut k) = (part(l.q + shared * c.key, c.key), part(l.k + shared * c.key, c.key));
        if c.delta {
            (q, k) = (unit(q, 1.0 / (c.key as f64).sqrt()), unit(k, 1.0));
        }
        let extra = |i: usize| f64::from(rows[s.kernel - 1][l.channels + i * c.heads + head]);
        let x = extra(usize::from(c.delta)) + f64::from(self.step_bias[head]);
        let mut step = (1.0 + x.exp()).ln();
        if let Some((low, high)) = c.limit {
            step = step.clamp(low, high);
        }
        let strength = if c.delta { 1.0 / (1.0 + (-extra(0)).exp()) } else { step };
        Place {
            q,
            k,
            v: part(l.v + head * c.value, c.value),
            decay: step * valid * f64::from(self.rate[head]),
            strength: strength * valid,
        }
    }

    /// The results for a head of a sequence: for each place of its chunks the row, and for each of its chunks
    /// the matrix after it. The bounds are of the errors of an element: the largest magnitude of the terms
    /// that it was computed from, since errors of earlier positions do not grow. (Factors are at most 1. In
    /// DeltaNet, `1 - strength k kᵀ` has no eigenvalue above 1.)
    fn scan_f64(&self, sequence: usize, head: usize) -> (Vec<Vec<Bounded>>, Vec<Vec<Bounded>>) {
        let (s, l) = (&self.s, Layout::new(&self.s, 1));
        let c = &s.scan;
        let first = self.start[sequence] as usize * l.all + head * c.key * c.value;
        let start: Vec<f64> =
            self.matrices[first..][..c.key * c.value].iter().map(|x| f64::from(*x)).collect();
        let mut before: Vec<f64> = start;
        let mut most = vec![0f64; c.value];
        let (mut rows, mut after) = (vec![], vec![]);
        for chunk in (0..s.depth).map(|d| d * s.width + sequence) {
            let (mut m, mut worst) = (before.clone(), most.clone());
            for place in 0..s.chunk {
                let p = self.place(chunk, place, head);
                m.iter_mut().for_each(|x| *x *= p.decay.exp());
                let mut row = vec![Bounded::default(); c.value];
                for (j, row) in row.iter_mut().enumerate() {
                    let column = |m: &[f64]| -> Vec<f64> { (0..c.key).map(|i| m[i * c.value + j]).collect() };
                    let size = |x: &[Bounded]| x.iter().map(|x| x.most * x.most).sum::<f64>().sqrt();
                    let product =
                        |x: &[Bounded], m: &[f64]| -> f64 { x.iter().zip(m).map(|(x, m)| x.x * m).sum() };
                    let norm = |m: &[f64]| m.iter().map(|m| m * m).sum::<f64>().sqrt();
                    let now = column(&m);
                    let stored = if c.delta { product(&p.k, &now) } else { 0.0 };
                    let u = (p.v[j].x - stored) * p.strength;
                    for (i, k) in p.k.iter().enumerate() {
                        m[i * c.value + j] += k.x * u;
                    }
                    let new = column(&m);
                    let reach = norm(&now).max(norm(&new));
                    let part = p.v[j].most.max(if c.delta { size(&p.k) * reach } else { 0.0 });
                    worst[j] += (size(&p.k) * part * p.strength).max(reach);
                    let skip = self.skip.get(head).map_or(0.0, |s| f64::from(*s));
                    *row = Bounded {
                        x: product(&p.q, &new) + skip * p.v[j].x,
                        most: size(&p.q) * worst[j] + p.v[j].most,
                    };
                }
                rows.push(row);
            }
            if self.full[chunk] > 0.5 {
                (before, most) = (m, worst);
            }
            after.push(
                (0..c.key * c.value).map(|i| Bounded { x: before[i], most: most[i % c.value] }).collect(),
            );
        }
        (rows, after)
    }

    /// The error of a term, relative to the bound: of products over a key and over a chunk, of the
    /// convolution and the functions, and of the exponents, which are sums of at most `chunk` steps of at
    /// most 3.
    fn tolerance(&self) -> f64 {
        let (key, chunk, kernel) = (self.s.scan.key, self.s.chunk, self.s.kernel);
        f64::from(f32::EPSILON) * (2 * key + 2 * chunk + kernel + 40 + 3 * chunk * chunk) as f64
    }
}

fn follows_f64(rng: &mut Rng, delta: bool, team: &Team, isa: Isa) {
    let case = Case::new(rng, delta);
    let (s, l) = (&case.s, Layout::new(&case.s, 1));
    let side = pick(rng, &[Side::Start, Side::End]);
    let (y, fault) = case.run(team, isa, side);
    assert!(!fault, "{s:?}");
    let (size, value) = (s.scan.key * s.scan.value, s.scan.value);
    for (sequence, head) in (0..s.width).flat_map(|w| (0..s.scan.heads).map(move |h| (w, h))) {
        let (rows, after) = case.scan_f64(sequence, head);
        let check = |got: &[f32], want: &[Bounded], what: &str| {
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                close(*got, want.x, want.most, case.tolerance(), &(isa, s, what, sequence, head, i));
            }
        };
        for (row, place) in case.back.iter().enumerate() {
            let (chunk, place) = (*place as usize / s.chunk, *place as usize % s.chunk);
            if chunk % s.width == sequence {
                let want = &rows[chunk / s.width * s.chunk + place];
                check(&y[row * l.inner + head * value..][..value], want, "row");
            }
        }
        for (i, chunk) in case.kept.iter().enumerate() {
            if *chunk as usize % s.width == sequence {
                let got = &y[s.rows * l.inner + i * l.all + head * size..][..size];
                check(got, &after[*chunk as usize / s.width], "matrix");
            }
        }
    }
}

#[test]
fn chunk_scan_follows_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for _ in 0..15 {
                [false, true].into_iter().for_each(|delta| follows_f64(&mut rng, delta, &team, isa));
            }
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The case with other rows. Its inputs are all in the ring.
fn with_rows(case: &Case, back: &[i32]) -> Case {
    let size = Layout::new(&case.s, 1).size;
    let s = ChunkScanSizes { rows: back.len(), ..case.s };
    Case { s, input: vec![f32::NAN; back.len() * size], back: back.to_vec(), ..case.clone() }
}

/// Chunk `d` of a sequence as a call of its own, that starts with these matrices.
fn alone(case: &Case, (d, w): (usize, usize), start: &[f32], full: f32) -> Case {
    let (s, old) = (ChunkScanSizes { depth: 1, width: 1, matrices: 1, kept: 1, ..case.s }, &case.s);
    let (chunk, wide) = (d * old.width + w, old.chunk + old.kernel - 1);
    let ring = old.scan.ring as i32;
    let to_own = |i: &i32| if *i < ring * old.width as i32 { i % ring } else { ring + old.chunk as i32 };
    let kept = Case {
        s,
        matrices: start.to_vec(),
        sequences: vec![case.sequences[w]],
        window: case.window[chunk * wide..][..wide].iter().map(to_own).collect(),
        valid: case.valid[chunk * old.chunk..][..old.chunk].to_vec(),
        full: vec![full],
        start: vec![0],
        kept: vec![0],
        ..case.clone()
    };
    with_rows(&kept, &(0..old.chunk as i32).collect::<Vec<_>>())
}

fn is_invariant(rng: &mut Rng, delta: bool, teams: &[Team; 2], isa: Isa) {
    let mut case = Case::new(rng, delta);
    let (chunks, ring) = (case.s.depth * case.s.width, case.s.width * case.s.scan.ring);
    // A window has places of its own sequence, as in a model.
    let wide = case.s.chunk + case.s.kernel - 1;
    for (i, place) in case.window.iter_mut().enumerate() {
        let own = i / wide % case.s.width * case.s.scan.ring;
        *place = (own + rng.below(case.s.scan.ring)) as i32;
    }
    case.full.fill(1.0);
    case.s.kept = chunks;
    case.kept = (0..chunks as i32).collect();
    let places: Vec<i32> = (0..(chunks * case.s.chunk) as i32).collect();
    let all = with_rows(&case, &places);
    let (s, l) = (&all.s, Layout::new(&all.s, 1));
    // Numbers beyond the ring would be those of rows, which are NaN.
    assert!(all.window.iter().all(|i| (*i as usize) < ring));
    let (want, _) = all.run(&teams[0], isa, Side::End);
    assert_eq!(bits(&all.run(&teams[1], isa, Side::End).0), bits(&want), "other threads: {s:?}");
    let row = |y: &[f32], i: usize| bits(&y[i * l.inner..][..l.inner]);
    for _ in 0..6 {
        let n = 1 + rng.below(4);
        let some: Vec<i32> = (0..n).map(|_| pick(rng, &places)).collect();
        let mut few = with_rows(&all, &some);
        // The last chunks of the sequences need not be complete.
        few.full[chunks - case.s.width..].fill(0.0);
        let (got, _) = few.run(pick(rng, &[&teams[0], &teams[1]]), isa, Side::End);
        for (i, place) in some.iter().enumerate() {
            assert_eq!(row(&got, i), row(&want, *place as usize), "{some:?} of {s:?}");
        }
    }
    for w in 0..s.width {
        let first = all.start[w] as usize * l.all;
        let mut start = all.matrices[first..][..l.all].to_vec();
        for d in 0..s.depth {
            let (chunk, after) = (d * s.width + w, s.chunk * l.inner);
            let (got, _) = alone(&all, (d, w), &start, 1.0).run(&teams[0], isa, Side::End);
            let rows = &want[chunk * s.chunk * l.inner..][..s.chunk * l.inner];
            assert_eq!(bits(&got[..after]), bits(rows), "chunk {d} of {s:?}");
            start = want[places.len() * l.inner + chunk * l.all..][..l.all].to_vec();
            assert_eq!(bits(&got[after..]), bits(&start), "after chunk {d} of {s:?}");
        }
    }
}

#[test]
fn rows_do_not_depend_on_others() {
    let mut rng = Rng::new();
    let teams = [Team::new(1), Team::new(3)];
    for isa in Isa::available() {
        for _ in 0..6 {
            [false, true].into_iter().for_each(|delta| is_invariant(&mut rng, delta, &teams, isa));
        }
    }
}

#[test]
fn indices_out_of_range_are_clamped_and_reported() {
    let mut rng = Rng::new();
    let team = Team::new(1);
    for isa in Isa::available() {
        let mut case = Case::new(&mut rng, false);
        case.s.kept = 1;
        case.kept = vec![0];
        case.full.fill(1.0);
        type Field = fn(&mut Case) -> &mut Vec<i32>;
        // Place 0 of the window belongs to the first chunk, which is complete, so it is read. Its number is
        // that of the first ring.
        case.window[0] = 0;
        let fields: [(Field, usize); 5] = [
            (|c| &mut c.sequences, case.s.slots),
            (|c| &mut c.window, case.s.width * case.s.scan.ring + case.s.rows + 1),
            (|c| &mut c.start, case.s.matrices),
            (|c| &mut c.kept, case.s.depth * case.s.width),
            (|c| &mut c.back, case.s.depth * case.s.width * case.s.chunk),
        ];
        for (field, n) in fields {
            for (bad, near) in [(n as i32, n - 1), (i32::MAX, n - 1), (i32::MIN, 0)] {
                let [mut wrong, mut good] = [case.clone(), case.clone()];
                field(&mut wrong)[0] = bad;
                field(&mut good)[0] = near as i32;
                let (want, fault) = good.run(&team, isa, Side::End);
                assert!(!fault);
                let (got, fault) = wrong.run(&team, isa, Side::End);
                assert_eq!((bits(&got), fault), (bits(&want), true), "{bad} of {n}");
            }
        }
    }
}
