//! Compares matrix products with `torch.matmul`, with the limit of the machine, and with their rate
//! in a training step.
//!
//! The table for a number of threads has three measurements:
//!
//! - The cargo benchmark `gemm` of `deepburn-kernels` measures the products of GPT-2 124M. Next to
//!   each product it measures a loop that executes the same multiply-add instruction on registers.
//!   Its rate is the limit of the machine. The rate of a product as a fraction of this limit is
//!   independent of the machine's speed.
//! - `matmul.py` measures `torch.matmul` with the same shapes and layouts.
//! - A run of `finetune` measures the rate of the products within training steps, from the
//!   operations and times of the spans of large products in its profile. It is compared with the
//!   rate of the separate f32 products, weighted by their share of a step. The difference is caused
//!   by cold caches and by newly allocated memory for results. The products of attention, which are
//!   2 % of the operations, have no spans, because each of them runs on one thread. A second row
//!   divides the operations of all products by the time of forward and backward, which includes all
//!   other ops (norms, softmax, GELU). Its ratio is the fraction of a pass that products would take
//!   at full speed.
//!
//! Rates are in GFLOP/s. A product `[m, k] × [k, n]` has 2·m·k·n operations.
//!
//! Measurement errors: limit and product are measured one after the other, and clock rates depend
//! on the temperature and on the use of wide vectors. Operands that fit in the cache are already
//! there, unlike in a training step.

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;

use super::*;
use crate::statistics::median;

pub(super) const BENCH: Bench = Bench {
    name: "products",
    title: "Matrix products",
    about: "Products [m, k] × [k, n] with the shapes of GPT-2. The limit is the rate of a register-blocked loop of the \
        same instruction, which `cargo bench -p deepburn-kernels --bench gemm` measures next to each product. Two \
        rates are measured in training steps: the rate of the products, from the spans of a profile, and the rate of \
        forward and backward, whose time includes all other ops. Both are compared with the rate of the f32 products \
        together, weighted as in a step, in which the loss head has 31 % of the operations.",
    run,
};

/// The cargo benchmark of `deepburn-kernels`, which prints a JSON line for each product.
const GEMM: CargoBench = CargoBench {
    source: "crates/deepburn-kernels/benches/gemm.rs",
    selection: &["-p", "deepburn-kernels", "--bench", "gemm"],
};

/// Row of the rate of the products within training steps.
const IN_STEP: &str = "f32 products within a training step";
/// Row of the operations of a training step's products divided by the time of forward and backward.
const PASS: &str = "f32 forward and backward";
/// Row of DeepBurn's f32 products, weighted as in a step.
const ALL_F32: &str = "f32 products together";
/// Row of `torch.matmul`'s f32 products, weighted as in a step.
const PEER_ALL_F32: &str = "f32 products together, torch.matmul";

/// Name of the loss head's product in the benchmark `gemm`: hidden states times the transposed
/// embedding. The names of its gradients begin with it.
const LOSS_HEAD: &str = "loss head";

/// Share of the loss head in the operations of a step of GPT-2 124M on sequences of 128 tokens.
///
/// A test checks it against `step_gflop`.
const LOSS_HEAD_SHARE: f64 = 0.31;

/// A line of the benchmark `gemm` or of `matmul.py`. Lines of `matmul.py` have no name and no
/// limit.
#[derive(Debug, Deserialize)]
struct MeasuredProduct {
    /// The part of a step: forward, one of the gradients, or the loss head.
    #[serde(default)]
    name: String,
    /// The dimensions `[m, k, n]` of `[m, k] × [k, n]`.
    shape: [usize; 3],
    /// `f32` or `bf16`.
    dtype: String,
    /// Number of threads.
    threads: usize,
    /// The median rate over repetitions in GFLOP/s.
    gflops_median: f64,
    /// The rate of the loop on registers with the same number of threads, in GFLOP/s.
    limit_gflops: Option<f64>,
}

impl MeasuredProduct {
    /// Returns the name of the product's row.
    fn row(&self) -> String {
        let [m, k, n] = self.shape;
        format!("{} {}, {m} × {k} × {n}", self.dtype, self.name)
    }

