//! Stored inputs of fuzz tests: valid files to mutate, and malformed files that readers must
//! reject.
//!
//! Main type: [`SeedCorpus`]. [`replay`](crate::replay) reads every file unchanged. Afterwards
//! [`fuzz`](crate::fuzz) also uses corpus files as inputs to mutate.

use std::fs;
use std::path::Path;

use crate::Mutator;

/// A file of a seed corpus.
#[derive(Debug, Clone)]
pub struct SeedFile {
    /// The path relative to the corpus. It starts with a folder that names the format:
    /// `configuration/deep_lists.json`.
    pub name: String,
    /// The contents.
    pub bytes: Vec<u8>,
}

impl SeedFile {
    /// Returns the name of the folder, which is the format of the file.
    pub fn format(&self) -> &str {
        self.name.split_once('/').map_or("", |(format, _)| format)
    }

    /// Returns the name of the file without its folder.
    pub fn file_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }
}

/// The seed corpus of a crate: its files, sorted by name.
#[derive(Debug, Clone)]
pub struct SeedCorpus(Vec<SeedFile>);

impl SeedCorpus {
    /// Reads the files `tests/corpus/FORMAT/FILE` in the folder of a crate. Tests pass
    /// `CARGO_MANIFEST_DIR`.
    ///
    /// # Panics
    /// Panics if a folder or a file cannot be read, or if there is no file.
    pub fn of_crate(folder: &str) -> Self {
        let corpus = Path::new(folder).join("tests/corpus");
        let mut files: Vec<_> = names(&corpus)
            .iter()
            .flat_map(|format| {
                names(&corpus.join(format)).into_iter().map(move |file| format!("{format}/{file}"))
            })
            .map(|name| {
                let bytes = fs::read(corpus.join(&name)).expect("a file of the corpus is readable");
                SeedFile { name, bytes }
            })
            .collect();
        // The order of a folder's entries depends on the file system, and seeds pick files by
        // index.
        files.sort_by(|left, right| left.name.cmp(&right.name));
        assert!(!files.is_empty(), "{} has no file", corpus.display());
        Self(files)
    }

    /// Returns the files.
    pub fn files(&self) -> &[SeedFile] {
        &self.0
    }

    /// Returns a random file for one of four inputs on average. Returns `None` for the other
    /// inputs, which start from files that the test generates.
    pub fn sometimes(&self, mutator: &mut Mutator) -> Option<&SeedFile> {
        (mutator.below(4) == 0).then(|| mutator.pick(&self.0))
    }
}

/// Returns the file names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("the folder is readable").file_name();
        name.into_string().expect("names in the corpus are UTF-8")
    };
    entries.map(name).collect()
}
