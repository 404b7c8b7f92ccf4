//! Bar charts as SVG.

use crate::report::short;
use halcyon::markup::escape;
use std::fmt::Write;

#[derive(Clone, Debug)]
pub(super) struct Bar {
    pub label: String,
    /// Text after the bar.
    pub note: String,
    pub length: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Part {
    pub title: &'static str,
    pub bars: Vec<Bar>,
}

const WIDTH: f64 = 1000.0;
/// Left edge of the bars.
const BARS_LEFT: f64 = 330.0;
/// Length of the longest bar of a part.
const BARS_WIDTH: f64 = 400.0;
const ROW: f64 = 22.0;
/// Characters of a label that fit to the left of the bars.
const LABEL: usize = 46;

/// A chart of several parts, one below the other. The longest bar of each part has the full length.
pub(super) fn svg(title: &str, parts: &[Part]) -> String {
    let rows: usize = parts.iter().map(|p| p.bars.len()).sum();
    let height = 60.0 + parts.len() as f64 * 46.0 + rows as f64 * ROW;
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="16" y="30" font-size="18">{}</text>"#,
        escape(&short(title, 100))
    );
    let mut y = 44.0;
    for p in parts {
        y += 34.0;
        let _ =
            writeln!(out, r#"<text x="16" y="{y}" font-size="14" fill="dimgray">{}</text>"#, escape(p.title));
        y += 12.0;
        let most = p.bars.iter().map(|b| b.length).fold(f64::MIN_POSITIVE, f64::max);
        for b in &p.bars {
            let length = (b.length / most * BARS_WIDTH).max(1.0);
            let _ = writeln!(
                out,
                r#"<text x="{}" y="{}" text-anchor="end">{}<title>{}</title></text><rect x="{BARS_LEFT}" y="{}" width="{length:.1}" height="{}" fill="steelblue"/><text x="{:.1}" y="{}" fill="dimgray">{}</text>"#,
                BARS_LEFT - 8.0,
                y + 14.0,
                escape(&short(&b.label, LABEL)),
                escape(&b.label),
                y + 3.0,
                ROW - 6.0,
                BARS_LEFT + length + 8.0,
                y + 14.0,
                escape(&b.note)
            );
            y += ROW;
        }
    }
    out += "</svg>\n";
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion_and_names_are_escaped() {
        let bar = |label: &str, length| Bar { label: label.into(), note: "1 ms".into(), length };
        let bars = vec![bar("a<b>&\"\u{1}", 2.0), bar(&"x".repeat(100), 1.0)];
        let text = svg("t & u", &[Part { title: "p", bars }, Part { title: "none", bars: vec![] }]);
        assert!(text.contains("t &amp; u") && text.contains("a&lt;b&gt;&amp;&quot;\u{fffd}"), "{text}");
        assert!(text.contains(r#"width="400.0""#) && text.contains(r#"width="200.0""#), "{text}");
        assert!(text.contains(&format!("{}…<title>", "x".repeat(LABEL))));
        assert_eq!(text.matches("<rect").count(), 3);
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
    }
}
