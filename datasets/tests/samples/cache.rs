//! The cache of samples: found again, rebuilt when damaged, and keyed by everything that determines
//! the samples.

use std::sync::atomic::{AtomicUsize, Ordering};

use deepburn_datasets::{SampleRows, Samples};
use serde_json::json;

use super::*;

/// A file of rows and a cache, in a folder.
struct CacheFixture {
    folder: tempfile::TempDir,
    splits: Splits,
    cache: TokenCache,
    encoded: AtomicUsize,
}

impl CacheFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let rows: Vec<_> = (0..50)
            .map(|id| {
                let labels: Vec<i64> =
                    (0..=id % 5).map(|at| if at % 2 == 0 { id } else { -100 }).collect();
                json!({"ids": vec![id; labels.len()], "labels": labels})
            })
            .chain([json!({"other": 1})])
            .collect();
        let splits = Splits::all(write_lines(folder.path(), "t.jsonl", &rows));
        let cache = TokenCache::new(folder.path().join("cache"));
        Self { folder, splits, cache, encoded: AtomicUsize::new(0) }
    }

    fn source(&self) -> SampleSource<'_> {
        SampleSource {
            cache: Some(&self.cache),
            invalid: InvalidRows::Skip,
            ..source(&self.splits)
        }
    }

    /// Opens the samples. Returns them, and the number of rows that were encoded.
    fn open(&self, source: SampleSource<'_>) -> (Samples, usize) {
        self.encoded.store(0, Ordering::Relaxed);
        let samples = open_samples(&source, |row| {
            self.encoded.fetch_add(1, Ordering::Relaxed);
            encode(row)
        });
        (samples.unwrap().train, self.encoded.load(Ordering::Relaxed))
    }

    fn entry(&self) -> PathBuf {
        let mut entries = self.cache.entries().unwrap();
        assert_eq!(entries.len(), 1);
        entries.remove(0).path
    }
}

fn all(samples: &Samples) -> Vec<Sample> {
    (0..samples.len()).map(|index| samples.get(index).unwrap()).collect()
}

#[test]
fn samples_come_from_the_cache_the_second_time() {
    for vocab_size in [1000, 70_000] {
        let fixture = CacheFixture::new();
        let source = SampleSource { vocab_size, ..fixture.source() };
        let (first, encoded) = fixture.open(source);
        assert_eq!((encoded, first.len()), (51, 50));
        let written = fixture.entry();
        let (second, encoded) = fixture.open(source);
        assert_eq!((encoded, fixture.entry()), (0, written.clone()));
        assert_eq!(all(&first), all(&second));
        assert_eq!((second.num_invalid(), second.place(49)), (1, first.place(49)));
        let (place, reason) = second.invalid_rows().next().unwrap();
        assert_eq!((place.number, reason), (51, "field `ids` is not an array"));
        let uncached = SampleSource { cache: None, ..source };
        assert_eq!(all(&fixture.open(uncached).0), all(&second));
        let fingerprint =
            |samples| SampleRows::new(samples, layout(None), "t").unwrap().fingerprint().unwrap();
        assert_eq!(fingerprint(first), fingerprint(second));
        let source = fixture.cache.entries().unwrap().remove(0).source.unwrap();
        assert!(source.starts_with("samples of") && source.ends_with("t.jsonl"), "{source}");
        assert_eq!(fixture.cache.clear().unwrap().len(), 1);
    }
}

#[test]
fn damaged_samples_are_encoded_again() {
    let fixture = CacheFixture::new();
    let expected = all(&fixture.open(fixture.source()).0);
    let path = fixture.entry();
    let intact = fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = intact.clone();
        bytes[at] ^= 1;
        bytes
    };
    let damaged = [
        flipped(0),
        flipped(intact.len() - 20),
        intact[..intact.len() - 1].to_vec(),
        intact[..30].to_vec(),
        Vec::new(),
    ];
    for damaged in damaged {
        fs::write(&path, damaged).unwrap();
        let (samples, encoded) = fixture.open(fixture.source());
        assert_eq!((encoded, all(&samples) == expected), (51, true));
        assert!(fs::read(fixture.entry()).unwrap() == intact);
    }
}

#[test]
fn whatever_determines_the_samples_is_part_of_the_key() {
    let fixture = CacheFixture::new();
    let fields = ["ids".to_owned(), "labels".to_owned()];
    let source = fixture.source();
    assert_eq!(fixture.open(source).1, 51);
    for changed in [
        SampleSource { encoder: &["ids", " and labels"], ..source },
        SampleSource { encoder: &["ids and labels", ""], ..source },
        SampleSource { fields: Some(&fields), ..source },
        SampleSource { vocab_size: 1001, ..source },
    ] {
        assert_eq!(fixture.open(changed).1, 51);
        assert_eq!(fixture.open(changed).1, 0);
    }
    let path = fixture.folder.path().join("t.jsonl");
    let renamed = path.with_file_name("renamed.jsonl");
    fs::copy(&path, &renamed).unwrap();
    let splits = Splits::all(&renamed);
    let (samples, encoded) = fixture.open(SampleSource { splits: &splits, ..source });
    // The contents are the same, and errors name the new file.
    assert_eq!((encoded, &*samples.place(0).file), (0, &*renamed));
    let twice = Splits::Paths { train: vec![path.clone(), renamed], eval: None, test: None };
    assert_eq!(fixture.open(SampleSource { splits: &twice, ..source }).1, 102);
    let contents = fs::read_to_string(&path).unwrap();
    fs::write(&path, contents.replacen("[0]", "[7]", 1)).unwrap();
    assert_eq!(fixture.open(source).1, 51);
}

#[test]
fn an_error_leaves_nothing_behind() {
    let fixture = CacheFixture::new();
    let strict = SampleSource { invalid: InvalidRows::Fail, ..fixture.source() };
    let message = open_samples(&strict, encode).unwrap_err().to_string();
    assert!(message.contains("line 51"), "{message}");
    assert_eq!(fs::read_dir(fixture.cache.folder()).unwrap().count(), 0);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_an_error() {
    let fixture = CacheFixture::new();
    let path = fixture.folder.path().join("t.jsonl");
    let error = open_samples(&fixture.source(), |row| {
        fs::File::options().append(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        encode(row)
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("t.jsonl` changed while it was read"), "{message}");
    assert_eq!(fs::read_dir(fixture.cache.folder()).unwrap().count(), 0);
}

#[test]
fn a_folder_that_cannot_be_written_costs_nothing_but_time() {
    let fixture = CacheFixture::new();
    fs::write(fixture.cache.folder(), "a file where the folder should be").unwrap();
    let (samples, encoded) = fixture.open(fixture.source());
    assert_eq!((encoded, samples.len()), (51, 50));
    assert_eq!(samples.get(3).unwrap().ids, [3, 3, 3, 3]);
}
