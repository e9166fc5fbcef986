//! Files of repositories on the Hugging Face Hub, through a local cache.
//!
//! [`Hub`] lists the files of a repository at a revision, selects the needed ones and downloads
//! those that are not in the cache, each verified by its hash ([`super::download`]). The addresses
//! and the cache layout are the Python library's, so that both share one cache:
//!
//! ```text
//! datasets--owner--name/refs/main                  the commit of a branch or tag
//! datasets--owner--name/blobs/<hash>               contents by hash
//! datasets--owner--name/snapshots/<commit>/<file>  links to the contents
//! ```
//!
//! Without a network, or with `HF_HUB_OFFLINE=1`, only the cache is used, and a file that is not in
//! it is an error.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::formats::folder;
use crate::hub::companions::CompanionFile;
use crate::hub::download::{Downloader, RemoteFile, RetryPolicy};
use crate::hub::file_selection::FileSelection;
use crate::{DataError, HubToken, Result};

/// The kind of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A data set.
    Dataset,
    /// A model: weights and a tokenizer.
    Model,
}

/// A repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRepo {
    /// Data set or model.
    pub kind: RepoKind,
    /// `owner/name`.
    pub id: String,
    /// A branch, a tag or a commit; usually [`HubRepo::MAIN`].
    pub revision: String,
}

impl HubRepo {
    /// The default branch of repositories.
    pub const MAIN: &'static str = "main";

    /// Returns whether `text` has the form of an id, `owner/name` in the characters that the Hub
    /// allows.
    ///
    /// Only the form is checked. A relative path can have the same form, and the repository need
    /// not exist.
    ///
    /// ```
    /// use deepburn_datasets::HubRepo;
    ///
    /// assert!(HubRepo::is_id("openai-community/gpt2"));
    /// assert!(!HubRepo::is_id("../gpt2") && !HubRepo::is_id("data/texts/train"));
    /// ```
    pub fn is_id(text: &str) -> bool {
        // Follows `validate_repo_id` of the Python library.
        let is_part = |part: &str| {
            let is_start = |char: char| char.is_ascii_alphanumeric() || char == '_';
            part.starts_with(is_start)
                && part.chars().all(is_name_char)
                && part.len() <= 96
                && !part.ends_with(['-', '.'])
                && !part.contains("--")
                && !part.contains("..")
        };
        text.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
    }

    /// Returns whether `text` can name a branch, a tag or a commit. `refs/pr/1` can, but a path
    /// that leads out of the cache cannot.
    ///
    /// ```
    /// use deepburn_datasets::HubRepo;
    ///
    /// assert!(HubRepo::is_revision(HubRepo::MAIN) && HubRepo::is_revision("refs/pr/1"));
    /// assert!(!HubRepo::is_revision("../../etc"));
    /// ```
    pub fn is_revision(text: &str) -> bool {
        let is_part = |part: &str| {
            !part.is_empty() && part.chars().all(is_name_char) && !part.starts_with('.')
        };
        text.len() <= 256 && text.split('/').all(is_part)
    }

    /// Returns the id below the name of its kind, as in the API: `datasets/owner/name`.
    fn path(&self) -> String {
        let kind = match self.kind {
            RepoKind::Dataset => "datasets",
            RepoKind::Model => "models",
        };
        format!("{kind}/{}", self.id)
    }
}

/// Returns whether an id or a revision may contain a character.
fn is_name_char(char: char) -> bool {
    char.is_ascii_alphanumeric() || "-_.".contains(char)
}

/// The location of the Hub, and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// Folder of the cache, with a subfolder for each repository.
    pub cache: PathBuf,
    /// Address of the Hub, without a slash at its end.
    pub endpoint: String,
    /// Token for private and gated repositories.
    pub token: Option<HubToken>,
    /// Whether to use only the cache.
    pub offline: bool,
    /// Whether downloads show a progress bar on a terminal.
    pub progress: bool,
    /// How often failed requests are retried.
    pub retry: RetryPolicy,
}

