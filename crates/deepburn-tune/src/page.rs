//! The results as a page: memory against time, and all candidates.
//!
//! ```text
//! step s │  ○ ○          ● measured   ○ forecast
//!        │    ● ○        ✕ too large, at the top: it has no time
//!        │      ●
//!        └──────────── GB per rank
//! ```
//!
//! The page is self-contained: one file with an inline SVG and without scripts. A dot shows its
//! candidate when the pointer is on it.

use std::fmt::{self, Write};

use crate::candidate::{CandidateConfig, policy_name};
use crate::search::{Assessment, Search, Trial};

/// Width, height and margin of the picture, in units of the SVG.
const SIZE: [f64; 2] = [640.0, 360.0];
const MARGIN: f64 = 56.0;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;\
    color-scheme:light dark}svg{width:100%;height:auto}table{border-collapse:collapse;font-size:.85rem}\
    th,td{text-align:right;padding:.15rem .6rem;border-bottom:1px solid #8884}th:first-child,td:first-child,\
    td:last-child,th:last-child{text-align:left}.axis{stroke:#888}text{fill:currentColor;font-size:12px}\
    .measured{fill:#16a34a}.best{fill:#f97316}.forecast{fill:none;stroke:#3b82f6}.large{stroke:#db2777}";

/// A candidate in the picture.
struct Dot<'a> {
    trial: &'a Trial,
    /// Bytes of a rank on its device.
    memory: f64,
    /// Seconds of a step; `None` if it is too large.
    seconds: Option<f64>,
    class: &'static str,
}

/// Returns the page of a search. `title` is the name of the job.
pub fn page(search: &Search, title: &str) -> String {
    let mut html = String::new();
    // Writing to a string fails only if a `Display` fails, and none of these does.
    let _ = write_page(&mut html, search, title);
    html
}

/// Appends the page.
fn write_page(html: &mut String, search: &Search, title: &str) -> fmt::Result {
    writeln!(
        html,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>Tuning of {0}</title><style>{STYLE}</style></head>\n<body>\n\
         <h1>Tuning of {0}</h1>",
        escaped(title)
    )?;
    let best = search.best().map(|best| search.trials()[best].candidate.name());
    let best = best.map_or("Nothing was measured.".to_owned(), |name| {
        format!("The best configuration is <b>{name}</b>.")
    });
    writeln!(
        html,
        "<p>{best} Orange: the best; green: measured; blue: forecast; crosses: too large.</p>"
    )?;
    picture(html, &dots(search))?;
    rows(html, search)?;
    writeln!(html, "</body></html>")
}

/// Returns the candidates that were forecast.
fn dots(search: &Search) -> Vec<Dot<'_>> {
    let calibration = search.calibration();
    let best = search.best();
    let dots = search.trials().iter().enumerate().filter_map(|(index, trial)| {
        let memory = trial.memory()?.device as f64;
        let predicted = trial.prediction().map(|it| calibration.seconds(it));
        let (seconds, class) = match trial.measurement() {
            Some(measured) if best == Some(index) => (Some(measured.fastest()), "best"),
            Some(measured) => (Some(measured.fastest()), "measured"),
            None if predicted.is_some() => (predicted, "forecast"),
            None => (None, "large"),
        };
        Some(Dot { trial, memory, seconds, class })
    });
    dots.collect()
}

/// Appends the picture.
fn picture(html: &mut String, dots: &[Dot<'_>]) -> fmt::Result {
    // A margin of 5 % keeps the largest dot inside, and an empty picture has axes too.
    let largest =
        |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max).max(1e-9) * 1.05;
    let most_memory = largest(&mut dots.iter().map(|dot| dot.memory));
    let longest = largest(&mut dots.iter().filter_map(|dot| dot.seconds));
    let [width, height] = SIZE;
    writeln!(
        html,
        "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Seconds of a step and memory of a rank\">"
    )?;
    axes(html, most_memory, longest)?;
    for Dot { trial, memory, seconds, class } in dots {
        let (name, x) = (trial.candidate.name(), x_of(*memory, most_memory));
        match seconds {
            Some(seconds) => writeln!(
                html,
                "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{:.1}\" r=\"5\"><title>{name}: {:.2} GB, {seconds:.3} s</title></circle>",
                y_of(*seconds, longest),
                memory / 1e9,
            )?,
            None => writeln!(
                html,
                "<path class=\"{class}\" d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\"><title>{name}: {}</title></path>",
                x - 4.0,
                MARGIN / 2.0,
                escaped(reason(trial).as_deref().unwrap_or_default()),
            )?,
        }
    }
    writeln!(html, "</svg>")
}

/// Returns the horizontal position of bytes, where the axis ends at `most`.
fn x_of(memory: f64, most: f64) -> f64 {
    MARGIN + (SIZE[0] - 2.0 * MARGIN) * memory / most
}

/// Returns the vertical position of seconds, where the axis ends at `longest`.
fn y_of(seconds: f64, longest: f64) -> f64 {
    SIZE[1] - MARGIN - (SIZE[1] - 2.0 * MARGIN) * seconds / longest
}

/// Appends the axes, whose ends are bytes of a rank and seconds of a step.
fn axes(html: &mut String, most_memory: f64, longest: f64) -> fmt::Result {
    let [width, height] = SIZE;
    writeln!(
        html,
        "<path class=\"axis\" fill=\"none\" d=\"M{MARGIN} {} V{} H{}\"/>",
        MARGIN / 2.0,
        height - MARGIN,
        width - MARGIN / 2.0
    )?;
    for part in 0..=4 {
        let (memory, seconds) =
            (most_memory * f64::from(part) / 4.0, longest * f64::from(part) / 4.0);
        writeln!(
            html,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.2}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{seconds:.2}</text>",
            x_of(memory, most_memory),
            height - MARGIN + 18.0,
            memory / 1e9,
            MARGIN - 6.0,
            y_of(seconds, longest) + 4.0,
        )?;
    }
    writeln!(
        html,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">GB of a rank</text><text x=\"6\" y=\"14\">seconds of a step</text>",
        width / 2.0,
        height - 10.0
    )
}

