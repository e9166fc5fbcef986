//! Predicted step times over a range of ranks, for `deepburn estimate --network`.
//!
//! Main type: [`ScalingArguments`], the options for the machine and the network. Figures that are
//! not given are measured on this machine ([`machine_speed`]) or assumed, and the output states the
//! source of each. The cost model of a step is [`cost`](deepburn::cost).
//!
//! With a network, each rank has its own hardware, and the step time would ideally stay the same as
//! ranks are added. Rank threads share the FLOP/s and the memory bandwidth of one machine, so the
//! step time is ideally proportional to their number. The efficiency of a row is relative to this
//! ideal.
//!
//! `deepburn estimate --ranks 4 --network 100Gb --flops 150T --memory-bandwidth 1.5TB` prints the
//! tables for GPT-2 small.

mod quantity;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use burn_flex::{Flex, FlexDevice};
use clap::Args;
use deepburn::comm::{Count, Statistics};
use deepburn::cost::{Links, Network, RankSpeed, SharedCores, StepCost, UnknownBandwidth};
use deepburn::{
    MeasuredSizes, dtype_of, machine_speed, shared_by_threads, shared_cores, thread_latency,
};
use deepburn_config::{Precision, Stage, counted};
use deepburn_models::BatchShape;
use serde_json::{Value, json};

use crate::failure::Failure;
use quantity::{NetworkKind, bandwidth, flops, network, seconds};

/// Default latency in seconds: small MPI messages take 1 to 2 µs on InfiniBand and 10 to 30 µs over
/// TCP.
const ASSUMED_LATENCY: f64 = 5e-6;

/// Source of a measured figure.
const MEASURED: &str = "measured on this machine";

/// Maximum number of ranks of a prediction. No cluster has more, and numbers of tokens and bytes do
/// not overflow.
const MAX_RANKS: u64 = 1 << 20;

/// The machine and the network of the predicted step times.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ScalingArguments {
    /// Predict step times from 1 rank to --ranks with this bandwidth per machine and second, such
    /// as 100Gb (gigabits) or 12.5GB (gigabytes), or with `threads` for rank threads on this
    /// machine.
    #[arg(long, value_name = "RATE", value_parser = network)]
    network: Option<NetworkKind>,
    /// Latency of a message [default: 5us; measured with `threads`].
    #[arg(long, value_name = "TIME", value_parser = seconds, requires = "network")]
    latency: Option<f64>,
    /// Ranks that share a machine and its link [default: 1].
    #[arg(long, value_name = "N", requires = "local_bandwidth", value_parser = clap::value_parser!(u64).range(1..))]
    ranks_per_machine: Option<u64>,
    /// Bandwidth between ranks of one machine, per rank and second, such as 300GB.
    #[arg(long, value_name = "RATE", value_parser = bandwidth, requires = "network")]
    local_bandwidth: Option<f64>,
    /// FLOP/s of matrix products on a rank, such as 150T [default: measured on this machine].
    #[arg(long, value_name = "RATE", value_parser = flops, requires = "network")]
    flops: Option<f64>,
    /// Memory bandwidth of a rank per second, reads and writes together, such as 1.5TB [default:
    /// measured on this machine].
    #[arg(long, value_name = "RATE", value_parser = bandwidth, requires = "network")]
    memory_bandwidth: Option<f64>,
    /// Bandwidth between device and host memory of a rank, for states or activations that are
    /// offloaded to the host.
    #[arg(long, value_name = "RATE", value_parser = bandwidth, requires = "network")]
    host_bandwidth: Option<f64>,
    /// Bandwidth of a rank's disk, reads and writes together, for states or activations that are
    /// offloaded to NVMe.
    #[arg(long, value_name = "RATE", value_parser = bandwidth, requires = "network")]
    disk_bandwidth: Option<f64>,
}

/// Measures the speed of this machine with the sizes of `workload` on `ranks` ranks together.
fn measured(workload: &RankWorkload, ranks: u64) -> RankSpeed {
    let tokens = workload.batch.sequences.saturating_mul(workload.batch.length);
    let sizes = MeasuredSizes {
        rows: tokens.saturating_mul(ranks),
        // Each of several ranks multiplies its own rows only.
        fewest_rows: tokens,
        width: workload.width,
        dtype: dtype_of(workload.precision),
    };
    machine_speed::<Flex>(&FlexDevice, sizes)
}

