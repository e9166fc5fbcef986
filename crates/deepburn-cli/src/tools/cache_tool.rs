//! `deepburn cache`: show or clear the token cache.
//!
//! The cache stores the tokens of text files, so that a later run with the same files and the same
//! tokenizer does not tokenize them again. Each entry is a line with its key, its size, the time
//! since its last use, and its source file:
//!
//! ```text
//! /home/user/.cache/deepburn/tokens
//! entries: 2 (250.0 MB); limits: 20.0 GB, 30 d since the last use
//! ab    250.0 MB         2 h  a.txt
//! cd      0.9 kB         2 d  unknown source
//! ```

use std::time::Duration;

use clap::Subcommand;
use deepburn_datasets::{CacheEntry, TokenCache};

use crate::failure::Failure;

/// An action on the token cache.
#[derive(Debug, Clone, Copy, Subcommand)]
pub(crate) enum CacheAction {
    /// Remove all entries.
    Clear,
}

/// Lists or clears the token cache of the user.
///
/// # Errors
/// Returns a user's mistake if there is no home folder, or if the cache cannot be read or cleared.
pub(crate) fn cache(action: Option<CacheAction>) -> Result<String, Failure> {
    let cache = TokenCache::of_user().ok_or_else(|| {
        Failure::mistake("no home folder for a token cache; set XDG_CACHE_HOME to a folder")
    })?;
    match action {
        None => Ok(listing(&cache, &cache.entries().map_err(Failure::mistake)?)),
        Some(CacheAction::Clear) => {
            let removed = cache.clear().map_err(Failure::mistake)?;
            // Other programs may use the cache meanwhile, so this counts what was removed.
            let (entries, bytes) = (removed.len(), size(total(&removed)));
            Ok(format!("{}: removed entries: {entries} ({bytes})", cache.folder().display()))
        }
    }
}

/// Returns the folder of the cache, its limits, and a line for each entry.
fn listing(cache: &TokenCache, entries: &[CacheEntry]) -> String {
    let limits = cache.limits();
    let mut text = format!(
        "{}\nentries: {} ({}); limits: {}, {} since the last use",
        cache.folder().display(),
        entries.len(),
        size(total(entries)),
        size(limits.bytes),
        age(limits.age),
    );
    for entry in entries {
        let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
        let source = entry.source.as_deref().unwrap_or("unknown source");
        let (bytes, unused) = (size(entry.bytes), age(entry.unused));
        // The file name also has a hash of the tokens, which is of no use to users.
        let key = name.split('-').next().unwrap_or_default();
        text.push_str(&format!("\n{key}  {bytes:>10}  {unused:>10}  {source}"));
    }
    text
}

/// Returns the total size of all entries.
fn total(entries: &[CacheEntry]) -> u64 {
    entries.iter().map(|entry| entry.bytes).sum()
}

/// Formats a size in bytes.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// Formats the time since the last use.
fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_entries_with_size_age_and_source() {
        let entry = |path: &str, bytes, hours: u64, source: Option<&str>| CacheEntry {
            path: path.into(),
            bytes,
            unused: Duration::from_secs(hours * 3600),
            source: source.map(str::to_owned),
        };
        let entries = [
            entry("/c/ab-12.bin", 250_000_000, 2, Some("a.txt")),
            entry("/c/cd-34.bin", 900, 50, None),
        ];
        let text = listing(&TokenCache::new("/c"), &entries);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "/c");
        assert!(lines[1].starts_with("entries: 2 (250.0 MB); limits: 20.0 GB, 30 d"), "{text}");
        assert!(lines[2].starts_with("ab ") && lines[2].contains("2 h  a.txt"), "{text}");
        assert!(lines[3].contains("0.9 kB") && lines[3].ends_with("2 d  unknown source"), "{text}");
    }
}
