//! Tests of `deepburn launch`: the command line that it prints, and invalid options. The tests of
//! `deepburn-launch` start processes.

use std::fs;

use crate::program::{Ending, deepburn};

/// Runs `deepburn launch` in a folder that has the hostfile `hosts`.
fn launch(arguments: &[&str]) -> Ending {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts"), "worker-1 slots=2\nworker-0 slots=4\n").unwrap();
    deepburn(folder.path(), &[&["launch"], arguments].concat())
}

#[test]
fn the_command_line_has_each_host_with_its_ranks_and_devices() {
    let line = launch(&["-H", "hosts", "-e", "worker-0:0,2", "--dry-run", "--", "train", "a b"]);
    let line = line.succeeded().stdout;
    assert!(line.starts_with("mpirun "), "{line}");
    let contexts: Vec<&str> = line.trim_end().split(" : ").collect();
    let hosts = [("worker-1:2", "0,1"), ("worker-0:2", "1,3")];
    assert_eq!(contexts.len(), hosts.len(), "{line}");
    for (context, (host, devices)) in contexts.into_iter().zip(hosts) {
        assert!(context.contains(&format!("-np 2 -H {host} ")), "{line}");
        assert!(context.contains(&format!(" -x CUDA_VISIBLE_DEVICES={devices} ")), "{line}");
        assert!(context.ends_with(" train 'a b'"), "{line}");
    }
}

#[test]
fn finds_programs_next_to_the_launcher() {
    let line = launch(&["--num-gpus", "3", "--dry-run", "--", "finetune", "job.yaml"]);
    let line = line.succeeded().stdout;
    assert!(line.contains(" -np 3 -H localhost:3 "), "{line}");
    let finetune = env!("CARGO_BIN_EXE_finetune");
    // A `finetune` on PATH takes precedence.
    assert!(line.contains(&format!(" {finetune} job.yaml")) || line.contains(" finetune job.yaml"));
}

#[test]
fn invalid_launches_are_refused() {
    for (arguments, part) in [
        (&["--num_gpus", "2"][..], "no command to launch"),
        (&["-H", "nowhere", "--", "train"], "hostfile nowhere: cannot be read"),
        (&["-H", "hosts", "-i", "jeff", "--", "train"], "--include: unknown host: `jeff`"),
        (&["-H", "hosts", "-i", "worker-1:2", "--", "train"], "unknown slot: `worker-1:2`"),
        (&["--num_nodes", "1", "-i", "localhost", "--", "train"], "--num_nodes and --include"),
        (&["--num_gpus", "1", "-e", "localhost", "--", "train"], "--num_gpus and --exclude"),
        (&["--num_nodes", "2", "--", "train"], "--num_nodes: too many: 2"),
        (&["--master_port", "29500", "--", "train"], "--master_port: unsupported: 29500"),
        (&["--launcher", "pdsh", "--", "train"], "--launcher: unsupported: pdsh"),
        (&["--ssh_port", "22", "--", "train"], "use --remote-shell 'ssh -p PORT'"),
        (&["--elastic_training", "--", "train"], "unexpected argument '--elastic_training'"),
    ] {
        launch(arguments).failed(2, &[part]);
    }
}
