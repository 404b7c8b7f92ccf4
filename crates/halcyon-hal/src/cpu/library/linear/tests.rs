//! Products against f64, and whether the bits of a row depend on anything but the row.

use super::ints::Path;
use super::layout::{GROUP, Layout};
use super::product::{Operands, Product, Size, Weights};
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use halcyon_ir::blocks::BlockType;
use half::{bf16, f16};

/// Every type of weights.
fn types() -> Vec<Weights> {
    let blocks = BlockType::ALL.iter().map(|b| Weights::Blocks(*b));
    [Weights::F32, Weights::F16, Weights::BF16].into_iter().chain(blocks).collect()
}

/// Every product of these operands that may run here.
fn products(size: Size, weights: Weights) -> Vec<Product> {
    let paths = |isa: Isa| match weights {
        Weights::Blocks(_) => Path::all(isa).collect(),
        _ => vec![Path::Plain],
    };
    let fines: &[bool] = if let Weights::Blocks(_) = weights { &[false, true] } else { &[false] };
    let on = |(isa, fine): (Isa, bool)| {
        let one = move |path| Product { path, fine, ..Product::new(isa, size, weights) };
        paths(isa).into_iter().map(one)
    };
    let isas = Isa::available().into_iter();
    fines.iter().flat_map(|f| isas.clone().map(|i| (i, *f))).flat_map(on).collect()
}

/// The numbers of a random sum of floats or blocks.
fn k_of(rng: &mut Rng, w: Weights) -> usize {
    match w {
        Weights::Blocks(b) if b.row().elements == 256 => 256 * (1 + rng.below(3)),
        Weights::Blocks(_) => 32 * (1 + rng.below(20)),
        _ => 1 + rng.below(300),
    }
}

/// Places of the f16 numbers in a block.
fn halves(b: BlockType) -> &'static [usize] {
    match b {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::MXFP4 => &[],
        _ => &[0],
    }
}

