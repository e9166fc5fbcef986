//! The in-process engine, used as ranks use it: threads, collectives, failures.

mod collectives;
mod failures;
mod memory;
mod order;
mod ranks;
mod stress;

use std::time::Duration;

use deepburn_comm::{CollectiveTag, CommError, Host, Member, ProcessGroup, ReduceOp, run_ranks};

/// Long enough that no test reaches it unless something hangs.
const LONG: Duration = Duration::from_secs(60);

const TAG: CollectiveTag = CollectiveTag::new("test", 0);

type Floats = Host<f32>;

/// Runs `body` on every rank; none may fail.
fn on_ranks<R: Send>(
    world_size: usize,
    body: impl Fn(&Member) -> Result<R, CommError> + Sync,
) -> Vec<R> {
    run_ranks(world_size, LONG, |member| body(&member))
        .unwrap_or_else(|failure| panic!("{failure}"))
}

/// One array from a vector.
fn array(values: Vec<f32>) -> Vec<Floats> {
    vec![values.into()]
}

/// All-reduce of one array, waited for.
fn sum(member: &Member, tag: CollectiveTag, values: Vec<f32>) -> Result<Vec<f32>, CommError> {
    Ok(member.all_reduce(tag, array(values), ReduceOp::Sum)?.wait()?.remove(0).into_vec())
}
