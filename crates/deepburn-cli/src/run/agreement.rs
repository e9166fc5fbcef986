//! Agreement of the processes of a job: whether all of them are ready for the next phase.
//!
//! A process that fails before training must not leave the others waiting in a collective. So all processes exchange
//! their exit statuses after each phase. Where ranks are threads there is one process, and nothing is exchanged.
//!
//! Messages are printed once. The process of the first failed rank prints its failure, and the others end with the same
//! status and without a message ([`Failure::Elsewhere`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use deepburn::comm::RankFailure;
use deepburn::{BoxError, Ranks};

use crate::failure::Failure;

/// Waits for the outcome of all processes. A failure of one is a failure of all, and the first of them prints why.
///
/// `what` names the phase for the message of a collective that fails. All processes have to call it in the
/// same order.
///
/// # Errors
/// The failure of this process, or [`Failure::Elsewhere`].
pub(crate) fn agree<T>(
    ranks: &Ranks,
    what: &'static str,
    outcome: Result<T, Failure>,
) -> Result<T, Failure> {
    let Some(placement) = ranks.placement() else { return outcome };
    // A failed process sends its exit status, a ready one sends nothing. Statuses are gathered in rank order, so all
    // processes agree on which failure is the first.
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

/// Prepares on one rank of each host, then on the others, which find downloads in the cache of the host.
///
/// On each host the process with local rank 0 goes first. The others then find its downloads and its
/// tokenized text in the caches, so no file is downloaded or tokenized twice on a host.
///
/// # Errors
/// The errors of [`agree`].
pub(crate) fn one_per_host_first<T>(
    ranks: &Ranks,
    prepare: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    // The first process downloads and tokenizes. The others wait for it and find both in the caches.
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

/// Checks that all processes see the folder that rank 0 writes to. Rank 0 creates a file there, and all look for it.
///
/// Without this check, ranks on other hosts would write their parts of a checkpoint to folders of their own,
/// and no checkpoint would ever be complete.
///
/// # Errors
/// A user's mistake, with the host that does not see the folder.
pub(crate) fn check_shared(ranks: &Ranks, folder: &Path) -> Result<(), Failure> {
    let Some(placement) = ranks.placement() else { return Ok(()) };
    let probe = ranks.has_first().then(|| write_probe(folder)).transpose();
    let probe = agree(ranks, "probe of the output folder", probe)?;
    let name = probe.as_ref().and_then(|probe| probe.file_name()).unwrap_or_default();
    let names = ranks.gather_bytes("name of the probe", name.as_encoded_bytes());
    let names = names.map_err(|failure| failure_of_rank(ranks, failure))?;
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
        // All processes have looked. A file that stays does no harm.
        let _ = fs::remove_file(probe);
    }
    agreed
}

/// Writes an empty file under a new name.
///
/// # Errors
/// A failure while running: the folder cannot be written to.
fn write_probe(folder: &Path) -> Result<PathBuf, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let probe = folder.join(format!(".shared-{}-{now}", std::process::id()));
    fs::write(&probe, b"").map_err(Failure::run)?;
    Ok(probe)
}

/// Returns the failure of a rank. Only the process of that rank prints it.
///
/// Threads are all in one process, which prints it in any case.
pub(crate) fn failure_of_rank<E: std::fmt::Display>(
    ranks: &Ranks,
    failure: RankFailure<E>,
) -> Failure {
    match ranks.placement() {
        Some(placement) if placement.rank != failure.rank => Failure::Elsewhere { status: 1 },
        _ => Failure::run(failure.to_string()),
    }
}

/// Adds rank and host to a failure, except on rank 0, whose messages need none.
///
/// A failure that was already reported elsewhere stays as it is.
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
