//! Tests of swap files on a fake file in memory that can return short counts and errors.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use proptest::prelude::*;
use rustix::io::Errno;

use super::SwapFile;
use crate::raw_file::RawFile;
use crate::{ALIGNMENT, AlignedBuffer, IoPolicy, PendingIo, SwapError, SwapOperation};

const FOLDER: &str = "/in/memory";

/// An injected fault of a read or write.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The call transfers at most this number of bytes.
    Short(usize),
    /// The call fails.
    Error(Errno),
}

/// A file in memory.
#[derive(Debug, Default)]
struct FakeFile {
    data: Mutex<Vec<u8>>,
    direct: bool,
    /// The number of reads and writes so far.
    calls: AtomicU64,
    faults: HashMap<u64, Fault>,
    /// A barrier at which every read and write waits.
    barrier: Option<Barrier>,
    /// The size of the disk in bytes; `None` if it is unlimited.
    room: Option<u64>,
}

impl FakeFile {
    fn new(bytes: u64) -> Self {
        Self { data: Mutex::new(vec![0; bytes as usize]), direct: true, ..Self::default() }
    }

    /// Returns a file with a fault in call number `call`, counted from 0.
    fn faulty(bytes: u64, call: u64, fault: Fault) -> Self {
        Self { faults: HashMap::from([(call, fault)]), ..Self::new(bytes) }
    }

    fn call(&self, memory: &[u8], offset: u64) -> Result<usize, Errno> {
        if self.direct {
            let numbers = [memory.len(), memory.as_ptr() as usize, offset as usize];
            assert!(numbers.iter().all(|number| number % ALIGNMENT == 0), "{numbers:?}");
        }
        if let Some(barrier) = &self.barrier {
            barrier.wait();
        }
        match self.faults.get(&self.calls.fetch_add(1, Ordering::SeqCst)) {
            None => Ok(memory.len()),
            Some(Fault::Short(most)) => Ok(memory.len().min(*most)),
            Some(Fault::Error(errno)) => Err(*errno),
        }
    }
}

impl RawFile for FakeFile {
    fn read_at(&self, memory: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let count = self.call(memory, offset)?;
        let start = offset as usize;
        memory[..count].copy_from_slice(&self.data.lock().unwrap()[start..start + count]);
        Ok(count)
    }

    fn write_at(&self, memory: &[u8], offset: u64) -> Result<usize, Errno> {
        let count = self.call(memory, offset)?;
        let start = offset as usize;
        self.data.lock().unwrap()[start..start + count].copy_from_slice(&memory[..count]);
        Ok(count)
    }

    fn drop_cache(&self, _: u64, _: u64) {}

