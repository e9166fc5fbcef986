//! Prints the output of ranks as complete lines with the rank as a prefix: `[3] loss 2.1`.
//!
//! `mpirun --tag-output` prints `[1,3]<stdout>:` before each chunk that it reads from rank 3, even
//! in the middle of another rank's line. This module collects the chunks of each rank until a line
//! is complete. Text without a tag is printed by `mpirun` itself and is not changed.
//!
//! ```text
//! from mpirun                                  printed
//! [1,0]<stdout>:loss [1,1]<stdout>:loss 2.2⏎   [1] loss 2.2
//! [1,0]<stdout>:2.1⏎                           [0] loss 2.1
//! Primary job terminated normally⏎             Primary job terminated normally
//! ```
//!
//! The standard error of a rank is not a terminal, so programs print lines instead of a progress
//! bar. If a line is overwritten with carriage returns, only its last state is printed.
//!
//! Only the incomplete lines of all ranks are kept in memory.

use std::collections::BTreeMap;
use std::io::{Read, Write};

/// Copies the output of `mpirun` to `to`, line by line. Returns the first failed rank if it appears
/// in the output of `mpirun`. Calls `on_abort` when `mpirun` reports that it is ending the job.
///
/// Output that cannot be written is dropped. `from` is always read to the end, because ranks would
/// otherwise block on a full pipe.
pub(crate) fn copy_lines(
    mut from: impl Read,
    to: impl Write,
    on_abort: impl FnMut(),
) -> Option<usize> {
    let (unread, rank, open, failed) = (Vec::new(), None, BTreeMap::new(), None);
    let mut lines = Lines { to, on_abort, unread, rank, open, failed };
    let mut buffer = [0; 8192];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => lines.add(&buffer[..count], false),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    lines.add(&[], true);
    lines.finish();
    lines.failed
}

/// Messages that `mpirun` prints when it ends a job because of a failed rank or a lost host.
const ABORTS: [&str; 3] =
    ["the job has been aborted", "the job to be terminated", "lost communication with"];

/// The state of copying one stream.
struct Lines<W, F> {
    /// The destination of complete lines.
    to: W,
    /// A function that is called for each message in [`ABORTS`].
    on_abort: F,
    /// Bytes that may be the start of a tag.
    unread: Vec<u8>,
    /// The rank whose text is being read; `None` for `mpirun` itself.
    rank: Option<usize>,
    /// Incomplete lines by rank.
    open: BTreeMap<Option<usize>, Vec<u8>>,
    /// The first failed rank in the output of `mpirun`.
    failed: Option<usize>,
}

/// The result of parsing text at a position where a tag may start.
enum OutputTag {
    /// A complete tag of `length` bytes.
    Rank { length: usize, rank: usize },
    /// No tag.
    None,
    /// The start of a tag whose rest has not been read yet.
    Partial,
}

impl<W: Write, F: FnMut()> Lines<W, F> {
    /// Processes bytes in the order in which they were read. `last` means that no more bytes will
    /// follow, so an incomplete tag is treated as text.
    fn add(&mut self, bytes: &[u8], last: bool) {
        self.unread.extend_from_slice(bytes);
        let text = std::mem::take(&mut self.unread);
        let mut position = 0;
        while position < text.len() {
            match tag(&text[position..]) {
                OutputTag::Rank { length, rank } => {
                    self.rank = Some(rank);
                    position += length;
                }
                // The rest of the tag is in the next read, so these bytes are kept until then.
                OutputTag::Partial if !last => {
                    self.unread = text[position..].to_vec();
                    return;
                }
                OutputTag::Partial | OutputTag::None => {
                    self.push(text[position]);
                    position += 1;
                }
            }
        }
    }

    /// Appends a byte to the line of the current rank, and prints the line if it is complete.
    fn push(&mut self, byte: u8) {
        let line = self.open.entry(self.rank).or_default();
        if byte == b'\n' {
            let line = std::mem::take(line);
            self.print(self.rank, &line);
            // A line that does not start with a tag is printed by mpirun itself.
            self.rank = None;
            return;
        }
        // A carriage return overwrites the line, so only the text after it is visible.
        if line.last() == Some(&b'\r') {
            line.clear();
        }
        line.push(byte);
    }

    /// Prints a line with its rank. Lines of `mpirun` are searched for failures and have no prefix.
    fn print(&mut self, rank: Option<usize>, line: &[u8]) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if rank.is_none() {
            let text = String::from_utf8_lossy(line);
            self.failed = self.failed.or_else(|| failed_rank(&text));
            if ABORTS.iter().any(|abort| text.contains(abort)) {
                (self.on_abort)();
            }
        }
        let mut whole = rank.map(|rank| format!("[{rank}] ")).unwrap_or_default().into_bytes();
        whole.extend_from_slice(line);
        whole.push(b'\n');
        // A closed reader (`| head`) does not end the job.
        let _ = self.to.write_all(&whole).and_then(|()| self.to.flush());
    }

    /// Prints incomplete lines.
    fn finish(&mut self) {
        for (rank, line) in std::mem::take(&mut self.open) {
            if !line.is_empty() {
                self.print(rank, &line);
            }
        }
    }
}