/// Returns the error of a step whose time depends on a bandwidth that was not given.
pub(crate) fn unpredicted(unknown: UnknownBandwidth) -> Failure {
    let option = match unknown {
        UnknownBandwidth::Host => "--host-bandwidth",
        UnknownBandwidth::Disk => "--disk-bandwidth",
    };
    Failure::mistake(format!("--network: {unknown}; give {option}, such as 2GB"))
}

/// The work of a rank in a step. How much of its peak performance a machine reaches depends on
/// these sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankWorkload {
    /// Micro-batch of a rank.
    pub(crate) batch: BatchShape,
    /// Width of the residual stream.
    pub(crate) width: u64,
    /// Type of matrix products.
    pub(crate) precision: Precision,
    /// Micro-batches of a step.
    pub(crate) micro_batches: u64,
}

/// The machine and the network, with the source of each figure.
#[derive(Debug)]
pub(crate) struct Speed {
    /// The speed of a rank, or of all rank threads together.
    rank: RankSpeed,
    /// Links between machines, or threads.
    pub(crate) network: Network,
    /// Sources of FLOP/s, memory bandwidth and latency.
    sources: [&'static str; 3],
    /// The work for which the speed was measured.
    pub(crate) workload: RankWorkload,
}

/// One row of the table.
#[derive(Debug)]
pub(crate) struct ScalingRow {
    /// Peak memory of a rank, in bytes.
    pub(crate) memory: u64,
    /// Times of the step, in seconds.
    pub(crate) cost: StepCost,
    /// The collectives of the step.
    pub(crate) collectives: Statistics,
}

impl ScalingArguments {
    /// Returns whether step times are requested.
    pub(crate) fn is_given(&self) -> bool {
        self.network.is_some()
    }

    /// Returns the speed of machine and network; `None` without `--network`.
    ///
    /// # Errors
    /// Returns a user's mistake if options conflict, or a failure while running if threads for a
    /// measurement cannot be started.
    pub(crate) fn speed(
        &self,
        workload: &RankWorkload,
        ranks: u64,
    ) -> Result<Option<Speed>, Failure> {
        let Some(kind) = self.network else { return Ok(None) };
        self.check(kind, ranks)?;
        let is_threads = kind == NetworkKind::Threads;
        let measured = match (self.flops, self.memory_bandwidth) {
            (Some(_), Some(_)) => None,
            // Rank threads share the caches, so the measured arrays are as large as the arrays of
            // all ranks.
            _ => Some(measured(workload, if is_threads { ranks } else { 1 })),
        };
        let figure =
            |given: Option<f64>, option, of: fn(&RankSpeed) -> f64| match (given, &measured) {
                (None, Some(measured)) => (of(measured), MEASURED),
                (given, _) => (given.unwrap_or_default(), option),
            };
        let (flops, flops_source) = figure(self.flops, "--flops", |it| it.flops);
        let (memory_bandwidth, memory_source) =
            figure(self.memory_bandwidth, "--memory-bandwidth", |it| it.memory_bandwidth);
        let (latency, latency_source) = match self.latency {
            Some(latency) => (latency, "--latency"),
            None if is_threads => (thread_latency(ranks as usize).map_err(Failure::run)?, MEASURED),
            None => (ASSUMED_LATENCY, "assumed"),
        };
        // With one rank per machine, the local bandwidth is never used.
        let network = match kind {
            NetworkKind::Threads => Network::Threads { latency },
            NetworkKind::Links { bandwidth } => Network::Links(Links {
                bandwidth,
                latency,
                ranks_per_machine: self.ranks_per_machine.unwrap_or(1),
                local_bandwidth: self.local_bandwidth.unwrap_or(bandwidth),
            }),
        };
        let rank = RankSpeed {
            // Given figures describe another machine, for which no overhead is known.
            op_seconds: measured.as_ref().map_or(0.0, |it| it.op_seconds),
            operand_bandwidth: match (self.flops, &measured) {
                (None, Some(measured)) => measured.operand_bandwidth,
                _ => f64::INFINITY,
            },
            host_bandwidth: self.host_bandwidth,
            disk_bandwidth: self.disk_bandwidth,
            ..RankSpeed::new(flops, memory_bandwidth)
        };
        let sources = [flops_source, memory_source, latency_source];
        Ok(Some(Speed { rank, network, sources, workload: *workload }))
    }

