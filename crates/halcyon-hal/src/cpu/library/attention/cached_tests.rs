use super::*;
use crate::cpu::library::testing::*;
use halcyon_ir::blocks::BlockType;
use half::{bf16, f16};
use std::sync::atomic::{AtomicU32, Ordering};

/// A random call. Positions of the cache that no row sees are NaN.
struct Case {
    a: Cached,
    q: Vec<f32>,
    keys: Store,
    values: Store,
    table: Vec<i32>,
    sequence: Vec<i32>,
    position: Vec<i32>,
    sinks: Vec<f32>,
    side: Side,
}

/// Keys or values: the bytes of the operand, and the numbers that they mean.
struct Store {
    kept: Kept,
    /// Numbers of a row.
    n: usize,
    bytes: Vec<u8>,
    numbers: Vec<f32>,
}

impl Store {
    fn new(kept: Kept, rows: usize, n: usize) -> Store {
        // A scale of these bytes is NaN, as are f32, f16 and bf16.
        Store { kept, n, bytes: vec![0xff; rows * kept.bytes(n)], numbers: vec![f32::NAN; rows * n] }
    }

    fn set(&mut self, row: usize, x: &[f32]) {
        let (size, n) = (self.kept.bytes(self.n), self.n);
        let (to, numbers) =
            (&mut self.bytes[row * size..(row + 1) * size], &mut self.numbers[row * n..(row + 1) * n]);
        match self.kept {
            Kept::Q8_0 => {
                BlockType::Q8_0.encode(x, to);
                // The encoder has positive scales only.
                to[1] ^= 0x80;
                return BlockType::Q8_0.decode(to, numbers);
            }
            Kept::F32 => {
                x.iter().zip(to.chunks_mut(4)).for_each(|(x, to)| to.copy_from_slice(&x.to_le_bytes()))
            }
            Kept::F16 => {
                let bits = x.iter().map(|x| f16::from_f32(*x).to_le_bytes());
                bits.zip(to.chunks_mut(2)).for_each(|(b, to)| to.copy_from_slice(&b));
            }
            Kept::BF16 => {
                let bits = x.iter().map(|x| bf16::from_f32(*x).to_le_bytes());
                bits.zip(to.chunks_mut(2)).for_each(|(b, to)| to.copy_from_slice(&b));
            }
        }
        for (x, y) in x.iter().zip(numbers) {
            *y = match self.kept {
                Kept::F16 => f16::from_f32(*x).to_f32(),
                Kept::BF16 => bf16::from_f32(*x).to_f32(),
                _ => *x,
            };
        }
    }

    fn fill(&mut self, mut f: impl FnMut() -> f32) {
        for row in 0..self.numbers.len() / self.n {
            let x: Vec<f32> = (0..self.n).map(|_| f()).collect();
            self.set(row, &x);
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.numbers[row * self.n..(row + 1) * self.n]
    }
}

/// Types of keys and of values.
const TYPES: [[Kept; 2]; 6] = [
    [Kept::F32, Kept::F32],
    [Kept::F16, Kept::F16],
    [Kept::BF16, Kept::BF16],
    [Kept::Q8_0, Kept::Q8_0],
    [Kept::Q8_0, Kept::F16],
    [Kept::F32, Kept::Q8_0],
];

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len())]
}