/// Random weights as they are stored. Some scales are 0.
fn stored(rng: &mut Rng, w: Weights, count: usize) -> Vec<u8> {
    let floats = rng.vec(count);
    match w {
        Weights::F32 => floats.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Weights::F16 => floats.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Weights::BF16 => floats.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Weights::Blocks(b) => {
            let mut bytes: Vec<u8> = (0..b.bytes_of(count).unwrap()).map(|_| rng.bits() as u8).collect();
            for block in bytes.chunks_exact_mut(b.row().bytes) {
                for at in halves(b) {
                    let d = if rng.below(10) == 0 { 0.0 } else { rng.f32() * 0.1 };
                    block[*at..at + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
                }
                if b == BlockType::MXFP4 {
                    block[0] = if rng.below(10) == 0 { rng.below(3) } else { 110 + rng.below(20) } as u8;
                }
            }
            bytes
        }
    }
}

/// The weights in f32.
fn decoded(w: Weights, bytes: &[u8]) -> Vec<f32> {
    match w {
        Weights::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Weights::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Weights::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Weights::Blocks(b) => {
            let mut v = vec![0.0; b.elements_of(bytes.len()).unwrap()];
            b.decode(bytes, &mut v);
            v
        }
    }
}

struct Case {
    size: Size,
    weights: Weights,
    x: Vec<f32>,
    w: Vec<u8>,
    which: Option<Vec<u32>>,
}

impl Case {
    fn new(rng: &mut Rng, weights: Weights, (m, n, k): (usize, usize, usize), chosen: bool) -> Case {
        let matrices = if chosen { 1 + rng.below(6) } else { 1 };
        let which = chosen.then(|| (0..m).map(|_| rng.below(matrices) as u32).collect());
        let size = Size { m, n, k, matrices };
        Case { size, weights, x: rng.vec(m * k), w: stored(rng, weights, matrices * n * k), which }
    }

    /// The case with some of its rows only.
    fn only(&self, rows: &[usize]) -> Case {
        let k = self.size.k;
        Case {
            size: Size { m: rows.len(), ..self.size },
            weights: self.weights,
            x: rows.iter().flat_map(|r| self.x[r * k..][..k].to_vec()).collect(),
            w: self.w.clone(),
            which: self.which.as_ref().map(|w| rows.iter().map(|r| w[*r]).collect()),
        }
    }

    /// Computes the product between guard pages, in poisoned memory.
    fn run(&self, team: &Team, p: &Product, packed: bool, side: Side) -> Vec<f32> {
        let (x, w) = (Guarded::new(&self.x, side), Guarded::new(&self.w, side));
        let room = Guarded::new(&vec![255u8; p.packed_bytes().unwrap()], side);
        let y = Guarded::new(&vec![f32::NAN; self.size.m * self.size.n], side);
        let mut work = vec![255u8; p.workspace()];
        for (i, j) in self.which.iter().flatten().enumerate() {
            work[4 * i..][..4].copy_from_slice(&j.to_ne_bytes());
        }
        let work = Guarded::new(&work, side);
        if packed {
            // SAFETY: the buffers have the sizes that `pack` needs.
            unsafe { p.pack(team, w.ptr(), room.mut_ptr()) };
        }
        let w = if packed { room.ptr() } else { w.ptr() };
        let o = Operands { x: x.ptr(), w, packed, y: y.mut_ptr(), work: work.mut_ptr() };
        // SAFETY: the buffers have the sizes that `run` needs.
        unsafe { p.run(team, o, self.which.is_some()) };
        y.slice().to_vec()
    }

    /// Compares results with f64.
    fn check(&self, got: &[f32], fine: bool, what: &dyn std::fmt::Debug) {
        let Size { n, k, m, .. } = self.size;
        let w = decoded(self.weights, &self.w);
        for r in 0..m {
            let x = &self.x[r * k..][..k];
            let matrix = self.which.as_ref().map_or(0, |w| w[r] as usize);
            for j in 0..n {
                let w = &w[(matrix * n + j) * k..][..k];
                match self.weights {
                    Weights::Blocks(_) => check_bytes(x, w, got[r * n + j], fine, what),
                    _ => {
                        let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let size = terms.clone().map(f64::abs).sum();
                        close(got[r * n + j], terms.sum(), size, sum_tolerance(k), &(r, j, what));
                    }
                }
            }
        }
    }
}

/// Compares one result with that of activations rounded to bytes, unless they are `fine`, and with that of
/// the activations.
fn check_bytes(x: &[f32], w: &[f32], got: f32, fine: bool, what: &dyn std::fmt::Debug) {
    let (mut rounded, mut exact, mut size, mut error) = (0f64, 0f64, 0f64, 0f64);
    for (x, w) in x.chunks(GROUP).zip(w.chunks(GROUP)) {
        let top = x.iter().fold(0f32, |a, x| a.max(x.abs()));
        let most = w.iter().fold(0f32, |a, w| a.max(w.abs()));
        for (x, w) in x.iter().zip(w) {
            let code = (x * (127.0 / top)).round_ties_even();
            let near = if top > 0.0 { f64::from(code) * f64::from(top) / 127.0 } else { 0.0 };
            rounded += near * f64::from(*w);
            exact += f64::from(*x) * f64::from(*w);
            size += f64::from(top) * f64::from(most) * 4.0;
            error += f64::from(w.abs()) * f64::from(top) / 254.0;
        }
    }
    // The product of two scales may be denormal. It is then rounded to a multiple of 2^-149, and the sum of a
    // group's codes is at most 32 * 127 * 128.
    let denormal = 2f64.powi(-150) * 32.0 * 127.0 * 128.0 * (x.len() / 16) as f64;
    let rest = sum_tolerance(x.len() / 16) * size + denormal;
    if fine {
        // The second record takes away all but 1/254 of the error, and f32 rounds what it holds.
        error *= 1.01 / 254.0;
    } else {
        close(got, rounded, rest, 1.0, what);
    }
    close(got, exact, error * 1.0001 + rest, 1.0, what);
}

#[test]
fn products_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    let teams = [Team::new(1), Team::new(3)];
    for weights in types() {
        for chosen in [false, true] {
            for _ in 0..4 {
                let m = [1, 2, 3, 7, 12, 13, 23, 24, 25, 40][rng.below(10)];
                let shape = (m, 1 + rng.below(150), k_of(&mut rng, weights));
                let case = Case::new(&mut rng, weights, shape, chosen);
                let side = [Side::Start, Side::End][rng.below(2)];
                for p in products(case.size, weights) {
                    let packed = rng.below(2) == 0;
                    let got = case.run(&teams[rng.below(2)], &p, packed, side);
                    case.check(&got, p.fine, &(&p, packed));
                }
            }
        }
    }
}

