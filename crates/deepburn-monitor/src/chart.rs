//! A chart: lines or stacked bands over the step, as an inline SVG with a caption.
//!
//! Main types: [`Chart`] and [`Series`]. Values that are not finite leave a gap. Long lines are
//! reduced to the extremes of each range of steps, so that no spike is lost and the page stays
//! small. Bands are reduced to means, which still add up.
//!
//! The SVG has fixed colors. The page's style sheet finds the grid and the dashed lines by their
//! colors, because plotters writes neither classes nor dashes.

use crate::html::{Escaped, push};
use crate::report_error::ReportError;
use plotters::prelude::*;
use std::ops::Range;

/// The drawn size in pixels, which the page scales. It is small, so that labels stay readable on a
/// phone.
const SIZE: (u32, u32) = (420, 240);

/// The number of step ranges to which a line is reduced; each keeps its lowest and highest point.
const STRETCHES: usize = 300;

/// Larger values are drawn as gaps. A single value of this size would flatten the rest of the curve
/// to a line.
const LARGEST: f64 = 1e100;

/// The color of grid and axes. The style sheet replaces exactly this color with the theme's.
const LINES: RGBColor = RGBColor(0xAA, 0xAA, 0xAA);

/// Colors that can be distinguished on light and dark pages. The second half has the same colors
/// with the last bit flipped, which the style sheet draws dashed.
const COLORS: [RGBColor; MAX_SERIES] = [
    RGBColor(0x3B, 0x82, 0xF6),
    RGBColor(0xF9, 0x73, 0x16),
    RGBColor(0x16, 0xA3, 0x4A),
    RGBColor(0xA8, 0x55, 0xF7),
    RGBColor(0x08, 0x91, 0xB2),
    RGBColor(0xDB, 0x27, 0x77),
    RGBColor(0x3B, 0x82, 0xF7),
    RGBColor(0xF9, 0x73, 0x17),
    RGBColor(0x16, 0xA3, 0x4B),
    RGBColor(0xA8, 0x55, 0xF6),
    RGBColor(0x08, 0x91, 0xB3),
    RGBColor(0xDB, 0x27, 0x76),
];

/// The largest number of series in a chart.
pub(crate) const MAX_SERIES: usize = 12;

/// The number of solid lines; further lines are dashed.
const UNBROKEN: usize = 6;

/// The note above curves over optimizer steps.
pub(crate) const GAPS_NOTE: &str = "Curves over optimizer steps; a gap is a skipped step or a \
                                    value that is not finite.";

/// A named line.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    /// The name in the legend.
    name: String,
    /// Segments of (step, value) without gaps.
    segments: Vec<Vec<(f64, f64)>>,
}

impl Series {
    /// Returns a line through `points`, which are (step, value) in ascending order of steps.
    pub(crate) fn new(name: impl Into<String>, points: impl Iterator<Item = (f64, f64)>) -> Self {
        Self::of(name.into(), &thinned(points.collect()))
    }

    /// Returns a line through all `points`, split where a value cannot be drawn.
    fn of(name: String, points: &[(f64, f64)]) -> Self {
        // A gap splits the line, because a line through NaN would end the drawing.
        let drawable = |(_, y): &(f64, f64)| y.is_finite() && y.abs() <= LARGEST;
        let segments = points
            .split(|point| !drawable(point))
            .filter(|segment| !segment.is_empty())
            .map(<[_]>::to_vec)
            .collect();
        Self { name, segments }
    }

    /// Returns all points that are drawn.
    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.segments.iter().flatten().copied()
    }
}

/// Returns the lowest and highest point of each range, in order. Short lines are returned
/// unchanged. The first point of a range that is not finite is kept too, so that gaps stay visible.
///
/// Each range has at most three points: a gap, the lowest and the highest value.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    if points.len() <= 2 * STRETCHES {
        return points;
    }
    let mut kept = Vec::with_capacity(2 * STRETCHES);
    for stretch in points.chunks(points.len().div_ceil(STRETCHES)) {
        if let Some(gap) = stretch.iter().find(|(_, y)| !y.is_finite()) {
            kept.push(*gap);
        }
        let finite = || stretch.iter().filter(|(_, y)| y.is_finite());
        let lowest = finite().min_by(|a, b| a.1.total_cmp(&b.1));
        let highest = finite().max_by(|a, b| a.1.total_cmp(&b.1));
        if let (Some(lowest), Some(highest)) = (lowest, highest) {
            let (first, second) =
                if lowest.0 <= highest.0 { (lowest, highest) } else { (highest, lowest) };
            kept.push(*first);
            if first.0 < second.0 {
                kept.push(*second);
            }
        }
    }
    kept
}

