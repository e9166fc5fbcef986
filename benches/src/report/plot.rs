//! Plots tables as SVG, for a light and a dark background.
//!
//! There are two kinds of plots (see [`Plot`]): a bar for each row, and lines over the number of
//! ranks. A plot shows the medians of one quantity. The background is transparent. Only text and
//! axes depend on the theme, and the other colors have enough contrast on both backgrounds.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Outcome;
use crate::quantity::Quantity;
use crate::results::{MeasuredRow, Plot, Table};
use crate::statistics::RoundSummary;

/// Width of every plot. All lengths are in pixels.
const WIDTH: u32 = 840;
/// Width of the names of rows, left of the bars.
const LABELS: i32 = 330;
/// Width of the values, right of the bars.
const VALUES: i32 = 90;
/// Height of a row. Its bar has a margin of 4 pixels above and below.
const BAR: i32 = 26;
/// Margin of the plot.
const MARGIN: i32 = 8;
/// Height of a plot with lines. The height of a plot with bars depends on the number of rows.
const LINES_HEIGHT: u32 = 320;
/// Color of DeepBurn's bars.
const OWN: RGBColor = RGBColor(0x3B, 0x82, 0xF6);
/// Color of peers' bars, and of grid lines.
const PEER: RGBColor = RGBColor(0x9A, 0xA4, 0xB2);
/// Colors of the lines, for groups in alphabetical order. More groups than colors are not drawn.
const SERIES: [RGBColor; 4] =
    [OWN, RGBColor(0xF9, 0x73, 0x16), RGBColor(0x16, 0xA3, 0x4A), RGBColor(0xA8, 0x55, 0xF7)];

/// The background on which a plot is shown. The plot is transparent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Theme {
    /// Name in the file names of plots.
    pub(super) name: &'static str,
    /// Color of text and axes.
    ink: RGBColor,
}

impl Theme {
    /// Dark text on a light page.
    pub(super) const LIGHT: Self = Self { name: "light", ink: RGBColor(0x1C, 0x23, 0x30) };
    /// Light text on a dark page.
    pub(super) const DARK: Self = Self { name: "dark", ink: RGBColor(0xE6, 0xE9, 0xEE) };

    /// Returns the style of text in the theme's color, anchored at `horizontal` and centered
    /// vertically.
    fn text(self, horizontal: HPos) -> TextStyle<'static> {
        self.text_in(self.ink, horizontal)
    }

    /// Returns the style of text in another color, such as the color of a line.
    fn text_in(self, color: RGBColor, horizontal: HPos) -> TextStyle<'static> {
        let mut style = TextStyle::from(("sans-serif", 17).into_font());
        style.color = color.to_backend_color();
        style.pos(Pos::new(horizontal, VPos::Center))
    }
}

/// The drawing area of plotters for an SVG.
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Returns the plot of a table as the text of an SVG file, or `None` if the table has no plot or no
/// row has the quantity.
///
/// # Errors
/// Returns an error if the plot cannot be drawn.
pub(super) fn draw(table: &Table, theme: Theme) -> Outcome<Option<String>> {
    let Some(plot) = table.plot else { return Ok(None) };
    let (Plot::Bars(quantity) | Plot::Ranks(quantity)) = plot;
    let value = |row: &'_ MeasuredRow| row.measures.get(&quantity).cloned();
    let rows: Vec<_> = table.rows.iter().filter_map(|row| Some((row, value(row)?))).collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let mut svg = String::new();
    let drawn = match plot {
        Plot::Bars(_) => {
            let height = rows.len() as u32 * BAR as u32 + 2 * MARGIN as u32;
            let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
            draw_bars(&area, &rows, quantity, theme)
        }
        Plot::Ranks(_) => {
            let area = SVGBackend::with_string(&mut svg, (WIDTH, LINES_HEIGHT)).into_drawing_area();
            draw_ranks(&area, &rows, quantity, theme)
        }
    };
    drawn.map_err(|error| format!("cannot draw {}: {error}", table.title))?;
    Ok(Some(svg))
}

