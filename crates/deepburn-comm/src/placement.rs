//! Detects which rank this process is, from the environment variables of its launcher.
//!
//! [`Placement::detect`] reads the variables that mpirun (Open MPI), mpiexec (MPICH, Intel MPI) and
//! srun (Slurm) set for each process. `None` means that no launcher started this process; it then
//! runs all ranks as threads. Incomplete, malformed or contradictory variables cause a
//! [`PlacementError`], because a process with the wrong rank would train on the wrong data.
//! `DEEPBURN_LAUNCHER=none|mpi|slurm` overrides the detection.

mod error;
mod variables;

use std::fmt;

pub use error::PlacementError;
use variables::{Number, Variables, World};

/// The environment variable that overrides the detection.
const OVERRIDE: &str = "DEEPBURN_LAUNCHER";

/// The variable that srun sets to the number of the job step.
const STEP_ID: &str = "SLURM_STEP_ID";

/// The first reserved job step. Slurm numbers the steps of srun upwards from 0 and reserves the
/// highest numbers: 4294967290 for the shell of `salloc`, 4294967291 for the script of `sbatch`,
/// 4294967292 for `extern`.
const FIRST_RESERVED_STEP: u32 = 0xffff_fff0;

/// The variables of Open MPI's mpirun.
const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
};

/// The variables of hydra, the process manager of MPICH and Intel MPI.
const MPICH: Names = Names {
    rank: "PMI_RANK",
    world_size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
};

/// The advice in errors about two launchers with contradictory variables.
const CHOOSE_ONE: &str = "unset the variables of the one that did not start this process, or set \
                          DEEPBURN_LAUNCHER to mpi or slurm to name the one that did";

/// A program that starts one process per rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and other implementations that use hydra.
    Mpich,
    /// `srun` of Slurm.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "mpirun of Open MPI",
            Self::Mpich => "mpiexec of MPICH",
            Self::Slurm => "srun of Slurm",
        })
    }
}

/// The position of this process among the processes of its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The launcher that started this process.
    pub launcher: Launcher,
    /// The rank of this process, below `world_size`.
    pub rank: usize,
    /// The number of processes on all hosts.
    pub world_size: usize,
    /// The rank of this process among the processes of its host, below `local_size`.
    pub local_rank: usize,
    /// The number of processes on this host.
    pub local_size: usize,
}