    fn grow(&self, added: Range<u64>) -> Result<(), Errno> {
        // The file grows up to the size of the disk.
        let mut data = self.data.lock().unwrap();
        let has_room = self.room.is_none_or(|room| added.end <= room);
        has_room.then(|| data.resize(added.end as usize, 0)).ok_or(Errno::NOSPC)
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn is_preallocated(&self) -> bool {
        true
    }
}

fn swap(file: FakeFile, blocks: usize, queue_depth: usize) -> SwapFile {
    let bytes = file.data.lock().unwrap().len() as u64;
    let policy = IoPolicy { block_size: blocks * ALIGNMENT, queue_depth, direct: file.direct };
    SwapFile::with_file(Arc::new(file), Path::new(FOLDER), bytes, &policy).unwrap()
}

fn filled(swap: &SwapFile, length: usize, seed: u8) -> AlignedBuffer {
    let mut buffer = swap.pool().unfilled(length).unwrap();
    for (index, byte) in buffer.as_mut_bytes().iter_mut().enumerate() {
        *byte = (index / 7) as u8 ^ seed;
    }
    buffer
}

fn errno_of(error: &SwapError) -> Option<(SwapOperation, i32)> {
    match error {
        SwapError::Os { operation, code, .. } => Some((*operation, *code)),
        _ => None,
    }
}

/// A call in a random test program. Numbers are reduced modulo the number of existing items.
#[derive(Debug, Clone)]
enum Step {
    Write {
        region: usize,
        start: usize,
        end: usize,
        seed: u8,
    },
    Read {
        region: usize,
        start: usize,
        end: usize,
    },
    /// Waits for the pending request with this number.
    Wait(usize),
    /// Drops the pending request with this number.
    Drop(usize),
    WaitAll,
}

fn step() -> impl Strategy<Value = Step> {
    let number = 0..1000_usize;
    prop_oneof![
        4 => (number.clone(), number.clone(), number.clone(), any::<u8>())
            .prop_map(|(region, start, end, seed)| Step::Write { region, start, end, seed }),
        4 => (number.clone(), number.clone(), number.clone())
            .prop_map(|(region, start, end)| Step::Read { region, start, end }),
        2 => number.clone().prop_map(Step::Wait),
        1 => number.prop_map(Step::Drop),
        1 => Just(Step::WaitAll),
    ]
}

fn faults() -> impl Strategy<Value = HashMap<u64, Fault>> {
    // Direct I/O cannot continue after a transfer of less than a sector.
    let short = (ALIGNMENT..3 * ALIGNMENT).prop_map(Fault::Short);
    let fault = prop_oneof![short, Just(Fault::Error(Errno::INTR))];
    prop::collection::hash_map(0..200_u64, fault, 0..60)
}

/// Runs a random program on `swap` and compares every read with a model.
fn check_against_model(swap: &SwapFile, sizes: &[usize], steps: Vec<Step>) {
    let regions: Vec<_> = sizes.iter().map(|&size| swap.region(size).unwrap()).collect();
    let mut model: Vec<Vec<u8>> = sizes.iter().map(|&size| vec![0; size]).collect();
    let mut pending: Vec<(PendingIo, Vec<u8>)> = Vec::new();
    let check = |(io, expected): (PendingIo, Vec<u8>)| {
        assert!(io.wait().unwrap().as_bytes() == expected.as_slice());
    };
    for step in steps {
        match step {
            Step::Write { region, start, end, seed } => {
                let region = region % regions.len();
                let size = sizes[region];
                let start = start % (size / ALIGNMENT + 1) * ALIGNMENT;
                let blocks = end % ((size - start) / ALIGNMENT + 2);
                let length = (blocks * ALIGNMENT).min(size - start);
                let buffer = filled(swap, length, seed);
                model[region][start..start + length].copy_from_slice(buffer.as_bytes());
                let expected = buffer.as_bytes().to_vec();
                pending.push((swap.write(&regions[region], start, buffer).unwrap(), expected));
            }
            Step::Read { region, start, end } => {
                let region = region % regions.len();
                let size = sizes[region];
                let start = start % (size / ALIGNMENT + 1) * ALIGNMENT;
                let range = start..start + end * 37 % (size - start + 1);
                let expected = model[region][range.clone()].to_vec();
                pending.push((swap.read(&regions[region], range).unwrap(), expected));
            }
            Step::Wait(number) if !pending.is_empty() => {
                check(pending.swap_remove(number % pending.len()));
            }
            Step::Drop(number) if !pending.is_empty() => {
                drop(pending.swap_remove(number % pending.len()));
            }
            Step::Wait(_) | Step::Drop(_) => {}
            Step::WaitAll => swap.wait_all().unwrap(),
        }
    }
    pending.into_iter().for_each(check);
    for (region, model) in regions.iter().zip(&model) {
        let read = swap.read(region, 0..region.len()).unwrap().wait().unwrap();
        assert!(read.as_bytes() == model.as_slice());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_read_returns_what_was_written_before_it(
        sizes in prop::collection::vec(0..5 * ALIGNMENT, 1..5),
        steps in prop::collection::vec(step(), 0..60),
        faults in faults(),
        direct in any::<bool>(),
        (blocks, queue_depth) in (1..4_usize, 1..5_usize),
    ) {
        let bytes = sizes.iter().map(|&size| SwapFile::padded(size)).sum();
        let file = FakeFile { faults, direct, ..FakeFile::new(bytes) };
        check_against_model(&swap(file, blocks, queue_depth), &sizes, steps);
    }

    #[test]
    fn after_a_failed_write_no_read_returns_old_data(
        call in 0..120_u64,
        errno in prop_oneof![Just(Errno::IO), Just(Errno::NOSPC)],
        (blocks, queue_depth) in (1..4_usize, 1..5_usize),
        waits in prop::collection::vec(any::<bool>(), 20),
    ) {
        let file = FakeFile::faulty(4 * 4096, call, Fault::Error(errno));
        check_after_failure(&swap(file, blocks, queue_depth), &waits);
    }
}

/// Alternately writes and reads one region while one disk request fails.
fn check_after_failure(swap: &SwapFile, waits: &[bool]) {
    let region = swap.region(4 * 4096).unwrap();
    let mut reads = Vec::new();
    let mut has_failed = false;
    for (round, wait) in waits.iter().enumerate() {
        let buffer = filled(swap, region.len(), round as u8);
        let expected = buffer.as_bytes().to_vec();
        match swap.write(&region, 0, buffer) {
            Ok(writing) if *wait => has_failed |= writing.wait().is_err(),
            Ok(writing) => drop(writing),
            Err(_) => has_failed = true,
        }
        match swap.read(&region, 0..region.len()) {
            Ok(read) => reads.push((read, expected)),
            Err(SwapError::EarlierWrite(_)) => has_failed = true,
            Err(error) => panic!("{error}"),
        }
    }
    for (read, expected) in reads {
        match read.wait() {
            Ok(buffer) => assert!(buffer.as_bytes() == expected.as_slice()),
            Err(SwapError::EarlierWrite(_)) => has_failed = true,
            Err(error) => assert_eq!(errno_of(&error).unwrap().0, SwapOperation::Read),
        }
    }
    assert_eq!(swap.wait_all().is_err(), has_failed);
    assert_eq!(swap.pool().held_bytes(), swap.pool().idle_bytes(), "a buffer was lost");
}

#[test]
fn blocks_of_one_request_run_in_parallel() {
    let file = FakeFile { barrier: Some(Barrier::new(4)), ..FakeFile::new(8 * 4096) };
    let swap = swap(file, 1, 4);
    let region = swap.region(8 * 4096).unwrap();
    let written = swap.write(&region, 0, filled(&swap, 8 * 4096, 3)).unwrap().wait().unwrap();
    let read = swap.read(&region, 0..8 * 4096).unwrap().wait().unwrap();
    assert_eq!(read.as_bytes(), written.as_bytes());
}

#[test]
fn threads_share_a_file() {
    let swap = swap(FakeFile::new(8 * 40_960), 2, 3);
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let swap = &swap;
            scope.spawn(move || {
                let region = swap.region(40_000).unwrap();
                for round in 0..50 {
                    let written = filled(swap, 40_000, thread ^ round);
                    let expected = written.as_bytes().to_vec();
                    drop(swap.write(&region, 0, written).unwrap());
                    let read = swap.read(&region, 8192..40_000).unwrap().wait().unwrap();
                    assert_eq!(read.as_bytes(), &expected[8192..]);
                }
            });
        }
    });
    let statistics = swap.statistics();
    assert_eq!(statistics.bytes_written, 8 * 50 * 40_960);
    assert_eq!(statistics.bytes_read, 8 * 50 * (40_960 - 8192));
    assert!(statistics.active > std::time::Duration::ZERO);
    assert!(swap.pool().held_bytes() <= 8 * 2 * 40_960);
}

