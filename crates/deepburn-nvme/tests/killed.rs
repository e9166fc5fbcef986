//! Tests that a swapping process leaves no file in the folder when it is killed at different times.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use deepburn_nvme::{IoPolicy, SwapError, SwapFile};

/// The variable that passes the folder to the swapping process.
const FOLDER: &str = "DEEPBURN_NVME_TEST_FOLDER";
const LENGTH: usize = 4 << 20;
const KILLS: u64 = 10;

/// The body of the process that is killed. It does nothing when it is run as a normal test.
#[test]
fn swaps_until_it_is_killed() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    let bytes = 2 * SwapFile::padded(LENGTH);
    let swap = match SwapFile::create(&folder, bytes, &IoPolicy::default()) {
        Err(SwapError::InMemory { .. }) => return println!("\nin memory"),
        created => created.unwrap(),
    };
    let regions = [swap.region(LENGTH).unwrap(), swap.region(LENGTH).unwrap()];
    println!("\nswaps");
    loop {
        for region in &regions {
            let buffer = swap.pool().zeroed(LENGTH).unwrap();
            drop(swap.write(region, 0, buffer).unwrap());
            swap.read(region, 0..LENGTH).unwrap().wait().unwrap();
        }
    }
}

#[test]
fn killed_processes_leave_nothing() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kill in 0..KILLS {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "swaps_until_it_is_killed", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let started = output.lines().map_while(Result::ok).find(|line| line == "swaps");
        if started.is_none() {
            process.wait().unwrap();
            return eprintln!("skipped: {} is in memory", folder.path().display());
        }
        // The delay is different for every kill.
        thread::sleep(Duration::from_micros(kill * 1_237 % 10_000));
        assert!(process.try_wait().unwrap().is_none(), "it ended without being killed");
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