impl HubSettings {
    /// Reads the settings from the environment variables `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`,
    /// `HF_TOKEN` (else the token that `hf auth login` stored in `HF_HOME`) and `HF_HUB_OFFLINE`,
    /// which `variable` looks up. Empty variables count as unset.
    ///
    /// ```
    /// use deepburn_datasets::HubSettings;
    ///
    /// let variable = |name: &str| match name {
    ///     "HF_HOME" => Some("/data/huggingface".to_owned()),
    ///     "HF_HUB_OFFLINE" => Some("1".to_owned()),
    ///     _ => None,
    /// };
    /// let settings = HubSettings::from_variables(variable)?;
    /// assert_eq!(settings.cache, std::path::Path::new("/data/huggingface/hub"));
    /// assert_eq!(settings.endpoint, "https://huggingface.co");
    /// assert!(settings.offline);
    /// # Ok::<(), deepburn_datasets::DataError>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`DataError::NoHome`] if no variable names the cache and there is no home folder.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name| variable(name).filter(|value| !value.trim().is_empty());
        let home = match set("HF_HOME") {
            Some(home) => PathBuf::from(home),
            None => std::env::home_dir().ok_or(DataError::NoHome)?.join(".cache/huggingface"),
        };
        // A stored token that cannot be read counts as none: public repositories need no token.
        let stored = || fs::read_to_string(home.join("token")).ok();
        let token = set("HF_TOKEN").or_else(|| stored().filter(|it| !it.trim().is_empty()));
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let offline = set("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_lowercase();
        Ok(Self {
            token: token.map(|token| HubToken::new(&token)),
            cache: set("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
            progress: true,
            retry: RetryPolicy::default(),
        })
    }
}

/// Maximum number of files in a repository.
const MAX_FILES: usize = 100_000;

/// Maximum bytes of a file name in a repository.
const MAX_NAME: usize = 1024;

/// The Hub's answer about a repository: its commit and its files.
#[derive(Deserialize)]
struct Listing {
    /// The commit.
    sha: String,
    /// The files.
    siblings: Vec<Sibling>,
}

/// A file of a repository.
#[derive(Deserialize)]
struct Sibling {
    /// The path in the repository, with `/`.
    rfilename: String,
}

/// Files of a repository in the cache.
#[derive(Debug)]
struct RepoSnapshot {
    /// The folder of the commit.
    folder: PathBuf,
    /// The selected files, sorted.
    files: Vec<PathBuf>,
}

/// A Hub with its local cache.
#[derive(Debug)]
pub struct Hub {
    /// The location of the Hub, and how it is used.
    settings: HubSettings,
    /// The HTTP client.
    downloader: Downloader,
}

impl Hub {
    /// Creates a Hub from the environment variables, see [`HubSettings::from_variables`].
    ///
    /// # Errors
    /// Returns [`DataError::NoHome`] if no variable names the cache and there is no home folder.
    pub fn from_env() -> Result<Self> {
        Ok(Self::new(HubSettings::from_variables(|name| std::env::var(name).ok())?))
    }

    /// Creates a Hub with `settings`.
    pub fn new(settings: HubSettings) -> Self {
        let downloader = Downloader::new(settings.token.clone(), settings.retry, settings.progress);
        Self { settings, downloader }
    }

    /// Returns the files of a split of a data set. `name` is the configuration, if there are
    /// several.
    ///
    /// # Errors
    /// Returns an error if the repository has no such files, if the server cannot be reached or
    /// sends damaged files, if a file is missing from the cache in offline mode, or if the cache
    /// cannot be written; see [`DataError`].
    pub fn split(&self, repo: &HubRepo, name: Option<&str>, split: &str) -> Result<Vec<PathBuf>> {
        Ok(self.snapshot(repo, FileSelection::Split { name, split })?.files)
    }

    /// Returns a folder with the configuration and the weights, the tokenizer if the model has one,
    /// and its companion files ([`companion_files`](crate::companion_files)).
    ///
    /// # Errors
    /// Returns the errors of [`Hub::split`].
    pub fn model(&self, repo: &HubRepo) -> Result<PathBuf> {
        Ok(self.snapshot(repo, FileSelection::Model)?.folder)
    }