impl Case {
    /// `reach` is the largest number of positions of a sequence, rounded up to whole pages.
    fn new(rng: &mut Rng, kept: [Kept; 2], rows: usize, reach: usize) -> Case {
        let sizes = kept.map(|k| match k {
            Kept::Q8_0 => [32, 32, 64, 64, 96, 128],
            _ => [1, 12, 31, 64, 80, 128],
        });
        let page = pick(rng, &[1, 4, 5, 16, 64]);
        let (shared, group) = (pick(rng, &[1, 2, 3]), pick(rng, &[1, 1, 2, 3, 7, 8]));
        let (sequences, columns) = (1 + rng.below(3), reach.div_ceil(page));
        let a = Cached {
            rows,
            heads: shared * group,
            shared,
            d: pick(rng, &sizes[0]),
            dv: pick(rng, &sizes[1]),
            pages: sequences * columns + 1,
            page,
            sequences,
            columns,
            scale: 0.3,
            softcap: pick(rng, &[None, None, Some(2.5)]),
            window: pick(rng, &[None, None, Some(1), Some(7), Some(300)]),
        };
        // Each place in the table has its own page, in random order.
        let mut order: Vec<i32> = (0..a.pages as i32).collect();
        shuffle(rng, &mut order);
        let table = order[..sequences * columns].to_vec();
        let sequence: Vec<i32> = (0..rows).map(|_| rng.below(sequences) as i32).collect();
        let mut position: Vec<i32> = vec![];
        for i in 0..rows {
            // Often the row after the previous one, as in a prompt.
            let next = match i {
                0 => 0,
                _ => position[i - 1] + 1,
            };
            let at = match rng.below(4) {
                0 => rng.below(columns * page) as i32,
                _ => next.min((columns * page) as i32 - 1),
            };
            position.push(if rng.below(12) == 0 { -1 - rng.below(3) as i32 } else { at });
        }
        let sinks = if rng.below(3) == 0 { rng.vec(a.heads) } else { vec![] };
        let mut case = Case {
            a,
            q: rng.vec(rows * a.heads * a.d),
            keys: Store::new(kept[0], a.pages * shared * page, a.d),
            values: Store::new(kept[1], a.pages * shared * page, a.dv),
            table,
            sequence,
            position,
            sinks,
            side: pick(rng, &[Side::Start, Side::End]),
        };
        for row in 0..rows {
            for j in case.sees(row) {
                for h in 0..shared {
                    let at = case.place(row, h, j);
                    // A position that an earlier row sees keeps its key and value.
                    if case.keys.row(at)[0].is_nan() {
                        let (k, v) = (rng.vec(a.d), rng.vec(a.dv));
                        case.keys.set(at, &k);
                        case.values.set(at, &v);
                    }
                }
            }
        }
        case
    }

    fn sees(&self, row: usize) -> std::ops::Range<usize> {
        let to = (self.position[row] + 1).max(0) as usize;
        self.a.window.map_or(0, |w| to.saturating_sub(w))..to
    }

    /// The row of keys and values with position `j` of the sequence of `row`.
    fn place(&self, row: usize, h: usize, j: usize) -> usize {
        let a = &self.a;
        let page = self.table[self.sequence[row] as usize * a.columns + j / a.page] as usize;
        (page * a.shared + h) * a.page + j % a.page
    }

    /// The results of the rows `which`, in their order, and whether a fault was reported.
    fn run(&self, team: &Team, isa: Isa, which: &[usize]) -> (Vec<f32>, bool) {
        let (a, side) = (Cached { rows: which.len(), ..self.a }, self.side);
        let n = a.heads * a.d;
        let q: Vec<f32> = which.iter().flat_map(|r| &self.q[r * n..(r + 1) * n]).copied().collect();
        let pick = |x: &[i32]| which.iter().map(|r| x[*r]).collect::<Vec<i32>>();
        let bytes = |s: &Store| Guarded::new(&s.bytes, side);
        let (q, keys, values) = (Guarded::new(&q, side), bytes(&self.keys), bytes(&self.values));
        let (table, sinks) = (Guarded::new(&self.table, side), Guarded::new(&self.sinks, side));
        let sequence = Guarded::new(&pick(&self.sequence), side);
        let position = Guarded::new(&pick(&self.position), side);
        let y = Guarded::new(&vec![f32::NAN; which.len() * a.heads * a.dv], side);
        let word = AtomicU32::new(0);
        let operands = Operands {
            q: SharedConst(q.ptr()),
            keys: Numbers { at: SharedConst(keys.ptr()), kept: self.keys.kept },
            values: Numbers { at: SharedConst(values.ptr()), kept: self.values.kept },
            table: SharedConst(table.ptr()),
            sequence: SharedConst(sequence.ptr()),
            position: SharedConst(position.ptr()),
            sinks: SharedConst(if self.sinks.is_empty() { std::ptr::null() } else { sinks.ptr() }),
            y: SharedMut(y.mut_ptr()),
        };
        // SAFETY: each guarded vector has the elements of its operand.
        unsafe { cached_attention(team, isa, &a, operands, Fault::new(&word, 1)) };
        (y.slice().to_vec(), word.load(Ordering::Relaxed) != 0)
    }

    /// The result of a row and head in f64.
    fn want(&self, row: usize, head: usize) -> Vec<f64> {
        let (a, h) = (&self.a, head / self.a.group());
        if self.position[row] < 0 {
            return vec![0.0; a.dv];
        }
        let q = &self.q[(row * a.heads + head) * a.d..][..a.d];
        let mut scores: Vec<f64> = self
            .sees(row)
            .map(|j| {
                let k = self.keys.row(self.place(row, h, j));
                let dot: f64 = q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
                let s = dot * a.scale as f64;
                a.softcap.map_or(s, |c| c as f64 * (s / c as f64).tanh())
            })
            .collect();
        scores.extend(self.sinks.get(head).map(|s| *s as f64));
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        let mut y = vec![0.0; a.dv];
        for (j, s) in self.sees(row).zip(&scores) {
            let v = self.values.row(self.place(row, h, j));
            y.iter_mut().zip(v).for_each(|(y, v)| *y += (s - top).exp() / sum * *v as f64);
        }
        y
    }
}

