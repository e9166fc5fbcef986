//! Flushes a file to the disk while it is still being written.
//!
//! The operating system keeps written data in memory until it is flushed or there is too much of
//! it. With a single flush at the end, the disk would be idle during most of the write. Main type:
//! [`Flusher`].

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, SyncSender};
use std::thread::{self, JoinHandle};

/// The number of written bytes after which a flush starts.
const INTERVAL: u64 = 16 << 20;

/// Flushes a file from its own thread.
#[derive(Debug)]
pub(crate) struct Flusher {
    /// Wakes the thread; dropping it ends the thread.
    wake: Option<SyncSender<()>>,
    /// The thread, whose result is the first failed flush.
    thread: Option<JoinHandle<io::Result<()>>>,
    /// The number of bytes written since the thread was last woken.
    pending: u64,
}

impl Flusher {
    /// Starts the thread, unless the file is too short to benefit.
    pub(crate) fn start(file: &File, length: u64) -> io::Result<Self> {
        if length <= INTERVAL {
            return Ok(Self { wake: None, thread: None, pending: 0 });
        }
        let file = file.try_clone()?;
        // One message waits at most: a flush covers everything that was written before it. Only the
        // data is flushed; the writer flushes the metadata at the end.
        let (wake, woken) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("checkpoint flush".into())
            .spawn(move || woken.iter().try_for_each(|()| file.sync_data()))?;
        Ok(Self { wake: Some(wake), thread: Some(thread), pending: 0 })
    }

    /// Records that this many bytes were written.
    pub(crate) fn wrote(&mut self, bytes: usize) {
        self.pending += bytes as u64;
        if let Some(wake) = self.wake.as_ref().filter(|_| self.pending >= INTERVAL) {
            // A thread that is still flushing includes these bytes in its next flush.
            if wake.try_send(()).is_ok() {
                self.pending = 0;
            }
        }
    }

    /// Waits until the thread has ended. The operating system reports a disk error only to the
    /// first flush after it, so the thread's error has to be returned.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        drop(self.wake.take());
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(io::Error::other("the thread that flushes panicked")),
            None => Ok(()),
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // The file is being abandoned, so its errors are not needed.
        _ = self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn long_files_are_flushed_while_they_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = File::create(folder.path().join("file")).unwrap();
        let mut flusher = Flusher::start(&file, 2 * INTERVAL).unwrap();
        for _ in 0..4 {
            file.write_all(&[1; 1000]).unwrap();
            flusher.wrote(INTERVAL as usize);
        }
        flusher.finish().unwrap();
        flusher.finish().unwrap();
        let short = Flusher::start(&file, INTERVAL).unwrap();
        assert!(short.thread.is_none());
    }

    /// Pipes cannot be flushed, and `finish` returns the error.
    #[test]
    #[cfg(unix)]
    fn a_failed_flush_is_reported() {
        let (_reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut flusher = Flusher::start(&file, 2 * INTERVAL).unwrap();
        flusher.wrote(INTERVAL as usize);
        assert!(flusher.finish().is_err());
    }
}