    /// Checks the options of a prediction against the network.
    ///
    /// # Errors
    /// Returns a user's mistake if options conflict.
    fn check(&self, kind: NetworkKind, ranks: u64) -> Result<(), Failure> {
        let is_threads = kind == NetworkKind::Threads;
        if ranks > MAX_RANKS {
            return Err(Failure::mistake(format!(
                "--ranks: too many: {ranks}; use at most {MAX_RANKS} with --network"
            )));
        }
        if !is_threads && self.local_bandwidth.is_some() && self.ranks_per_machine.is_none() {
            return Err(Failure::mistake(
                "--local-bandwidth: no effect with one rank per machine; give --ranks-per-machine, or remove the option",
            ));
        }
        if is_threads && self.local_bandwidth.is_some() {
            return Err(Failure::mistake(
                "--local-bandwidth: no effect on threads, which share memory; remove the option, or give --network a \
                 bandwidth",
            ));
        }
        Ok(())
    }
}

impl Speed {
    /// Returns the speed of each rank if there are `ranks` ranks.
    pub(crate) fn rank_speed(&self, ranks: u64) -> RankSpeed {
        match self.network {
            Network::Threads { latency } => shared_by_threads(self.rank, latency, ranks as usize).0,
            Network::Links(_) => self.rank,
        }
    }

    /// Returns two lines with the figures that the predictions are based on, the speed and the
    /// network. Each figure has its source.
    pub(crate) fn lines(&self) -> Vec<String> {
        let [flops, memory, latency] = self.sources;
        let RankSpeed { flops: rate, operand_bandwidth, memory_bandwidth, .. } = self.rank;
        let shared = match self.network {
            Network::Threads { .. } => "all ranks together",
            Network::Links(_) => "a rank",
        };
        // Infinite unless it is measured.
        let operands = match operand_bandwidth.is_finite() {
            true => format!(", operands {} ({MEASURED})", scaled(operand_bandwidth, "B/s")),
            false => String::new(),
        };
        let speed = format!(
            "speed of {shared}: {} in {} ({flops}){operands}, memory {} ({memory})",
            scaled(rate, "FLOP/s"),
            self.workload.precision.name(),
            scaled(memory_bandwidth, "B/s"),
        );
        let network = match self.network {
            Network::Threads { latency: time } => {
                format!(
                    "network: threads of this machine, {:.1} us per rank ({latency})",
                    time * 1e6
                )
            }
            Network::Links(links) => {
                let mut text = format!("network: {} per machine", scaled(links.bandwidth, "B/s"));
                if links.ranks_per_machine > 1 {
                    text.push_str(&format!(
                        " of {} ranks, {} per rank inside",
                        links.ranks_per_machine,
                        scaled(links.local_bandwidth, "B/s"),
                    ));
                }
                format!("{text}, {:.1} us per message ({latency})", links.latency * 1e6)
            }
        };
        vec![speed, network]
    }

    /// Returns the figures as JSON.
    pub(crate) fn record(&self) -> Value {
        let [flops, memory, latency] = self.sources;
        let mut record = json!({
            "flops": { "value": self.rank.flops, "source": flops },
            "memory_bandwidth": { "value": self.rank.memory_bandwidth, "source": memory },
        });
        let (kind, seconds) = match self.network {
            Network::Threads { latency } => ("threads", latency),
            Network::Links(links) => {
                record["bandwidth"] = json!({ "value": links.bandwidth, "source": "--network" });
                record["ranks_per_machine"] = json!(links.ranks_per_machine);
                record["local_bandwidth"] = json!(links.local_bandwidth);
                ("links", links.latency)
            }
        };
        for (name, rate) in [
            ("host_bandwidth", self.rank.host_bandwidth),
            ("disk_bandwidth", self.rank.disk_bandwidth),
        ] {
            if let Some(rate) = rate {
                record[name] =
                    json!({ "value": rate, "source": format!("--{}", name.replace('_', "-")) });
            }
        }
        record["network"] = json!(kind);
        record["latency"] = json!({ "value": seconds, "source": latency });
        record
    }

    /// Returns the cores that the ranks share; `None` if each rank has hardware of its own.
    pub(crate) fn cores(&self) -> Option<SharedCores> {
        match self.network {
            Network::Threads { .. } => Some(shared_cores()),
            Network::Links(_) => None,
        }
    }

    /// Returns the throughput of all ranks together.
    fn tokens_per_second(&self, cost: &StepCost) -> f64 {
        self.workload.tokens_per_second(cost.ranks, cost.seconds)
    }