/// Draws a bar from 0 to the median for each row, and a line from the smallest to the largest round
/// over it.
///
/// All bars have the same scale, in which the largest round of all rows ends left of the values.
fn draw_bars(
    area: &Area<'_>,
    rows: &[(&MeasuredRow, RoundSummary)],
    quantity: Quantity,
    theme: Theme,
) -> Outcome<()> {
    // The smallest positive number avoids a division by 0 if all values are 0.
    let most = rows.iter().map(|(_, value)| value.max).fold(f64::MIN_POSITIVE, f64::max);
    // The value is written right of the largest round, so it needs room beside the longest bar.
    let room = f64::from(WIDTH as i32 - LABELS - VALUES);
    let at = |value: f64| LABELS + (value / most * room).round() as i32;
    for (index, (row, value)) in rows.iter().enumerate() {
        let top = MARGIN + index as i32 * BAR;
        let middle = top + BAR / 2;
        let color = if row.is_peer { PEER } else { OWN };
        let corners = [(LABELS, top + 4), (at(value.median), top + BAR - 4)];
        area.draw(&Rectangle::new(corners, color.filled()))?;
        area.draw(&PathElement::new(
            [(at(value.min), middle), (at(value.max), middle)],
            theme.ink,
        ))?;
        area.draw(&Text::new(row.name.clone(), (LABELS - 8, middle), theme.text(HPos::Right)))?;
        let label = quantity.format(value.median);
        area.draw(&Text::new(label, (at(value.max) + 6, middle), theme.text(HPos::Left)))?;
    }
    Ok(area.present()?)
}

/// Draws a line over the number of ranks for each group of rows, with a label at its end.
///
/// The axis of ranks is logarithmic with base 2. The axis of values is linear, from 0 to 10 % above
/// the largest median. Ranges are not drawn.
fn draw_ranks(
    area: &Area<'_>,
    rows: &[(&MeasuredRow, RoundSummary)],
    quantity: Quantity,
    theme: Theme,
) -> Outcome<()> {
    let points: Vec<_> = rows.iter().filter_map(|(row, value)| point(row, value)).collect();
    let most_ranks = points.iter().map(|(_, ranks, _)| *ranks).fold(1.0, f64::max);
    let most = points.iter().map(|(_, _, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_right(120)
        .x_label_area_size(36)
        .y_label_area_size(70)
        // The logarithm is drawn on a linear axis. The labels convert it back.
        .build_cartesian_2d(0.0..most_ranks.log2(), 0.0..most * 1.1)?;
    chart
        .configure_mesh()
        .x_desc("ranks")
        .x_label_formatter(&|power| format!("{:.0}", power.exp2()))
        .y_label_formatter(&|value| quantity.format(*value))
        .label_style(theme.text(HPos::Left))
        .axis_style(theme.ink)
        .bold_line_style(PEER.mix(0.4))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let mut groups: Vec<&str> = points.iter().map(|(group, ..)| *group).collect();
    // Colors are assigned by name, so that the color of a group does not depend on the order of
    // rows.
    groups.sort_unstable();
    groups.dedup();
    for (group, color) in groups.into_iter().zip(SERIES) {
        let own = points.iter().filter(|(name, ..)| *name == group);
        let line: Vec<_> = own.map(|(_, ranks, value)| (ranks.log2(), *value)).collect();
        chart.draw_series(LineSeries::new(line.clone(), color.stroke_width(2)))?;
        chart.draw_series(line.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
        if let Some(end) = line.last() {
            let style = theme.text_in(color, HPos::Left);
            chart.draw_series([
                EmptyElement::at(*end) + Text::new(group.to_owned(), (8, 0), style)
            ])?;
        }
    }
    Ok(area.present()?)
}

/// Returns the group, the number of ranks and the median of a row called `GROUP, N ranks`, or
/// `None` for other names.
fn point<'a>(row: &'a MeasuredRow, value: &RoundSummary) -> Option<(&'a str, f64, f64)> {
    let (group, ranks) = row.name.rsplit_once(", ")?;
    Some((group, ranks.split_once(' ')?.0.parse().ok()?, value.median))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn both_kinds_of_plots_are_drawn_in_both_themes() {
        let mut table = sample().tables.remove(0);
        let light = draw(&table, Theme::LIGHT).expect("drawn").expect("a plot");
        let dark = draw(&table, Theme::DARK).expect("drawn").expect("a plot");
        assert!(
            light.contains("fp32, PyTorch eager")
                && light.contains("#1C2330")
                && dark.contains("#E6E9EE")
        );
        assert!(light.contains("#3B82F6") && light.contains("#9AA4B2"));
        for (row, name) in table.rows.iter_mut().zip(["stage 3, 1 rank", "stage 3, 64 ranks"]) {
            row.name = name.into();
        }
        table.plot = Some(Plot::Ranks(Quantity::Step));
        assert!(draw(&table, Theme::LIGHT).expect("drawn").expect("a plot").contains("polyline"));
        table.rows.clear();
        assert_eq!(draw(&table, Theme::LIGHT).expect("nothing to draw"), None);
    }
}
