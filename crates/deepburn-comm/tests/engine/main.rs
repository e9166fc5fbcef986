//! Tests of the in-process engine with rank threads: collectives, messages, subgroups and failures.

mod collectives;
mod deadlocks;
mod failures;
mod memory;
mod messages;
mod order;
mod ranks;
mod schedules;
mod stress;
mod subgroups;

use std::time::Duration;

use deepburn_comm::{CollectiveTag, CommError, Host, Member, ProcessGroup, ReduceOp, run_ranks};

/// A time-out that is only reached if a test hangs.
const LONG: Duration = Duration::from_secs(60);

const TAG: CollectiveTag = CollectiveTag::new("test", 0);

type Floats = Host<f32>;

/// Runs `body` on every rank and panics if a rank fails.
fn on_ranks<R: Send>(
    world_size: usize,
    body: impl Fn(&Member) -> Result<R, CommError> + Sync,
) -> Vec<R> {
    run_ranks(world_size, LONG, |member| body(&member))
        .unwrap_or_else(|failure| panic!("{failure}"))
}

/// Returns a list with one array.
fn array(values: Vec<f32>) -> Vec<Floats> {
    vec![values.into()]
}

/// Runs an all-reduce of one array and waits for the result.
fn sum(member: &Member, tag: CollectiveTag, values: Vec<f32>) -> Result<Vec<f32>, CommError> {
    Ok(member.all_reduce(tag, array(values), ReduceOp::Sum)?.wait()?.remove(0).into_vec())
}
