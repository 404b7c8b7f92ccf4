//! Runs rows of the op table and collects failures.

use crate::{Rng, one_in};
use halcyon::optable::Errors;
pub use halcyon::optable::check::{Expected, eps, expect, has, judge, run};
use halcyon::optable::{Case, Row};
use halcyon::{Backend, BackendType, DType};

/// Failures of a run over rows, and the number of cases run. A case counts once for each backend.
#[derive(Debug, Default)]
pub struct Tally {
    pub cases: usize,
    /// The largest errors among correct results.
    pub worst: Errors,
    pub failures: Vec<String>,
}

impl Tally {
    pub fn check(&mut self, backends: &[Backend], row: &Row, case: &Case, d: DType, rng: &mut Rng) {
        let at = |b: &str| format!("{} {d} [{}] {b}", row.name, case.label);
        let sample = match case.sample(row.tol, d, rng) {
            Ok(s) => s,
            Err(e) => return self.failures.push(format!("{}: {e}", at("reference"))),
        };
        for b in backends.iter().filter(|b| has(b, d)) {
            self.cases += 1;
            let result = match judge(b, &sample) {
                Ok(verdict) => verdict.map_err(|w| w.what),
                Err(e) => Err(e.to_string()),
            };
            match result {
                Ok(e) => self.worst = self.worst.max(e),
                Err(e) => self.failures.push(format!("{}: {e}", at(&format!("{} {}", b.id(), b.level())))),
            }
        }
    }

    /// Panics with the failures, if there are any.
    pub fn finish(self, what: &str) {
        println!(
            "{what}: {} cases with errors of at most {:.2} of the tolerance",
            self.cases, self.worst.of_tolerance
        );
        if self.failures.is_empty() {
            // A row that was chosen by its name may have no case of this kind.
            let chosen = std::env::var_os("HALCYON_ROW").is_some();
            assert!(self.cases > 0 || chosen, "{what}: nothing ran");
            return;
        }
        // Print only a few failures of every row and dtype, so that one broken op does not hide the others.
        let mut of_row: std::collections::BTreeMap<&str, usize> = Default::default();
        let few: usize = std::env::var("HALCYON_FAILURES").ok().and_then(|v| v.parse().ok()).unwrap_or(3);
        let list: Vec<&str> = self
            .failures
            .iter()
            .filter(|f| {
                let n = of_row.entry(f.split(" [").next().unwrap_or("")).or_default();
                *n += 1;
                *n <= few
            })
            .map(|s| s.as_str())
            .collect();
        panic!(
            "{what}: {} failures in {} cases, among them\n{}",
            self.failures.len(),
            self.cases,
            list.join("\n")
        );
    }
}

/// On devices that build a program for every case, one case in this many runs, and at least one case of each
/// row. The cases are drawn anew each time.
const SAMPLE: usize = 48;
/// If a sample has one case in at most this many, it contains a case of every dtype of each row. A smaller
/// sample contains at least one case of each row.
const EVERY_DTYPE: usize = 3;

/// Whether `HALCYON_ROW` selects one of these rows of the table. If the variable is not set, it selects every
/// row.
///
/// # Panics
/// If `HALCYON_ROW` selects no row of the whole table.
pub fn selects(what: &str, rows: &[Row]) -> bool {
    let pick = std::env::var("HALCYON_ROW").unwrap_or_default();
    let among = |rows: &[Row]| rows.iter().any(|r| r.name.contains(&pick));
    if among(rows) {
        return true;
    }
    assert!(among(&halcyon::optable::rows()), "no row has a name that contains HALCYON_ROW={pick}");
    println!("{what}: skipped, because HALCYON_ROW={pick} selects other rows");
    false
}

/// Runs the cases of rows. If `HALCYON_ROW` is set, runs all cases of the rows whose name contains it.
/// Otherwise runs all cases if the CPU is among `backends`, else a sample of each row, because the other
/// devices build a program for each case. `HALCYON_CASES` replaces this choice on every device: it is `all`,
/// or the number N to run one case in N.
pub fn check_rows(what: &str, rows: &[Row], backends: &[Backend], rng: &mut Rng) -> Tally {
    let cpu = backends.iter().any(|b| b.device().info().backend == BackendType::Cpu);
    check_some(what, rows, backends, if cpu { 1 } else { SAMPLE }, rng)
}

/// Like [`check_rows`], but runs one case in N, where N is `usual` unless `HALCYON_CASES` is set. Runs at
/// least one case of each row, and at least one of each dtype of the row if N is at most `EVERY_DTYPE`.
pub fn check_some(what: &str, rows: &[Row], backends: &[Backend], usual: usize, rng: &mut Rng) -> Tally {
    let pick = std::env::var("HALCYON_ROW").unwrap_or_default();
    let every = if pick.is_empty() { one_in(usual) } else { 1 };
    let mut t = Tally::default();
    for row in rows.iter().filter(|r| r.name.contains(&pick)) {
        let start = std::time::Instant::now();
        let of_row = rng.below(row.dtypes.len().max(1));
        for (k, d) in row.dtypes.iter().enumerate() {
            let cases: Vec<&Case> = row.cases.iter().filter(|c| c.takes(*d)).collect();
            let sure = (every <= EVERY_DTYPE || k == of_row).then(|| rng.below(cases.len().max(1)));
            for (i, case) in cases.into_iter().enumerate() {
                if Some(i) == sure || rng.below(every) == 0 {
                    t.check(backends, row, case, *d, rng);
                }
            }
        }
        if start.elapsed().as_secs_f64() > 2.0 {
            println!("{what}: {} took {:.1} s", row.name, start.elapsed().as_secs_f64());
        }
    }
    t
}