/// Parses `[1,RANK]<stdout>:` at the beginning of `text`. The job number of the ranks is always 1.
fn tag(text: &[u8]) -> OutputTag {
    const OPENING: &[u8] = b"[1,";
    let shared = text.len().min(OPENING.len());
    if text[..shared] != OPENING[..shared] {
        return OutputTag::None;
    }
    let digits = text[shared..].iter().take_while(|b| b.is_ascii_digit()).count();
    let rest = &text[shared + digits..];
    for closing in [&b"]<stdout>:"[..], b"]<stderr>:", b"]<stddiag>:"] {
        let same = rest.len().min(closing.len());
        if rest[..same] != closing[..same] {
            continue;
        }
        if same < closing.len() {
            return OutputTag::Partial;
        }
        let number = std::str::from_utf8(&text[shared..shared + digits]).ok();
        return match number.and_then(|number| number.parse().ok()) {
            Some(rank) => OutputTag::Rank { length: shared + digits + closing.len(), rank },
            None => OutputTag::None,
        };
    }
    OutputTag::None
}

/// Returns the rank in mpirun's message about the first failure:
/// `process rank 1 with PID 7 on node a exited on signal 9` or `Process name: [[7310,1],1]`.
fn failed_rank(line: &str) -> Option<usize> {
    let number = match line.split_once("process rank ") {
        Some((_, rest)) => rest.split(' ').next()?,
        None => {
            line.trim().strip_prefix("Process name: [[")?.split_once("],")?.1.strip_suffix(']')?
        }
    };
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies `text` at once and in chunks of every length, and checks that the results are equal.
    fn printed(text: &str) -> String {
        let mut whole = Vec::new();
        copy_lines(text.as_bytes(), &mut whole, || {});
        for length in 1..text.len().min(40) {
            let mut printed = Vec::new();
            let chunks = Chunks { text: text.as_bytes(), length };
            copy_lines(chunks, &mut printed, || {});
            assert_eq!(printed, whole, "in chunks of {length} bytes");
        }
        String::from_utf8(whole).unwrap()
    }

    struct Chunks<'a> {
        text: &'a [u8],
        length: usize,
    }

    impl Read for Chunks<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.length.min(self.text.len());
            buffer[..count].copy_from_slice(&self.text[..count]);
            self.text = &self.text[count..];
            Ok(count)
        }
    }

    #[test]
    fn lines_have_their_rank_in_front() {
        assert_eq!(
            printed("[1,0]<stdout>:a\n[1,12]<stderr>:b\r\n[1,0]<stdout>:\nmpirun: note\n"),
            "[0] a\n[12] b\n[0] \nmpirun: note\n"
        );
    }

    #[test]
    fn pieces_of_several_ranks_become_whole_lines() {
        let text = "[1,0]<stdout>:a0[1,1]<stdout>:a1[1,0]<stdout>:b0\n[1,1]<stdout>:b1\n\
                    [1,0]<stdout>:next[1,1]<stdout>:end";
        assert_eq!(printed(text), "[0] a0b0\n[1] a1b1\n[0] next\n[1] end\n");
    }

    #[test]
    fn an_overwritten_line_is_shown_as_it_ended() {
        assert_eq!(printed("[1,0]<stdout>:\r 1/2[1,0]<stdout>:\r 2/2\n"), "[0]  2/2\n");
    }

    #[test]
    fn text_that_looks_like_a_tag_stays() {
        for text in ["[1,2] is a list\n", "[1,x]<stdout>:\n", "[\n", "[1,", "[1,]<stdout>:\n"] {
            assert_eq!(printed(text), format!("{}\n", text.trim_end()));
        }
    }

    #[test]
    fn the_rank_that_failed_first_is_found() {
        let failed = |text: &str| copy_lines(text.as_bytes(), Vec::new(), || {});
        let noticed =
            "mpirun noticed that process rank 2 with PID 3063 on node b exited on signal 9";
        assert_eq!(failed(noticed), Some(2));
        assert_eq!(failed("\n  Process name: [[7310,1],1]\n  Exit code:    7\n"), Some(1));
        assert_eq!(failed("[1,0]<stderr>:process rank 2 with\n"), None, "a rank printed it");
    }
    #[test]
    fn the_end_of_the_job_is_noticed() {
        let aborts = |text: &str| {
            let mut count = 0;
            copy_lines(text.as_bytes(), Vec::new(), || count += 1);
            count
        };
        assert_eq!(aborts("exit code. Per user-direction, the job has been aborted.\n"), 1);
        assert_eq!(aborts("[1,0]<stdout>:the job has been aborted\n"), 0, "a rank printed it");
    }
}