/// Returns stacked bands, one for each name. If there are many steps, each range of steps is
/// reduced to its mean.
///
/// Each row contains a step and one amount for each name. The series are cumulative: the value of a
/// band is its upper edge. A range is drawn at its first step.
pub(crate) fn stacked(names: &[&str], rows: &[(f64, Vec<f64>)]) -> Vec<Series> {
    let stretch = rows.len().div_ceil(STRETCHES).max(1);
    let mut tops = vec![Vec::new(); names.len()];
    for rows in rows.chunks(stretch) {
        let mut top = 0.0;
        for (band, points) in tops.iter_mut().enumerate() {
            let sum: f64 = rows.iter().map(|(_, amounts)| amounts[band]).sum();
            top += sum / rows.len() as f64;
            points.push((rows[0].0, top));
        }
    }
    names.iter().zip(tops).map(|(name, points)| Series::of((*name).to_owned(), &points)).collect()
}

/// The drawing style of a chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marks {
    /// Lines.
    Lines,
    /// Areas down to 0, with the first series in front.
    Bands,
}

/// Series over the step with a common vertical axis.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    /// The caption.
    title: String,
    /// The lines, or the bands from the lowest to the highest.
    series: Vec<Series>,
    /// How the series are drawn.
    marks: Marks,
    /// Whether the vertical axis includes 0.
    starts_at_zero: bool,
}

impl Chart {
    /// Returns a chart of lines. The vertical axis covers the values.
    pub(crate) fn new(title: impl Into<String>, series: Vec<Series>) -> Self {
        Self { title: title.into(), series, marks: Marks::Lines, starts_at_zero: false }
    }

    /// Creates a chart of [`stacked`] bands.
    pub(crate) fn of_bands(title: impl Into<String>, series: Vec<Series>) -> Self {
        Self { title: title.into(), series, marks: Marks::Bands, starts_at_zero: true }
    }

    /// Starts the vertical axis at 0, for amounts whose size is compared.
    pub(crate) fn starting_at_zero(self) -> Self {
        Self { starts_at_zero: true, ..self }
    }

    /// Returns the chart as an HTML figure, or a sentence if there is nothing to draw.
    ///
    /// # Errors
    /// Returns an error if the drawing library fails.
    pub(crate) fn to_figure(&self) -> Result<String, ReportError> {
        let title = Escaped(&self.title);
        let mut html = String::new();
        push(&mut html, format_args!("<figure>\n<figcaption>{title}</figcaption>\n"));
        if self.series.iter().all(|series| series.segments.is_empty()) {
            html.push_str("<p>No finite values.</p>\n</figure>\n");
            return Ok(html);
        }
        if self.series.len() > 1 {
            self.push_key(&mut html);
        }
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|reason| ReportError::Chart { chart: self.title.clone(), reason })?;
        // plotters cannot set attributes of the image.
        let svg = svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{title}\" "), 1);
        html.push_str(&svg);
        html.push_str("</figure>\n");
        Ok(html)
    }

    /// Appends the names of the series that have points, with samples of their lines.
    fn push_key(&self, html: &mut String) {
        html.push_str("<p>");
        let drawn = |series: &Series| !series.segments.is_empty();
        for (index, series) in self.series.iter().enumerate().filter(|(_, it)| drawn(it)) {
            push_key_entry(html, index, &series.name);
        }
        html.push_str("</p>\n");
    }

    /// Draws axes and series into an SVG. Each band is drawn as an area down to
    /// 0. Bands are drawn from the highest to the lowest, so that lower bands
    /// cover the lower part of higher ones.
    ///
    /// # Errors
    /// Returns the error of the drawing library.
    fn draw(&self, svg: &mut String) -> Result<(), String> {
        let says = |error: DrawingAreaErrorKind<_>| error.to_string();
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let (x, y) = self.ranges();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            // Half of the last label of the step axis is outside of the plot.
            .margin_right(18)
            .x_label_area_size(26)
            .y_label_area_size(54)
            .build_cartesian_2d(x, y)
            .map_err(says)?;
        chart
            .configure_mesh()
            .x_labels(6)
            .y_labels(5)
            .x_label_formatter(&|step| compact(*step))
            .y_label_formatter(&|value| compact(*value))
            .label_style(("sans-serif", 14))
            .axis_style(LINES)
            .bold_line_style(LINES)
            // Only the lines at labels are drawn.
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(says)?;
        let plot = chart.plotting_area();
        let mut order: Vec<_> = self.series.iter().zip(COLORS).collect();
        // The highest band is drawn first, and lower ones cover its lower part.
        if self.marks == Marks::Bands {
            order.reverse();
        }
        for (series, color) in order {
            for segment in &series.segments {
                match (segment.as_slice(), self.marks) {
                    // A line through one point is invisible.
                    ([point], _) => plot.draw(&Circle::new(*point, 4, color.filled())),
                    (points, Marks::Lines) => {
                        plot.draw(&PathElement::new(points, color.stroke_width(2)))
                    }
                    (points, Marks::Bands) => {
                        let floor = [points[points.len() - 1], points[0]].map(|(x, _)| (x, 0.0));
                        plot.draw(&Polygon::new([points, &floor].concat(), color.filled()))
                    }
                }
                .map_err(says)?;
            }
        }
        area.present().map_err(says)
    }

    /// Returns the ranges of both axes.
    ///
    /// For a single step, the range extends by 0.5 on both sides, because an axis must not be
    /// empty.
    fn ranges(&self) -> (Range<f64>, Range<f64>) {
        let bounds = |value: fn((f64, f64)) -> f64| {
            let values = self.series.iter().flat_map(Series::points).map(value);
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            })
        };
        let (first, last) = bounds(|(step, _)| step);
        let (low, high) = bounds(|(_, value)| value);
        let y = padded(if self.starts_at_zero { low.min(0.0) } else { low }, high);
        // Otherwise, the margin below the lowest value would extend the axis to negative amounts.
        let y = if self.starts_at_zero && low >= 0.0 { 0.0..y.end } else { y };
        let x = if first < last { first..last } else { first - 0.5..last + 0.5 };
        (x, y)
    }
}

