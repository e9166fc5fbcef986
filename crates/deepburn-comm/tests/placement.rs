//! Environment variables of launchers, and the placements that are read from them.

use std::process::Command;

use deepburn_comm::{Launcher, Placement, PlacementError};

type Environment<'a> = &'a [(&'a str, &'a str)];

/// Rank 2 of `mpirun -np 3` (Open MPI 4.1.4, one host).
const OPEN_MPI: Environment<'static> = &[
    ("OMPI_APP_CTX_NUM_PROCS", "3"),
    ("OMPI_COMMAND", "env"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
    ("OMPI_COMM_WORLD_NODE_RANK", "2"),
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "3"),
    ("OMPI_UNIVERSE_SIZE", "2"),
    ("PMIX_NAMESPACE", "113573889"),
    ("PMIX_RANK", "2"),
    ("PMIX_VERSION", "4.2.2rc2"),
];

/// Rank 2 of `mpiexec.hydra -np 3` (MPICH 4.0.2, one host).
const HYDRA: Environment<'static> = &[
    ("GFORTRAN_UNBUFFERED_PRECONNECTED", "y"),
    ("HYDI_CONTROL_FD", "7"),
    ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "vm"),
    ("MPI_LOCALNRANKS", "3"),
    ("MPI_LOCALRANKID", "2"),
    ("PMI_FD", "14"),
    ("PMI_RANK", "2"),
    ("PMI_SIZE", "3"),
];

/// Rank 5 of 8 of Intel MPI, 4 on each of two hosts.
const INTEL: Environment<'static> = &[
    ("I_MPI_HYDRA_UUID", "bb3b0000-bc1e-4f00-8e10-060000000000"),
    ("I_MPI_INFO_NUMA_NODE_NUM", "2"),
    ("MPI_LOCALNRANKS", "4"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "9"),
    ("PMI_RANK", "5"),
    ("PMI_SIZE", "8"),
];