/// Appends the table of all candidates that were forecast or are not valid.
fn rows(html: &mut String, search: &Search) -> fmt::Result {
    writeln!(
        html,
        "<table><thead><tr><th>configuration</th><th>ranks</th><th>pipeline stages</th><th>ZeRO stage</th><th>micro-batch</th><th>recompute</th>\
         <th>GB/rank</th><th>step s</th><th>forecast s</th><th>note</th></tr></thead>\n<tbody>",
    )?;
    let calibration = search.calibration();
    for trial in search.trials() {
        // They are never measured, and would hide the others.
        if matches!(trial.assessment, Assessment::Dominated { .. }) {
            continue;
        }
        let CandidateConfig { ranks, pipeline_stages, stage, recompute, micro_batch, .. } =
            trial.candidate;
        let number = |value: Option<f64>, digits: usize| {
            value.map_or(String::new(), |it| format!("{it:.digits$}"))
        };
        let memory = trial.measurement().map(|it| it.memory).or(trial.memory().copied());
        writeln!(
            html,
            "<tr><td>{}</td><td>{ranks}</td><td>{pipeline_stages}</td><td>{}</td><td>{micro_batch}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{}</td></tr>",
            trial.candidate.name(),
            stage.number(),
            policy_name(recompute),
            number(memory.map(|it| it.device as f64 / 1e9), 2),
            number(trial.measurement().map(super::Measurement::fastest), 3),
            number(trial.prediction().map(|it| calibration.seconds(it)), 3),
            escaped(reason(trial).as_deref().unwrap_or_default()),
        )?;
    }
    writeln!(html, "</tbody></table>")
}

/// Returns why a candidate was not measured, or how its measurement failed.
fn reason(trial: &Trial) -> Option<String> {
    match (&trial.assessment, &trial.measured) {
        (_, Some(Err(reason))) => Some(format!("failed: {reason}")),
        (Assessment::TooLarge { reason, .. }, _) => Some(format!("too large: {reason}")),
        (Assessment::Invalid { reason }, _) => Some(format!("not valid: {reason}")),
        _ => None,
    }
}

/// Returns text that is safe in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
