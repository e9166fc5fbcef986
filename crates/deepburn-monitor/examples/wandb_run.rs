//! Writes a W&B run of many steps, to read it with W&B's own reader, without a network:
//!
//! ```text
//! cargo run -p deepburn-monitor --example wandb_run -- /tmp/run 3000
//! pip install wandb
//! wandb leet inspect --summary /tmp/run/wandb/offline-run-*
//! wandb sync --dry-run /tmp/run/wandb
//! ```
//!
//! A third argument is the step after which the run resumes. A fourth one, `killed`, leaves the run
//! without its end.

use std::error::Error;
use std::path::Path;

use deepburn_monitor::metrics::{EvalRow, StepRow};
use deepburn_monitor::{WandbOptions, WandbRun};
use serde_json::json;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize| arguments.get(index).map(String::as_str);
    let folder = argument(0).ok_or("the first argument is a folder")?;
    let steps: u64 = argument(1).unwrap_or("3000").parse()?;
    let resumed_after: u64 = argument(2).unwrap_or("0").parse()?;
    let options = WandbOptions {
        project: "deepspeed".to_owned(),
        group: Some("Gruppe ä 🦀".to_owned()),
        name: "wandb_run".to_owned(),
        producer: format!("deepburn-{}", env!("CARGO_PKG_VERSION")),
        config: json!({
            "training": {"seed": 42, "output_dir": folder, "report_to": ["wandb"]},
            // Larger than two blocks of the file.
            "long": "日本".repeat(20_000),
            "none": null,
        }),
        loss_scale: true,
        resumed_after,
        continues: resumed_after > 0,
        ..WandbOptions::default()
    };
    let mut run = WandbRun::create(&Path::new(folder).join("wandb"), &options)?;
    for step in resumed_after + 1..=steps {
        let loss = match step % 100 {
            97 => f64::NAN,
            98 => f64::INFINITY,
            99 => f64::NEG_INFINITY,
            _ => 5.0 / step as f64,
        };
        let row = StepRow {
            step,
            loss,
            lr: 1e-4 / step as f64,
            grad_norm: (step % 10 != 0).then_some(1.5),
            loss_scale: 65536.0,
            tokens_per_second: 1e6 / 3.0,
            ..StepRow::default()
        };
        run.step(32 * step, &row)?;
        if step % 50 == 0 {
            let eval_accuracy = Some(1.0 - 1.0 / step as f64);
            run.evaluation(&EvalRow {
                step,
                eval_loss: 4.0 / step as f64,
                eval_accuracy,
                ..EvalRow::default()
            })?;
        }
    }
    println!("{}", run.folder().display());
    match argument(3) {
        Some("killed") => std::mem::forget(run),
        _ => run.finish(0)?,
    }
    Ok(())
}