/// Rank 6 of `srun --mpi=pmix -N 4 -n 7`: two tasks on each of three nodes, one on the last.
const SRUN_PMIX: Environment<'static> = &[
    ("PMIX_NAMESPACE", "slurm.pmix.24471977.0"),
    ("PMIX_RANK", "6"),
    ("SLURM_GTIDS", "6"),
    ("SLURM_JOB_ID", "24471977"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_MPI_TYPE", "pmix"),
    ("SLURM_NNODES", "4"),
    ("SLURM_NODEID", "3"),
    ("SLURM_NPROCS", "7"),
    ("SLURM_NTASKS", "7"),
    ("SLURM_PMIX_MAPPING_SERV", "(vector,(0,3,2),(3,1,1))"),
    ("SLURM_PROCID", "6"),
    ("SLURM_STEPID", "0"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_NODES", "4"),
    ("SLURM_STEP_NUM_TASKS", "7"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
    ("SLURM_TASKS_PER_NODE", "2(x3),1"),
];

/// Rank 3 of `srun --mpi=pmi2 -N 2 -n 4`.
const SRUN_PMI2: Environment<'static> = &[
    ("PMI_FD", "8"),
    ("PMI_JOBID", "512.3"),
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
    ("SLURM_JOB_ID", "512"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "3"),
    ("SLURM_STEP_ID", "3"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
];

/// The script of `sbatch -N 2 -n 4`, which srun did not start.
const SBATCH: Environment<'static> = &[
    ("ENVIRONMENT", "BATCH"),
    ("SLURM_GTIDS", "0"),
    ("SLURM_JOB_ID", "513"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NPROCS", "4"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "0"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_TASK_PID", "26431"),
];

/// The shell of `salloc` on the login node.
const SALLOC: Environment<'static> = &[
    ("SLURM_JOB_ID", "514"),
    ("SLURM_JOB_NODELIST", "node[1-2]"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
];

/// The shell of `salloc` on the first node (`use_interactive_step`). Its step has a number that
/// Slurm reserves.
const SALLOC_INTERACTIVE: Environment<'static> = &[
    ("PMI_RANK", "0"),
    ("PMI_SIZE", "1"),
    ("SLURM_JOB_ID", "1717712"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEPID", "4294967290"),
    ("SLURM_STEP_ID", "4294967290"),
    ("SLURM_STEP_NUM_TASKS", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ("SLURM_TASKS_PER_NODE", "8"),
];

/// Rank 3 of `mpirun -np 4 --map-by node` (Open MPI) in a job of two nodes. Its daemon is task 0 of
/// a step with one task on the second node, and was given PMI's variables by srun.
const MPIRUN_IN_SBATCH: Environment<'static> = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("PMI_RANK", "0"),
    ("PMI_SIZE", "1"),
    ("SLURM_JOB_ID", "515"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NTASKS", "1"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEP_ID", "5"),
    ("SLURM_STEP_NUM_TASKS", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ("SLURM_TASKS_PER_NODE", "1"),
];

/// Rank 3 of hydra's `mpiexec -np 4` in a job of two nodes: its proxy is a task of srun.
const HYDRA_IN_SBATCH: Environment<'static> = &[
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
    ("SLURM_JOB_ID", "516"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "1"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
];

/// Rank 3 of `torchrun --nnodes 2 --nproc-per-node 2`.
const TORCHRUN: Environment<'static> = &[
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
    ("OMP_NUM_THREADS", "1"),
    ("RANK", "3"),
    ("ROLE_RANK", "3"),
    ("ROLE_WORLD_SIZE", "4"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("WORLD_SIZE", "4"),
];

/// The second pod of a PyTorchJob of Kubernetes. It has no LOCAL_RANK: its program is torchrun.
const PYTORCH_JOB: Environment<'static> = &[
    ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
    ("MASTER_ADDR", "job-master-0"),
    ("MASTER_PORT", "23456"),
    ("PET_NNODES", "2"),
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
];

fn read(environment: Environment<'_>) -> Result<Option<Placement>, PlacementError> {
    Placement::from_variables(|name| {
        let found = environment.iter().rev().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// Returns `environment` with additional variables. A variable that is already set is replaced,
/// because the last value counts.
fn with<'a>(environment: Environment<'a>, more: Environment<'a>) -> Vec<(&'a str, &'a str)> {
    [environment, more].concat()
}

/// Returns the launcher, rank, world size, local rank and local size.
fn found(environment: Environment<'_>) -> Option<(Launcher, [usize; 4])> {
    let placement = read(environment).unwrap_or_else(|error| panic!("{environment:?}: {error}"))?;
    let Placement { launcher, rank, world_size, local_rank, local_size } = placement;
    Some((launcher, [rank, world_size, local_rank, local_size]))
}

/// Asserts that `environment` is rejected with a message that contains all `parts`.
fn refused(environment: Environment<'_>, parts: &[&str]) {
    let error = match read(environment) {
        Err(error) => error.to_string(),
        Ok(placement) => panic!("{environment:?} was read as {placement:?}"),
    };
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn each_launcher_is_found() {
    assert_eq!(found(OPEN_MPI), Some((Launcher::OpenMpi, [2, 3, 2, 3])));
    assert_eq!(found(HYDRA), Some((Launcher::Mpich, [2, 3, 2, 3])));
    assert_eq!(found(INTEL), Some((Launcher::Mpich, [5, 8, 1, 4])));
    assert_eq!(found(SRUN_PMIX), Some((Launcher::Slurm, [6, 7, 0, 1])));
    assert_eq!(found(SRUN_PMI2), Some((Launcher::Slurm, [3, 4, 1, 2])));
}

#[test]
fn without_a_launcher_there_is_no_placement() {
    let nothing: [Environment<'_>; 8] = [
        &[],
        SBATCH,
        SALLOC,
        SALLOC_INTERACTIVE,
        &[("WORLD_SIZE", "8")],
        &[("RANK", "left over"), ("LOCAL_RANK", "3")],
        &[("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")],
        &[("RANK", ""), ("WORLD_SIZE", ""), ("PMI_RANK", ""), ("DEEPBURN_LAUNCHER", "")],
    ];
    for environment in nothing {
        assert_eq!(found(environment), None, "{environment:?}");
    }
}

#[test]
fn steps_of_slurms_own_are_no_tasks() {
    for step in
        ["4294967290", "4294967291", "4294967292", "4294967293", "4294967294", "-5", "batch"]
    {
        assert_eq!(found(&with(SBATCH, &[("SLURM_STEP_ID", step)])), None, "{step}");
    }
}

#[test]
fn mpirun_wins_over_the_slurm_step_of_its_daemons() {
    assert_eq!(found(MPIRUN_IN_SBATCH), Some((Launcher::OpenMpi, [3, 4, 1, 2])));
    assert_eq!(found(HYDRA_IN_SBATCH), Some((Launcher::Mpich, [3, 4, 1, 2])));
    // On the node of the batch script, mpirun starts its ranks without srun.
    let on_the_first_node = with(SBATCH, OPEN_MPI);
    assert_eq!(found(&on_the_first_node), Some((Launcher::OpenMpi, [2, 3, 2, 3])));
    let in_a_shell_of_salloc = with(SALLOC_INTERACTIVE, OPEN_MPI);
    assert_eq!(found(&in_a_shell_of_salloc), Some((Launcher::OpenMpi, [2, 3, 2, 3])));
}

#[test]
fn the_step_counts_where_it_differs_from_the_job() {
    // `srun -n 2` in a job with 8 tasks per node.
    let step = [
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "0"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_PROCID", "1"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "2"),
        ("SLURM_TASKS_PER_NODE", "8"),
    ];
    assert_eq!(found(&step), Some((Launcher::Slurm, [1, 2, 1, 2])));
    // Without the step's variables, the job's are used.
    assert_eq!(
        found(&step.map(|(name, value)| match name {
            "SLURM_STEP_NUM_TASKS" | "SLURM_STEP_TASKS_PER_NODE" => ("UNUSED", value),
            _ => (name, value),
        })),
        Some((Launcher::Slurm, [1, 8, 1, 8]))
    );
}

#[test]
fn processes_of_pytorch_launchers_are_refused() {
    refused(TORCHRUN, &["RANK is 3", "WORLD_SIZE is 4", "mpirun or `deepburn launch`"]);
    refused(PYTORCH_JOB, &["RANK is 1", "WORLD_SIZE is 2", "DEEPBURN_LAUNCHER=none"]);
    refused(&with(SBATCH, TORCHRUN), &["RANK is 3", "WORLD_SIZE is 4"]);
}

#[test]
fn exported_torch_variables_must_match_the_launcher() {
    let torch = |rank, size| [("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", "0")];
    assert!(found(&with(OPEN_MPI, &torch("2", "3"))).is_some());
    assert!(found(&with(HYDRA, &torch("2", "3"))).is_some());
    assert!(found(&with(SRUN_PMIX, &torch("6", "7"))).is_some());
    refused(
        &with(OPEN_MPI, &torch("0", "3")),
        &["OMPI_COMM_WORLD_RANK is 2", "RANK is 0", "must be equal", "DEEPBURN_LAUNCHER"],
    );
    refused(&with(HYDRA, &torch("2", "6")), &["PMI_SIZE is 3", "WORLD_SIZE is 6"]);
    refused(
        &with(SRUN_PMIX, &torch("6", "14")),
        &["SLURM_STEP_NUM_TASKS is 7", "WORLD_SIZE is 14"],
    );
    // torchrun starts one process in each rank of mpirun.
    refused(&with(OPEN_MPI, &torch("0", "1")), &["OMPI_COMM_WORLD_SIZE is 3", "WORLD_SIZE is 1"]);
    // A single variable is ignored.
    assert!(found(&with(OPEN_MPI, &[("WORLD_SIZE", "8")])).is_some());
    assert!(found(&with(OPEN_MPI, &[("RANK", "8"), ("DEEPBURN_LAUNCHER", "mpi")])).is_some());
}

#[test]
fn launchers_that_disagree_are_refused() {
    assert_eq!(found(&with(OPEN_MPI, HYDRA)), Some((Launcher::OpenMpi, [2, 3, 2, 3])));
    refused(
        &with(OPEN_MPI, INTEL),
        &["OMPI_COMM_WORLD_SIZE is 3", "PMI_SIZE is 8", "one of the two"],
    );
    refused(
        &with(SRUN_PMI2, &[("PMI_RANK", "1")]),
        &["SLURM_PROCID is 3", "PMI_RANK is 1", "must be equal"],
    );
    refused(
        &with(SRUN_PMI2, &[("PMI_SIZE", "8")]),
        &["SLURM_STEP_NUM_TASKS is 4", "PMI_SIZE is 8"],
    );
}

#[test]
fn the_override_decides() {
    fn choose<'a>(environment: Environment<'a>, choice: &'a str) -> Vec<(&'a str, &'a str)> {
        [environment, &[("DEEPBURN_LAUNCHER", choice)]].concat()
    }
    for environment in [OPEN_MPI, HYDRA, SRUN_PMI2, TORCHRUN, SBATCH, &[][..]] {
        assert_eq!(found(&choose(environment, "none")), None);
    }
    assert_eq!(found(&choose(HYDRA, "mpi")), Some((Launcher::Mpich, [2, 3, 2, 3])));
    assert_eq!(found(&choose(SBATCH, "slurm")), Some((Launcher::Slurm, [0, 4, 0, 2])));
    // Variables of other launchers are not read.
    let torch = with(OPEN_MPI, &[("RANK", "0"), ("WORLD_SIZE", "9"), ("LOCAL_RANK", "0")]);
    assert_eq!(found(&choose(&torch, "mpi")), Some((Launcher::OpenMpi, [2, 3, 2, 3])));
    assert_eq!(found(&choose(MPIRUN_IN_SBATCH, "slurm")), Some((Launcher::Slurm, [0, 1, 0, 1])));

    refused(
        &choose(SRUN_PMI2, "mpi"),
        &["DEEPBURN_LAUNCHER is mpi", "OMPI_COMM_WORLD_RANK", "mpirun"],
    );
    refused(&choose(&[], "mpi"), &["DEEPBURN_LAUNCHER is mpi", "not set"]);
    refused(&choose(OPEN_MPI, "slurm"), &["DEEPBURN_LAUNCHER is slurm", "SLURM_PROCID", "srun"]);
    refused(&choose(OPEN_MPI, "MPI"), &["DEEPBURN_LAUNCHER is `MPI`", "none, mpi and slurm"]);
    refused(&choose(&[], "torchrun"), &["`torchrun`", "none, mpi and slurm"]);
}

#[test]
fn incomplete_variables_are_refused() {
    for (environment, names) in [
        (OPEN_MPI, ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (OPEN_MPI, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]),
        (HYDRA, ["PMI_SIZE", "MPI_LOCALNRANKS"]),
        (HYDRA, ["PMI_RANK", "MPI_LOCALRANKID"]),
        (SRUN_PMIX, ["SLURM_PROCID", "SLURM_LOCALID"]),
        (SRUN_PMIX, ["SLURM_NODEID", "SLURM_NODEID"]),
    ] {
        for name in names {
            refused(
                &with(environment, &[(name, "")]),
                &[&format!("{name} is not set, but "), "sets both"],
            );
        }
    }
    let no_tasks = [("SLURM_STEP_TASKS_PER_NODE", ""), ("SLURM_TASKS_PER_NODE", "")];
    refused(&with(SRUN_PMIX, &no_tasks), &["SLURM_TASKS_PER_NODE is not set"]);
    // A PMI launcher that does not set local ranks, such as Cray's aprun.
    refused(
        &[("PMI_RANK", "0"), ("PMI_SIZE", "2")],
        &["MPI_LOCALRANKID is not set", "PMI_RANK is `0`"],
    );
}

#[test]
fn malformed_variables_are_refused() {
    let wrong: [(Environment<'_>, &str, &str, &str); 14] = [
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "two", "whole number"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "-1", "whole number"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "3", "below OMPI_COMM_WORLD_SIZE, which is 3"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "0", "at least 1"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "99999999999999999999", "whole number"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "3", "below OMPI_COMM_WORLD_LOCAL_SIZE"),
        (HYDRA, "MPI_LOCALNRANKS", "2.5", "whole number"),
        (HYDRA, "MPI_LOCALNRANKS", "0", "at least 1"),
        (SRUN_PMIX, "SLURM_PROCID", "7", "below SLURM_STEP_NUM_TASKS, which is 7"),
        (SRUN_PMIX, "SLURM_STEP_TASKS_PER_NODE", "2(x3)", "it has 3 and SLURM_NODEID is 3"),
        (SRUN_PMIX, "SLURM_STEP_TASKS_PER_NODE", "2(x", "2(x3),1"),
        (SRUN_PMIX, "SLURM_STEP_TASKS_PER_NODE", "2(x3),", "2(x3),1"),
        (SRUN_PMIX, "SLURM_STEP_TASKS_PER_NODE", "2(x3),\u{fffd}", "2(x3),1"),
        (&[("RANK", "1"), ("LOCAL_RANK", "0")], "WORLD_SIZE", "many", "whole number"),
    ];
    for (environment, name, value, rule) in wrong {
        let message = format!("{name} is `{value}`");
        refused(&with(environment, &[(name, value)]), &[&message, rule, "DEEPBURN_LAUNCHER=none"]);
    }
    // A huge repeat count must not be expanded node by node.
    let many = [("SLURM_STEP_TASKS_PER_NODE", "1(x18446744073709551615),1(x18446744073709551615)")];
    assert_eq!(found(&with(SRUN_PMIX, &many)), Some((Launcher::Slurm, [6, 7, 0, 1])));
}

/// Prints the placement in each process that the test below starts.
#[test]
#[ignore = "started by processes_of_a_real_launcher_know_their_ranks"]
fn print_the_placement() {
    println!("read: {:?}", Placement::detect());
}

/// `DEEPBURN_TEST_MPIRUN` replaces the default launcher, Open MPI's mpirun, by another command
/// line.
#[test]
#[ignore = "needs mpirun of Open MPI"]
fn processes_of_a_real_launcher_know_their_ranks() {
    let launcher =
        std::env::var("DEEPBURN_TEST_MPIRUN").unwrap_or_else(|_| "mpirun --oversubscribe".into());
    let mut words = launcher.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["-np", "3"]).arg(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "print_the_placement"]);
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(name, "1");
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for rank in 0..3 {
        let numbers = format!("rank: {rank}, world_size: 3, local_rank: {rank}, local_size: 3");
        assert_eq!(text.matches(&numbers).count(), 1, "{text}");
    }
}
