//! Checks that a backend trains as the CPU does: the steps `smoke` and `tests`.
//!
//! A tiny GPT-2 is trained for 12 steps. Its losses are compared with the losses of the backend
//! `flex` on the same machine, and its bits with another run on the GPU: losses, norms and the
//! trained weights. A difference is a failure.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::super::*;
use super::recording::{GpuRecording, TableHead};
use crate::metrics::ObservedStep;

/// Optimizer steps of the tiny model.
const STEPS: usize = 12;
/// Time limit of a run of the tiny model in seconds. The first run compiles about 100 kernels.
const TINY_LIMIT: u64 = 120;
/// Time limit of each test program in seconds.
const TESTS_LIMIT: u64 = 200;

/// Returns by how much a loss may differ from the loss of `flex`. Losses are about 6.
///
/// In fp32, sums have another order, and Adam enlarges their difference in its first steps. In 16
/// bits, the backends round after other operations; bf16 has 8 bits of precision, and fp16 has 11.
fn tolerance(precision: RunPrecision) -> f64 {
    match precision {
        RunPrecision::Fp32 => 1e-4,
        RunPrecision::Bf16 => 5e-3,
        RunPrecision::Fp16 => 3e-3,
    }
}

/// What a run of the tiny model left.
struct TinyRun {
    /// The bits of the loss and of the norm in each step.
    bits: Vec<(u64, Option<u64>)>,
    losses: Vec<f64>,
    /// The file of the trained weights.
    weights: Vec<u8>,
    seconds: f64,
}

