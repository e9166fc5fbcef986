//! Writes all pages and monitoring files of a synthetic run, to check changes of their layout.
//!
//! ```sh
//! cargo run -p deepburn-monitor --example gallery -- FOLDER
//! ```

use deepburn_monitor::metrics::{
    EvalRow, MemoryRow, MetricsWriter, PhaseSeconds, StepRow, read_metrics,
};
use deepburn_monitor::{Comparison, Environment, MonitorFolders, Monitors, Profiler, Report};
use serde_json::json;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::{fs, thread};
use tracing_subscriber::layer::SubscriberExt;

const STEPS: u64 = 600;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).ok_or("give the folder that is written")?;
    let folder = PathBuf::from(folder);
    let runs: Vec<_> = (0..7_u8).map(|run| folder.join(format!("stage-{run}/output"))).collect();
    for (run, output) in (0_u8..).zip(&runs) {
        fs::create_dir_all(output)?;
        write_run(output, run)?;
    }
    Comparison::read(&runs[..3])?.write(&folder.join("plot-3.html"))?;
    Comparison::read(&runs)?.write(&folder.join("plot-7.html"))?;
    profile(&folder.join("profile"))
}

fn step_row(step: u64, run: u8) -> StepRow {
    let noise = ((step * 7919 + u64::from(run)) % 100) as f64 / 400.0;
    StepRow {
        step,
        loss: 4.0 + 6.5 / (step as f64).sqrt() + noise + 0.1 * f64::from(run),
        lr: 1e-4 * (step as f64 / 100.0).min(1.0) / f64::from(run + 1),
        grad_norm: (step % 50 != 3).then_some(1.0 / step as f64 + 0.5 + noise),
        loss_scale: f64::from(1_u32 << (16 - (step / 100).min(8))),
        skipped: step % 50 == 3,
        tokens: 4096,
        step_seconds: 0.5,
        tokens_per_second: 8192.0 + (step % 17) as f64 * 30.0 - 300.0 * f64::from(run),
        memory: MemoryRow {
            parameters: 124_000_000,
            gradients: 124_000_000,
            optimizer: 249_000_000,
            gathered_peak: 154_000_000,
            activations_peak: 300_000_000 + (step % 5) * 10_000_000,
            device_peak: 900_000_000,
            host_peak: 0,
            disk_peak: 249_000_000,
            rss: 1_900_000_000 - 100_000_000 * u64::from(run),
        },
        seconds: Some(PhaseSeconds {
            data: 0.01 + (step % 7) as f64 * 0.005,
            forward: 0.12,
            backward: 0.25,
            optimizer: 0.06,
        }),
        ..StepRow::default()
    }
}

fn write_run(output: &Path, run: u8) -> Result<(), Box<dyn Error>> {
    let record = output.join("metrics.jsonl");
    let mut writer = MetricsWriter::create(&record)?;
    let mut monitors = Monitors::create(&MonitorFolders {
        tensorboard: Some(output.join("tensorboard")),
        csv: Some(output.join("csv")),
        loss_scale: true,
        resumed_after: 0,
    })?;
    for step in 1..=STEPS {
        let row = step_row(step, run);
        writer.write(row)?;
        monitors.step(32 * step, &row)?;
        if step % 50 == 0 {
            let eval_accuracy = (run.is_multiple_of(2)).then_some(1.0 - 20.0 / (step + 50) as f64);
            let eval_loss = 4.1 + 6.0 / (step as f64).sqrt();
            let row = EvalRow { step, eval_loss, eval_accuracy, ..EvalRow::default() };
            writer.write(row)?;
            monitors.evaluation(32 * step, &row)?;
        }
    }
    drop(monitors);
    let job = json!({"model": {"architecture": "gpt2"}, "data": {"path": "a/rather/long/path/to/a/corpus.txt"},
        "training": {"max_steps": STEPS}, "deepspeed": {"zero_optimization": {"stage": run}}});
    let test = if run.is_multiple_of(2) {
        json!({"test_loss": 0.41, "targets": 25_000, "test_accuracy": 0.8512,
            "confusion": [[10_000, 2_500], [1_220, 11_280]]})
    } else {
        json!({"test_loss": 4.2, "perplexity": 66.69, "targets": 287_643})
    };
    let environment = Environment::detect(env!("CARGO_PKG_VERSION"));
    let rows = read_metrics(&record)?;
    let title = format!("stage-{run}");
    let report = Report {
        title: &title,
        job: &job,
        rows: &rows,
        test: Some(&test),
        generated: &[],
        environment: &environment,
    };
    Ok(report.write(&output.join("report.html"))?)
}

/// Runs ten steps on two ranks and profiles steps 2 to 6.
fn profile(folder: &Path) -> Result<(), Box<dyn Error>> {
    let profiler = Profiler::idle();
    profiler.profile(vec![2..=6], folder);
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(profiler.layer()));
    thread::scope(|scope| {
        for rank in 0..2 {
            let (profiler, dispatch) = (&profiler, &dispatch);
            let work = move || {
                tracing::dispatcher::with_default(dispatch, || work(profiler, rank));
            };
            thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, work)?;
        }
        Ok::<_, std::io::Error>(())
    })?;
    profiler.finish()?;
    Ok(())
}

fn work(profiler: &Profiler, rank: usize) {
    const MIB: u64 = 1 << 20;
    let wait = || thread::sleep(std::time::Duration::from_micros(300));
    for step in 1..=10 {
        profiler.begin_step(step);
        for layer in 0..12_u64 {
            let name = if layer < 6 { "forward" } else { "backward" };
            let held = if layer < 6 { layer } else { 11 - layer };
            let _span =
                tracing::info_span!(target: "deepburn_learner", "block", pass = name, layer)
                    .entered();
            {
                let _gather =
                    tracing::info_span!(target: "deepburn_comm", "all_gather", numel = 768 * layer)
                        .entered();
                wait();
            }
            profiler.memory(
                rank,
                &[
                    ("parameters", 120 * MIB),
                    ("optimizer", 240 * MIB),
                    ("activations", 30 * held * MIB),
                ],
            );
        }
        profiler.end_step(step);
    }
}
