//! Parses Markdown pages into code blocks, headings and links.

use std::fs;
use std::path::{Path, PathBuf};

/// Other pages than the README and the book. Only their links are checked.
const OTHERS: [&str; 6] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benches/README.md",
    "benches/gpu/README.md",
    "configs/guides/README.md",
];

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A page, by its path from the root of the repository.
pub(crate) struct Page {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// A fenced block of code.
pub(crate) struct Block {
    pub(crate) language: String,
    pub(crate) code: String,
}

impl Page {
    /// Reads the README and all chapters of the book.
    pub(crate) fn all() -> Vec<Self> {
        let chapters = fs::read_dir(root().join("docs/src")).unwrap();
        let names = chapters.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut paths: Vec<_> = names
            .filter(|name| name.ends_with(".md"))
            .map(|name| format!("docs/src/{name}"))
            .collect();
        paths.sort();
        paths.insert(0, "README.md".to_owned());
        paths.into_iter().map(Self::read).collect()
    }

    /// Reads the page of the scripts in `benches/gpu`.
    pub(crate) fn of_gpu_scripts() -> Self {
        Self::read("benches/gpu/README.md".to_owned())
    }

    /// Reads the other pages of the repository.
    pub(crate) fn others() -> Vec<Self> {
        OTHERS.map(|path| Self::read(path.to_owned())).into()
    }

    fn read(path: String) -> Self {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        Self { path, text }
    }

    /// Returns the fenced blocks of code.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks = vec![];
        let mut lines = self.text.lines();
        while let Some(line) = lines.next() {
            let Some(language) = line.strip_prefix("```") else { continue };
            let code: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push(Block { language: language.to_owned(), code: code.join("\n") });
        }
        blocks
    }

    /// Returns the text without fenced blocks of code.
    pub(crate) fn prose(&self) -> String {
        let mut inside = false;
        let lines = self.text.lines().filter(|line| {
            let is_fence = line.starts_with("```");
            inside ^= is_fence;
            !inside && !is_fence
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Returns the texts between single backticks.
    pub(crate) fn inline_code(&self) -> Vec<String> {
        let prose = self.prose();
        let parts =
            prose.split("\n\n").flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2));
        parts.map(|code| code.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    /// Returns the targets of links and images.
    pub(crate) fn links(&self) -> Vec<String> {
        let prose = self.prose();
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        targets.map(|(target, _)| target.to_owned()).collect()
    }

    /// Returns the anchors of headings, as mdBook and code hosts make them.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let prose = self.prose();
        let headings = prose.lines().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
    }
}

/// Returns the anchor of a heading.
pub(crate) fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}
