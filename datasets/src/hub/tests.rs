//! Tests of the Hub client and its cache, against a local server that drops, stalls and corrupts
//! transfers.

mod loopback;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::formats::folder;
use crate::tests::test_data;
use crate::*;
use loopback::{COMMIT, Fault, Loopback, Repos};

const ID: &str = "owner/name";
const FILE: &str = "data/train-00000-of-00001.parquet";

/// A cache folder and the Hub that `endpoint` serves.
struct Client {
    folder: tempfile::TempDir,
    settings: HubSettings,
}

impl Client {
    fn new(endpoint: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            cache: folder.path().join("hub"),
            endpoint: endpoint.to_owned(),
            token: None,
            offline: false,
            progress: false,
            retry: RetryPolicy {
                // Only tests of stalled connections may depend on the speed of the machine.
                stall_timeout: Duration::from_secs(60),
                attempts: 3,
                pause: Duration::from_millis(1),
            },
        };
        Self { folder, settings }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn train(&self) -> Result<Vec<PathBuf>> {
        self.hub().split(&repo(), None, "train")
    }

    /// All files in the cache.
    fn cached(&self) -> Vec<String> {
        folder::listing(self.folder.path()).unwrap()
    }
}

fn repo() -> HubRepo {
    HubRepo { kind: RepoKind::Dataset, id: ID.into(), revision: HubRepo::MAIN.into() }
}

/// Bytes without repetitions at short distances, so that a misplaced part is detected.
fn contents(length: u32) -> Vec<u8> {
    (0..length).flat_map(|at| (at.wrapping_mul(2_654_435_761)).to_le_bytes()).collect()
}

fn serve(contents: &[u8], fault: Fault) -> (Loopback, Client) {
    let server = Loopback::dataset(ID, &[(FILE, contents), ("README.md", b"words")], fault);
    let client = Client::new(&server.endpoint);
    (server, client)
}

#[test]
fn connections_that_drop_every_64_kib_end_in_a_verified_file() {
    let contents = contents(300_000);
    let (server, client) = serve(&contents, Fault::DropEvery(64 << 10));
    let files = client.train().unwrap();
    assert_eq!(fs::read(&files[0]).unwrap(), contents);
    assert!(files[0].ends_with(format!("datasets--owner--name/snapshots/{COMMIT}/{FILE}")));
    assert_eq!(server.transfers(), contents.len().div_ceil(64 << 10));
    // The second time, the file is in the cache.
    assert_eq!(client.train().unwrap(), files);
    assert_eq!(server.transfers(), contents.len().div_ceil(64 << 10));
    assert!(!client.cached().iter().any(|file| file.ends_with(".part")));
}

#[test]
fn faults_that_pass_are_waited_out() {
    let contents = contents(20_000);
    for (fault, transfers) in [
        (Fault::None, 1),
        (Fault::Stall(1), 2),
        (Fault::IgnoreRange(1), 2),
        (Fault::Status(503, 2), 3),
        (Fault::Status(429, 1), 2),
        (Fault::Corrupt(1), 2),
    ] {
        let (server, mut client) = serve(&contents, fault);
        if let Fault::Stall(_) = fault {
            client.settings.retry.stall_timeout = Duration::from_secs(2);
        }
        let files = client.train().unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert!(fs::read(&files[0]).unwrap() == contents, "{fault:?}");
        assert_eq!(server.transfers(), transfers, "{fault:?}");
    }
}

#[test]
fn a_corrupted_file_is_refused_by_its_hash_and_not_kept() {
    let (server, client) = serve(&contents(20_000), Fault::Corrupt(usize::MAX));
    let error = client.train().unwrap_err();
    assert!(matches!(error, DataError::Corrupted { .. }), "{error}");
    assert!(error.to_string().contains("announced is sha256 "), "{error}");
    assert_eq!(server.transfers(), 2);
    let left = client.cached();
    assert!(left.iter().all(|file| file.ends_with(".lock")), "{left:?}");
    assert!(client.train().is_err(), "nothing that is damaged may be found in the cache");
}