    /// Returns the name of the row of `torch.matmul` on the same operands.
    fn peer_row(&self) -> String {
        format!("{}, torch.matmul", self.row())
    }

    /// Returns the product as an argument of `matmul.py`: `dtype:MxKxN:layout`, such as
    /// `bf16:768x3072x512:nn`. The letters are the layouts of the left and the right operand, where
    /// `t` means that the transpose is stored.
    fn argument(&self) -> String {
        let [m, k, n] = self.shape;
        let layouts = match &*self.name {
            "input gradient" | LOSS_HEAD => "nt",
            "weight gradient" | "loss head, weight gradient" => "tn",
            _ => "nn",
        };
        format!("{}:{m}x{k}x{n}:{layouts}", self.dtype)
    }

    /// Returns whether this is a product of the loss head.
    fn is_of_loss_head(&self) -> bool {
        self.name.starts_with(LOSS_HEAD)
    }

    /// Returns whether the product has a bound. These are a product of the MLP and the logits of
    /// the loss head, in bf16.
    fn is_bound(&self) -> bool {
        let is_mlp = self.name == "forward" && self.shape == [768, 3072, 512];
        self.dtype == "bf16" && (self.name == LOSS_HEAD || is_mlp)
    }
}

/// Runs all three measurements in rounds and creates a table for each number of threads.
///
/// If a peer or a training run fails, it is not run again, but the products are still measured.
///
/// # Errors
/// Returns an error if the benchmark `gemm` does not build or fails, or if its output is invalid.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let rounds = suite.rounds(3);
    // A table for each number of threads.
    let mut recorders: BTreeMap<usize, RoundRecorder> = BTreeMap::new();
    let mut products = BTreeMap::new();
    // Quick runs have no training run, because the share of the loss head is only valid for the
    // full model.
    let lacks = suite.peers_with(Script::MATMUL.packages).err();
    // Failed rows are not run again.
    let (mut has_peer, mut has_step) = (lacks.is_none(), !suite.options.quick);
    results.missing.extend(lacks.map(|lacks| format!("torch.matmul: {lacks}")));
    for round in 1..=rounds {
        eprintln!("products: round {round}/{rounds}");
        let Some(lines) = suite.programs.cargo_bench(&GEMM, suite.pick(&[], &["1"]))? else {
            results.missing.push(format!("the bench {}", GEMM.source));
            return Ok(());
        };
        // All rounds have the same products, so the last round may name the rows.
        products = by_threads(parse(&lines)?);
        for (threads, products) in &products {
            let recorder = recorders.entry(*threads).or_default();
            record(recorder, products, false);
            if has_peer && let Err(error) = record_peer(suite, recorder, *threads, products) {
                results.failures.push(format!("torch.matmul: {error}"));
                has_peer = false;
            }
        }
        if has_step
            // The map is ordered by threads, so its last table has all cores, as a training step.
            && let Some(mut all_cores) = recorders.last_entry()
            && let Err(error) = record_step(suite, all_cores.get_mut())
        {
            results.failures.push(format!("{IN_STEP}: {error}"));
            has_step = false;
        }
    }
    push_tables(suite, results, recorders, &products);
    Ok(())
}

/// Adds a table with comparisons for each number of threads. `products` are the products of the
/// last round.
fn push_tables(
    suite: &Suite,
    results: &mut Results,
    recorders: BTreeMap<usize, RoundRecorder>,
    products: &BTreeMap<usize, Vec<MeasuredProduct>>,
) {
    let most = recorders.keys().max().copied();
    for (threads, recorder) in recorders {
        let plural = if threads == 1 { "" } else { "s" };
        let title = format!("Products of GPT-2 124M, {threads} thread{plural}");
        let mut table = recorder.table(&title, &[Quantity::Arithmetic, Quantity::OfLimit]);
        let own = products.get(&threads).map_or(&[][..], Vec::as_slice);
        compare(suite, &mut table, own, most == Some(threads));
        results.tables.push(table);
    }
}

