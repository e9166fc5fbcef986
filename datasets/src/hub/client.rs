//! The Hugging Face Hub: files of a repository, by its id, through a cache.
//!
//! [`Hub`] lists what a repository has at a revision, picks the files that are wanted and brings
//! those that the cache lacks, each verified by its hash ([`crate::download`]). Addresses and the
//! layout of the cache are those of the `hf-hub` crate and of the Python library, so that all
//! three share one cache. Without a network, or with `HF_HUB_OFFLINE=1`, the cache alone answers;
//! what it lacks is refused by name.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use crate::formats::folder;
use crate::hub::download::{Downloader, Patience};
use crate::hub::selection::Wanted;
use crate::{DataError, HubToken};

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// Data.
    Dataset,
    /// Weights and a tokenizer.
    Model,
}

/// A repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRepo {
    /// What it holds.
    pub kind: RepoKind,
    /// `owner/name`.
    pub id: String,
    /// A branch, a tag or a commit; usually [`HubRepo::MAIN`].
    pub revision: String,
}

impl HubRepo {
    /// The branch that repositories begin with.
    pub const MAIN: &'static str = "main";

    /// Whether `text` has the form of an id, `owner/name` in the characters that the Hub allows.
    pub fn is_id(text: &str) -> bool {
        let is_part = |part: &str| {
            let is_allowed = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
            let starts_well = |char: char| char.is_ascii_alphanumeric() || char == '_';
            part.starts_with(starts_well)
                && part.chars().all(is_allowed)
                && part.len() <= 96
                && !part.ends_with(['-', '.'])
                && !part.contains("--")
                && !part.contains("..")
        };
        text.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
    }

    /// Whether `text` can name a branch, a tag or a commit: `refs/pr/1` can, what leads out of the
    /// cache cannot.
    pub fn is_revision(text: &str) -> bool {
        let is_part = |part: &str| {
            let is_allowed = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
            !part.is_empty() && part.chars().all(is_allowed) && !part.starts_with('.')
        };
        text.len() <= 256 && text.split('/').all(is_part)
    }

    fn at(&self, revision: &str) -> Repo {
        let kind = match self.kind {
            RepoKind::Dataset => RepoType::Dataset,
            RepoKind::Model => RepoType::Model,
        };
        Repo::with_revision(self.id.clone(), kind, revision.to_owned())
    }
}

/// Where the Hub is and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// Folder of the cache, with a folder for each repository in it.
    pub cache: PathBuf,
    /// Address of the Hub, without a slash at its end.
    pub endpoint: String,
    /// Token for private and gated repositories.
    pub token: Option<HubToken>,
    /// Whether the cache alone answers.
    pub offline: bool,
    /// Whether downloads draw a bar, where there is a terminal.
    pub progress: bool,
    /// When to give up.
    pub patience: Patience,
}

impl HubSettings {
    /// Settings from environment variables, looked up through `variable`: `HF_HUB_CACHE`,
    /// `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` (else the token that logging in has left in `HF_HOME`)
    /// and `HF_HUB_OFFLINE`. Empty ones count as not set.
    ///
    /// # Errors
    /// [`DataError::NoHome`] where no variable says where the cache is and there is no home folder.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, DataError> {
        let set = |name| variable(name).filter(|value| !value.trim().is_empty());
        let home = match set("HF_HOME") {
            Some(home) => PathBuf::from(home),
            None => std::env::home_dir().ok_or(DataError::NoHome)?.join(".cache/huggingface"),
        };
        let cache = set("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let offline = set("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_lowercase();
        Ok(Self {
            token: set("HF_TOKEN")
                .or_else(|| Cache::new(home.join("hub")).token())
                .map(|token| HubToken::new(&token)),
            cache,
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
            progress: true,
            patience: Patience::default(),
        })
    }
}

/// Files that a repository may list, at most.
const MAX_FILES: usize = 100_000;

/// Bytes of a file's name in a repository, at most.
const MAX_NAME: usize = 1024;

/// Files of a repository that lie in the cache.
#[derive(Debug)]
struct Snapshot {
    /// The folder of the commit.
    folder: PathBuf,
    /// The files that were wanted, sorted.
    files: Vec<PathBuf>,
}

/// A Hub and the cache before it.
#[derive(Debug)]
pub struct Hub {
    settings: HubSettings,
    cache: Cache,
    api: Api,
    downloader: Downloader,
}