#[test]
fn what_an_interrupted_download_left_is_taken_up() {
    let contents = contents(20_000);
    for (part, transfers) in
        [(&contents[..50_000], 1), (&contents[..], 0), (&[7; 50_000][..], 2), (&[7; 90_000][..], 1)]
    {
        let (server, client) = serve(&contents, Fault::None);
        // The path of the blob is known after the first download.
        let file = client.train().unwrap().remove(0);
        let blob = fs::canonicalize(&file).unwrap();
        fs::remove_file(&file).unwrap();
        fs::remove_file(&blob).unwrap();
        fs::write(blob.with_extension("part"), part).unwrap();
        assert!(fs::read(&client.train().unwrap()[0]).unwrap() == contents);
        assert_eq!(server.transfers(), 1 + transfers, "{} bytes", part.len());
    }
}

#[test]
fn a_server_that_stays_broken_is_given_up() {
    for fault in [Fault::Status(500, usize::MAX), Fault::DropEvery(0)] {
        let (server, client) = serve(&contents(20_000), fault);
        let error = client.train().unwrap_err();
        assert!(matches!(error, DataError::Unreachable { .. }), "{fault:?}: {error}");
        assert_eq!(server.transfers(), 3, "{fault:?}");
    }
}

#[test]
fn a_download_stops_at_the_announced_size() {
    let contents = contents(20_000);
    let (server, client) = serve(&contents, Fault::Endless);
    let files = client.train().unwrap();
    assert!(fs::read(&files[0]).unwrap() == contents);
    assert_eq!(server.transfers(), 1);
    assert!(!client.cached().iter().any(|file| file.ends_with(".part")));
}

#[test]
fn what_will_not_change_is_refused_at_once_and_leaves_nothing() {
    for (fault, reason, transfers) in [
        (Fault::Encoded, "content encoding gzip", 1),
        (Fault::Status(403, usize::MAX), "access is denied", 1),
        (Fault::Status(410, usize::MAX), "status 410", 1),
        (Fault::Status(501, usize::MAX), "status 501", 1),
        (Fault::Ring, "redirects more than 5 times", 5),
    ] {
        let (server, client) = serve(&contents(20_000), fault);
        let message = client.train().unwrap_err().to_string();
        assert!(message.contains(reason), "{fault:?}: {message}");
        assert_eq!(server.transfers(), transfers, "{fault:?}");
        let left = client.cached();
        assert!(left.iter().all(|file| file.ends_with(".lock")), "{fault:?}: {left:?}");
    }
}

#[test]
fn a_name_without_address_is_given_up_soon() {
    let client = Client::new("http://no-such-host.invalid");
    let message = client.train().unwrap_err().to_string();
    assert!(message.contains("no-such-host.invalid"), "{message}");
}

#[test]
fn the_token_stays_at_the_port_it_was_given_for() {
    let large = contents(2000);
    let (server, mut client) = serve(&large, Fault::None);
    server.require("secret");
    client.settings.token = Some(HubToken::new("secret"));
    // The same host at another port; it ends connections that show a token.
    let (storage, _other) = serve(&large, Fault::None);
    server.store_at(&storage.endpoint);
    assert!(fs::read(&client.train().unwrap()[0]).unwrap() == large);
    assert_eq!((server.transfers(), storage.transfers()), (0, 1));
}

#[test]
fn a_mirror_may_store_large_files_itself() {
    let large = contents(2000);
    let (server, client) = serve(&large, Fault::None);
    server.store_at(&server.endpoint);
    assert!(fs::read(&client.train().unwrap()[0]).unwrap() == large);
    // Hash and size are from the redirect, so the contents are requested once.
    assert_eq!(server.transfers(), 1);
}

