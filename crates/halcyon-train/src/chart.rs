//! A chart of the loss by step.

use crate::callback::{Callback, EpochReport, Flow, StepReport, make_folder_of};
use halcyon::ir::error::{Error, Result};
use std::io::BufWriter;
use std::path::PathBuf;

/// Size of the chart in pixels, and its margins.
const WIDTH: usize = 800;
const HEIGHT: usize = 480;
const LEFT: usize = 80;
const RIGHT: usize = 36;
const TOP: usize = 20;
const BOTTOM: usize = 48;
/// The side of one font pixel, in pixels of the chart.
const SCALE: usize = 2;

const WHITE: [u8; 3] = [255, 255, 255];
const BLACK: [u8; 3] = [40, 40, 40];
const GREY: [u8; 3] = [225, 225, 225];
const FAINT: [u8; 3] = [160, 190, 230];
const LINE: [u8; 3] = [25, 90, 180];
const POINT: [u8; 3] = [215, 80, 30];

/// Draws the loss of every step, its moving average, and the mean of each epoch as a PNG file with axes. The
/// file is written after each epoch and at the end.
#[derive(Debug)]
pub struct LossChart {
    path: PathBuf,
    log: Option<PathBuf>,
    steps: Vec<(u64, f64)>,
    epochs: Vec<(u64, f64)>,
}

impl LossChart {
    /// A chart that is written to the file `path`. Its folder is made if it is missing.
    pub fn new(path: impl Into<PathBuf>) -> LossChart {
        LossChart { path: path.into(), log: None, steps: vec![], epochs: vec![] }
    }

    /// Sets the file of a [`crate::JsonLog`]. When a training is resumed, the chart reads the earlier losses
    /// from this file.
    pub fn history(mut self, log: impl Into<PathBuf>) -> LossChart {
        self.log = Some(log.into());
        self
    }

    fn write(&self) -> Result<()> {
        let canvas = self.draw();
        let mut bytes = vec![];
        let mut encoder = png::Encoder::new(BufWriter::new(&mut bytes), WIDTH as u32, HEIGHT as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let failed = |e: png::EncodingError| Error::internal(format!("a picture was not encoded: {e}"));
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&canvas.pixels).map_err(failed)?;
        writer.finish().map_err(failed)?;
        make_folder_of(&self.path)?;
        halcyon_host::output::write(&self.path, &bytes)
    }

    fn draw(&self) -> Canvas {
        let mut c = Canvas { pixels: WHITE.repeat(WIDTH * HEIGHT) };
        let finite: Vec<(u64, f64)> = self.steps.iter().copied().filter(|(_, l)| l.is_finite()).collect();
        let all = || finite.iter().chain(self.epochs.iter().filter(|(_, l)| l.is_finite()));
        let first = all().map(|p| p.0).min().unwrap_or(0);
        let last = all().map(|p| p.0).max().unwrap_or(1).max(first + 1);
        let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
        let high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = match (low.is_finite() && high.is_finite(), high > low) {
            (false, _) => (0.0, 1.0),
            (true, true) => (low.min(0.0).max(low - (high - low)), high),
            (true, false) => (low - 0.5, high + 0.5),
        };
        let x_at = |s: f64| LEFT as f64 + (s - first as f64) / (last - first) as f64 * plot_width();
        let y_at = |l: f64| TOP as f64 + (high - l) / (high - low) * plot_height();
        for tick in ticks(first as f64, last as f64).into_iter().filter(|t| t.fract() == 0.0) {
            let x = x_at(tick);
            c.line((x, TOP as f64), (x, (HEIGHT - BOTTOM) as f64), GREY);
            let text = format!("{tick}");
            c.text(x - text_width(&text) / 2.0, (HEIGHT - BOTTOM + 8) as f64, &text);
        }
        for tick in ticks(low, high) {
            let y = y_at(tick);
            c.line((LEFT as f64, y), ((WIDTH - RIGHT) as f64, y), GREY);
            let text = label(tick, high - low);
            c.text(LEFT as f64 - 8.0 - text_width(&text), y - 3.5 * SCALE as f64, &text);
        }
        c.line((LEFT as f64, TOP as f64), (LEFT as f64, (HEIGHT - BOTTOM) as f64), BLACK);
        let bottom = (HEIGHT - BOTTOM) as f64;
        c.line((LEFT as f64, bottom), ((WIDTH - RIGHT) as f64, bottom), BLACK);
        c.text(((WIDTH + LEFT) / 2) as f64 - text_width("step") / 2.0, (HEIGHT - 20) as f64, "step");
        c.text(8.0, 2.0, "loss");
        let at = |p: &(u64, f64)| (x_at(p.0 as f64), y_at(p.1));
        finite.windows(2).for_each(|w| c.line(at(&w[0]), at(&w[1]), FAINT));
        let smooth = averaged(&finite);
        smooth.windows(2).for_each(|w| c.line(at(&w[0]), at(&w[1]), LINE));
        self.epochs.iter().filter(|p| p.1.is_finite()).for_each(|p| c.dot(at(p), POINT));
        c
    }
}

