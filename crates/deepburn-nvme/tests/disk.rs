//! Tests of swap files on the disk that contains the build folder.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepburn_nvme::{IoPolicy, SwapError, SwapFile};
use tempfile::TempDir;

const SMALL: IoPolicy = IoPolicy { block_size: 65_536, queue_depth: 4, direct: true };

/// Returns a folder on the disk that contains the build folder, because the default folder for
/// temporary files may be in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn entries(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

/// Returns whether the build folder is on a disk. If it is not, prints that the test is skipped.
fn on_disk(created: &Result<SwapFile, SwapError>) -> bool {
    let in_memory = matches!(created, Err(SwapError::InMemory { .. }));
    if in_memory {
        eprintln!("skipped: {} is in memory", env!("CARGO_TARGET_TMPDIR"));
    }
    !in_memory
}

#[test]
fn what_is_written_is_read_with_and_without_the_page_cache() {
    let folder = folder();
    for direct in [true, false] {
        let length = 1_000_003;
        let bytes = 2 * SwapFile::padded(length);
        let policy = IoPolicy { direct, ..SMALL };
        let created = SwapFile::create(folder.path(), bytes, &policy);
        if !on_disk(&created) {
            return;
        }
        let swap = created.unwrap();
        assert!(direct || !swap.is_direct());
        assert_eq!((swap.bytes(), entries(folder.path())), (bytes, 0));
        let (region, untouched) = (swap.region(length).unwrap(), swap.region(length).unwrap());
        let mut buffer = swap.pool().zeroed(length).unwrap();
        for (index, value) in buffer.as_mut_slice::<f32>().iter_mut().enumerate() {
            *value = index as f32;
        }
        let writing = swap.write(&region, 0, buffer).unwrap();
        let reading = swap.read(&region, 0..length).unwrap();
        let part = swap.read(&region, 40_960..40_960 + 40).unwrap();
        let zeros = swap.read(&untouched, 0..length).unwrap().wait().unwrap();
        assert!(zeros.as_bytes().iter().all(|&byte| byte == 0));
        assert_eq!(writing.wait().unwrap().as_bytes(), reading.wait().unwrap().as_bytes());
        let expected: Vec<f32> = (10_240..10_250).map(|index| index as f32).collect();
        assert_eq!(part.wait().unwrap().as_slice::<f32>(), expected);
        swap.wait_all().unwrap();
        let full = swap.region(1).unwrap_err();
        assert!(matches!(full, SwapError::Full { requested: 4096, left: 0, .. }), "{full}");
    }
}

#[test]
fn two_files_in_one_folder_do_not_meet() {
    let folder = folder();
    let create = || SwapFile::create(folder.path(), 1 << 20, &SMALL);
    let first = create();
    if !on_disk(&first) {
        return;
    }
    let files = [first.unwrap(), create().unwrap()];
    let regions = files.each_ref().map(|file| file.region(1 << 20).unwrap());
    for (index, (file, region)) in files.iter().zip(&regions).enumerate() {
        let mut buffer = file.pool().zeroed(1 << 20).unwrap();
        buffer.as_mut_bytes().fill(index as u8 + 1);
        drop(file.write(region, 0, buffer).unwrap());
    }
    for (index, (file, region)) in files.iter().zip(&regions).enumerate() {
        let read = file.read(region, 0..1 << 20).unwrap().wait().unwrap();
        assert!(read.as_bytes().iter().all(|&byte| byte == index as u8 + 1));
    }
    let foreign = files[0].read(&regions[1], 0..1).unwrap_err();
    assert!(foreign.to_string().contains("another swap file"), "{foreign}");
}

#[test]
fn unusable_folders_are_refused() {
    let folder = folder();
    let create = |path: &Path, bytes| SwapFile::create(path, bytes, &SMALL).unwrap_err();
    let missing = folder.path().join("missing");
    assert_eq!(create(&missing, 1), SwapError::Missing { folder: missing.clone() });
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        assert_eq!(create(&path, 1), SwapError::NotAFolder { folder: path.clone() });
    }
    let huge = SwapFile::create(folder.path(), u64::MAX / 2, &SMALL);
    if on_disk(&huge) {
        let error = huge.unwrap_err();
        let SwapError::NoSpace { needed, free, .. } = &error else { panic!("{error}") };
        assert!(*needed == (1 << 63) && *free > 0 && free < needed, "{error}");
        assert!(error.to_string().contains(&format!("free {} more bytes", needed - free)));
    }
    assert_eq!(entries(folder.path()), 1);
}