    /// Returns the scaling efficiency of a row: the ideal step time, divided by the predicted one.
    ///
    /// It is 1 if the throughput per machine is the same as with one rank.
    fn efficiency(&self, row: &StepCost, one: &StepCost) -> f64 {
        // Threads share the hardware, so the ideal step time is proportional to their number.
        let ideal = match self.network {
            Network::Threads { .. } => one.seconds * row.ranks as f64,
            Network::Links(_) => one.seconds,
        };
        ideal / row.seconds
    }
}

/// Returns the powers of two below `ranks`, followed by `ranks`.
pub(crate) fn rank_counts(ranks: u64) -> Vec<u64> {
    let powers = (0..u64::BITS).map(|power| 1_u64 << power);
    powers.take_while(|count| *count < ranks).chain([ranks]).collect()
}

/// Returns the table of a stage.
///
/// Memory is in GB (1e9 bytes), times are in seconds per step, and the throughput is the sum over
/// all ranks. *Hidden* is the communication time that overlaps with computation.
pub(crate) fn table(stage: Stage, rows: &[ScalingRow], speed: &Speed) -> Vec<String> {
    let mut lines = vec![
        format!("step time, stage {}", stage.number()),
        format!(
            "  {:>6}{:>10}{:>11}{:>11}{:>17}{:>10}{:>10}{:>12}{:>12}",
            "ranks",
            "GB/rank",
            "compute s",
            "offload s",
            "communication s",
            "hidden s",
            "step s",
            "tokens/s",
            "efficiency"
        ),
    ];
    for ScalingRow { memory, cost, .. } in rows {
        lines.push(format!(
            "  {:>6}{:>10.2}{:>11.4}{:>11.4}{:>17.4}{:>10.4}{:>10.4}{:>12.0}{:>11.1}%",
            cost.ranks,
            *memory as f64 / 1e9,
            cost.compute,
            cost.offload,
            cost.communication,
            cost.hidden,
            cost.seconds,
            speed.tokens_per_second(cost),
            100.0 * speed.efficiency(cost, &rows[0].cost),
        ));
    }
    lines
}

/// Returns the rows of a stage as JSON, in bytes and seconds.
pub(crate) fn records(rows: &[ScalingRow], speed: &Speed) -> Value {
    let record = |ScalingRow { memory, cost, collectives }: &ScalingRow| {
        // A purpose occurs once for each operation, element type and group.
        let mut counts = BTreeMap::<&str, Count>::new();
        for (_, purpose, count) in collectives.iter() {
            let sum = counts.entry(purpose).or_default();
            sum.calls += count.calls;
            sum.elements += count.elements;
        }
        let collectives = counts.into_iter().map(|(purpose, count)| {
            (purpose.to_owned(), json!({ "calls": count.calls, "elements": count.elements }))
        });
        json!({
            "ranks": cost.ranks,
            "memory": memory,
            "compute_seconds": cost.compute,
            "offload_seconds": cost.offload,
            "communication_seconds": cost.communication,
            "hidden_seconds": cost.hidden,
            "step_seconds": cost.seconds,
            "bytes_sent": cost.bytes_sent,
            "tokens_per_second": speed.tokens_per_second(cost),
            "efficiency": speed.efficiency(cost, &rows[0].cost),
            "collectives": collectives.collect::<serde_json::Map<_, _>>(),
        })
    };
    rows.iter().map(record).collect()
}

impl RankWorkload {
    /// Returns the tokens per second of `ranks` data-parallel ranks whose step takes `seconds`.
    pub(crate) fn tokens_per_second(&self, ranks: u64, seconds: f64) -> f64 {
        let Self { batch, micro_batches, .. } = self;
        (ranks * micro_batches * batch.sequences * batch.length) as f64 / seconds
    }

    /// Describes the work of a rank in one line. `flops` is the number of operations of a step.
    pub(crate) fn line(&self, flops: u64) -> String {
        let Self { batch, micro_batches, .. } = self;
        format!(
            "step of a rank: {} of {} x {} tokens, {}",
            counted(*micro_batches as usize, "micro-batch"),
            batch.sequences,
            batch.length,
            scaled(flops as f64, "FLOP"),
        )
    }
}

/// Formats a figure with a decimal prefix.
fn scaled(value: f64, unit: &str) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match prefixes.iter().find(|(factor, _)| value >= *factor) {
        Some((factor, prefix)) => format!("{:.2} {prefix}{unit}", value / factor),
        None => format!("{value:.2} {unit}"),
    }
}