fn plot_width() -> f64 {
    (WIDTH - LEFT - RIGHT) as f64
}

fn plot_height() -> f64 {
    (HEIGHT - TOP - BOTTOM) as f64
}

/// An exponential moving average. It averages over about 2 % of the steps.
fn averaged(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let share = (50.0 / points.len().max(1) as f64).min(1.0);
    let mut mean = points.first().map_or(0.0, |p| p.1);
    let next = |p: &(u64, f64)| {
        mean += share * (p.1 - mean);
        (p.0, mean)
    };
    points.iter().map(next).collect()
}

/// At most 7 round numbers between two bounds. Their distance is 1, 2 or 5 times a power of ten.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    if !rough.is_finite() || rough <= 0.0 {
        return vec![];
    }
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|k| k * power).find(|s| *s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    (first..first + 12).map(|k| k as f64 * step).take_while(|t| *t <= high + step * 1e-9).collect()
}

fn label(tick: f64, range: f64) -> String {
    match range.abs() {
        r if !(1e-3..1e5).contains(&r) => format!("{tick:.1e}"),
        r if r < 0.1 => format!("{tick:.4}"),
        r if r < 10.0 => format!("{tick:.2}"),
        _ => format!("{tick:.0}"),
    }
}

struct Canvas {
    /// RGB, row by row.
    pixels: Vec<u8>,
}

impl Canvas {
    fn set(&mut self, x: i64, y: i64, colour: [u8; 3]) {
        if let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y))
            && x < WIDTH
            && y < HEIGHT
        {
            self.pixels[(y * WIDTH + x) * 3..][..3].copy_from_slice(&colour);
        }
    }

    fn line(&mut self, a: (f64, f64), b: (f64, f64), colour: [u8; 3]) {
        let n = (b.0 - a.0).abs().max((b.1 - a.1).abs()).ceil().clamp(1.0, 4096.0);
        for k in 0..=n as i64 {
            let t = k as f64 / n;
            let (x, y) = (a.0 + (b.0 - a.0) * t, a.1 + (b.1 - a.1) * t);
            self.set(x.round() as i64, y.round() as i64, colour);
        }
    }

    fn dot(&mut self, (x, y): (f64, f64), colour: [u8; 3]) {
        for dy in -3i64..=3 {
            for dx in -3i64..=3 {
                if dx * dx + dy * dy <= 10 {
                    self.set(x.round() as i64 + dx, y.round() as i64 + dy, colour);
                }
            }
        }
    }

    fn text(&mut self, x: f64, y: f64, text: &str) {
        let mut x = x.round() as i64;
        for c in text.chars() {
            for (row, bits) in glyph(c).iter().enumerate() {
                for column in (0..5).filter(|k| bits >> (4 - k) & 1 == 1) {
                    for k in 0..SCALE * SCALE {
                        let dx = column as i64 * SCALE as i64 + (k % SCALE) as i64;
                        self.set(x + dx, y.round() as i64 + (row * SCALE + k / SCALE) as i64, BLACK);
                    }
                }
            }
            x += 6 * SCALE as i64;
        }
    }
}

