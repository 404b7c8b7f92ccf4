//! A report as one HTML page: tables, and plots as inline SVG. The page has no scripts and loads nothing.

use super::result::{OpTime, OptimizationReport, error, size, time};
use crate::markup::escape;
use std::fmt::Write;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:960px;margin:2em auto;padding:0 1em}\
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.15em;margin-top:2em}\
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.15em .9em .15em 0;text-align:left;vertical-align:top}\
th{font-weight:600;border-bottom:1px solid #ccc}td.n,th.n{text-align:right}\
.sub{color:#666}.big{font-size:1.6em}.bad{color:#b00020}svg{display:block;margin:.5em 0}\
svg text{font:12px system-ui,sans-serif;fill:#333}svg .v{fill:#666}";

/// Colours of the bars for the times before and after the optimisation.
const BEFORE: &str = "#b0b7c3";
const AFTER: &str = "#3b75af";
const WIDTH: f64 = 920.0;
/// The left edge of the bars, and the length of the longest bar.
const LEFT: f64 = 300.0;
const LONGEST: f64 = 440.0;
const ROW: f64 = 21.0;
/// Characters of a label that fit to the left of the bars.
const LABEL: usize = 42;
/// The number of ops in a plot. The table below the plot has all ops.
const OPS: usize = 15;

/// Shortens `s` to `most` characters and an ellipsis if it is longer.
fn short(s: &str, most: usize) -> String {
    match s.char_indices().nth(most) {
        Some((i, _)) => format!("{}…", &s[..i]),
        None => s.into(),
    }
}

struct Bar {
    label: String,
    note: String,
    length: f64,
    colour: &'static str,
}

/// A bar chart. `whole` is the value of a bar with the full length. If `mark` is given, a line is drawn at
/// this value.
fn bars(title: &str, bars: &[Bar], whole: f64, mark: Option<f64>) -> String {
    let height = bars.len() as f64 * ROW + 6.0;
    let of = |v: f64| (v / whole.max(f64::MIN_POSITIVE) * LONGEST).clamp(0.0, LONGEST);
    let mut out = format!(
        r#"<svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{}">"#,
        escape(title)
    );
    for (i, b) in bars.iter().enumerate() {
        let (y, length) = (i as f64 * ROW + 3.0, of(b.length).max(1.0));
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            r#"<text x="{}" y="{}" text-anchor="end">{}<title>{}</title></text><rect x="{LEFT}" y="{y}" width="{length:.1}" height="{}" fill="{}"/><text class="v" x="{:.1}" y="{}">{}</text>"#,
            LEFT - 8.0,
            y + 13.0,
            escape(&short(&b.label, LABEL)),
            escape(&b.label),
            ROW - 5.0,
            b.colour,
            LEFT + length + 8.0,
            y + 13.0,
            escape(&b.note)
        );
    }
    if let Some(m) = mark {
        let x = LEFT + of(m);
        let _ = write!(
            out,
            r##"<line x1="{x:.1}" y1="0" x2="{x:.1}" y2="{height}" stroke="#999" stroke-dasharray="3 3"/>"##
        );
    }
    out + "</svg>\n"
}

fn most(bars: &[Bar]) -> f64 {
    bars.iter().map(|b| b.length).fold(0.0, f64::max)
}

fn chart(title: &str, b: &[Bar], mark: Option<f64>) -> String {
    bars(title, b, most(b), mark)
}

/// A table. The columns in `right` hold numbers and are aligned to the right.
fn table(head: &[&str], rows: &[Vec<String>], right: &[usize]) -> String {
    let row = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        let one = |(i, c): (usize, &str)| {
            let class = if right.contains(&i) { r#" class="n""# } else { "" };
            format!("<{tag}{class}>{}</{tag}>", escape(c))
        };
        format!("<tr>{}</tr>\n", cells.enumerate().map(one).collect::<String>())
    };
    let mut out = String::from("<table>\n") + &row("th", &mut head.iter().copied());
    rows.iter().for_each(|r| out += &row("td", &mut r.iter().map(String::as_str)));
    out + "</table>\n"
}

fn time_section(r: &OptimizationReport) -> String {
    let m = &r.result.metrics;
    let bar = |label: &str, ms: f64, colour| Bar { label: label.into(), note: time(ms), length: ms, colour };
    let both = [bar("at O0", m.time_before_ms, BEFORE), bar("optimised", m.time_after_ms, AFTER)];
    let [low, high] = m.speedup_interval;
    format!(
        "<h2>Time of a run</h2>\n<p><span class=\"big\">{:.2}×</span> <span class=\"sub\">95 % confidence interval {low:.2} to {high:.2}; {} steps before, {} after</span></p>\n{}",
        m.speedup,
        m.steps_before,
        m.steps_after,
        chart("time of a run", &both, None)
    )
}

fn receipt_section(r: &OptimizationReport) -> String {
    let mut out = String::from("<h2>Transformations that changed the executable</h2>\n");
    if r.receipts.is_empty() {
        return out + "<p>None.</p>\n";
    }
    let measured = r.receipts.iter().filter_map(|x| Some((x, x.gain?)));
    let gains: Vec<Bar> = measured
        .map(|(x, g)| Bar {
            label: x.transformation.clone(),
            note: format!("{g:.3}×"),
            length: g,
            colour: AFTER,
        })
        .collect();
    if !gains.is_empty() {
        out += "<p class=\"sub\">Time without the transformation divided by time with it. The line is at 1.</p>\n";
        out += &chart("gain of each transformation", &gains, Some(1.0));
    }
    let cell = |v: Option<f64>| v.map_or("not measured".into(), |g| format!("{g:.3}×"));
    let rows: Vec<Vec<String>> = r
        .receipts
        .iter()
        .map(|x| vec![x.transformation.clone(), x.count.to_string(), cell(x.gain)])
        .collect();
    out + &table(&["transformation", "applied", "gain"], &rows, &[1, 2])
}

fn op_section(r: &OptimizationReport) -> String {
    let mut out = String::from("<h2>Time by op</h2>\n");
    let (Some(before), Some(after)) = (&r.ops_before, &r.ops_after) else {
        let why = r.no_ops.as_deref().unwrap_or("not measured");
        return out + &format!("<p>There are no times of ops: {}.</p>\n", escape(why));
    };
    let of = |ops: &[OpTime], colour| -> Vec<Bar> {
        let bar = |o: &OpTime| Bar {
            label: format!("{} × {}", o.steps, o.op),
            note: time(o.time_ms),
            length: o.time_ms,
            colour,
        };
        ops.iter().take(OPS).map(bar).collect()
    };
    let (old, new) = (of(before, BEFORE), of(after, AFTER));
    // Both plots have the same scale, so that their bars can be compared.
    let whole = most(&old).max(most(&new));
    for (title, b) in [("at O0", &old), ("optimised", &new)] {
        let _ = write!(out, "<h3>{title}</h3>\n{}", bars(&format!("time by op {title}"), b, whole, None));
    }
    let rows = |when: &str, ops: &[OpTime]| -> Vec<Vec<String>> {
        let row = |o: &OpTime| {
            vec![
                when.to_string(),
                o.op.clone(),
                o.kernel.clone(),
                o.steps.to_string(),
                time(o.time_ms),
                o.flops.to_string(),
                o.bytes.to_string(),
            ]
        };
        ops.iter().map(row).collect()
    };
    let all = [rows("O0", before), rows("optimised", after)].concat();
    let head = ["", "op", "kernel", "steps", "time", "FLOPs", "bytes"];
    out + "<details><summary>All ops</summary>\n" + &table(&head, &all, &[3, 4, 5, 6]) + "</details>\n"
}

fn error_section(r: &OptimizationReport) -> String {
    let mut out = String::from(
        "<h2>Difference from O0</h2>\n<p class=\"sub\">Largest difference of an output relative to its largest magnitude at O0. The scale is logarithmic, from 1e-9 to 1.</p>\n",
    );
    let outputs = &r.result.metrics.outputs;
    // 0 at 1e-9 and below, 9 at 1 and above.
    let length = |e: f64| (e.max(1e-9).log10() + 9.0).clamp(0.0, 9.0);
    let bar = |name: &str, e: Option<f64>| Bar {
        label: name.into(),
        note: error(e),
        length: e.map_or(9.0, length),
        colour: if e.is_some() { AFTER } else { "#b00020" },
    };
    let all: Vec<Bar> = outputs.iter().map(|o| bar(&o.name, o.relative)).collect();
    out += &bars("difference of each output", &all, 9.0, None);
    let rows: Vec<Vec<String>> = outputs
        .iter()
        .map(|o| {
            let deviations = o.deviations.map_or("-".into(), |d| format!("{d:.1e}"));
            vec![o.name.clone(), error(o.relative), deviations]
        })
        .collect();
    out + &table(&["output", "relative", "in standard deviations"], &rows, &[1, 2])
}

fn memory_section(r: &OptimizationReport) -> String {
    let m = &r.result.metrics;
    let bar =
        |label: String, bytes: u64, colour| Bar { label, note: size(bytes), length: bytes as f64, colour };
    let both = |name: &str, before: u64, after: u64| {
        [bar(format!("{name}, O0"), before, BEFORE), bar(format!("{name}, optimised"), after, AFTER)]
    };
    let mut all: Vec<Bar> =
        both("on the device in total", m.memory_before_bytes, m.memory_after_bytes).into();
    r.memory.iter().for_each(|p| all.extend(both(&p.name, p.before, p.after)));
    format!("<h2>Memory of a run</h2>\n{}", chart("memory of a run", &all, None))
}

/// The report as one self-contained HTML page. All names from the model are escaped.
pub fn report_html(r: &OptimizationReport) -> String {
    let result = &r.result;
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n<title>{name}: {level}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name} at {level}</h1>\n<p class=\"sub\">{} ({})</p>\n",
        escape(&r.device),
        escape(&r.device_name),
        name = escape(&r.model),
        level = result.level,
    );
    if !result.success {
        out += "<p class=\"bad\">The results cannot be compared with O0: the model stays at O0.</p>\n";
    }
    out += &time_section(r);
    out += &receipt_section(r);
    out += &op_section(r);
    out += &error_section(r);
    out += &memory_section(r);
    if !result.warnings.is_empty() {
        out += "<h2>What had no effect</h2>\n<ul>\n";
        for w in &result.warnings {
            let _ = writeln!(out, "<li>{}</li>", escape(w));
        }
        out += "</ul>\n";
    }
    out + "</body>\n</html>\n"
}