    /// Returns a folder with the tokenizer of a model and the tokenizer's companion files.
    ///
    /// # Errors
    /// Returns the errors of [`Hub::split`].
    pub fn tokenizer(&self, repo: &HubRepo) -> Result<PathBuf> {
        Ok(self.snapshot(repo, FileSelection::Tokenizer)?.folder)
    }

    /// Returns the selected files of `repo`, and downloads those that are not cached.
    fn snapshot(&self, repo: &HubRepo, selection: FileSelection<'_>) -> Result<RepoSnapshot> {
        if self.settings.offline {
            return self.cached(repo, selection);
        }
        let (commit, listing) = match self.listing(repo) {
            Ok(listing) => listing,
            // A repository that was fetched before is usable without a network.
            Err(error @ DataError::Unreachable { .. }) => {
                let snapshot = self.cached(repo, selection).map_err(|_| error)?;
                tracing::warn!(id = repo.id, "the Hub cannot be reached; using the cache");
                return Ok(snapshot);
            }
            Err(error) => return Err(error),
        };
        let selected = selection.select_in(&repo.id, &listing)?;
        let files = selected.iter().map(|name| self.fetch(repo, &commit, name, u64::MAX));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        for name in selection.companions(&listing) {
            // Its absence does not end a job, so a failure is only a warning.
            if let Err(error) = self.fetch(repo, &commit, name, CompanionFile::MAX_BYTES) {
                tracing::warn!(
                    "{}: {name} cannot be downloaded and is not exported with the trained model: {error}",
                    repo.id
                );
            }
        }
        // Last, so that the cache never names a commit whose files are incomplete.
        let branch = self.folder(repo).join("refs").join(&repo.revision);
        // A revision such as `refs/pr/1` contains folders.
        fs::create_dir_all(branch.parent().unwrap_or(&branch))
            .and_then(|()| fs::write(&branch, &commit))
            .map_err(DataError::unwritable(&branch))?;
        Ok(RepoSnapshot { folder: self.snapshot_folder(repo, &commit), files })
    }

    /// Returns the commit and the files of `repo`, as the Hub lists them.
    fn listing(&self, repo: &HubRepo) -> Result<(String, Vec<String>)> {
        // A revision is a single segment of the URL. The slash is the only character that
        // `HubRepo::is_revision` allows and that needs to be encoded.
        let (endpoint, revision) = (&self.settings.endpoint, repo.revision.replace('/', "%2F"));
        let url = format!("{endpoint}/api/{}/revision/{revision}", repo.path());
        let document = self.downloader.document(&url)?;
        let refused = |reason: String| Err(DataError::Hub { url: url.clone(), reason });
        let Listing { sha, siblings } = match serde_json::from_str(&document) {
            Ok(listing) => listing,
            Err(error) => return refused(format!("not the listing of a repository ({error})")),
        };
        // The file names and the commit become paths below the cache folder, and must not point
        // outside of it.
        let leads_out = |name: &str| {
            name.split(['/', '\\']).any(|part| part.is_empty() || part == "." || part == "..")
        };
        let (files, names) = (siblings.len(), siblings.into_iter().map(|it| it.rfilename));
        let names: Vec<String> = names.collect();
        if files > MAX_FILES {
            return refused(format!("it lists {files} files, more than {MAX_FILES}"));
        }
        if let Some(name) = names.iter().find(|name| name.len() > MAX_NAME) {
            let bytes = name.len();
            return refused(format!("it lists a name of {bytes} bytes, more than {MAX_NAME}"));
        }
        if let Some(name) = names.iter().find(|name| leads_out(name)) {
            return refused(format!("it lists a file `{name}` outside of the repository"));
        }
        if sha.is_empty() || !sha.chars().all(char::is_alphanumeric) {
            return refused(format!("its commit is `{sha}`, not a hash"));
        }
        Ok((sha, names))
    }

    /// Downloads one file into the cache unless it is already cached. One of more than `max_bytes`
    /// is left out with a warning, and its path then does not exist.
    fn fetch(&self, repo: &HubRepo, commit: &str, name: &str, max_bytes: u64) -> Result<PathBuf> {
        let link = self.snapshot_folder(repo, commit).join(name);
        if link.is_file() {
            return Ok(link);
        }
        let file = self.announced(repo, commit, name)?;
        if file.bytes > max_bytes {
            tracing::warn!("{}: {name} has {} bytes and is not downloaded", repo.id, file.bytes);
        } else {
            self.place(repo, &file, &link, name)?;
        }
        Ok(link)
    }