/// Adds the fraction of the limit and the ratio to `torch.matmul` for each product.
///
/// Only the table with all cores has bounds and the comparisons of the training step, because
/// training uses all cores.
fn compare(suite: &Suite, table: &mut Table, products: &[MeasuredProduct], has_all_cores: bool) {
    for product in products {
        let has_bound = has_all_cores && product.is_bound();
        let of = |bound| has_bound.then_some(AtLeast(bound)).and_then(|bound| suite.bound(bound));
        if has_bound {
            table.check(Quantity::OfLimit, &product.row(), of(0.80));
        }
        table.compare(Quantity::Arithmetic, &product.row(), &product.peer_row(), of(1.0));
    }
    if has_all_cores {
        table.compare(Quantity::Arithmetic, IN_STEP, ALL_F32, suite.bound(AtLeast(0.85)));
        table.compare(Quantity::Arithmetic, IN_STEP, PEER_ALL_F32, suite.bound(AtLeast(0.85)));
        table.compare(Quantity::Arithmetic, PASS, ALL_F32, None);
        table.compare(Quantity::Arithmetic, PASS, PEER_ALL_F32, None);
        table.plot = Some(Plot::Bars(Quantity::OfLimit));
    }
}

/// Groups products by their number of threads, in the order of the bench.
fn by_threads(products: Vec<MeasuredProduct>) -> BTreeMap<usize, Vec<MeasuredProduct>> {
    let mut all: BTreeMap<usize, Vec<MeasuredProduct>> = BTreeMap::new();
    for product in products {
        all.entry(product.threads).or_default().push(product);
    }
    all
}

/// Parses products from JSON lines.
///
/// # Errors
/// Returns an error that quotes the line if a field is missing or invalid.
fn parse(lines: &[Value]) -> Outcome<Vec<MeasuredProduct>> {
    let product = |line: &Value| {
        let problem = |error| format!("invalid product: {line}: {error}");
        Ok(serde_json::from_value(line.clone()).map_err(problem)?)
    };
    lines.iter().map(product).collect()
}

/// Records a round of products of DeepBurn or of `torch.matmul`: the rate of each, the fraction of
/// the limit if it was measured, and the weighted rate of all f32 products.
fn record(recorder: &mut RoundRecorder, products: &[MeasuredProduct], is_peer: bool) {
    for product in products {
        let row = if is_peer { product.peer_row() } else { product.row() };
        let mut found = Observations::of(Quantity::Arithmetic, product.gflops_median);
        if let Some(limit) = product.limit_gflops {
            found.push(Quantity::OfLimit, product.gflops_median / limit);
        }
        recorder.record(&row, is_peer, &found);
    }
    if let Some(rate) = rate_of_all(products) {
        let row = if is_peer { PEER_ALL_F32 } else { ALL_F32 };
        recorder.record(row, is_peer, &Observations::of(Quantity::Arithmetic, rate));
    }
}

/// Returns the rate of all f32 products in GFLOP/s, weighted as in a step. Returns `None` if there
/// are none.
///
/// It is the weighted harmonic mean of the rates, Σ share / Σ (share / rate), because the times of
/// the products add up. The loss head has `LOSS_HEAD_SHARE` of the operations, which are divided
/// equally among its products. The other operations are divided equally among the other products.
fn rate_of_all(products: &[MeasuredProduct]) -> Option<f64> {
    let f32 = || products.iter().filter(|product| product.dtype == "f32");
    let of_head = f32().filter(|product| product.is_of_loss_head()).count() as f64;
    let others = f32().count() as f64 - of_head;
    let share = |product: &MeasuredProduct| match product.is_of_loss_head() {
        true => LOSS_HEAD_SHARE / of_head,
        false => (1.0 - LOSS_HEAD_SHARE) / others,
    };
    let time: f64 = f32().map(|product| share(product) / product.gflops_median).sum();
    (time > 0.0).then(|| f32().map(share).sum::<f64>() / time)
}