/// The bits of a row are the same whatever the number of rows, its place among them, the threads and the time
/// of packing. Products of bytes with multiply-adds are the same for all instructions.
#[test]
fn the_bits_of_a_row_depend_on_nothing_else() {
    if halcyon_test_host::left_out("the_bits_of_a_row_depend_on_nothing_else") {
        return;
    }
    let mut rng = Rng::new();
    let teams = [Team::new(1), Team::new(3)];
    for weights in types() {
        for chosen in [false, true] {
            let shape = (40, 17 + rng.below(70), k_of(&mut rng, weights));
            let (n, case) = (shape.1, Case::new(&mut rng, weights, shape, chosen));
            let mut before: Option<(Product, Vec<f32>)> = None;
            for p in products(case.size, weights) {
                let all = case.run(&teams[0], &p, true, Side::End);
                for m in 1..=40 {
                    let rows: Vec<usize> = (0..m).map(|_| rng.below(40)).collect();
                    let part = case.only(&rows);
                    let p = Product { size: part.size, ..p };
                    let (t, packed) = (rng.below(2), rng.below(2) == 0);
                    let got = part.run(&teams[t], &p, packed, Side::End);
                    for (i, r) in rows.iter().enumerate() {
                        let (got, want) = (&got[i * n..][..n], &all[r * n..][..n]);
                        let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "row {r} at {i} of {m}, packed {packed}, team {t}: {p:?}");
                    }
                }
                let same = |b: &&(Product, _)| b.0.isa != Isa::Portable && b.0.fine == p.fine;
                if let Some((_, other)) = before.as_ref().filter(same) {
                    assert!(*other == all, "{p:?} differs from another instruction set");
                }
                before = Some((p, all));
            }
        }
    }
}

#[test]
fn special_activations() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for weights in types() {
        let k = k_of(&mut rng, weights).max(4);
        let (m, n) = (7, 20);
        let mut case = Case::new(&mut rng, weights, (m, n, k), false);
        case.x[..k].fill(0.0);
        case.x[k + k / 2] = f32::NAN;
        case.x[2 * k + k - 1] = f32::INFINITY;
        case.x[3 * k] = f32::NEG_INFINITY;
        case.x[4 * k..5 * k].iter_mut().for_each(|x| *x *= 1e-36);
        case.x[5 * k..6 * k].iter_mut().for_each(|x| *x *= 1e-41);
        case.x[6 * k..].iter_mut().for_each(|x| *x *= 1e30);
        for p in products(case.size, weights) {
            let got = case.run(&team, &p, true, Side::End);
            let row = |r: usize| &got[r * n..][..n];
            assert!(row(0).iter().all(|y| *y == 0.0), "{p:?}");
            assert!(row(1).iter().all(|y| y.is_nan()), "{p:?}");
            let ended = |y: &f32| match weights {
                Weights::Blocks(_) => y.is_nan(),
                _ => !y.is_finite(),
            };
            assert!(row(2).iter().all(ended) && row(3).iter().all(ended), "{p:?}");
            let finite = case.only(&[4, 6]);
            finite.check(&[row(4), row(6)].concat(), p.fine, &p);
            // Less than the smallest normal number, up to the factors of the weights.
            assert!(row(5).iter().all(|y| y.abs() < 1e-33), "{p:?} {:?}", row(5));
        }
    }
}

/// The largest sums: all codes of a group are the largest or the smallest, and all activations have the same
/// magnitude, with one sign or with the sign of the code.
#[test]
fn the_largest_sums_are_exact() {
    let mut rng = Rng::new();
    let team = Team::new(1);
    for b in BlockType::ALL {
        let weights = Weights::Blocks(*b);
        for pattern in [0x00, 0xff, 0x0f, 0xf0, 0x80, 0x7f] {
            let mut case = Case::new(&mut rng, weights, (7, 33, 512), false);
            for block in case.w.chunks_exact_mut(b.row().bytes) {
                let scales: Vec<(usize, u8)> =
                    halves(*b).iter().flat_map(|at| [*at, at + 1]).map(|at| (at, block[at])).collect();
                block.fill(pattern);
                scales.iter().for_each(|(at, byte)| block[*at] = *byte);
                if *b == BlockType::MXFP4 {
                    block[0] = 120;
                }
            }
            let w = decoded(weights, &case.w);
            for (i, x) in case.x.iter_mut().enumerate() {
                let (row, at) = (i / 512, i % 512);
                *x = if row % 2 == 0 { 1.0 } else { w[at].signum() };
            }
            for p in products(case.size, weights) {
                let got = case.run(&team, &p, true, Side::End);
                case.check(&got, p.fine, &(&p, pattern));
            }
        }
    }
}

/// The packed codes take no more bits than those of the blocks, and scales little more.
#[test]
fn packed_weights_are_small() {
    for b in BlockType::ALL {
        let (stored, k) = (b.row(), 2048);
        let packed = Layout::of(*b).bytes(k / GROUP) as f64 / 16.0 / k as f64;
        let bytes = stored.bytes as f64 / stored.elements as f64;
        assert!(packed <= bytes * 1.06, "{b}: {packed} bytes per weight, {bytes} in blocks");
    }
}

#[test]
fn empty_products() {
    let team = Team::new(2);
    for weights in types() {
        for (m, n, k) in [(0, 5, 256), (3, 0, 256), (3, 5, 0)] {
            let case = Case::new(&mut Rng::new(), weights, (m, n, k), false);
            for p in products(case.size, weights) {
                assert!(case.run(&team, &p, false, Side::End).iter().all(|y| *y == 0.0));
            }
        }
    }
}