/// Appends a note and a section with charts.
///
/// # Errors
/// Returns an error if the drawing library fails.
pub(crate) fn push_charts(
    html: &mut String,
    note: &str,
    charts: impl IntoIterator<Item = Chart>,
) -> Result<(), ReportError> {
    push(html, format_args!("<p class=\"note\">{note}</p>\n<section class=\"charts\">\n"));
    for chart in charts {
        html.push_str(&chart.to_figure()?);
    }
    html.push_str("</section>\n");
    Ok(())
}

/// Appends a legend entry: a sample of the line of series `index`, and `name`.
///
/// If there are more series than colors, the colors repeat.
pub(crate) fn push_key_entry(html: &mut String, index: usize, name: &str) {
    let RGBColor(r, g, b) = COLORS[index % MAX_SERIES];
    let line = if index % MAX_SERIES < UNBROKEN { "solid" } else { "dashed" };
    let name = Escaped(name);
    push(
        html,
        format_args!(
            "<span class=\"key\"><i style=\"border-top:4px {line} #{r:02X}{g:02X}{b:02X}\"></i>{name}</span>\n"
        ),
    );
}

/// Returns the range with a margin. A range that is too narrow for its numbers is widened, because
/// an axis needs ticks that floats can distinguish.
fn padded(low: f64, high: f64) -> Range<f64> {
    let size = low.abs().max(high.abs());
    // All values are zero, for which any range will do.
    let margin = if size < 1e-30 {
        1.0
    } else if high - low < 1e-9 * size {
        0.1 * size
    } else {
        0.05 * (high - low)
    };
    low - margin..high + margin
}

