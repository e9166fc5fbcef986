//! Memory over time: a table, and a page with a chart for each rank.
//!
//! A sample is taken whenever a rank reports its memory, usually several times per step. The table
//! contains all samples. A chart has at most 300 points and at most 12 bands; further categories
//! are summed as *other*.

use crate::chart::{Chart, MAX_SERIES, push_charts, stacked};
use crate::html;
use crate::report_error::ReportError;
use std::io;

/// The number of points in a chart. If there are more samples, the sample with the largest total of
/// each range is drawn.
const MOMENTS: usize = 300;

/// The memory of a rank at one time.
#[derive(Debug, Clone)]
pub(super) struct MemorySample {
    /// Microseconds since the start of the profiler.
    pub(super) at: f64,
    /// The rank that reported the memory.
    pub(super) rank: usize,
    /// Bytes by category.
    pub(super) bytes: Vec<(String, u64)>,
}

impl MemorySample {
    /// Returns the bytes of all categories.
    fn total(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the bytes of a category; 0 if it was not reported.
    fn of(&self, category: &str) -> u64 {
        self.bytes.iter().find(|(name, _)| name == category).map_or(0, |(_, bytes)| *bytes)
    }
}

/// Returns a line for each time, rank and category.
///
/// # Errors
/// Returns an error if the table cannot be formatted.
pub(super) fn to_csv(samples: &[MemorySample]) -> io::Result<String> {
    let mut table = csv::Writer::from_writer(Vec::new());
    table.write_record(["microseconds", "rank", "category", "bytes"])?;
    for sample in samples {
        let (at, rank) = (format!("{:.3}", sample.at), sample.rank.to_string());
        for (category, bytes) in &sample.bytes {
            table.write_record([&*at, &*rank, category, &*bytes.to_string()])?;
        }
    }
    let bytes = table.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// Returns a page with a chart for each rank.
///
/// # Errors
/// Returns an error if a chart cannot be drawn.
pub(super) fn to_html(samples: &[MemorySample]) -> Result<String, ReportError> {
    const TITLE: &str = "Memory over time";
    let mut ranks: Vec<usize> = samples.iter().map(|sample| sample.rank).collect();
    // Ranks report in any order, and the page has them by number.
    ranks.sort_unstable();
    ranks.dedup();
    let of_rank = |rank| {
        let samples: Vec<_> = samples.iter().filter(|sample| sample.rank == rank).collect();
        chart(rank, &samples)
    };
    let mut body = format!("<h1>{TITLE}</h1>\n");
    let note = "MiB over milliseconds, by category, one upon the other.";
    push_charts(&mut body, note, ranks.into_iter().map(of_rank))?;
    Ok(html::page(TITLE, &body))
}

/// Returns the chart of a rank: MiB of each category over milliseconds, stacked. For each range of
/// samples, the one with the largest total is drawn.
fn chart(rank: usize, samples: &[&MemorySample]) -> Chart {
    const MIB: f64 = (1 << 20) as f64;
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in samples.iter().flat_map(|sample| &sample.bytes) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    // One series is left for the sum of all other categories.
    names.truncate(MAX_SERIES - 1);
    let mut rows = Vec::new();
    for stretch in samples.chunks(samples.len().div_ceil(MOMENTS).max(1)) {
        // The chart shows peaks, which a mean would hide.
        let Some(fullest) = stretch.iter().max_by_key(|sample| sample.total()) else { continue };
        let mut amounts: Vec<u64> = names.iter().map(|name| fullest.of(name)).collect();
        let named: u64 = amounts.iter().sum();
        amounts.push(fullest.total().saturating_sub(named));
        let amounts = amounts.into_iter().map(|bytes| bytes as f64 / MIB).collect();
        rows.push((fullest.at / 1e3, amounts));
    }
    let rest = rows.iter().any(|(_, amounts): &(f64, Vec<f64>)| amounts[names.len()] > 0.0);
    names.extend(rest.then_some("other"));
    Chart::of_bands(format!("Rank {rank}"), stacked(&names, &rows))
}