    /// Asks the Hub for the hash and the size of a file.
    fn announced(&self, repo: &HubRepo, commit: &str, name: &str) -> Result<RemoteFile> {
        let path = match repo.kind {
            RepoKind::Dataset => repo.path(),
            // The URL of a model's file has no prefix for the kind.
            RepoKind::Model => repo.id.clone(),
        };
        let (endpoint, file) = (&self.settings.endpoint, escaped(name));
        self.downloader.announced(&format!("{endpoint}/{path}/resolve/{commit}/{file}"))
    }

    /// Downloads the contents of `file` unless they are cached, and links them as the file `name`
    /// of a snapshot.
    fn place(&self, repo: &HubRepo, file: &RemoteFile, link: &Path, name: &str) -> Result<()> {
        let blob = self.folder(repo).join("blobs").join(file.hash.digits());
        for path in [blob.as_path(), link] {
            let parent = path.parent().unwrap_or(path);
            fs::create_dir_all(parent).map_err(DataError::unwritable(parent))?;
        }
        let path = blob.with_extension("lock");
        let lock = File::create(&path).map_err(DataError::unwritable(&path))?;
        // The lock is held until this function returns: one process downloads the file, and the
        // others wait for it.
        lock.lock().map_err(DataError::unwritable(&path))?;
        if !blob.is_file() {
            tracing::info!(file = name, bytes = file.bytes, id = repo.id, "fetching");
            self.downloader.fetch(file, &blob)?;
        }
        link_blob(link, &blob, name).map_err(DataError::unwritable(link))
    }

    /// Returns the selected files of `repo` from the cache alone.
    fn cached(&self, repo: &HubRepo, selection: FileSelection<'_>) -> Result<RepoSnapshot> {
        let missing = |looked: PathBuf, reason: String| DataError::Offline {
            id: repo.id.clone(),
            wanted: selection.described(),
            looked,
            reason,
        };
        let home = self.folder(repo);
        // A revision is the name of a branch or tag, or itself a commit.
        let commit = fs::read_to_string(home.join("refs").join(&repo.revision))
            .map_or_else(|_| repo.revision.clone(), |commit| commit.trim().to_owned());
        let folder = self.snapshot_folder(repo, &commit);
        if !folder.is_dir() {
            let reason = format!("which does not have revision `{}`", repo.revision);
            return Err(missing(home, reason));
        }
        let listing = folder::listing(&folder)?;
        match selection.select(&listing) {
            Ok(names) => {
                let files = names.into_iter().map(|name| folder.join(name)).collect();
                Ok(RepoSnapshot { folder, files })
            }
            Err(reason) => Err(missing(folder, reason)),
        }
    }

    /// Returns the folder of `repo` in the cache.
    fn folder(&self, repo: &HubRepo) -> PathBuf {
        self.settings.cache.join(repo.path().replace('/', "--"))
    }

    /// Returns the folder of a commit in the cache.
    fn snapshot_folder(&self, repo: &HubRepo, commit: &str) -> PathBuf {
        self.folder(repo).join("snapshots").join(commit)
    }
}

/// Creates `link`, the file `name` of a snapshot, as a link to `blob`.
fn link_blob(link: &Path, blob: &Path, name: &str) -> std::io::Result<()> {
    if link.is_file() {
        return Ok(());
    }
    #[cfg(unix)]
    {
        // Relative, so that a cache can be moved: up from snapshots/<commit>/<folders of name>.
        let up = "../".repeat(2 + name.matches('/').count());
        let digits = blob.file_name().unwrap_or_default();
        std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(digits), link)
    }
    #[cfg(not(unix))]
    {
        let _ = name;
        // Windows reserves symbolic links for privileged users, and not every file system has hard
        // links.
        fs::hard_link(blob, link).or_else(|_| fs::copy(blob, link).map(drop))
    }
}

/// Percent-encodes the name of a file for a URL.
fn escaped(path: &str) -> String {
    let escape = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    path.bytes().map(escape).collect()
}