fn text_width(text: &str) -> f64 {
    (text.len() * 6 * SCALE) as f64
}

/// A character in 7 rows of 5 pixels.
fn glyph(c: char) -> [u8; 7] {
    match c {
        '0' => [0x0e, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0e],
        '1' => [0x04, 0x0c, 0x04, 0x04, 0x04, 0x04, 0x0e],
        '2' => [0x0e, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1f],
        '3' => [0x1f, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0e],
        '4' => [0x02, 0x06, 0x0a, 0x12, 0x1f, 0x02, 0x02],
        '5' => [0x1f, 0x10, 0x1e, 0x01, 0x01, 0x11, 0x0e],
        '6' => [0x06, 0x08, 0x10, 0x1e, 0x11, 0x11, 0x0e],
        '7' => [0x1f, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08],
        '8' => [0x0e, 0x11, 0x11, 0x0e, 0x11, 0x11, 0x0e],
        '9' => [0x0e, 0x11, 0x11, 0x0f, 0x01, 0x02, 0x0c],
        '.' => [0, 0, 0, 0, 0, 0x0c, 0x0c],
        '-' => [0, 0, 0, 0x1f, 0, 0, 0],
        'e' => [0, 0, 0x0e, 0x11, 0x1f, 0x10, 0x0e],
        'l' => [0x0c, 0x04, 0x04, 0x04, 0x04, 0x04, 0x0e],
        'o' => [0, 0, 0x0e, 0x11, 0x11, 0x11, 0x0e],
        'p' => [0, 0, 0x1e, 0x11, 0x1e, 0x10, 0x10],
        's' => [0, 0, 0x0e, 0x10, 0x0e, 0x01, 0x1e],
        't' => [0x08, 0x08, 0x1c, 0x08, 0x08, 0x09, 0x06],
        _ => [0; 7],
    }
}

impl Callback for LossChart {
    fn on_start(&mut self, step: u64) -> Result<()> {
        self.steps.clear();
        self.epochs.clear();
        let Some(log) = self.log.as_ref().filter(|l| step > 0 && l.exists()) else { return Ok(()) };
        for (of_epoch, at, loss) in crate::json_log::read(log, step)? {
            if of_epoch { &mut self.epochs } else { &mut self.steps }.push((at, loss));
        }
        Ok(())
    }

    fn on_step(&mut self, r: &StepReport) -> Result<Flow> {
        self.steps.push((r.step, r.loss));
        Ok(Flow::Continue)
    }

    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        self.epochs.push((r.step, r.loss));
        self.write()?;
        Ok(Flow::Continue)
    }

    fn on_end(&mut self) -> Result<()> {
        self.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.1, 0.3).len(), 5);
        assert!(ticks(1.0, 1.0).is_empty() && ticks(f64::NAN, 1.0).is_empty());
    }

    #[test]
    fn the_curve_falls_from_left_to_right() {
        let dir = tempfile::tempdir().unwrap();
        let mut chart = LossChart::new(dir.path().join("loss.png"));
        for k in 0..100u64 {
            let loss = if k == 50 { f64::NAN } else { 1.0 / (k + 1) as f64 };
            chart
                .on_step(&StepReport { step: k + 1, epoch: 0, loss, samples_per_s: 1.0, batches: (k, 100) })
                .unwrap();
        }
        chart.on_end().unwrap();
        let file = std::fs::File::open(dir.path().join("loss.png")).unwrap();
        let info = png::Decoder::new(std::io::BufReader::new(file)).read_info().unwrap();
        assert_eq!(info.info().size(), (WIDTH as u32, HEIGHT as u32));
        let pixels = chart.draw().pixels;
        let height = |x: usize| (0..HEIGHT).find(|y| pixels[(y * WIDTH + x) * 3..][..3] == LINE);
        let (left, right) = (height(LEFT + 5).unwrap(), height(WIDTH - RIGHT - 5).unwrap());
        assert!(left < right, "{left} {right}");
        // A chart without losses is written too.
        LossChart::new(dir.path().join("empty.png")).on_end().unwrap();
    }
}
