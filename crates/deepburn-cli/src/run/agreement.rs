//! Agreement between the processes of a job on whether all of them are ready for the next phase.
//!
//! A process that fails before training must not leave the others waiting in a collective. So all
//! processes exchange their exit statuses after each phase. If ranks are threads, there is only one
//! process, and nothing is exchanged.
//!
//! Messages are printed once. The process of the first failed rank prints its failure, and the
//! others exit with the same status and without a message ([`Failure::Elsewhere`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use deepburn::comm::{FailureCause, RankFailure};
use deepburn::{BoxError, Ranks};

use crate::failure::Failure;
use crate::job::device_panics;

/// Waits for the outcome of all processes. If one process fails, all of them fail, and the first
/// failed one prints the reason.
///
/// `what` names the phase in the error of a failed collective. All processes have to call this
/// function in the same order.
///
/// # Errors
/// Returns the failure of this process, or [`Failure::Elsewhere`] if another process failed first.
pub(crate) fn agree<T>(
    ranks: &Ranks,
    what: &'static str,
    outcome: Result<T, Failure>,
) -> Result<T, Failure> {
    let Some(placement) = ranks.placement() else { return outcome };
    // A failed process sends its exit status, and a ready one sends nothing. Statuses are gathered
    // in rank order, so all processes agree on which failure is the first.
    let status: Vec<u8> = outcome.as_ref().err().map(Failure::status).into_iter().collect();
    let statuses =
        ranks.gather_bytes(what, &status).map_err(|failure| failure_of_rank(ranks, failure))?;
    let first =
        statuses.iter().enumerate().find_map(|(rank, status)| Some((rank, *status.first()?)));
    match (first, outcome) {
        (None, outcome) => outcome,
        (Some((rank, _)), Err(failure)) if rank == placement.rank => Err(with_rank(ranks, failure)),
        (Some((_, status)), _) => Err(Failure::Elsewhere { status }),
    }
}

/// Calls `prepare` on local rank 0 of each host first, then on the other ranks.
///
/// The other ranks find the downloads and the tokenized text of local rank 0 in the caches, so that
/// no file is downloaded or tokenized twice on a host.
///
/// # Errors
/// Returns the errors of [`agree`].
pub(crate) fn one_per_host_first<T>(
    ranks: &Ranks,
    prepare: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    // Both branches call `agree` twice, because all processes have to take part in both exchanges.
    let leads = ranks.placement().is_none_or(|placement| placement.local_rank == 0);
    match leads {
        true => {
            let prepared = agree(ranks, "preparation of each host", prepare())?;
            agree(ranks, "preparation", Ok(prepared))
        }
        false => {
            agree(ranks, "preparation of each host", Ok(()))?;
            agree(ranks, "preparation", prepare())
        }
    }
}

/// Checks that all processes see the folder that rank 0 writes to. Rank 0 creates a file there, and
/// all processes check that it exists.
///
/// Without this check, ranks on other hosts could write their parts of a checkpoint to local
/// folders, and no checkpoint would ever be complete.
///
/// # Errors
/// Returns a user's mistake that names the host which does not see the folder.
pub(crate) fn check_shared(ranks: &Ranks, folder: &Path) -> Result<(), Failure> {
    let Some(placement) = ranks.placement() else { return Ok(()) };
    let probe = ranks.has_first().then(|| write_probe(folder)).transpose();
    // All processes wait until the file is written.
    let probe = agree(ranks, "probe of the output folder", probe)?;
    let name = probe.as_ref().and_then(|probe| probe.file_name()).unwrap_or_default();
    let names = ranks.gather_bytes("name of the probe", name.as_encoded_bytes());
    let names = names.map_err(|failure| failure_of_rank(ranks, failure))?;
    // Rank 0 wrote the file; the other ranks sent empty names.
    let name = String::from_utf8_lossy(&names[0]).into_owned();
    let host = ranks.host(placement.rank);
    let seen = match folder.join(&name).exists() {
        true => Ok(()),
        false => Err(Failure::mistake(format!(
            "training.output_dir: {} is not the folder that rank 0 writes to{}; give a folder that all hosts share, \
             under the same path",
            folder.display(),
            host.map(|host| format!(" (seen from {host})")).unwrap_or_default()
        ))),
    };
    let agreed = agree(ranks, "output folder", seen);
    if let Some(probe) = probe {
        // All processes have checked by now. If the file cannot be removed, it does no harm.
        let _ = fs::remove_file(probe);
    }
    agreed
}

/// Writes an empty file under a new name.
///
/// # Errors
/// Returns a failure while running if the folder cannot be written to.
fn write_probe(folder: &Path) -> Result<PathBuf, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let probe = folder.join(format!(".shared-{}-{now}", std::process::id()));
    fs::write(&probe, b"").map_err(Failure::run)?;
    Ok(probe)
}

/// Returns the failure of a rank. Only the process of that rank prints it.
///
/// If ranks are threads, their only process prints it in any case.
pub(crate) fn failure_of_rank<E: std::fmt::Display>(
    ranks: &Ranks,
    failure: RankFailure<E>,
) -> Failure {
    match ranks.placement() {
        Some(placement) if placement.rank != failure.rank => Failure::Elsewhere { status: 1 },
        _ => match device_panics::behind(&failure.cause) {
            // The error of a read from a device does not say what happened before.
            Some(fault) => {
                let cause = FailureCause::Error(fault);
                Failure::run(RankFailure { rank: failure.rank, host: failure.host, cause })
            }
            None => {
                let mut message = failure.to_string();
                message.push_str(&device_panics::as_cause_of(&message));
                Failure::run(message)
            }
        },
    }
}

/// Adds rank and host to a failure, except on rank 0, whose messages need none.
///
/// A failure that another process reports is returned unchanged.
fn with_rank(ranks: &Ranks, failure: Failure) -> Failure {
    let Some(placement) = ranks.placement().filter(|placement| placement.rank != 0) else {
        return failure;
    };
    let host = ranks.host(placement.rank).unwrap_or_default();
    let at = |error: BoxError| format!("rank {} on {host}: {error}", placement.rank).into();
    match failure {
        Failure::Mistake(error) => Failure::Mistake(at(error)),
        Failure::Run(error) => Failure::Run(at(error)),
        other => other,
    }
}