/// Records a round of `torch.matmul` on the same products with the same number of threads.
///
/// The lines of `matmul.py` have no names, but they are in the order of its arguments.
///
/// # Errors
/// Returns an error if the script fails, or prints another number of products.
fn record_peer(
    suite: &Suite,
    recorder: &mut RoundRecorder,
    threads: usize,
    products: &[MeasuredProduct],
) -> Outcome<()> {
    let options = ["--threads", &threads.to_string(), "--repeats", suite.pick("10", "1")];
    let mut arguments = options.map(str::to_owned).to_vec();
    arguments.extend(products.iter().map(MeasuredProduct::argument));
    let peers = suite.peers_with(Script::MATMUL.packages)?;
    let output = peers.run(Script::MATMUL, 1, &arguments)?.output();
    let lines: Vec<Value> =
        output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut peers = parse(&lines)?;
    if peers.len() != products.len() {
        return Err(format!("{} rates for {} products", peers.len(), products.len()).into());
    }
    for (product, theirs) in products.iter().zip(&mut peers) {
        theirs.name.clone_from(&product.name);
    }
    record(recorder, &peers, true);
    Ok(())
}

/// Records a round of a training run: the rate of its products, and the rate of forward and
/// backward.
///
/// The first two of five steps are not counted. Micro-batches have 4 sequences of 128 tokens, for
/// which `LOSS_HEAD_SHARE` is valid.
///
/// # Errors
/// Returns an error if the run fails or has too few steps, or if its profile has no products.
fn record_step(suite: &Suite, recorder: &mut RoundRecorder) -> Outcome<()> {
    let (sequences, length) = (4, 128);
    let workload = Workload::gpt2_small(sequences, length);
    let job = BenchJob::new(&workload, &suite.tokens(&workload)?, 5)
        .set("deepspeed.profiling", json!({ "enabled": true, "profile_steps": [3, 5] }));
    let trained = suite.train(&job, suite.output()?, &[])?;
    let passes: Vec<_> =
        trained.rows.iter().skip(2).map(|row| row.seconds.forward + row.seconds.backward).collect();
    let seconds = median(&passes).ok_or("the run made no step that counts")?;
    let profile = fs::read_to_string(trained.output.path().join("run/profile/trace.json"))?;
    let rates = [
        (IN_STEP, rate_of_spans(&serde_json::from_str(&profile)?)?),
        (PASS, step_gflop(sequences * length, length) / seconds),
    ];
    for (row, rate) in rates {
        recorder.record(row, false, &Observations::of(Quantity::Arithmetic, rate));
    }
    Ok(())
}

/// An event of a profile that describes a product `[rows, depth] × [depth, columns]`.
#[derive(Debug, Deserialize)]
struct ProductSpan {
    /// Duration in microseconds.
    dur: f64,
    args: ProductShape,
}

/// The fields of a product's span.
#[derive(Debug, Deserialize)]
struct ProductShape {
    rows: f64,
    depth: f64,
    columns: f64,
}

/// Returns the operations of all products in a profile divided by their time, in GFLOP/s.
///
/// The run has one rank, and spans of a thread do not overlap, so the durations can be added up.
///
/// # Errors
/// Returns an error if the profile has no products, or if a product has no shape.
fn rate_of_spans(profile: &Value) -> Outcome<f64> {
    let (mut operations, mut microseconds) = (0.0, 0.0);
    let events = profile["traceEvents"].as_array().into_iter().flatten();
    for event in events.filter(|event| event["name"] == "matrix product") {
        let span: ProductSpan = serde_json::from_value(event.clone())?;
        let ProductShape { rows, depth, columns } = span.args;
        operations += 2.0 * rows * depth * columns;
        microseconds += span.dur;
    }
    if microseconds == 0.0 {
        return Err("the profile has no matrix products".into());
    }
    // One operation per microsecond is 1e-3 GFLOP/s.
    Ok(operations / microseconds * 1e-3)
}

