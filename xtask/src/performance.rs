//! Writes the part of `docs/performance.md` that records a run of `cargo xtask bench peers`: a table with
//! date, machine and versions.

use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const BEGIN: &str = "<!-- bench peers: begin -->";
const END: &str = "<!-- bench peers: end -->";

/// Writes a run's record between the page's markers.
pub(crate) fn write(page: &Path, record: &Value) -> Result<(), String> {
    let at = |e: std::io::Error| format!("{}: {e}", page.display());
    let old = std::fs::read_to_string(page).map_err(at)?;
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() / 86_400);
    let text = table(record, &date(days as i64), &machine());
    let new = replace(&old, &text).map_err(|e| format!("{}: {e}", page.display()))?;
    std::fs::write(page, new).map_err(at)
}

fn replace(page: &str, part: &str) -> Result<String, String> {
    let (Some(from), Some(to)) = (page.find(BEGIN), page.find(END)) else {
        return Err(format!("the markers `{BEGIN}` and `{END}` are missing"));
    };
    let from = from + BEGIN.len();
    if to < from {
        return Err(format!("`{END}` is before `{BEGIN}`"));
    }
    Ok(format!("{}\n{part}{}", &page[..from], &page[to..]))
}

/// Returns a date such as `2026-01-31` for a number of days since 1970-01-01, in the proleptic Gregorian
/// calendar. The computation counts years from March, so that a leap day is the last day of a year.
fn date(days: i64) -> String {
    let z = days + 719_468;
    let (era, day) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (d, m) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{m:02}-{d:02}", era * 400 + year + i64::from(m <= 2))
}

/// The processor's name, with the relevant instruction sets.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name))?;
        line.split_once(':').map(|(_, v)| v.trim().to_string())
    };
    let flags = field("flags").unwrap_or_default();
    let known = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"];
    let has: Vec<&str> = known.into_iter().filter(|f| flags.split(' ').any(|g| g == *f)).collect();
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    match has.is_empty() {
        true => format!("{name}, {cores} cores"),
        false => format!("{name}, {cores} cores ({})", has.join(", ")),
    }
}

fn table(record: &Value, date: &str, machine: &str) -> String {
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let sides: Vec<String> =
        list(&record["sides"]).iter().filter_map(|s| s.as_str().map(Into::into)).collect();
    let torch = sides.iter().any(|s| s.starts_with("torch "));
    let mut out = format!(
        "Measured on {date}: {machine}; {} threads; medians of {} interleaved rounds; {}{}.\n",
        record["threads"],
        record["rounds"],
        sides.join(", "),
        if torch { "" } else { "; torch: not installed" }
    );
    let peaks: Vec<String> = list(&record["peaks"])
        .iter()
        .filter_map(|c| {
            let name = c["name"].as_str()?.strip_prefix("peak.")?;
            Some(format!("{name} {:.0}", c["giga_per_second"].as_f64()?))
        })
        .collect();
    // Writing to a string does not fail.
    let _ = writeln!(out, "Measured peaks, 10⁹ operations or bytes per second: {}.\n", peaks.join(", "));
    let peers: Vec<&str> = sides.iter().skip(1).map(|s| s.split(' ').next().unwrap_or(s)).collect();
    let _ = writeln!(
        out,
        "| item | ours | of the peak | {} |{} fastest peer's time over ours |",
        peers.join(" | "),
        if torch { "" } else { " torch |" }
    );
    let columns = 4 + peers.len() + usize::from(!torch);
    let _ = writeln!(out, "|{}", "---|".repeat(columns));
    for item in list(&record["items"]) {
        let of = |name: &str| list(&item["sides"]).into_iter().find(|s| s["name"].as_str() == Some(name));
        let unit = item["unit"].as_str().unwrap_or_default();
        let cell = |side: Option<Value>| -> String {
            let Some((s, seconds)) = side.and_then(|s| s["median_seconds"].as_f64().map(|t| (s, t))) else {
                return "–".into();
            };
            match s["giga_per_second"].as_f64() {
                Some(rate) => format!("{rate:.0} {unit}"),
                None => format!("{:.3} ms", seconds * 1e3),
            }
        };
        let ours = sides.first().and_then(|n| of(n));
        let share = ours.as_ref().and_then(|o| o["share_of_peak"].as_f64());
        let best = sides.iter().skip(1).filter_map(|n| of(n)?["ours_times_as_fast"].as_f64());
        let mut cells = vec![
            format!("`{}`", item["item"].as_str().unwrap_or_default()),
            cell(ours),
            share.map_or("–".into(), |s| format!("{:.0} %", s * 100.0)),
        ];
        cells.extend(sides.iter().skip(1).map(|n| cell(of(n))));
        if !torch {
            cells.push("not installed".into());
        }
        cells.push(best.reduce(f64::min).map_or("–".into(), |r| format!("{r:.2}")));
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dates() {
        assert_eq!(
            [date(0), date(59), date(789), date(20_513)],
            ["1970-01-01", "1970-03-01", "1972-02-29", "2026-03-01"]
        );
        assert_eq!(date(-1), "1969-12-31");
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        assert_eq!(replace(&page, "new\n").unwrap(), format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert!(replace("a", "new").is_err());
        assert!(replace(&format!("{END}{BEGIN}"), "new").is_err());
        let page = std::fs::read_to_string(crate::root().join("docs/performance.md")).unwrap();
        assert!(replace(&page, "").is_ok());
    }

    #[test]
    fn a_row_says_rates_shares_and_the_fastest_peer() {
        let side = |name: &str, t: f64, rate: Option<f64>, ratio: f64| {
            json!({"name": name, "median_seconds": t, "giga_per_second": rate, "share_of_peak": rate.map(|r| r / 1000.0),
                "ours_times_as_fast": ratio})
        };
        let record = json!({
            "threads": 2, "rounds": 3, "sides": ["halcyon 1", "a 2", "b 3"],
            "peaks": [{"name": "peak.fma", "giga_per_second": 1000.0, "by": "halcyon 1"}],
            "items": [
                {"item": "gemm.8", "unit": "GFLOP/s", "sides": [side("halcyon 1", 0.1, Some(500.0), 1.0), side("a 2", 0.2, Some(250.0), 2.0),
                    side("b 3", 0.09, Some(555.0), 0.9)]},
                {"item": "model.x", "unit": "", "sides": [side("halcyon 1", 0.0175, None, 1.0), side("b 3", 0.035, None, 2.0)]},
            ],
        });
        let t = table(&record, "2026-01-02", "a machine");
        assert!(
            t.contains("2026-01-02")
                && t.contains("a machine")
                && t.contains("halcyon 1, a 2, b 3; torch: not installed")
        );
        assert!(t.contains("fma 1000"), "{t}");
        assert!(
            t.contains(
                "| `gemm.8` | 500 GFLOP/s | 50 % | 250 GFLOP/s | 555 GFLOP/s | not installed | 0.90 |"
            ),
            "{t}"
        );
        assert!(t.contains("| `model.x` | 17.500 ms | – | – | 35.000 ms | not installed | 2.00 |"), "{t}");
        let columns = |l: &str| l.matches('|').count();
        let rows: Vec<usize> = t.lines().filter(|l| l.starts_with('|')).map(columns).collect();
        assert!(rows.len() == 4 && rows.iter().all(|n| *n == rows[0]), "{t}");
    }
}