/// Formats a label of about six characters: `0.25`, `1.5k`, `64M`, `3e-5`.
///
/// Values below 1e-12 are shown as 0.
fn compact(value: f64) -> String {
    let size = value.abs();
    let (value, suffix) = match size {
        _ if size < 1e-12 => return "0".to_owned(),
        _ if !(1e-3..1e15).contains(&size) => return scientific(value),
        _ if size >= 1e12 => (value / 1e12, "T"),
        _ if size >= 1e9 => (value / 1e9, "G"),
        _ if size >= 1e6 => (value / 1e6, "M"),
        _ if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.4}");
    format!("{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Formats a number with up to three digits and its power of ten, without trailing zeros.
fn scientific(value: f64) -> String {
    let text = format!("{value:.2e}");
    match text.split_once('e') {
        Some((digits, power)) => {
            format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[f64]) -> Series {
        Series::new("a", values.iter().enumerate().map(|(i, y)| (i as f64 + 1.0, *y)))
    }

    #[test]
    fn labels_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (1e-17, "0"),
            (0.25, "0.25"),
            (0.1 + 0.2, "0.3"),
            (-1.5, "-1.5"),
            (3e-5, "3e-5"),
            (2.5e-4, "2.5e-4"),
            (65536.0, "65.536k"),
            (6.4e7, "64M"),
            (4.294967296e9, "4.295G"),
            (1e20, "1e20"),
        ] {
            assert_eq!(compact(value), text);
        }
    }

    #[test]
    fn gaps_cut_a_line() {
        let series = series(&[1.0, 2.0, f64::NAN, 3.0, f64::INFINITY, f64::NAN, 4.0, 1e300]);
        let lengths = series.segments.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths, [2, 1, 1]);
    }

    #[test]
    fn thinning_keeps_spikes_and_gaps() {
        let mut values = (0..100_000).map(|i| f64::from(i % 7)).collect::<Vec<_>>();
        values[54_321] = 99.0;
        values[11_111] = -99.0;
        values[77_777] = f64::NAN;
        let series = series(&values);
        let points = series.points().collect::<Vec<_>>();
        assert!(points.len() <= 2 * STRETCHES);
        assert!(points.contains(&(54_322.0, 99.0)) && points.contains(&(11_112.0, -99.0)));
        assert_eq!(series.segments.len(), 2);
        assert!(points.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn ranges_are_never_empty() {
        for values in [
            &[0.0][..],
            &[5.0, 5.0],
            &[1.0, 1.0 + f64::EPSILON],
            &[-1e100, 1e100],
            &[1e-300, 2e-300],
            &[3.0, 4.0],
        ] {
            for chart in [
                Chart::new("t", vec![series(values)]),
                Chart::new("t", vec![series(values)]).starting_at_zero(),
            ] {
                let (x, y) = chart.ranges();
                assert!(x.start < x.end && y.start < y.end && (y.end - y.start).is_finite());
                assert!(values.iter().all(|value| y.contains(value)), "{values:?} {y:?}");
                assert!(chart.to_figure().unwrap().contains("</svg>"));
            }
        }
    }

    #[test]
    fn nothing_to_draw_is_said() {
        let chart = Chart::new("t", vec![series(&[f64::NAN])]);
        assert!(chart.to_figure().unwrap().contains("No finite values."));
    }

    #[test]
    fn a_key_names_each_of_several_lines() {
        let figure = Chart::new("t", vec![series(&[1.0, 2.0]); 2]).to_figure().unwrap();
        assert_eq!(figure.matches("class=\"key\"").count(), 2);
        // The drawing and the legend use the same colors.
        assert_eq!(figure.matches("#3B82F6").count(), 2, "{figure}");
        assert!(figure.contains("#AAAAAA"), "the style sheet recolors the grid by this value");
    }

    #[test]
    fn further_lines_are_dashed_by_the_style_sheet() {
        let figure = Chart::new("t", vec![series(&[1.0, 2.0]); MAX_SERIES]).to_figure().unwrap();
        assert_eq!(figure.matches("px dashed").count(), MAX_SERIES - UNBROKEN);
        let style = include_str!("style.css");
        for RGBColor(r, g, b) in &COLORS[UNBROKEN..] {
            let stroke = format!("[stroke=\"#{r:02X}{g:02X}{b:02X}\"]");
            assert!(style.contains(&stroke), "{stroke}");
        }
    }

    #[test]
    fn bands_add_up_however_many_steps_there_are() {
        for steps in [1, 2, 1000] {
            let rows: Vec<_> = (1..=steps).map(|k| (f64::from(k), vec![1.0, 2.0, 0.5])).collect();
            let bands = stacked(&["a", "b", "c"], &rows);
            let tops: Vec<_> = bands.iter().map(|band| band.points().next().unwrap().1).collect();
            assert_eq!(tops, [1.0, 3.0, 3.5]);
            assert!(bands[0].points().count() <= STRETCHES);
            assert!(bands[2].points().all(|(_, top)| top == 3.5));
            let figure = Chart::of_bands("t", bands).to_figure().unwrap();
            assert_eq!(figure.matches("<polygon").count(), if steps > 1 { 3 } else { 0 });
        }
    }
}