/// Returns the operations of the products in forward and backward of GPT-2 124M, in units of 1e9.
///
/// `tokens` is the number of tokens of a micro-batch, and `length` the number of tokens of a
/// sequence. A product in forward has 2 operations per weight and token. For each of them, backward
/// has two products, the gradients of the input and of the weight. So there are 6 operations per
/// weight and token, plus attention. Activation checkpointing is disabled.
fn step_gflop(tokens: usize, length: usize) -> f64 {
    let (layers, width, vocabulary) = (12.0, 768.0, 50257.0);
    // Query, key and value, the projection of attention, and the two layers of the MLP have 3 + 1 +
    // 4 + 4 times the square of the width in weights.
    let block = 12.0 * width * width;
    // The attention scores, and their product with the values.
    let attention = 2.0 * length as f64 * width;
    3.0 * 2e-9 * tokens as f64 * (layers * (block + attention) + vocabulary * width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_read_and_summed_up() {
        let line = |name: &str, dtype: &str, shape: [usize; 3], rate: f64| {
            json!({ "name": name, "shape": shape, "dtype": dtype, "threads": 2, "gflops_median": rate,
                "spread": [1.0, 2.0], "limit_gflops": 200.0 })
        };
        let lines = [
            line("forward", "f32", [100, 100, 100], 100.0),
            line("input gradient", "f32", [100, 100, 100], 50.0),
            line("forward", "bf16", [768, 3072, 512], 300.0),
            line("weight gradient", "bf16", [768, 3072, 512], 300.0),
            line(LOSS_HEAD, "bf16", [256, 768, 50257], 300.0),
            line(LOSS_HEAD, "f32", [256, 768, 50257], 40.0),
            line("loss head, weight gradient", "f32", [50257, 256, 768], 80.0),
        ];
        let products = parse(&lines).expect("seven products");
        assert_eq!(products[2].row(), "bf16 forward, 768 × 3072 × 512");
        assert_eq!(products[2].argument(), "bf16:768x3072x512:nn");
        assert_eq!(products[4].argument(), "bf16:256x768x50257:nt");
        assert_eq!(products[6].argument(), "f32:50257x256x768:tn");
        let bound = products.iter().map(MeasuredProduct::is_bound).collect::<Vec<_>>();
        assert_eq!(bound, [false, false, true, false, true, false, false]);
        // The rate of the same work at 100 and at 50 GFLOP/s.
        let rate = rate_of_all(&products[..2]).expect("two in f32");
        assert!((rate - 200.0 / 3.0).abs() < 1e-9, "{rate}");
        let rate = rate_of_all(&products).expect("four in f32");
        let time = 0.345 / 100.0 + 0.345 / 50.0 + 0.155 / 40.0 + 0.155 / 80.0;
        assert!((rate - 1.0 / time).abs() < 1e-9, "{rate}");
        assert_eq!(rate_of_all(&products[2..5]), None);
        assert!(parse(&[json!({ "name": "x" })]).is_err());
    }

    #[test]
    fn the_rate_of_a_profile_is_its_products_rate() {
        let product = |dur: f64| {
            json!({ "name": "matrix product", "ph": "X", "ts": 0.0, "dur": dur,
            "args": { "rows": 100, "depth": 200, "columns": 50 } })
        };
        let phase = json!({ "name": "forward", "ph": "X", "ts": 0.0, "dur": 5e3, "args": {} });
        let profile = json!({ "traceEvents": [product(10.0), phase, product(30.0)] });
        // 2 × 2e6 operations in 40 microseconds are 1e11 per second.
        let rate = rate_of_spans(&profile).expect("two products");
        assert!((rate - 100.0).abs() < 1e-9, "{rate}");
        assert!(rate_of_spans(&json!({ "traceEvents": [] })).is_err());
    }

    #[test]
    fn a_step_has_six_operations_for_each_weight_and_token() {
        // 124M weights without 0.8M for positions, norms and biases, plus 2 % for attention over
        // 128 tokens.
        let gflop = step_gflop(512, 128);
        assert!((gflop / (6e-9 * 512.0 * 123.5e6) - 1.02).abs() < 0.01, "{gflop}");
        let loss_head = 6e-9 * 512.0 * 50257.0 * 768.0;
        assert!((loss_head / gflop - LOSS_HEAD_SHARE).abs() < 0.005, "{gflop}");
    }
}