impl Placement {
    /// Reads the placement from the environment of this process. Returns `None` if no launcher
    /// started it.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::from_variables`].
    pub fn detect() -> Result<Option<Self>, PlacementError> {
        // A value that is not Unicode is not treated as unset: the lossy conversion gives a value
        // that fails the checks.
        Self::from_variables(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the placement from the variables that `get` returns. Returns `None` if no launcher
    /// started this process. An empty value counts as unset.
    ///
    /// # Errors
    /// Returns an error if
    ///
    /// - the variables of a launcher are incomplete, malformed or out of range,
    /// - two launchers disagree on the rank or the number of ranks,
    /// - torchrun or a PyTorch job operator started this process as one of several,
    /// - `DEEPBURN_LAUNCHER` has an unknown value, or names a launcher whose variables are not set.
    pub fn from_variables(
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, PlacementError> {
        let variables = Variables(&get);
        let Some(choice) = variables.text(OVERRIDE) else {
            return detected(&variables);
        };
        let (start, names) = match choice.as_str() {
            "none" => return Ok(None),
            "mpi" => (mpirun(&variables)?, "OMPI_COMM_WORLD_RANK or PMI_RANK with MPI_LOCALRANKID"),
            "slurm" => (slurm_task(&variables)?, "SLURM_PROCID"),
            _ => return Err(PlacementError::UnknownOverride { value: choice }),
        };
        match start {
            Some(start) => Ok(Some(start.placement())),
            None => Err(PlacementError::NotStarted { value: choice, names }),
        }
    }
}

/// The names of a launcher's four variables.
struct Names {
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

/// The numbers of one launcher with the names of their variables.
struct Start {
    launcher: Launcher,
    world: World,
    local: World,
}

impl Start {
    /// Reads the variables; `None` if the launcher set none of them.
    fn read(
        launcher: Launcher,
        names: &Names,
        variables: &Variables<'_>,
    ) -> Result<Option<Self>, PlacementError> {
        let all = [names.rank, names.world_size, names.local_rank, names.local_size];
        // One variable is enough to expect the others. Their absence is an error instead of a
        // single process.
        let Some(present) = all.into_iter().find(|name| variables.text(name).is_some()) else {
            return Ok(None);
        };
        let number = |name| variables.required(name, present, launcher);
        // Checked as pairs, so that an error names the rank and the size that do not fit.
        let world = World::new(number(names.rank)?, number(names.world_size)?)?;
        let local = World::new(number(names.local_rank)?, number(names.local_size)?)?;
        Ok(Some(Self { launcher, world, local }))
    }

    fn placement(&self) -> Placement {
        Placement {
            launcher: self.launcher,
            rank: self.world.rank.value,
            world_size: self.world.size.value,
            local_rank: self.local.rank.value,
            local_size: self.local.size.value,
        }
    }
}

/// Finds the innermost launcher.
///
/// mpirun is checked before srun. In a Slurm job, mpirun starts its daemons with srun, and the
/// ranks inherit the daemons' Slurm variables, which contain host numbers instead of rank numbers.
fn detected(variables: &Variables<'_>) -> Result<Option<Placement>, PlacementError> {
    let torch = variables.pair("RANK", "WORLD_SIZE")?;
    let start = match mpirun(variables)? {
        Some(start) => Some(start),
        None => srun(variables)?,
    };
    match (start, torch) {
        (Some(start), torch) => {
            // Scripts often set RANK and WORLD_SIZE from the launcher's variables. Different values
            // mean that there is a second launcher between this launcher and the process.
            if let Some(torch) = torch {
                start.world.agree(&torch, CHOOSE_ONE)?;
            }
            Ok(Some(start.placement()))
        }
        // Without this check, every process would train separately and write to the same folder.
        (None, Some(torch)) if torch.size.value > 1 => {
            Err(PlacementError::Torch { rank: torch.rank.value, world_size: torch.size.value })
        }
        // A single process that torchrun started trains alone anyway.
        (None, _) => Ok(None),
    }
}

/// Reads the variables of mpirun or mpiexec.
fn mpirun(variables: &Variables<'_>) -> Result<Option<Start>, PlacementError> {
    let open_mpi = Start::read(Launcher::OpenMpi, &OPEN_MPI, variables)?;
    // These PMI variables describe tasks of Slurm, which the function `srun` reads.
    let mpich = match pmi_of_srun(variables) {
        true => None,
        false => Start::read(Launcher::Mpich, &MPICH, variables)?,
    };
    if let (Some(open_mpi), Some(mpich)) = (&open_mpi, &mpich) {
        open_mpi.world.agree(
            &mpich.world,
            "start the job with one of the two, and unset the variables of the other",
        )?;
    }
    Ok(open_mpi.or(mpich))
}

/// Returns true if PMI_RANK and PMI_SIZE come from `srun --mpi=pmi2`. hydra also sets
/// MPI_LOCALRANKID, but srun does not.
fn pmi_of_srun(variables: &Variables<'_>) -> bool {
    variables.text(STEP_ID).is_some() && variables.text(MPICH.local_rank).is_none()
}

/// Reads the variables of srun; `None` if srun did not start this process.
///
/// The batch script of `sbatch` and the shell of `salloc` also have SLURM_PROCID=0 and the job's
/// number of tasks, although they are not tasks. They can only be distinguished by the step number.
fn srun(variables: &Variables<'_>) -> Result<Option<Start>, PlacementError> {
    let step = variables.text(STEP_ID).and_then(|step| step.parse::<u32>().ok());
    if step.is_none_or(|step| step >= FIRST_RESERVED_STEP) {
        return Ok(None);
    }
    let start = slurm_task(variables)?;
    if let (Some(start), Some(pmi)) = (&start, variables.pair(MPICH.rank, MPICH.world_size)?) {
        start.world.agree(&pmi, CHOOSE_ONE)?;
    }
    Ok(start)
}

/// Reads the task that Slurm's variables describe; `None` outside Slurm jobs.
fn slurm_task(variables: &Variables<'_>) -> Result<Option<Start>, PlacementError> {
    // srun sets both. A step may have fewer tasks than the job in which it runs.
    let of_step_or_job = |step, job| if variables.text(step).is_some() { step } else { job };
    let present = match variables.text(STEP_ID) {
        Some(_) => STEP_ID,
        None if variables.text("SLURM_PROCID").is_some() => "SLURM_PROCID",
        None => return Ok(None),
    };
    let number = |name| variables.required(name, present, Launcher::Slurm);
    let size = number(of_step_or_job("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))?;
    let world = World::new(number("SLURM_PROCID")?, size)?;

    let tasks = of_step_or_job("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
    // Slurm gives the numbers of tasks as a list over all nodes.
    let list = variables.required_text(tasks, present, Launcher::Slurm)?;
    let local_size = tasks_of_node(tasks, &list, number("SLURM_NODEID")?)?;
    let local = World::new(number("SLURM_LOCALID")?, Number { name: tasks, value: local_size })?;
    Ok(Some(Start { launcher: Launcher::Slurm, world, local }))
}

/// Returns the entry of `node` in a list such as `2(x3),1`, which means 2 tasks on each of three
/// nodes and 1 task on the fourth node.
fn tasks_of_node(name: &'static str, list: &str, node: Number) -> Result<usize, PlacementError> {
    let malformed = |rule: String| PlacementError::Malformed { name, value: list.to_owned(), rule };
    let mut nodes = 0_usize;
    for entry in list.split(',') {
        let (tasks, repeated) = match entry.split_once("(x") {
            Some((tasks, rest)) => (tasks, rest.strip_suffix(')').and_then(|n| n.parse().ok())),
            None => (entry, Some(1_usize)),
        };
        let (Ok(tasks), Some(repeated)) = (tasks.parse(), repeated) else {
            return Err(malformed("must be the tasks of each node, such as 2(x3),1".to_owned()));
        };
        // A malformed list may repeat an entry more often than a number can hold.
        nodes = nodes.saturating_add(repeated);
        if node.value < nodes {
            return Ok(tasks);
        }
    }
    Err(malformed(format!(
        "must have an entry for each node, but it has {nodes} and {} is {}",
        node.name, node.value
    )))
}