fn shuffle<T>(rng: &mut Rng, x: &mut [T]) {
    for i in (1..x.len()).rev() {
        x.swap(i, rng.below(i + 1));
    }
}

fn follows_f64(rng: &mut Rng, kept: [Kept; 2], team: &Team, isa: Isa, (rows, reach): (usize, usize)) {
    let case = Case::new(rng, kept, rows, reach);
    let (y, fault) = case.run(team, isa, &(0..rows).collect::<Vec<_>>());
    assert!(!fault, "{:?}", case.a);
    for (i, y) in y.chunks_exact(case.a.dv).enumerate() {
        let (row, head) = (i / case.a.heads, i % case.a.heads);
        for (got, want) in y.iter().zip(case.want(row, head)) {
            close(*got, want, 1.0, 3e-6, &(isa, &case.a, row, head, case.position[row]));
        }
    }
}

#[test]
fn cached_attention_follows_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for _ in 0..10 {
                let size = pick(&mut rng, &[(1, 20), (1, 700), (5, 300), (30, 40), (20, 520)]);
                TYPES.iter().for_each(|kept| follows_f64(&mut rng, *kept, &team, isa, size));
            }
        }
    }
}

#[test]
fn prompts_follow_f64() {
    let mut rng = Rng::new();
    let team = Team::new(3);
    for (isa, kept) in
        Isa::available().into_iter().flat_map(|isa| [TYPES[1], TYPES[3]].map(|kept| (isa, kept)))
    {
        let mut case = Case::new(&mut rng, kept, 300, 300);
        // All rows belong to one sequence. Its cache is that of a row which sees everything.
        case.sequence.fill(0);
        case.position = (0..300).collect();
        case.keys.fill(|| rng.f32());
        case.values.fill(|| rng.f32());
        let (y, fault) = case.run(&team, isa, &(0..300).collect::<Vec<_>>());
        assert!(!fault);
        for _ in 0..100 {
            let (row, head) = (rng.below(300), rng.below(case.a.heads));
            let y = &y[(row * case.a.heads + head) * case.a.dv..][..case.a.dv];
            for (got, want) in y.iter().zip(case.want(row, head)) {
                close(*got, want, 1.0, 3e-6, &(isa, &case.a, row, head));
            }
        }
    }
}

fn is_invariant(rng: &mut Rng, kept: [Kept; 2], teams: &[Team; 2], isa: Isa, (rows, reach): (usize, usize)) {
    let case = Case::new(rng, kept, rows, reach);
    let n = case.a.heads * case.a.dv;
    let all: Vec<usize> = (0..rows).collect();
    let (want, _) = case.run(&teams[0], isa, &all);
    let check = |which: &[usize], what: &str| {
        for team in teams {
            let (y, _) = case.run(team, isa, which);
            for (i, row) in which.iter().enumerate() {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let (got, want) = (bits(&y[i * n..(i + 1) * n]), bits(&want[row * n..(row + 1) * n]));
                assert_eq!(got, want, "{what}: row {row} of {:?}", (isa, &case.a));
            }
        }
    };
    check(&all, "other threads");
    let mut mixed = all.clone();
    shuffle(rng, &mut mixed);
    check(&mixed, "shuffled");
    for row in &all {
        check(&[*row], "alone");
    }
    let mut first = 0;
    while first < rows {
        let end = (first + 1 + rng.below(rows)).min(rows);
        check(&all[first..end], "in pieces");
        first = end;
    }
}

#[test]
fn rows_do_not_depend_on_others() {
    let mut rng = Rng::new();
    let teams = [Team::new(1), Team::new(3)];
    for isa in Isa::available() {
        for _ in 0..6 {
            let size = pick(&mut rng, &[(2, 900), (12, 300), (30, 40), (17, 600)]);
            TYPES.iter().for_each(|kept| is_invariant(&mut rng, *kept, &teams, isa, size));
        }
    }
}