#[test]
fn a_failed_write_fails_everything_after_it() {
    for (errno, remedy) in [(Errno::NOSPC, "the disk is full"), (Errno::IO, "smartctl")] {
        // The fault is in the third block of the write.
        let swap = swap(FakeFile::faulty(16 * 4096, 2, Fault::Error(errno)), 1, 1);
        let region = swap.region(8 * 4096).unwrap();
        let other = swap.region(4096).unwrap();
        let writing = swap.write(&region, 0, filled(&swap, 8 * 4096, 1)).unwrap();
        let error = writing.wait().unwrap_err();
        assert_eq!(errno_of(&error), Some((SwapOperation::Write, errno.raw_os_error())));
        let text = error.to_string();
        assert!(text.contains(remedy) && text.contains(FOLDER), "{text}");
        assert!(text.contains("write 4096 bytes at byte 8192"), "{text}");

        let earlier = SwapError::EarlierWrite(Arc::new(error));
        assert_eq!(swap.read(&other, 0..4096).unwrap_err(), earlier);
        assert_eq!(swap.write(&other, 0, filled(&swap, 4096, 1)).unwrap_err(), earlier);
        assert_eq!(swap.wait_all().unwrap_err(), earlier);
        assert_eq!(swap.pool().held_bytes(), swap.pool().idle_bytes(), "a buffer was lost");
    }
}

#[test]
fn a_failed_write_is_reported_after_it_was_dropped() {
    let swap = swap(FakeFile::faulty(8 * 4096, 0, Fault::Error(Errno::IO)), 1, 2);
    let region = swap.region(4096).unwrap();
    drop(swap.write(&region, 0, filled(&swap, 4096, 1)).unwrap());
    // The read must not return old data, regardless of whether it is started before or after the
    // failure.
    let read = swap.read(&region, 0..4096).and_then(PendingIo::wait).unwrap_err();
    let SwapError::EarlierWrite(first) = &read else { panic!("{read}") };
    assert_eq!(errno_of(first), Some((SwapOperation::Write, Errno::IO.raw_os_error())));
    assert!(read.to_string().contains("resume from the latest checkpoint"), "{read}");
    assert_eq!(swap.wait_all().unwrap_err(), read);
}