#[test]
fn folders_in_memory_are_refused() {
    let memory = PathBuf::from("/dev/shm");
    if !memory.is_dir() {
        return eprintln!("skipped: no /dev/shm");
    }
    match SwapFile::create(&memory, 4096, &SMALL) {
        Err(SwapError::InMemory { filesystem, .. }) => assert_eq!(filesystem, "tmpfs"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn policies_out_of_range_are_refused() {
    let folder = folder();
    let refused = |policy| match SwapFile::create(folder.path(), 1, &policy) {
        Err(SwapError::Policy { field, value, .. }) => (field, value),
        other => panic!("{other:?}"),
    };
    for block_size in [0, 4095, 6144] {
        assert_eq!(refused(IoPolicy { block_size, ..SMALL }), ("block_size", block_size));
    }
    for queue_depth in [0, 1025] {
        assert_eq!(refused(IoPolicy { queue_depth, ..SMALL }), ("queue_depth", queue_depth));
    }
}

#[test]
fn folders_without_write_permission_are_refused() {
    let folder = folder();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.path().join("probe"), "").is_ok() {
        return eprintln!("skipped: root may write everywhere; see a_small_disk");
    }
    let created = SwapFile::create(folder.path(), 1, &SMALL);
    if on_disk(&created) {
        assert!(matches!(created, Err(SwapError::ReadOnly { .. })), "{created:?}");
    }
}

/// A file system of 16 MB in an image file. It is unmounted when it is dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts ext4 with the given features and mount options. Returns `None` without root
    /// permissions or loop devices.
    fn mount(features: &str, options: &str) -> Option<Self> {
        let folder = folder();
        let image = folder.path().join("image");
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(folder.path().join("disk")).unwrap();
        let disk = Self(folder);
        let is_mounted = run("mkfs.ext4", &["-q", "-F", "-O", features, path(&image)])
            && disk.mount_with(&format!("loop,{options}"), &image);
        if !is_mounted {
            eprintln!("skipped: no root, loop device or mkfs.ext4");
        }
        is_mounted.then_some(disk)
    }

    fn mount_with(&self, options: &str, image: &Path) -> bool {
        run("mount", &["-o", options, path(image), path(&self.path())])
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("disk")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        run("umount", &[path(&self.path())]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_small_disk() {
    let Some(disk) = SmallDisk::mount("extents", "defaults") else { return };
    let folder = disk.path();
    let before = entries(&folder);
    let error = SwapFile::create(&folder, 32 << 20, &SMALL).unwrap_err();
    let SwapError::NoSpace { needed, free, .. } = error else { panic!("{error}") };
    assert!(needed == 32 << 20 && free < 16 << 20);

    let swap = SwapFile::create(&folder, 8 << 20, &SMALL).unwrap();
    assert!(swap.is_preallocated());
    let second = SwapFile::create(&folder, 8 << 20, &SMALL).unwrap_err();
    assert!(matches!(second, SwapError::NoSpace { .. }), "{second}");
    // Preallocated bytes can be written on a full disk.
    let _ = fs::write(folder.join("rest"), vec![0; 16 << 20]);
    let region = swap.region(8 << 20).unwrap();
    let buffer = swap.pool().zeroed(8 << 20).unwrap();
    swap.write(&region, 0, buffer).unwrap().wait().unwrap();
    drop(swap);
    fs::remove_file(folder.join("rest")).unwrap();
    assert_eq!(entries(&folder), before);
    SwapFile::create(&folder, 8 << 20, &SMALL).unwrap();

    assert!(disk.mount_with("remount,ro", Path::new("none")));
    let error = SwapFile::create(&folder, 4096, &SMALL).unwrap_err();
    assert_eq!(error, SwapError::ReadOnly { folder });
}

#[test]
fn a_disk_without_direct_io() {
    // ext4 supports no direct I/O for data that goes through its journal.
    let Some(disk) = SmallDisk::mount("has_journal", "data=journal") else { return };
    let swap = SwapFile::create(&disk.path(), 4 << 20, &SMALL).unwrap();
    assert!(!swap.is_direct());
    let region = swap.region(1_000_001).unwrap();
    let mut buffer = swap.pool().zeroed(1_000_001).unwrap();
    buffer.as_mut_bytes().fill(7);
    drop(swap.write(&region, 0, buffer).unwrap());
    let read = swap.read(&region, 0..1_000_001).unwrap().wait().unwrap();
    assert!(read.as_bytes().iter().all(|&byte| byte == 7));
    drop(swap);
    drop(disk);
}

#[test]
fn a_disk_that_fills_up() {
    // Without extents, ext4 cannot preallocate.
    let Some(disk) = SmallDisk::mount("^extents,^64bit", "defaults") else { return };
    let swap = SwapFile::create(&disk.path(), 8 << 20, &SMALL).unwrap();
    assert!(!swap.is_preallocated());
    let region = swap.region(8 << 20).unwrap();
    let zeros = swap.read(&region, 0..8 << 20).unwrap().wait().unwrap();
    assert!(zeros.as_bytes().iter().all(|&byte| byte == 0));
    let _ = fs::write(disk.path().join("rest"), vec![1; 16 << 20]);
    let error = swap.write(&region, 0, zeros).unwrap().wait().unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
    let error = swap.read(&region, 0..4096).unwrap_err();
    assert!(matches!(error, SwapError::EarlierWrite(_)), "{error}");
}
