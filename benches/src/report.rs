//! Generates the report from results: `benches/README.md` with its plots, and some lines of the
//! README.
//!
//! The same results always give the same files, and a test checks that the committed files are up
//! to date.
//!
//! ```text
//! benches/results/step.json              results of the benchmark `step`         (`results`)
//! benches/results/step-1-light.svg       plot of its first table                 (`plot`)
//! benches/results/step-1-dark.svg        the same plot for a dark background
//! benches/README.md                      all results, with links to the plots    (`markdown`)
//! README.md                              the lines between two markers           (`highlights`)
//! ```

mod highlights;
mod markdown;
mod plot;

use std::fs;
use std::path::Path;

use crate::Outcome;
use crate::results::{Results, Table};
use crate::tables::{BENCHES, Bench};

use highlights::{highlights, replace_highlights};
pub(crate) use markdown::section;
use markdown::{Pictures, report};
use plot::{Theme, draw};

/// Writes the report of the results in `folder` to `report_file`, the plots to `folder`, and the
/// generated lines to `readme`, if it is given.
///
/// # Errors
/// Returns an error if results cannot be read or a file cannot be written.
pub(crate) fn write(folder: &Path, report_file: &Path, readme: Option<&Path>) -> Outcome<()> {
    let results = read_all(folder)?;
    // Plots are drawn first, because the report links only those that exist.
    let mut pictures = Pictures::new();
    for results in &results {
        for (index, table) in results.tables.iter().enumerate() {
            let name = format!("{}-{}", results.bench, index + 1);
            if let Some(links) = write_plots(folder, report_file, &name, table)? {
                pictures.insert((results.bench.clone(), table.title.clone()), links);
            }
        }
    }
    fs::write(report_file, report(&results, &pictures))?;
    if let Some(readme) = readme {
        let text = fs::read_to_string(readme)?;
        fs::write(readme, replace_highlights(&text, &highlights(&results))?)?;
    }
    Ok(())
}

/// Reads the results of all benchmarks that have results, in the order of the suite.
///
/// # Errors
/// Returns an error if a file cannot be read or has another schema, because a report without its
/// results would look complete.
fn read_all(folder: &Path) -> Outcome<Vec<Results>> {
    let mut found = vec![];
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let place =
            Bench::of(&name).and_then(|it| BENCHES.iter().position(|bench| bench.name == it.name));
        if let Some(place) = place.filter(|_| path.extension().is_some_and(|it| it == "json")) {
            found.push((place, name, path));
        }
    }
    // In the order of the suite. Several GPUs are in the order of their names.
    found.sort();
    found.iter().filter_map(|(_, _, path)| Results::read(path).transpose()).collect()
}

/// Draws the plot of a table for both backgrounds and writes the files to `folder`. Their names
/// begin with `name`.
///
/// Returns the links for the report, or `None` if the table has no plot or no values.
///
/// # Errors
/// Returns an error if the plot cannot be drawn or a file cannot be written.
fn write_plots(
    folder: &Path,
    report_file: &Path,
    name: &str,
    table: &Table,
) -> Outcome<Option<[String; 2]>> {
    let path = |theme: Theme| folder.join(format!("{name}-{}.svg", theme.name));
    for theme in [Theme::LIGHT, Theme::DARK] {
        // A table without a plot has none for either background.
        let Some(svg) = draw(table, theme)? else { return Ok(None) };
        fs::write(path(theme), svg)?;
    }
    Ok(Some([Theme::LIGHT, Theme::DARK].map(|theme| relative(&path(theme), report_file))))
}

/// Returns the path of a file relative to the folder of the report. If the file is not in this
/// folder, the path is returned unchanged.
fn relative(path: &Path, report_file: &Path) -> String {
    let folder = report_file.parent().map(Path::to_path_buf).unwrap_or_default();
    path.strip_prefix(folder).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("benches/ lies in the workspace")
    }

    #[test]
    fn committed_reports_are_up_to_date() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path().join("results");
        fs::create_dir(&folder).expect("made");
        let committed = root().join("benches/results");
        for entry in fs::read_dir(committed).expect("listed") {
            let path = entry.expect("listed").path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let name = path.file_name().expect("a file");
                fs::copy(&path, folder.join(name)).expect("copied");
            }
        }
        fs::copy(root().join("README.md"), scratch.path().join("main.md")).expect("copied");
        write(&folder, &scratch.path().join("README.md"), Some(&scratch.path().join("main.md")))
            .expect("written");
        for (generated, committed) in [("README.md", "benches/README.md"), ("main.md", "README.md")]
        {
            let generated = fs::read_to_string(scratch.path().join(generated)).expect("read");
            let committed_text = fs::read_to_string(root().join(committed)).expect("read");
            assert!(
                generated == committed_text,
                "{committed} is out of date; run `cargo run --release -p deepburn-benches -- report`"
            );
        }
    }
}
