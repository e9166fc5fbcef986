//! Generates the lines of the README that compare DeepBurn with its peers.
//!
//! The lines between two HTML comments are replaced. The rest of the README is not changed.

use std::fmt::Write as _;

use super::markdown::short;
use crate::Outcome;
use crate::quantity::Quantity;
use crate::results::{Results, Table};

/// The marker before the lines, with its line break.
const START: &str = "<!-- benches -->\n";
/// The marker after the lines.
const END: &str = "<!-- /benches -->";

/// The lines: the description, the quantity, and the rows of DeepBurn and the peer in a table of
/// the benchmark `step`.
const LINES: [(&str, Quantity, &str, &str); 5] = [
    ("fp32 step, 1 rank", Quantity::Step, "fp32, flex", "fp32, PyTorch eager"),
    ("bf16 step, 1 rank", Quantity::Step, "bf16, flex", "bf16, PyTorch eager"),
    ("ZeRO-3 fp32 step, 2 ranks", Quantity::Step, "fp32, stage 3, flex", "fp32, DeepSpeed stage 3"),
    ("ZeRO-3 fp32 step, 2 ranks", Quantity::Step, "fp32, stage 3, flex", "fp32, FSDP2"),
    (
        "ZeRO-3 fp32 memory, 2 ranks",
        Quantity::Peak,
        "fp32, stage 3, flex",
        "fp32, DeepSpeed stage 3",
    ),
];

/// Returns the lines as a Markdown table, with the machine and the commit below it.
///
/// Values that were not measured are marked. Without results of the benchmark `step`, the text has
/// the command that measures them.
pub(super) fn highlights(results: &[Results]) -> String {
    let Some(results) = results.iter().find(|results| results.bench == "step") else {
        return "Not measured yet: `cargo run --release -p deepburn-benches -- all --peers VENV`.\n".into();
    };
    let mut text = String::from("| GPT-2 124M | DeepBurn | Peer | Ratio |\n|---|---|---|---|\n");
    for (what, quantity, own, peer) in LINES {
        let peer_name = peer.split_once(", ").map_or(peer, |(_, name)| name);
        // Both tables of the benchmark have rows of different names.
        let table = results.tables.iter().find(|table| table.row(own).is_some());
        // A line stays in the README if it was not measured, so that nobody misses it.
        let cells = table.map(|table| cells(table, quantity, own, peer)).unwrap_or_default();
        let [own, peer, ratio] = cells.map(|cell| cell.unwrap_or_else(|| "not measured".into()));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {what} | {own} | {peer_name}: {peer} | {ratio} |");
    }
    let (machine, commit) = (&results.machine, short(&results.commit.hash));
    let dirty = if results.commit.dirty { ", with changes" } else { "" };
    let _ = writeln!(
        text,
        "\nMedians on {} cores ({}) at commit {commit}{dirty}. [All results, and how to repeat \
         them](benches/README.md).",
        machine.cores, machine.cpu
    );
    text
}

/// Returns DeepBurn's median, the peer's median and their ratio, formatted. A value that was not
/// measured is `None`.
///
/// The ratio is computed over the same rounds of both (see [`crate::statistics`]).
fn cells(table: &Table, quantity: Quantity, own: &str, peer: &str) -> [Option<String>; 3] {
    let summary = |name: &str| table.row(name).and_then(|row| row.measures.get(&quantity));
    let shown = |name: &str| summary(name).map(|value| quantity.format(value.median));
    let ratio = summary(own).zip(summary(peer)).and_then(|(own, peer)| own.over(peer));
    [shown(own), shown(peer), ratio.map(|ratio| format!("{:.2}", ratio.median))]
}

/// Returns the README with new lines between its markers.
///
/// # Errors
/// Returns an error if the README lacks a marker.
pub(super) fn replace_highlights(readme: &str, lines: &str) -> Outcome<String> {
    let parts =
        readme.split_once(START).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) =
        parts.ok_or_else(|| format!("README.md lacks the lines {} and {END}", START.trim()))?;
    Ok(format!("{before}{START}{lines}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn lines_have_values_and_ratios() {
        let text = highlights(&[sample()]);
        assert!(
            text.contains("| fp32 step, 1 rank | 2.50 s | PyTorch eager: 3.00 s | 0.83 |"),
            "{text}"
        );
        assert!(
            text.contains("| bf16 step, 1 rank | not measured | PyTorch eager: not measured | not"),
            "{text}"
        );
        assert!(text.contains("at commit 0123456789."), "{text}");
        assert!(highlights(&[]).starts_with("Not measured yet"));
    }

    #[test]
    fn lines_are_replaced_between_their_markers() {
        let readme = "a\n<!-- benches -->\nold\n<!-- /benches -->\nb\n";
        let expected = "a\n<!-- benches -->\nnew\n<!-- /benches -->\nb\n";
        assert_eq!(replace_highlights(readme, "new\n").expect("markers"), expected);
        assert!(replace_highlights("a\n", "new\n").is_err());
    }
}