impl Hub {
    /// The Hub that the environment names, see [`HubSettings::from_variables`].
    ///
    /// # Errors
    /// [`DataError::NoHome`], and those of [`Hub::new`].
    pub fn from_env() -> Result<Self, DataError> {
        Self::new(HubSettings::from_variables(|name| std::env::var(name).ok())?)
    }

    /// A Hub used as `settings` say.
    ///
    /// # Errors
    /// [`DataError::Hub`] for settings that make no client.
    pub fn new(settings: HubSettings) -> Result<Self, DataError> {
        let cache = Cache::new(settings.cache.clone());
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(settings.endpoint.clone())
            .with_progress(false)
            // It is asked for addresses only.
            .with_token(None)
            .build()
            .map_err(|error| DataError::Hub {
                url: settings.endpoint.clone(),
                reason: error.to_string(),
            })?;
        let downloader =
            Downloader::new(settings.token.clone(), settings.patience, settings.progress);
        Ok(Self { settings, cache, api, downloader })
    }

    /// The files of a split of a data set, in the configuration `name` where there are several.
    ///
    /// # Errors
    /// A repository without such files, a server that cannot be reached or sends damaged files,
    /// an empty cache while offline, a cache that cannot be written: see [`DataError`].
    pub fn split(
        &self,
        repo: &HubRepo,
        name: Option<&str>,
        split: &str,
    ) -> Result<Vec<PathBuf>, DataError> {
        Ok(self.snapshot(repo, Wanted::Split { name, split })?.files)
    }

    /// A folder with the configuration, the weights and, where the model has one, the tokenizer.
    ///
    /// # Errors
    /// Those of [`Hub::split`].
    pub fn model(&self, repo: &HubRepo) -> Result<PathBuf, DataError> {
        Ok(self.snapshot(repo, Wanted::Model)?.folder)
    }

    /// A folder with the tokenizer of a model.
    ///
    /// # Errors
    /// Those of [`Hub::split`].
    pub fn tokenizer(&self, repo: &HubRepo) -> Result<PathBuf, DataError> {
        Ok(self.snapshot(repo, Wanted::Tokenizer)?.folder)
    }

    /// What is wanted of `repo`, from the cache where it must or can.
    fn snapshot(&self, repo: &HubRepo, wanted: Wanted<'_>) -> Result<Snapshot, DataError> {
        if self.settings.offline {
            return self.cached(repo, wanted);
        }
        let info = match self.info(repo) {
            Ok(info) => info,
            // Whoever has fetched it once can go on without a network.
            Err(error @ DataError::Unreachable { .. }) => {
                let snapshot = self.cached(repo, wanted).map_err(|_| error)?;
                tracing::warn!(id = repo.id, "the Hub cannot be reached; using the cache");
                return Ok(snapshot);
            }
            Err(error) => return Err(error),
        };
        let listing: Vec<String> =
            info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let selected = wanted.select(&listing).map_err(|reason| DataError::NotFound {
            place: repo.id.clone(),
            wanted: wanted.described(),
            reason,
        })?;
        let cache = self.cache.repo(repo.at(&repo.revision));
        let fetched = selected.iter().map(|name| self.fetch(repo, &cache, &info.sha, name));
        let files = fetched.collect::<Result<Vec<_>, _>>()?;
        cache.create_ref(&info.sha).map_err(DataError::unwritable(self.folder(repo)))?;
        Ok(Snapshot { folder: cache.pointer_path(&info.sha), files })
    }