#[test]
fn a_failed_read_fails_alone() {
    let swap = swap(FakeFile::faulty(8 * 4096, 1, Fault::Error(Errno::IO)), 1, 2);
    let region = swap.region(4 * 4096).unwrap();
    let error = swap.read(&region, 0..4 * 4096).unwrap().wait().unwrap_err();
    assert_eq!(errno_of(&error), Some((SwapOperation::Read, Errno::IO.raw_os_error())));
    swap.write(&region, 0, filled(&swap, 4096, 9)).unwrap().wait().unwrap();
    let read = swap.read(&region, 0..4096).unwrap().wait().unwrap();
    assert_eq!(read.as_bytes(), filled(&swap, 4096, 9).as_bytes());
}

#[test]
fn transfers_that_stall_are_errors() {
    for most in [0, 100] {
        let swap = swap(FakeFile::faulty(8 * 4096, 0, Fault::Short(most)), 2, 1);
        let region = swap.region(8192).unwrap();
        let error = swap.write(&region, 0, filled(&swap, 8192, 1)).unwrap().wait().unwrap_err();
        let expected = SwapError::Short {
            folder: FOLDER.into(),
            operation: SwapOperation::Write,
            offset: 0,
            length: 8192,
            transferred: most as u64,
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn requests_outside_of_their_region_are_refused() {
    let swap = swap(FakeFile::new(16 * 4096), 1, 1);
    let region = swap.region(10_000).unwrap();
    let reason = |error: Result<PendingIo, SwapError>| match error {
        Err(SwapError::Request { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(swap.read(&region, 0..10_001)).contains("has 10000 bytes"));
    assert!(reason(swap.read(&region, 5..10)).contains("multiple of 4096"));
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = 4096..0;
    assert!(reason(swap.read(&region, reversed)).contains("before its start"));
    let buffer = |length| filled(&swap, length, 0);
    assert!(reason(swap.write(&region, 4096, buffer(8192))).contains("has 10000 bytes"));
    assert!(reason(swap.write(&region, 0, buffer(100))).contains("or at the end of its region"));
    let other = super::tests::swap(FakeFile::new(4096), 1, 1).region(10).unwrap();
    assert!(reason(swap.read(&other, 0..10)).contains("another swap file"));
    let full = swap.region(usize::MAX).unwrap_err();
    assert!(matches!(full, SwapError::Full { left: 53_248, .. }), "{full}");
    swap.wait_all().unwrap();
}

#[test]
fn dropping_the_file_completes_its_requests() {
    let swap = swap(FakeFile::new(64 * 4096), 1, 2);
    let region = swap.region(64 * 4096).unwrap();
    drop(swap.write(&region, 0, filled(&swap, 64 * 4096, 5)).unwrap());
    let reading = swap.read(&region, 0..64 * 4096).unwrap();
    let expected = filled(&swap, 64 * 4096, 5);
    drop(swap);
    assert_eq!(reading.wait().unwrap().as_bytes(), expected.as_bytes());
}

#[test]
fn a_growing_file_grows_and_uses_released_regions_again() {
    let folder = tempfile::tempdir().unwrap();
    let swap = SwapFile::growing(folder.path(), &IoPolicy::default()).unwrap();
    let lengths = [20 << 20, 5_000_001, 1];
    let round = |seed: u8| {
        let regions = lengths.map(|length| swap.region(length).unwrap());
        for region in &regions {
            drop(swap.write(region, 0, filled(&swap, region.len(), seed)).unwrap());
        }
        for region in &regions {
            let read = swap.read(region, 0..region.len()).unwrap().wait().unwrap();
            assert_eq!(read.as_bytes(), filled(&swap, region.len(), seed).as_bytes());
        }
        // The next regions in these parts are written while these writes are still in progress.
        for region in &regions {
            drop(swap.write(region, 0, filled(&swap, region.len(), !seed)).unwrap());
            swap.release(region);
        }
        swap.bytes()
    };
    let bytes = round(1);
    assert!(bytes >= 25 << 20);
    assert!((2..6).all(|seed| round(seed) == bytes));
}

#[test]
fn a_disk_that_is_full_refuses_a_region_and_keeps_the_others() {
    let mut swap = swap(FakeFile::new(4096), 1, 1);
    swap.file = Arc::new(FakeFile { room: Some(20 << 20), ..FakeFile::new(4096) });
    swap.grows = true;
    let first = swap.region(4096).unwrap();
    // The file grows in steps of 16 MiB, or by the missing bytes if the disk has no more space.
    swap.region(1).unwrap();
    assert_eq!(swap.bytes(), 4096 + (16 << 20));
    swap.region(18 << 20).unwrap();
    assert_eq!(swap.bytes(), 2 * 4096 + (18 << 20));
    let full = swap.region(2 << 20).unwrap_err();
    assert!(matches!(full, SwapError::NoSpace { needed: 0x20_0000, .. }), "{full}");
    swap.write(&first, 0, filled(&swap, 4096, 3)).unwrap().wait().unwrap();
}