#[test]
fn indices_out_of_range_are_clamped_and_reported() {
    let mut rng = Rng::new();
    let team = Team::new(1);
    for isa in Isa::available() {
        let mut case = Case::new(&mut rng, TYPES[0], 3, 40);
        case.keys.fill(|| rng.f32());
        case.values.fill(|| rng.f32());
        case.position = vec![3, 5, 7];
        assert!(!case.run(&team, isa, &[0, 1, 2]).1);
        let reach = (case.a.columns * case.a.page) as i32;
        for (bad, good) in [(reach, reach - 1), (i32::MAX, reach - 1)] {
            case.position[1] = good;
            let (want, fault) = case.run(&team, isa, &[0, 1, 2]);
            assert!(!fault);
            case.position[1] = bad;
            assert_eq!(case.run(&team, isa, &[0, 1, 2]), (want, true));
        }
        case.position[1] = 5;
        for (bad, good) in [(-1, 0), (case.a.sequences as i32, case.a.sequences as i32 - 1)] {
            case.sequence[1] = good;
            let (want, _) = case.run(&team, isa, &[0, 1, 2]);
            case.sequence[1] = bad;
            assert_eq!(case.run(&team, isa, &[0, 1, 2]), (want, true));
        }
        case.sequence = vec![0; 3];
        for (bad, good) in [(-1, 0), (case.a.pages as i32, case.a.pages as i32 - 1), (i32::MIN, 0)] {
            // The last page that row 2 sees.
            let column = 7 / case.a.page;
            case.table[column] = good;
            let (want, _) = case.run(&team, isa, &[0, 1, 2]);
            case.table[column] = bad;
            assert_eq!(case.run(&team, isa, &[0, 1, 2]), (want, true));
            // No row sees this page.
            case.table[column] = good;
            if let Some(last) =
                case.table[..case.a.columns].last_mut().filter(|_| column + 1 < case.a.columns)
            {
                *last = bad;
            }
            assert!(!case.run(&team, isa, &[0, 1, 2]).1);
        }
        // The sequence of an unused row is not read.
        (case.position[1], case.sequence[1]) = (-1, i32::MAX);
        assert!(!case.run(&team, isa, &[0, 1, 2]).1);
    }
}

#[test]
fn scores_that_are_not_finite_have_the_results_of_a_softmax() {
    let mut rng = Rng::new();
    let team = Team::new(1);
    for isa in Isa::available() {
        let mut case = Case::new(&mut rng, TYPES[0], 2, 600);
        case.a = Cached { window: None, softcap: None, ..case.a };
        case.sequence = vec![0, 0];
        case.position = vec![300, 301];
        case.sinks.clear();
        case.q.fill(1.0);
        case.keys.fill(|| 1.0);
        case.values.fill(|| 2.0);
        let mut key = vec![1.0; case.a.d];
        // A NaN in the last key is seen by the second row only.
        let last = case.place(1, 0, 301);
        key[0] = f32::NAN;
        case.keys.set(last, &key);
        let (heads, dv) = (case.a.group(), case.a.dv);
        let (y, _) = case.run(&team, isa, &[0, 1]);
        assert!(y[..heads * dv].iter().all(|y| (*y - 2.0).abs() < 1e-5), "{isa:?}");
        let second = &y[case.a.heads * dv..][..heads * dv];
        assert!(second.iter().all(|y| y.is_nan()), "{isa:?}");
        // A weight of 0 for one position; all weights 0; no position at all.
        key[0] = f32::NEG_INFINITY;
        case.keys.set(last, &key);
        let (y, _) = case.run(&team, isa, &[0, 1]);
        assert!(y.iter().all(|y| (*y - 2.0).abs() < 1e-5), "{isa:?}");
        case.keys.fill(|| f32::NEG_INFINITY);
        assert!(case.run(&team, isa, &[0, 1]).0.iter().all(|y| y.is_nan()));
        case.keys.fill(|| 1.0);
        case.a.window = Some(0);
        assert!(case.run(&team, isa, &[0, 1]).0.iter().all(|y| y.is_nan()));
        case.sinks = vec![0.5; case.a.heads];
        assert!(case.run(&team, isa, &[0, 1]).0.iter().all(|y| *y == 0.0));
    }
}

/// A cache in blocks gives the bits of a cache in f32 that holds the decoded numbers.
#[test]
fn blocks_give_the_bits_of_their_numbers() {
    let mut rng = Rng::new();
    let team = Team::new(3);
    for isa in Isa::available() {
        for kept in [TYPES[3], TYPES[4], TYPES[5]] {
            for size in [(1, 700), (5, 300), (30, 40)] {
                let mut case = Case::new(&mut rng, kept, size.0, size.1);
                let all: Vec<usize> = (0..size.0).collect();
                let (blocks, _) = case.run(&team, isa, &all);
                for store in [&mut case.keys, &mut case.values] {
                    store.bytes = store.numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                    store.kept = Kept::F32;
                }
                let (floats, _) = case.run(&team, isa, &all);
                let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&blocks), bits(&floats), "{kept:?} {:?}", (isa, &case.a));
            }
        }
    }
}