    /// Commit and files of `repo`, as the Hub lists them.
    fn info(&self, repo: &HubRepo) -> Result<RepoInfo, DataError> {
        let url = format!("{}/api/{}", self.settings.endpoint, repo.at(&repo.revision).api_url());
        let document = self.downloader.document(&url)?;
        let wrong = |reason: String| DataError::Hub { url: url.clone(), reason };
        let info: RepoInfo = serde_json::from_str(&document)
            .map_err(|error| wrong(format!("no description of a repository ({error})")))?;
        // Both become paths below the cache, and must not lead out of it.
        let leads_out = |name: &str| {
            name.split(['/', '\\']).any(|part| part.is_empty() || part == "." || part == "..")
        };
        let mut names = info.siblings.iter().map(|sibling| sibling.rfilename.as_str());
        if info.siblings.len() > MAX_FILES {
            let files = info.siblings.len();
            return Err(wrong(format!("it lists {files} files, more than {MAX_FILES}")));
        }
        if let Some(name) = names.clone().find(|name| name.len() > MAX_NAME) {
            let bytes = name.len();
            return Err(wrong(format!("it lists a name of {bytes} bytes, more than {MAX_NAME}")));
        }
        match names.find(|name| leads_out(name)) {
            Some(name) => Err(wrong(format!("it lists a file `{name}`"))),
            None if info.sha.is_empty() || !info.sha.chars().all(char::is_alphanumeric) => {
                Err(wrong(format!("it is at a commit `{}`", info.sha)))
            }
            None => Ok(info),
        }
    }

    /// Brings one file into the cache, unless it is there.
    fn fetch(
        &self,
        repo: &HubRepo,
        cache: &CacheRepo,
        commit: &str,
        name: &str,
    ) -> Result<PathBuf, DataError> {
        let pointer = cache.pointer_path(commit).join(name);
        if pointer.is_file() {
            return Ok(pointer);
        }
        let url = self.api.repo(repo.at(commit)).url(&escaped(name));
        let file = self.downloader.announced(&url)?;
        let blob = cache.blob_path(file.hash.digits());
        for path in [&blob, &pointer] {
            let parent = path.parent().unwrap_or(path);
            fs::create_dir_all(parent).map_err(DataError::unwritable(parent))?;
        }
        let path = blob.with_extension("lock");
        let lock = File::create(&path).map_err(DataError::unwritable(&path))?;
        // Held until this function returns: one process fetches, the others wait and find it done.
        lock.lock().map_err(DataError::unwritable(&path))?;
        if !blob.is_file() {
            tracing::info!(file = name, bytes = file.bytes, id = repo.id, "fetching");
            self.downloader.fetch(&file, &blob)?;
        }
        point(&pointer, &blob, name).map_err(DataError::unwritable(&pointer))?;
        Ok(pointer)
    }

    /// What is wanted of `repo`, from the cache alone.
    fn cached(&self, repo: &HubRepo, wanted: Wanted<'_>) -> Result<Snapshot, DataError> {
        let missing = |looked: PathBuf, reason: String| DataError::Offline {
            id: repo.id.clone(),
            wanted: wanted.described(),
            looked,
            reason,
        };
        let home = self.folder(repo);
        let cache = self.cache.repo(repo.at(&repo.revision));
        // A revision is the name of a branch or tag, or itself a commit.
        let commit = fs::read_to_string(home.join("refs").join(&repo.revision))
            .map_or_else(|_| repo.revision.clone(), |commit| commit.trim().to_owned());
        let snapshot = cache.pointer_path(&commit);
        if !snapshot.is_dir() {
            let reason = format!("where revision `{}` is not", repo.revision);
            return Err(missing(home, reason));
        }
        let listing = folder::listing(&snapshot)?;
        match wanted.select(&listing) {
            Ok(names) => {
                let files = names.into_iter().map(|name| snapshot.join(name)).collect();
                Ok(Snapshot { folder: snapshot, files })
            }
            Err(reason) => Err(missing(snapshot, reason)),
        }
    }

    /// The folder of `repo` in the cache.
    fn folder(&self, repo: &HubRepo) -> PathBuf {
        self.settings.cache.join(repo.at(&repo.revision).folder_name())
    }
}

/// Makes `pointer`, the file `name` of a snapshot, stand for `blob`.
fn point(pointer: &Path, blob: &Path, name: &str) -> std::io::Result<()> {
    if pointer.is_file() {
        return Ok(());
    }
    #[cfg(unix)]
    {
        // Relative, so that a cache can be moved: up from snapshots/<commit>/<folders of name>.
        let up = "../".repeat(2 + name.matches('/').count());
        let digits = blob.file_name().unwrap_or_default();
        std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(digits), pointer)
    }
    #[cfg(not(unix))]
    {
        let _ = name;
        fs::hard_link(blob, pointer).or_else(|_| fs::copy(blob, pointer).map(drop))
    }
}

/// `path` as it stands in an address.
fn escaped(path: &str) -> String {
    let escape = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    path.bytes().map(escape).collect()
}