#[test]
fn listings_are_bounded() {
    let long = "x".repeat(2000) + ".csv";
    let many: Vec<String> = (0..100_001).map(|at| format!("{at}.csv")).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|name| (name.as_str(), &b"x"[..])).collect();
    for (files, reason) in [
        (&[(long.as_str(), &b"x"[..])][..], "a name of 2004 bytes, more than 1024"),
        (&many, "it lists 100001 files, more than 100000"),
    ] {
        let server = Loopback::dataset(ID, files, Fault::None);
        let client = Client::new(&server.endpoint);
        let message = client.train().unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn offline_the_cache_alone_answers() {
    let contents = contents(2000);
    let (server, mut client) = serve(&contents, Fault::None);
    client.settings.offline = true;
    let message = client.train().unwrap_err().to_string();
    let looked = client.settings.cache.join("datasets--owner--name").display().to_string();
    for expected in ["train-*.parquet", ID, &looked, "unset HF_HUB_OFFLINE", "HF_HOME", "local"] {
        assert!(message.contains(expected), "{expected} in {message}");
    }
    assert_eq!(server.requests(), [""; 0]);

    client.settings.offline = false;
    let files = client.train().unwrap();
    client.settings.offline = true;
    let asked = server.requests().len();
    assert_eq!(client.train().unwrap(), files);
    let commit = HubRepo { revision: COMMIT.into(), ..repo() };
    assert_eq!(client.hub().split(&commit, None, "train").unwrap(), files);
    let error = client.hub().split(&repo(), None, "test").unwrap_err();
    assert!(error.to_string().contains("test-*.parquet"), "{error}");
    assert_eq!(server.requests().len(), asked);

    // Without a network, and without offline mode.
    client.settings.offline = false;
    client.settings.endpoint = "http://127.0.0.1:9".into();
    assert_eq!(client.train().unwrap(), files);
    let error = client.hub().split(&repo(), None, "test").unwrap_err();
    assert!(matches!(error, DataError::Unreachable { .. }), "{error}");
}

#[test]
fn revisions_tokens_and_names_that_need_escaping() {
    let files = [("my data/train.csv", &b"text\nwords\n"[..]), ("my data/test.csv", &[b'x'; 5000])];
    let server = Loopback::dataset(ID, &files, Fault::None);
    server.require("secret");
    let mut client = Client::new(&server.endpoint);
    let message = client.train().unwrap_err().to_string();
    assert!(message.contains("HF_TOKEN"), "{message}");
    client.settings.token = Some(HubToken::new("secret"));
    assert!(!format!("{:?}", client.settings).contains("secret"));
    let tagged = HubRepo { revision: "v1".into(), ..repo() };
    for split in ["train", "test"] {
        let found = client.hub().split(&tagged, None, split).unwrap();
        assert!(found[0].ends_with(format!("my data/{split}.csv")));
    }
    assert!(client.cached().contains(&"hub/datasets--owner--name/refs/v1".to_owned()));
    let unknown = HubRepo { revision: "v2".into(), ..repo() };
    let message = client.hub().split(&unknown, None, "train").unwrap_err().to_string();
    assert!(message.contains("no such repository, revision or file"), "{message}");
}

#[test]
fn a_listing_that_leads_out_of_the_cache_is_refused() {
    for name in ["../train.csv", "/train.csv", "a/../../train.csv", "a\\..\\train.csv"] {
        let server = Loopback::dataset(ID, &[(name, b"x")], Fault::None);
        let client = Client::new(&server.endpoint);
        let message = client.train().unwrap_err().to_string();
        assert!(message.contains("it lists a file"), "{message}");
        assert_eq!(client.cached(), [""; 0]);
    }
}

#[test]
fn a_location_is_a_folder_a_file_or_an_id() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("train.txt");
    fs::write(&file, "words").unwrap();
    let parse = |text: &str| Location::parse(text, RepoKind::Dataset);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    assert_eq!(parse(&text(dir.path())).unwrap(), Location::Folder(dir.path().into()));
    assert_eq!(parse(&text(&file)).unwrap(), Location::File(file.clone()));
    assert_eq!(parse(ID).unwrap(), Location::Hub(repo()));
    for bad in ["", "name", "a/b/c", "./a", "../a", "-a/b", "a--b/c", "a/b c"] {
        let message = parse(bad).unwrap_err().to_string();
        for expected in ["existing folder", "existing file", "`owner/name`"] {
            assert!(message.contains(expected), "{bad}: {message}");
        }
    }
    let client = Client::new("http://127.0.0.1:9");
    let folder = Location::Folder(dir.path().into());
    assert_eq!(folder.split(&client.hub(), None, "train").unwrap(), std::slice::from_ref(&file));
    let message = folder.split(&client.hub(), None, "test").unwrap_err().to_string();
    assert!(message.contains("only [`train.txt`]"), "{message}");
    let message = Location::File(file).split(&client.hub(), None, "train").unwrap_err().to_string();
    assert!(message.contains("is a single file"), "{message}");
}

