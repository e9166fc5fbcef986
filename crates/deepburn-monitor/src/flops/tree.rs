//! The tree of modules that paths describe.

use super::{FlopsTotals, ModuleFlops};
use std::fmt;

/// A module with what is its own, and the modules inside of it in the order of their entries.
#[derive(Debug, Clone)]
pub(super) struct Node {
    name: String,
    own: FlopsTotals,
    children: Vec<Node>,
}

impl Node {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), own: FlopsTotals::default(), children: Vec::new() }
    }

    /// The module called `name` inside of this one, made where it is not there.
    pub(super) fn child(&mut self, name: &str) -> &mut Self {
        let place = self.children.iter().position(|child| child.name == name);
        let place = place.unwrap_or_else(|| {
            self.children.push(Self::new(name));
            self.children.len() - 1
        });
        &mut self.children[place]
    }

    /// Counts an entry as this module's own.
    pub(super) fn add(&mut self, entry: &ModuleFlops) {
        self.own = FlopsTotals {
            parameters: self.own.parameters.saturating_add(entry.parameters),
            forward: self.own.forward.saturating_add(entry.forward),
            backward: self.own.backward.saturating_add(entry.backward),
        };
    }

    /// What this module and all inside of it add up to.
    pub(super) fn totals(&self) -> FlopsTotals {
        self.children.iter().map(Self::totals).fold(self.own, |sum, child| FlopsTotals {
            parameters: sum.parameters.saturating_add(child.parameters),
            forward: sum.forward.saturating_add(child.forward),
            backward: sum.backward.saturating_add(child.backward),
        })
    }

    /// For each depth the modules there, by their full paths; depth 0 is this one.
    pub(super) fn levels(&self) -> Vec<Vec<(String, FlopsTotals)>> {
        let mut levels = Vec::new();
        self.collect_levels(0, "", &mut levels);
        levels
    }

    fn collect_levels(
        &self,
        depth: usize,
        prefix: &str,
        levels: &mut Vec<Vec<(String, FlopsTotals)>>,
    ) {
        if levels.len() == depth {
            levels.push(Vec::new());
        }
        let path = format!("{prefix}{}", self.name);
        // The model's own name is not part of the paths.
        let prefix = if depth == 0 { String::new() } else { format!("{path}.") };
        levels[depth].push((path, self.totals()));
        for child in &self.children {
            child.collect_levels(depth + 1, &prefix, levels);
        }
    }

    /// Shows every module, parents first.
    pub(super) fn visit(
        &self,
        depth: usize,
        show: &mut impl FnMut(usize, &str, FlopsTotals) -> fmt::Result,
    ) -> fmt::Result {
        show(depth, &self.name, self.totals())?;
        self.children.iter().try_for_each(|child| child.visit(depth + 1, show))
    }
}
