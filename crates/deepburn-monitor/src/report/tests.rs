//! Pages of synthetic runs.

use super::*;
use crate::metrics::{EvalRow, MemoryRow, PhaseSeconds, StepRow};
use serde_json::json;
use std::fs;

fn step(step: u64, loss: f64) -> MetricsRow {
    MetricsRow::Step(StepRow {
        step,
        loss,
        lr: 1e-4 * (step as f64 / 100.0).min(1.0),
        grad_norm: (step % 10 != 3).then_some(1.0 / step as f64 + 0.5),
        loss_scale: f64::from(1_u32 << (16 - (step / 500).min(8))),
        skipped: step % 10 == 3,
        tokens: 4096,
        step_seconds: 0.5,
        tokens_per_second: 8192.0 + (step % 17) as f64 * 30.0,
        memory: MemoryRow {
            parameters: 124_000_000,
            gradients: 124_000_000,
            optimizer: 249_000_000,
            gathered_peak: 154_000_000,
            activations_peak: 300_000_000 + (step % 5) * 10_000_000,
            device_peak: 900_000_000,
            host_peak: 0,
            disk_peak: 249_000_000,
            rss: 1_900_000_000,
        },
        seconds: Some(PhaseSeconds {
            data: 0.01 + (step % 7) as f64 * 0.005,
            forward: 0.12,
            backward: 0.25,
            optimizer: 0.06,
        }),
        ..StepRow::default()
    })
}

fn eval(step: u64) -> MetricsRow {
    MetricsRow::Eval(EvalRow {
        step,
        eval_loss: 4.0 + 6.0 / step as f64,
        eval_accuracy: Some(1.0 - 1.0 / step as f64),
        ..EvalRow::default()
    })
}

fn page(rows: &[MetricsRow]) -> String {
    let job = json!({
        "model": {"architecture": "gpt2", "pretrained": null, "config": {"n_layer": 12}},
        "data": {"kind": "text", "path": "corpus/<script>alert(1)</script>.txt"},
        "training": {"max_steps": 3000, "splits": [1, 2]},
        "deepspeed": {"zero_optimization": {"stage": 3}},
    });
    let environment = Environment::detect("1.2.3");
    Report {
        title: "gpt2 & <b>friends</b>",
        job: &job,
        rows,
        test: None,
        generated: &[],
        environment: &environment,
    }
    .to_html()
    .unwrap()
}

/// Returns a run of 3,000 steps with evaluations, a diverged range and skipped steps.
fn long_run() -> Vec<MetricsRow> {
    (1..=3000)
        .flat_map(|k| {
            let loss = 4.0 + 6.5 / (k as f64).sqrt() + ((k * 7919) % 100) as f64 / 400.0;
            let loss = if (1400..1450).contains(&k) { f64::NAN } else { loss };
            std::iter::once(step(k, loss)).chain((k % 250 == 0).then(|| eval(k)))
        })
        .collect()
}

#[test]
fn a_page_loads_and_runs_nothing() {
    let html = page(&long_run());
    for forbidden in ["<script", "http://", "https://", "<link", "<img", "@import", "url("] {
        // The SVG name space is a name, not an address that is fetched.
        let html = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!html.contains(forbidden), "{forbidden}");
    }
}

#[test]
fn what_users_wrote_is_escaped() {
    let html = page(&[]);
    assert!(html.contains("<title>gpt2 &amp; &lt;b&gt;friends&lt;/b&gt;</title>"));
    assert!(html.contains("<td>corpus/&lt;script&gt;alert(1)&lt;/script&gt;.txt</td>"));
    assert_eq!(html.matches("alert(1)").count(), 2);
    assert_eq!(Escaped("\"'<&>\u{1}\n").to_string(), "&quot;&#39;&lt;&amp;&gt;\u{FFFD}\n");
}

#[test]
fn the_job_is_a_table_and_folded_json() {
    let html = page(&[]);
    assert!(html.contains("<th scope=\"row\">model.config.n_layer</th><td>12</td>"));
    assert!(html.contains("<th scope=\"row\">training.splits</th><td>[1,2]</td>"));
    assert!(!html.contains("model.pretrained") && !html.contains("<th scope=\"row\">deepspeed"));
    assert!(html.contains("<details>") && html.contains("&quot;stage&quot;: 3"));
}

#[test]
fn every_length_of_run_has_a_page() {
    for (rows, drawn) in [
        (vec![], 0),
        (vec![step(1, 5.0)], 8),
        (vec![eval(1)], 2),
        (vec![step(1, f64::NAN)], 7),
        (vec![step(1, 5.0), step(2, 4.0), eval(2)], 9),
    ] {
        let html = page(&rows);
        assert_eq!(html.matches("</svg>").count(), drawn, "{} rows", rows.len());
        assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
    }
}

#[test]
fn a_long_run_has_all_curves_in_a_small_page() {
    let html = page(&long_run());
    assert_eq!(html.matches("</svg>").count(), 9);
    assert!(html.contains("Most memory by tier in MiB"));
    assert!(html.len() < 400_000, "{} bytes", html.len());
    assert!(html.contains("<td>3000 (300 skipped)</td>"));
    assert!(html.contains("<td>12,288,000</td>") && html.contains("<td>25 min 0 s</td>"));
    assert!(html.contains("<td>4.0020 at step 3000</td>"));
}

#[test]
fn a_written_page_replaces_the_old_one_at_once() {
    let folder = std::env::temp_dir().join(format!("deepburn-report-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("report.html");
    fs::write(&path, "old").unwrap();
    let (job, environment) = (json!({}), Environment::detect("1.2.3"));
    let rows = [step(1, 5.0)];
    let report = Report {
        title: "t",
        job: &job,
        rows: &rows,
        test: None,
        generated: &[],
        environment: &environment,
    };
    report.write(&path).unwrap();
    assert!(fs::read_to_string(&path).unwrap().ends_with("</html>\n"));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no partial file is left");
    let error = report.write(&folder.join("missing/report.html")).unwrap_err().to_string();
    assert!(error.contains("missing/report.html"), "{error}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_result_says_when_and_where() {
    let html = page(&[step(1, 4.0)]);
    let result = html.split("<h2>").nth(1).unwrap_or(&html);
    for part in ["Date", " UTC", "Machine", "core"] {
        assert!(result.contains(part), "{part}: {result}");
    }
}

#[test]
fn a_loss_scale_is_drawn_only_where_the_loss_is_scaled() {
    let chart = "<figcaption>Loss scale</figcaption>";
    assert!(page(&[step(1, 4.0), step(2, 3.0)]).contains(chart));
    let unscaled = |number| match step(number, 4.0) {
        MetricsRow::Step(row) => MetricsRow::Step(StepRow { loss_scale: 1.0, ..row }),
        row => row,
    };
    assert!(!page(&[unscaled(1), unscaled(2)]).contains(chart));
}

#[test]
fn one_evaluation_is_a_visible_marker() {
    let html = page(&[step(1, 4.0), step(2, 3.0), eval(2)]);
    assert!(html.contains("<circle") && html.contains("r=\"4\""), "no marker");
}