impl TinyRun {
    /// Trains the tiny GPT-2 of the models' tests, without dropout. The programs run in `folder`.
    fn train(
        recording: &GpuRecording<'_>,
        (backend, folder): (&str, &Path),
        (precision, ranks, stage): (RunPrecision, usize, usize),
    ) -> Outcome<Self> {
        let suite = recording.suite;
        let tokens = suite.root.join("crates/deepburn-cli/tests/data/tokens.bin");
        let no_dropout = json!({ "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0 });
        let job = BenchJob::new(&Workload::gpt2_small(2, 32), &tokens, STEPS)
            .set("model.pretrained", json!(suite.root.join("models/tests/data/tiny")))
            .set("model.config", no_dropout)
            .set("training.backend", backend)
            .set("deepspeed.optimizer.params", json!({ "lr": 1e-3, "weight_decay": 0.1 }))
            .precision(precision)
            .ranks(ranks)
            .stage(stage)
            .in_folder(folder)
            .within(recording.limit(TINY_LIMIT)?);
        let trained = suite.train(&job, suite.output()?, &[])?;
        let model = trained.output.path().join("run/model/model.safetensors");
        let bits = |row: &ObservedStep| (row.loss.to_bits(), row.grad_norm.map(f64::to_bits));
        Ok(Self {
            bits: trained.rows.iter().map(bits).collect(),
            losses: trained.rows.iter().map(|row| row.loss).collect(),
            weights: fs::read(model)?,
            seconds: trained.run.seconds,
        })
    }

    /// Returns the number of steps with other bits than the other run. Weights with other bits
    /// count as a step.
    fn other_bits(&self, other: &Self) -> f64 {
        let steps = self.bits.iter().zip(&other.bits).filter(|(own, other)| own != other).count();
        (steps + usize::from(self.weights != other.weights)) as f64
    }

    /// Returns the differences from the run on flex, and from another run on the GPU.
    fn compared(&self, flex: &Self, other: &Self) -> Observations {
        let differences =
            self.losses.iter().zip(&flex.losses).map(|(own, flex)| (own - flex).abs());
        Observations::of(Quantity::LossDifference, differences.fold(0.0, f64::max))
            .with(Quantity::OtherBits, self.other_bits(other))
    }
}

/// Fails if a row differs from what is expected.
fn judge(
    recording: &mut GpuRecording<'_>,
    what: &str,
    precision: RunPrecision,
    found: Option<&Observations>,
) -> Outcome<()> {
    let most = tolerance(precision);
    let of = |quantity| found.and_then(|found| found.median(quantity)).unwrap_or(0.0);
    let (difference, other) = (of(Quantity::LossDifference), of(Quantity::OtherBits));
    if difference > most {
        let error = format!("a loss differs by {difference:.1e} from flex; at most {most:.0e}");
        recording.fail(what, &error)?;
    }
    if other > 0.0 {
        recording.fail(what, &format!("{other} steps have other bits"))?;
    }
    Ok(())
}

/// Trains the tiny model in fp32 three times: without stored kernels, storing them, and with them.
pub(super) fn smoke(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    const FP32: (RunPrecision, usize, usize) = (RunPrecision::Fp32, 1, 0);
    let table = TableHead {
        title: format!("Tiny GPT-2, {STEPS} steps in fp32"),
        columns: vec![Quantity::Program, Quantity::LossDifference, Quantity::OtherBits],
    };
    let (plain, caching) = (recording.folder("plain", "")?, recording.caching("cached")?);
    let flex = TinyRun::train(recording, ("flex", &plain), FP32)?;
    let mut first = None;
    for (name, folder) in
        [("without stored kernels", &plain), ("storing kernels", &caching), ("with them", &caching)]
    {
        let found = recording.row(&table, name, false, |recording| {
            let run = TinyRun::train(recording, (recording.backend(), folder), FP32)?;
            let found = run.compared(&flex, first.as_ref().unwrap_or(&run));
            let found = found.with(Quantity::Program, run.seconds);
            first.get_or_insert(run);
            Ok(found)
        })?;
        judge(recording, &format!("smoke: {name}"), FP32.0, found.as_ref())?;
    }
    Ok(())
}

/// Runs the tests of kernels and of programs, and meanwhile [`stages`].
pub(super) fn tests(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let table =
        TableHead { title: "Tests".into(), columns: vec![Quantity::Tests, Quantity::Program] };
    let mut programs = vec![("programs", vec!["backends"])];
    if recording.backend() == "cuda" {
        programs.push(("cube", vec![]));
    }
    let mut started = vec![];
    for (name, filters) in programs {
        let folder = recording.caching(&format!("tests-{name}"))?;
        let limit = recording.limit(TESTS_LIMIT)?;
        started.push((name, test_program(recording.suite, &[], name, &filters, &folder, limit)));
    }
    thread::scope(|scope| {
        let running: Vec<_> = started
            .into_iter()
            .map(|(name, program)| (name, scope.spawn(move || program.run())))
            .collect();
        stages(recording)?;
        for (name, program) in running {
            recording.row(&table, name, false, |_| {
                let run = program.join().map_err(|_| "the thread of the program panicked")??;
                observe_tests(&run)
            })?;
        }
        Ok(())
    })
}

/// Returns a test program of `benches/gpu/build`, after the words of a tool that starts it. It has
/// its temporary files in its folder, because programs that tests start store kernels there, one
/// after the other.
pub(super) fn test_program(
    suite: &Suite,
    tool: &[&str],
    name: &str,
    filters: &[&str],
    folder: &Path,
    limit: Duration,
) -> Watched {
    let program = suite.programs.folder().join(name);
    let mut words = tool.iter().map(OsStr::new).chain([program.as_os_str()]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).args(filters).args(["--test-threads", "1"]);
    command.current_dir(folder).env("TMPDIR", folder).env("HF_HUB_OFFLINE", "1");
    Watched::from(command).within(Some(limit))
}

/// Returns the number of passed tests and the time of a test program.
///
/// # Errors
/// Returns an error if no test ran.
pub(super) fn observe_tests(run: &ProgramRun) -> Outcome<Observations> {
    let passed = |(_, line): &'_ (f64, String)| {
        let (passed, _) = line.strip_prefix("test result: ok. ")?.split_once(" passed")?;
        passed.parse().ok()
    };
    let passed = run.lines.iter().find_map(passed).filter(|passed| *passed > 0.0);
    let passed = passed.ok_or("no test ran; check the names that select them")?;
    Ok(Observations::of(Quantity::Tests, passed).with(Quantity::Program, run.seconds))
}

/// Compares ZeRO stages with each other, bit by bit, and with flex, in each precision and on 1, 2
/// and 4 ranks.
fn stages(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let all = (vec![1, 2, 4], vec![0, 1, 2, 3]);
    let (ranks, stages) = recording.suite.pick(all, (vec![1, 2], vec![0, 3]));
    let table = TableHead {
        title: format!("Tiny GPT-2, {STEPS} steps at {} ZeRO stages", stages.len()),
        columns: vec![Quantity::LossDifference, Quantity::OtherBits],
    };
    let folder = recording.caching("cached")?;
    for precision in [RunPrecision::Fp32, RunPrecision::Bf16, RunPrecision::Fp16] {
        for ranks in &ranks {
            let name =
                format!("{}, {ranks} rank{}", precision.name(), if *ranks == 1 { "" } else { "s" });
            let found = recording.row(&table, &name, false, |recording| {
                let train = |backend, stage| {
                    TinyRun::train(recording, (backend, &folder), (precision, *ranks, stage))
                };
                let flex = train("flex", 0)?;
                let first = train(recording.backend(), stages[0])?;
                let mut found = first.compared(&flex, &first);
                for stage in &stages[1..] {
                    let run = train(recording.backend(), *stage)
                        .map_err(|error| format!("stage {stage}: {error}"))?;
                    found.raise(&run.compared(&flex, &first));
                }
                Ok(found)
            })?;
            judge(recording, &format!("stages: {name}"), precision, found.as_ref())?;
        }
    }
    Ok(())
}
