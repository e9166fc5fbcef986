//! Checks links between pages.

use std::fs;

use crate::markdown::{Page, root};

#[test]
fn links_resolve() {
    let pages: Vec<_> = Page::all().into_iter().chain(Page::others()).collect();
    let mut broken = vec![];
    for page in &pages {
        let folder = root().join(&page.path).parent().unwrap().canonicalize().unwrap();
        for link in page.links() {
            if link.starts_with("https://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path.is_empty() {
                true => root().join(&page.path),
                false => folder.join(path),
            };
            let Ok(target) = target.canonicalize() else {
                broken.push(format!("{}: no file {link}", page.path));
                continue;
            };
            let in_book = page.path.starts_with("docs/src");
            if in_book && !target.starts_with(&folder) {
                broken.push(format!("{}: {link} is not part of the book", page.path));
            }
            let text = if anchor.is_empty() {
                String::new()
            } else {
                fs::read_to_string(&target).unwrap()
            };
            let linked = Page { path: link.clone(), text };
            if !anchor.is_empty() && !linked.anchors().iter().any(|known| known == anchor) {
                broken.push(format!("{}: no heading {link}", page.path));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_chapter_is_in_the_summary() {
    let summary = Page::all().into_iter().find(|page| page.path.ends_with("SUMMARY.md")).unwrap();
    let listed = summary.links();
    for page in Page::all() {
        let Some(name) = page.path.strip_prefix("docs/src/") else { continue };
        assert!(
            name == "SUMMARY.md" || listed.iter().any(|link| link == name),
            "{name} is not in SUMMARY.md"
        );
    }
}