#[test]
fn settings_come_from_the_variables_of_the_hub() {
    let settings = |variables: &[(&str, &str)]| {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name);
        HubSettings::from_variables(|name| find(name).map(|(_, value)| value.to_string())).unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), "stored\n").unwrap();
    let home = dir.path().to_str().unwrap();
    let found = settings(&[("HF_HOME", home), ("HF_ENDPOINT", "http://mirror/")]);
    assert_eq!(found.cache, dir.path().join("hub"));
    assert_eq!((found.endpoint.as_str(), found.offline), ("http://mirror", false));
    assert_eq!(found.token, Some(HubToken::new("stored")));
    let found = settings(&[("HF_HOME", home), ("HF_TOKEN", "given"), ("HF_HUB_OFFLINE", "1")]);
    assert_eq!((found.token, found.offline), (Some(HubToken::new("given")), true));
    let found = settings(&[("HF_HUB_CACHE", "/cache"), ("HF_HUB_OFFLINE", "0")]);
    assert_eq!((found.cache, found.offline), (PathBuf::from("/cache"), false));
}

#[test]
fn a_model_is_fetched_with_its_tokenizer() {
    let files = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "pytorch_model.bin",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
    ];
    let files = files.map(|name| (name.to_owned(), name.repeat(300).into_bytes()));
    let repos = Repos::from([(format!("models/{ID}"), BTreeMap::from(files))]);
    let server = Loopback::serve(repos, Fault::None);
    let client = Client::new(&server.endpoint);
    let location = Location::parse(ID, RepoKind::Model).unwrap();
    let tokenizer = location.tokenizer(&client.hub()).unwrap();
    assert_eq!(folder::listing(&tokenizer).unwrap(), ["chat_template.jinja", "tokenizer.json"]);
    let model = location.model(&client.hub()).unwrap();
    let found =
        ["LICENSE", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(folder::listing(&model).unwrap(), found);
}

/// A job does not need companion files, so it can run without them.
#[test]
fn a_companion_file_that_cannot_be_downloaded_is_left_out() {
    let small = ["config.json", "model.safetensors"].map(|name| (name, vec![7; 10]));
    let large = ("LICENSE", contents(20_000));
    let files = small.into_iter().chain([large]).map(|(name, bytes)| (name.to_owned(), bytes));
    let repos = Repos::from([(format!("models/{ID}"), files.collect())]);
    let server = Loopback::serve(repos, Fault::Corrupt(usize::MAX));
    let client = Client::new(&server.endpoint);
    let model = Location::parse(ID, RepoKind::Model).unwrap().model(&client.hub()).unwrap();
    assert_eq!(folder::listing(&model).unwrap(), ["config.json", "model.safetensors"]);
}

/// Real data sets, loaded by their Hub ids.
#[test]
fn wikitext_and_imdb_by_their_names() {
    let Some(hub) = test_data("hub") else { return };
    let mut repos = Repos::new();
    for id in ["Salesforce/wikitext", "stanfordnlp/imdb"] {
        let folder = hub.join("datasets").join(id);
        let names = folder::listing(&folder).unwrap();
        let read = |name: String| (name.clone(), fs::read(folder.join(name)).unwrap());
        repos.insert(format!("datasets/{id}"), names.into_iter().map(read).collect());
    }
    let server = Loopback::serve(repos, Fault::DropEvery(64 << 10));
    let client = Client::new(&server.endpoint);
    let dataset = |id: &str| Location::parse(id, RepoKind::Dataset).unwrap();
    let files = dataset("stanfordnlp/imdb").split(&client.hub(), None, "test").unwrap();
    let (kind, origin) = (LabelKind::Class, ClassesOrigin::TRAIN_SPLIT);
    let columns =
        LabeledColumns { text: TEXT_FIELD, label: LABEL_FIELD, kind, kind_reason: "", origin };
    assert_eq!(read_labeled(&files, columns, None).unwrap().0.len(), 25_000);
    let wikitext = dataset("Salesforce/wikitext");
    let name = Some("wikitext-2-raw-v1");
    let files = wikitext.split(&client.hub(), name, "test").unwrap();
    assert_eq!(read_documents(&files[0], TEXT_FIELD).unwrap().len(), 4358);
    let message = wikitext.split(&client.hub(), Some("raw"), "test").unwrap_err().to_string();
    assert!(message.contains("no configuration `raw` has it, only [`wikitext-2-raw-v1`]"));
}
