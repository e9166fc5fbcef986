//! Where a job finds data, a model or a tokenizer.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::lookup::find;

/// What the text of a key names. What exists on disk wins over a repository of the same name.
///
/// | Text | Place |
/// |---|---|
/// | `corpus.txt`, `../data/corpus.txt` | a file or folder that has to exist |
/// | `openai-community/gpt2` | the folder of this name if there is one, else the repository |
/// | `owner/name@v1.0` | the repository at a branch, tag or commit |
/// | `corpus`, `owner/name/part` | nothing, unless it exists: a repository has one slash |
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Place {
    /// A file or folder that exists.
    Local(PathBuf),
    /// What has the form of a repository on the Hub, `owner/name` or `owner/name@revision`. Whether
    /// there is one, only the Hub knows.
    Hub(String),
}

impl Place {
    /// What `text` names, looked for in `folders`; `None` where it is neither there nor has the
    /// form of a repository.
    pub(crate) fn find(text: &str, folders: &[PathBuf]) -> Option<Self> {
        if text.is_empty() {
            return None;
        }
        match find(Path::new(text), folders, "file or folder") {
            Ok(path) => Some(Self::Local(path)),
            Err(_) => looks_like_a_repository(text).then(|| Self::Hub(text.to_owned())),
        }
    }

    /// The file or folder, where it is one.
    pub fn local(&self) -> Option<&Path> {
        let Self::Local(path) = self else { return None };
        Some(path)
    }

    /// Whether it is one file.
    pub(crate) fn is_file(&self) -> bool {
        self.local().is_some_and(|path| !path.is_dir())
    }
}

/// One slash between two names; relative and absolute paths have a dot, a tilde or nothing before
/// it.
fn looks_like_a_repository(text: &str) -> bool {
    let starts_well =
        |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let parts = text.split_once('/');
    parts
        .is_some_and(|(owner, name)| starts_well(owner) && starts_well(name) && !name.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exists_wins_and_the_rest_must_look_like_a_repository() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [folder.path().to_path_buf()];
        let find = |text: &str| Place::find(text, &folders);
        assert_eq!(find("owner/name"), Some(Place::Hub("owner/name".into())));
        assert_eq!(find("owner/name@main"), Some(Place::Hub("owner/name@main".into())));
        std::fs::create_dir_all(folder.path().join("owner/name")).unwrap();
        assert_eq!(find("owner/name"), Some(Place::Local(folder.path().join("owner/name"))));
        for text in ["", "name", "./x/y", "../data/x", "/owner/name", "a/b/c", "~/data", "a/"] {
            assert_eq!(find(text), None, "{text}");
        }
    }
}
